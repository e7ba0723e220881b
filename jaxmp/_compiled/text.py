"""The text of a program of XLA: its computations, their instructions and shapes.

What XLA writes depends on its version, and readers of a program need not know of it:
an operation that runs beside others is a pair there, such as ``all-gather-start`` and
``all-gather-done``, since JAX 0.12 also ``fusion-start`` and ``fusion-done``. Here it
is one, a ``fusion``, that stands where it starts.
"""

import math
import re
from typing import NamedTuple

# Stands for the operation that it waits for.
WAITS = ("async-update", "async-done")
# The attributes that name what a conditional chooses from, and what a call calls.
BRANCHES = ("branch_computations", "true_computation", "false_computation")
CALLS = ("to_apply", "calls")


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    shape: str  # with dtypes; that of a tuple in parentheses
    opcode: str
    operands: list[str]
    attributes: str  # of a parameter its number, of a constant its value

    def called(self, *attributes: str) -> list[str]:
        """Returns the computations that some attributes name."""
        pattern = rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|%?[\w.\-]+)"
        found = re.findall(pattern, self.attributes)
        return re.findall(r"[\w.\-]+", " ".join(found))

    @property
    def op_name(self) -> str:
        """The scopes and the primitive that it comes from, as JAX names them."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


class Computation(NamedTuple):
    """Instructions by name, and which of them is the result."""

    instructions: dict[str, Instruction]
    root: str

    @property
    def root_opcode(self) -> str:
        """The operation that makes the result."""
        return self.instructions[self.root].opcode

    def behind(self, name: str) -> Instruction:
        """Returns the instruction that a name stands for, without bitcasts and tuples.

        An optimization barrier is a tuple of what it holds back by now. What waits for
        an operation stands for it.
        """
        instruction = self.instructions[name]
        if instruction.opcode in ("bitcast", *WAITS):
            return self.behind(instruction.operands[0])
        if instruction.opcode == "get-tuple-element":
            whole = self.behind(instruction.operands[0])
            place = re.search(r"index=(\d+)", instruction.attributes)
            if whole.opcode == "tuple" and place:
                return self.behind(whole.operands[int(place[1])])
        return instruction


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a program by name, and the name of its entry.

    Args:
        text: The program, ``compiled.as_text()`` or ``lowered.as_text("hlo")``, which
            has no ``%`` before a name.
    """
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    name = entry = root = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line):
            name, instructions = header[2], {}
            entry = name if header[1] else entry
        elif line == "}":
            computations[name] = Computation(_without_pairs(instructions), root)
        elif found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line):
            shape, rest = _until_balanced(line[found.end() :])
            opcode, bracket, rest = rest.lstrip().partition("(")
            inside, attributes = _until_balanced(bracket + rest)
            if opcode in ("parameter", "constant"):
                attributes = inside[1:-1]
            operands = re.findall(r"%([\w.\-]+)", inside)
            if not operands and opcode != "constant":
                operands = [x for x in inside[1:-1].split(", ") if x in instructions]
            root = found[2] if found[1] else root
            instructions[found[2]] = Instruction(
                found[2], shape, opcode, operands, attributes
            )
    return computations, entry


def _without_pairs(instructions: dict[str, Instruction]) -> dict[str, Instruction]:
    """Returns the instructions with one for each that is written as start and done.

    What starts has the name of the operation, and the shape of what is waited for: its
    own is a tuple, with the operands and what else the runtime holds.
    """
    read: dict[str, Instruction] = {}
    for name, instruction in instructions.items():
        opcode, dash, part = instruction.opcode.rpartition("-")
        if dash and part == "start" and opcode != "async":
            instruction = instruction._replace(opcode=opcode)
        elif dash and part in ("done", "update"):
            instruction = instruction._replace(opcode=f"async-{part}")
        read[name] = instruction
        start = instruction
        while start.opcode in WAITS and start.operands[0] in read:
            start = read[start.operands[0]]
        if instruction.opcode == "async-done":
            read[start.name] = start._replace(shape=instruction.shape)
    return read


def arrays(shape: str) -> list[tuple[str, int]]:
    """Returns the dtype and the number of elements of each array of a shape.

    Examples:
        >>> arrays("(f16[3,2]{1,0}, s32[])")
        [('f16', 6), ('s32', 1)]
    """
    found = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape)
    return [(d, math.prod(int(n) for n in s.split(",") if n)) for d, s in found]


_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def dtype_name(dtype: str) -> str:
    """Returns NumPy's name of a dtype that is spelled as XLA does.

    Examples:
        >>> [dtype_name(x) for x in ("bf16", "f8e4m3fn", "pred")]
        ['bfloat16', 'float8_e4m3fn', 'bool']
    """
    found = re.fullmatch(r"([a-z]+)(\d+)(\w*)", dtype)
    if not found:
        return "bool" if dtype == "pred" else dtype
    kind, size, rest = found.groups()
    return f"{_KINDS.get(kind, kind)}{size}{'_' * bool(rest)}{rest}"


def sizes_of(shape: str) -> list[int]:
    """Returns the sizes of an array, or of the first of a tuple."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(n) for n in found[1].split(",") if n] if found else []


def bytes_of(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple.

    Examples:
        >>> bytes_of("(f16[3,2]{1,0}, s32[], pred[5]{0})")
        21
    """
    return sum(bits(dtype) * size // 8 for dtype, size in arrays(shape))


def bits(dtype: str) -> int:
    """Returns the bits of a number, whose dtype is spelled as XLA does."""
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 0  # of a token


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
