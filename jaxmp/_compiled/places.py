"""What a compiled program runs, how often, and from which lines of code it comes."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .text import BRANCHES, CALLS, Computation, Instruction, trip_count


class Running(NamedTuple):
    """An instruction that runs, which is a kernel or names memory."""

    instruction: Instruction
    computation: Computation  # in which it stands
    times: int
    around: str  # the name of what calls it, where its own is relative to that


def runs(
    computations: Mapping[str, Computation], entry: str, unknown: set[str]
) -> Iterator[Running]:
    """Yields what runs, in loops and calls too, and of a conditional all branches.

    Args:
        computations: Of the program.
        entry: The name of the first of them.
        unknown: Gets the names of loops that do not say how often they run, and whose
            bodies count once.
    """

    def of(name: str, times: int, around: str) -> Iterator[Running]:
        computation = computations[name]
        for x in computation.instructions.values():
            yield Running(x, computation, times, around)
            more, called = 1, x.called(*BRANCHES)
            if x.opcode == "while":
                called = x.called("body")
                try:
                    more = trip_count(x, {**computations})
                except ValueError:
                    unknown.add(x.name)
            elif x.opcode in ("call", "async-start"):
                called = x.called(*CALLS)
            within = (
                f"{around}/{x.op_name}".strip("/") if x.opcode == "call" else around
            )
            for inner in called:
                yield from of(inner, times * more, within)

    yield from of(entry, 1, "")


# What JAX puts into names around a loop, a branch or a call. No scope of the user's.
_AROUND = re.compile(
    r"while/(body|cond)\b|cond/branch_\d+_fun\b|\b(closed_call|eval_jaxpr|checkpoint|"
    r"rematted_computation|shard_map|pallas_call|custom_(jvp|vjp)_call\w*)(?=/|$)"
)


def scopes_of(op_name: str) -> tuple[str, ...]:
    """Returns the named scopes in a name such as ``jit(f)/transpose(jvp(Net))/a/dot``.

    Examples:
        >>> scopes_of("jit(f)/transpose(jvp(Net))/while/body/a/dot_general")
        ('Net', 'a')
    """
    name = op_name.rpartition("/")[0]
    while (opened := re.sub(r"\bp?jit\([^()]*\)", "", name)) != name or (
        opened := re.sub(r"\b\w+\(([^()]*)\)", r"\1", name)
    ) != name:
        name = opened
    name = _AROUND.sub("", re.sub(r"/+", "/", name))
    return tuple(filter(None, name.split("/")))


Frame = tuple[str, int]  # file and line


class Lines:
    """The lines of code behind the instructions of a program.

    A text begins with tables of files, of places in them, and of frames, each with the
    frame that called it; instructions name a frame. In an older form they name a file
    and a line themselves.
    """

    def __init__(self, text: str):
        self._files = _table(text, "FileNames", r'"(.*)"')
        self._places = _table(text, "FileLocations", r"\{(.*)\}")
        self._frames = _table(text, "StackFrames", r"\{(.*)\}")
        # The first frame has no caller. Of this many is the number of none.
        self._none = _number(self._frames.get(1, ""), "parent_frame_id")

    def of(self, instruction: Instruction) -> list[Frame]:
        """Returns the frames of an instruction, the innermost first."""
        own = r'source_file="([^"]*)" source_line=(\d+)'
        if found := re.search(own, instruction.attributes):
            return [(found[1], int(found[2]))]
        found = []
        number = _number(instruction.attributes, "stack_frame_id")
        while number in self._frames and len(found) < len(self._frames):
            frame = self._frames[number]
            place = self._places.get(_number(frame, "file_location_id"), "")
            file = self._files.get(_number(place, "file_name_id"), "")
            found.append((file, _number(place, "line")))
            number = _number(frame, "parent_frame_id") - self._none
        return found


def _table(text: str, heading: str, row: str) -> dict[int, str]:
    """Returns the rows of a table before the program by their number."""
    _, _, rest = text.partition(f"\n{heading}\n")
    rows = re.findall(rf"^(\d+) {row}$", rest.partition("\n\n")[0], re.M)
    return {int(number): content for number, content in rows}


def _number(text: str, field: str) -> int:
    found = re.search(rf"\b{field}=(\d+)", text)
    return int(found[1]) if found else 0
