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
from typing import NamedTuple

from jaxmp._compiled.products import products_of
from jaxmp._compiled.text import (
    BRANCHES,
    CALLS,
    WAITS,
    Computation,
    Instruction,
    arrays,
    bits,
    bytes_of,
    parse,
    trip_count,
)

# No kernels: they name memory, or wait for what was counted when it started.
FREE = {
    "after-all",
    *WAITS,
    "bitcast",
    "constant",
    "get-tuple-element",
    "parameter",
    "tuple",
}
# These read of their first operand as much as they return.
READ_A_PART = {"dynamic-slice", "gather", "slice"}
# These write into their first operand, and where it is an argument of the kernel, in
# place: the operand that they write, and how often its bytes move.
WRITE_IN_PLACE = {"dynamic-update-slice": (1, 1), "scatter": (2, 2)}


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


def _times(counter, times):
    return collections.Counter({key: times * n for key, n in counter.items()})


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
    copies = opcodes == {"copy"}
    moved = reads.total() + written
    flops = sum(
        product.flops() / (2 if all(bits(x) == 8 for x in product.dtypes) else 1)
        for product in products_of(body, computations)
        if product.name != "attention"
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
    if output.opcode == "get-tuple-element":  # of a library call in a fusion
        call = body.behind(output.operands[0])
        last = len(arrays(call.shape)) - 1
        if _workspace(call) and f"index={last}" in output.attributes:
            return 0
    return bytes_of(output.shape) - _workspace(output)


def _workspace(instruction: Instruction) -> int:
    """Returns the bytes of a library call's last result, if it is no number."""
    results = arrays(instruction.shape)
    if instruction.opcode != "custom-call" or len(results) < 2:
        return 0
    dtype, size = results[-1]
    return size if dtype in ("s8", "u8") else 0


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
        if product.name == "attention":  # a kernel of its own kind
            continue
        lhs, rhs, result = (arrays(shape)[0][0] for shape in product.shapes)
        found[f"{product.name} {lhs} x {rhs} -> {result}"] += 1
    return found
