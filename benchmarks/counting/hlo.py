"""What a compiled GPU program does, counted from its text.

``Compiled.as_text()`` of a GPU program is what runs: each fusion and each library call
in it is a kernel that reads its operands from memory and writes its results. So the
bytes that move can be added up, and the kernels counted, without running anything.

They are counted as the kernels work: of an operand from which a slice is asked for, or
numbers are gathered, that part; of a buffer that is updated in place, the part that is
written; of a library call not its workspace. A loop counts as often as it runs, and a
conditional as its dearest branch.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# No kernels: they name memory, or wait for what was counted when it started.
FREE = {
    "after-all",
    "async-done",
    "async-update",
    "bitcast",
    "constant",
    "copy-done",
    "get-tuple-element",
    "parameter",
    "tuple",
}
# These read of their first operand as much as they return.
READ_A_PART = {"dynamic-slice", "gather", "slice"}
# These write into their first operand, and where it is an argument of the kernel, in
# place: the operand that they write, and how often its bytes move.
WRITE_IN_PLACE = {"dynamic-update-slice": (1, 1), "scatter": (2, 2)}
# The attributes that name what a conditional chooses from, and what a call calls.
BRANCHES = ("branch_computations", "true_computation", "false_computation")
CALLS = ("to_apply", "calls")
PRODUCTS = {
    "__cublas$": "matmul",
    "__cudnn$conv": "convolution",
    "dot": "matmul",
    "convolution": "convolution",
}


class Work(NamedTuple):
    """What a program does in one call."""

    bytes: int  # read from memory and written to it
    kernels: int
    copies: collections.Counter[str]  # by shape
    products: collections.Counter[str]  # by kind and dtypes
    workspace: int  # bytes of the largest that a library call asks for
    seconds: float  # an estimate, see :func:`roofline`

    def plus(self, other: "Work", times: int = 1) -> "Work":
        """Returns this work and after it the other, so many times."""
        return Work(
            self.bytes + times * other.bytes,
            self.kernels + times * other.kernels,
            self.copies + _times(other.copies, times),
            self.products + _times(other.products, times),
            max(self.workspace, other.workspace),
            self.seconds + times * other.seconds,
        )


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    shape: str  # with dtypes; that of a tuple in parentheses
    opcode: str
    operands: list[str]
    attributes: str  # of a parameter its number, of a constant its value

    def called(self, *attributes: str) -> list[str]:
        """Returns the computations that some attributes name."""
        pattern = rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|%\S+)"
        found = re.findall(pattern, self.attributes)
        return re.findall(r"%([\w.\-]+)", " ".join(found))


class Computation(NamedTuple):
    """Instructions by name, and which of them is the result."""

    instructions: dict[str, Instruction]
    root: str

    def behind(self, name: str) -> Instruction:
        """Returns the instruction that a name stands for, without bitcasts and tuples.

        An optimization barrier is a tuple of what it holds back by now.
        """
        instruction = self.instructions[name]
        if instruction.opcode == "bitcast":
            return self.behind(instruction.operands[0])
        if instruction.opcode == "get-tuple-element":
            whole = self.behind(instruction.operands[0])
            place = re.search(r"index=(\d+)", instruction.attributes)
            if whole.opcode == "tuple" and place:
                return self.behind(whole.operands[int(place[1])])
        return instruction


def work(text: str) -> Work:
    """Counts what a compiled program does in one call.

    Args:
        text: The program, ``compiled.as_text()`` of a GPU executable.

    Returns:
        A :class:`Work`.

    Raises:
        ValueError: If a loop does not say how often it runs.
    """
    computations, entry = parse(text)
    return _work(entry, computations)


def roofline(moved: float, flops: float) -> float:
    """Returns the seconds that a kernel takes on an H200 at the least.

    Its memory moves 4.8 TB/s and its tensor cores do 989 TFLOP/s in 16 bits (NVIDIA
    H200 data sheet). No kernel reaches both, and launches and small kernels cost more:
    what is added up from these is an estimate, and of use in comparisons.

    Args:
        moved: Bytes.
        flops: Of products of 16-bit operands; those of 8-bit ones count half.
    """
    return max(moved / 4.8e12, flops / 989e12)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a program by name, and the name of its entry."""
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    name = entry = root = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name, instructions = header[2], {}
            entry = name if header[1] else entry
        elif line == "}":
            computations[name] = Computation(instructions, root)
        elif found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line):
            shape, rest = _until_balanced(line[found.end() :])
            opcode, bracket, rest = rest.lstrip().partition("(")
            inside, attributes = _until_balanced(bracket + rest)
            if opcode in ("parameter", "constant"):
                attributes = inside[1:-1]
            operands = re.findall(r"%([\w.\-]+)", inside)
            root = found[2] if found[1] else root
            instructions[found[2]] = Instruction(
                found[2], shape, opcode, operands, attributes
            )
    return computations, entry


def arrays(shape: str) -> list[tuple[str, int]]:
    """Returns the dtype and the number of elements of each array of a shape.

    Examples:
        >>> arrays("(f16[3,2]{1,0}, s32[])")
        [('f16', 6), ('s32', 1)]
    """
    found = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape)
    return [(d, math.prod(int(n) for n in s.split(",") if n)) for d, s in found]


def bytes_of(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple.

    Examples:
        >>> bytes_of("(f16[3,2]{1,0}, s32[], pred[5]{0})")
        21
    """
    return sum(bits(dtype) * size // 8 for dtype, size in arrays(shape))


def bits(dtype: str) -> int:
    """Returns the bits of a number, whose dtype is spelled as XLA does."""
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def _times(counter, times):
    return collections.Counter({key: times * n for key, n in counter.items()})


def _until_balanced(text: str) -> tuple[str, str]:
    """Splits off the first word, or what stands in the first pair of parentheses."""
    if not text.startswith("("):
        word, space, rest = text.partition(" ")
        return word, space + rest
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    raise ValueError(f"The parentheses do not match in `{text}`.")


def _work(name: str, computations: dict[str, Computation]) -> Work:
    total = Work(0, 0, collections.Counter(), collections.Counter(), 0, 0.0)
    computation = computations[name]
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode in FREE:
            continue
        if opcode == "while":
            (body,) = instruction.called("body")
            total = total.plus(
                _work(body, computations), trip_count(instruction, computations)
            )
        elif opcode == "conditional":
            branches = instruction.called(*BRANCHES)
            total = total.plus(max(_work(branch, computations) for branch in branches))
        elif opcode in ("call", "async-start"):
            for called in instruction.called(*CALLS):
                total = total.plus(_work(called, computations))
        else:
            total = total.plus(_kernel(instruction, computation, computations))
    return total


def trip_count(loop: Instruction, computations: dict[str, Computation]) -> int:
    """Returns how often a loop runs, as XLA says or as its test does.

    The loops that ``scan`` writes run from 0 to the constant in their test.
    """
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(found[1])
    (test,) = loop.called("condition")
    tested = computations[test].instructions if test in computations else {}
    constants = [x.attributes for x in tested.values() if x.opcode == "constant"]
    if len(constants) != 1 or not constants[0].isdigit():
        raise ValueError(f"The loop `{loop.name}` does not say how often it runs.")
    return int(constants[0])


def _kernel(instruction, computation, computations) -> Work:
    """Returns the work of one kernel."""
    if instruction.opcode == "fusion":
        body = computations[instruction.called("calls")[0]]
    else:
        body = _alone(instruction, computation)
    computed = _computed(body)
    reads = collections.Counter()
    for inner in body.instructions.values():
        if inner.opcode == "parameter":
            operand = instruction.operands[int(inner.attributes)]
            operand = computation.behind(operand).name
            moved = bytes_of(inner.shape) * computed[inner.name]
            reads[operand] += math.ceil(moved / (_elements(inner.shape) or 1))
    for operand, count in reads.items():  # one that is used twice is read once
        reads[operand] = min(count, bytes_of(computation.instructions[operand].shape))
    written = sum(_written(output, body) for output in _outputs(body))
    opcodes = {inner.opcode for inner in body.instructions.values()} - FREE
    copies = opcodes and opcodes <= {"copy", "copy-start"}
    moved = reads.total() + written
    flops = sum(
        product.flops() / (2 if product.is_float8 else 1)
        for product in products_of(body, computations)
    )
    return Work(
        bytes=moved,
        kernels=1,
        copies=collections.Counter([instruction.shape] if copies else []),
        products=_products(body, computations),
        workspace=max(map(_workspace, body.instructions.values())),
        seconds=roofline(moved, flops),
    )


def _alone(instruction, computation) -> Computation:
    """Returns an instruction as if it were a fusion of one."""
    body = {instruction.name: instruction}
    for i, name in enumerate(instruction.operands):
        shape = computation.instructions[name].shape
        body[name] = Instruction(name, shape, "parameter", [], str(i))
    return Computation(body, instruction.name)


def _outputs(body: Computation) -> list[Instruction]:
    """Returns what a fusion writes."""
    root = body.behind(body.root)
    names = root.operands if root.opcode == "tuple" else [root.name]
    return [body.behind(name) for name in names]


def _is_in_place(instruction: Instruction, body: Computation) -> bool:
    return (
        instruction.opcode in WRITE_IN_PLACE
        and body.behind(instruction.operands[0]).opcode == "parameter"
    )


def _written(output: Instruction, body: Computation) -> int:
    if _is_in_place(output, body):
        operand, times = WRITE_IN_PLACE[output.opcode]
        return times * bytes_of(body.instructions[output.operands[operand]].shape)
    return bytes_of(output.shape) - _workspace(output)


def _workspace(instruction: Instruction) -> int:
    """Returns the bytes of a library call's results that are not numbers."""
    if instruction.opcode != "custom-call":
        return 0
    return sum(
        size for dtype, size in arrays(instruction.shape) if dtype in ("s8", "u8")
    )


def _elements(shape: str) -> int:
    return sum(size for _, size in arrays(shape))


def _computed(body: Computation) -> dict[str, int]:
    """Returns how many elements of each instruction a kernel computes, or reads.

    It computes what is asked for: where a product is sliced, the slice alone.
    """
    sizes = {name: _elements(x.shape) for name, x in body.instructions.items()}
    in_place = [x.name for x in _outputs(body) if _is_in_place(x, body)]
    asked: collections.Counter[str] = collections.Counter({body.root: sizes[body.root]})
    for user in reversed(body.instructions.values()):  # they stand before their users
        size = sizes[user.name]
        computed = asked[user.name] = min(asked[user.name], size)
        for i, operand in enumerate(user.operands):
            whole = sizes[operand]
            if i == 0 and user.name in in_place:
                continue
            if i == 0 and user.opcode in READ_A_PART:
                asked[operand] += computed
            elif user.opcode in READ_A_PART:  # the place
                asked[operand] += whole if computed else 0
            elif whole > size:  # a sum
                asked[operand] += math.ceil(whole * computed / size) if size else 0
            else:
                asked[operand] += computed
    return {name: min(asked[name], size) for name, size in sizes.items()}


def _products(body: Computation, computations) -> collections.Counter[str]:
    """Returns the matrix products and convolutions of a kernel, with their dtypes."""
    found = collections.Counter()
    for product in products_of(body, computations):
        lhs, rhs, result = (arrays(shape)[0][0] for shape in product.shapes)
        found[f"{product.name} {lhs} x {rhs} -> {result}"] += 1
    return found


class Product(NamedTuple):
    """A matrix product or a convolution."""

    name: str
    target: str  # the library call, or the operation
    shapes: tuple[str, str, str]  # of two operands and the result
    attributes: str

    @property
    def is_float8(self) -> bool:
        """Whether both operands have 8 bits."""
        return all(bits(arrays(shape)[0][0]) == 8 for shape in self.shapes[:2])

    def flops(self) -> float:
        """Returns twice the numbers that it multiplies."""
        lhs, rhs, result = map(_sizes, self.shapes)
        if self.name == "matmul":
            pattern = r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)[\]}]'
            found = re.search(pattern, self.attributes)
            contracted = re.findall(r"\d+", found[1]) if found else []
            return 2.0 * math.prod(result) * math.prod(lhs[int(i)] for i in contracted)
        # The layer that it belongs to has an output and a kernel.
        output, kernel = result, rhs
        if "Backward" in self.target:
            output, kernel = (lhs, rhs) if "Input" in self.target else (rhs, result)
        labels = re.search(r"dim_labels=\w+_(\w+)->", self.attributes)
        features = kernel[labels[1].index("o")] if labels else 1
        return 2.0 * math.prod(output) * math.prod(kernel) / features


def products_of(body: Computation, computations) -> Iterator[Product]:
    """Yields the matrix products and convolutions of a kernel."""
    for instruction in body.instructions.values():
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        opcode = target[1] if target else instruction.opcode
        for kind, name in PRODUCTS.items():
            if opcode.startswith(kind):
                lhs, rhs = (
                    body.instructions[x].shape for x in instruction.operands[:2]
                )
                shapes = lhs, rhs, instruction.shape
                yield Product(name, opcode, shapes, instruction.attributes)
        for called in instruction.called("calls"):
            yield from products_of(computations[called], computations)


def _sizes(shape: str) -> list[int]:
    """Returns the sizes of an array, or of the first of a tuple."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(n) for n in found[1].split(",") if n] if found else []
