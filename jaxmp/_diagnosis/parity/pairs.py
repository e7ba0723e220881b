"""Which values of two programs are compared: those at the same place of both.

A place is a module by its path and by the number of the call, in a loop with that of
the iteration, and there what goes in and what comes out, in order, by shape.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._base.checks import clipped
from ..._base.tree import is_inexact
from .program import IN, ITERATION, OUT, RESULT, Compared

Path = tuple[str, ...]
Key = tuple[int, tuple[int, ...]]  # a crossing and an iteration


class Spot(NamedTuple):
    """Where values of a program are; the name of a result is its path."""

    path: Path
    visit: int
    kind: str


class Slot(NamedTuple):
    """A value of a program: a crossing and an iteration, or what somebody stored."""

    source: Any  # the number of the crossing, or an array
    iteration: tuple[int, ...]
    value: Any  # the same wherever the same value crosses
    shape: tuple[int, ...]
    dtype: Any


Slots = dict[Spot, list[Slot]]


def slots_of(program: Compared) -> Slots:
    """Returns the values of a program by their places, in order."""
    found = collections.defaultdict(list)
    for x in program.crossings.values():
        kind = x.kind if x.kind in (IN, RESULT) else OUT
        for index in np.ndindex(x.loops):
            path = (x.name,) if kind == RESULT else path_at(x.call.path, index)
            slot = Slot(x.number, index, (x.uid, index), x.type.shape, x.type.dtype)
            found[Spot(path, x.call.visit, kind)].append(slot)
    return dict(found)


def path_at(path: Path, index: tuple[int, ...]) -> Path:
    """Returns a path in some iterations: ``layers[3]`` and ``attention``."""
    names, numbers = list[str](), iter(index)
    for name in path:
        if name != ITERATION:
            names.append(name)
        elif (number := next(numbers, None)) is None:
            names.append(ITERATION)  # the loop as a whole
        else:
            names[-1:] = [f"{names[-1] if names else 'scan'}[{number}]"]
    return tuple(names)


# Of a stored value: the path, the number of the call, and which input or output.
_KEY = re.compile(r"(.*?)(?:#(\d+))?(?::(?:(in)(\d*)|(\d+)))?")


def key_of(place: Spot, number: int) -> str:
    """Returns the name under which a value is stored, one of several at its place."""
    path = "/".join(place.path) + f"#{place.visit}" * (place.visit > 1)
    if place.kind == IN:
        return f"{path}:in{number or ''}"
    return f"{path}:{number}" if number else path


def slots_of_stored(stored: Mapping[str, Any]) -> Slots:
    """Returns stored arrays by their places."""
    found: Any = collections.defaultdict(dict)
    for key in stored:
        path, visit, is_in, which_in, which = _KEY.fullmatch(key).groups()  # pyright: ignore
        array, path = np.asarray(stored[key]), split(path)
        is_result = not path or path[0] == "result"
        place = Spot(path, int(visit or 1), IN if is_in else OUT)
        if is_result and not is_in:
            place = Spot(("/".join(path) or "result",), 1, RESULT)
        slot = Slot(array, (), key, array.shape, array.dtype)
        found[place][int(which_in or which or 0)] = slot
    return {place: [x[i] for i in sorted(x)] for place, x in found.items()}


def split(path: str) -> Path:
    """Returns the names in a path, which PyTorch joins by dots."""
    return tuple(filter(None, re.split(r"[./]", path)))


def paths_of(slots: Slots) -> list[Path]:
    """Returns the paths of modules, in order."""
    return [*dict.fromkeys(x.path for x in slots if x.kind != RESULT and x.path)]


class Pairs:
    """The values of a program, each with that of the reference at the same place.

    Attributes:
        slots: The slot of the reference for a crossing and an iteration.
        alias: The crossing and iteration that has it for one with the same value.
        results: Of each result its name in the reference, and its slot there.
        only: The modules that only the reference has, and those only the program has.
        notes: What could not be compared.
    """

    def __init__(
        self, reference: Slots, program: Compared, names: Mapping[str, str] | None
    ):
        """Finds the pairs; ``names`` has paths of the reference and what they are."""
        ours, self.program = slots_of(program), program
        self.slots: dict[Key, Slot] = {}
        self.alias: dict[Key, Key] = {}
        self.notes: list[str] = []
        self.results: dict[str, tuple[str, Slot]] = {}
        renamed = _renamed(paths_of(reference), paths_of(ours), names or {})
        theirs = {
            x if x.kind == RESULT else x._replace(path=renamed[x.path]): y
            for x, y in reference.items()
            if x.path in renamed or x.kind == RESULT
        }
        self.paths = {new: old for old, new in renamed.items()}
        self.only = (
            [x for x in paths_of(reference) if x not in renamed],
            [x for x in paths_of(ours) if x not in self.paths],
        )
        unlike = []
        for place, slots in ours.items():
            if place.kind != RESULT and place in theirs:
                for slot, other in _by_shape(slots, theirs[place]):
                    self.slots[slot.source, slot.iteration] = other
                if place.kind == OUT and slots[0].shape != theirs[place][0].shape:
                    both = [*theirs[place][0].shape], [*slots[0].shape]
                    unlike.append(f"`{'/'.join(place.path)}` ({both[0]} and {both[1]})")
        if unlike:
            more = f" and {len(unlike) - 3} more" if len(unlike) > 3 else ""
            text = f"not compared, because shapes differ: {', '.join(unlike[:3])}{more}"
            self.notes.append(text)
        self._pair_results(ours, theirs)
        self._drop_repeated()

    def _pair_results(self, ours: Slots, theirs: Slots) -> None:
        """Pairs results by name, and all others in order if they are as many."""
        own = {x.path[0]: y[0] for x, y in ours.items() if x.kind == RESULT}
        other = {x.path[0]: y[0] for x, y in theirs.items() if x.kind == RESULT}
        pairs = {name: name for name in own if name in other}
        left = [[x for x in names if x not in pairs] for names in (own, other)]
        if len(left[0]) == len(left[1]):
            pairs |= dict(zip(*left, strict=True))
        for name, their in pairs.items():
            slot, reference = own[name], other[their]
            if _kind(slot) == _kind(reference):
                self.slots[slot.source, slot.iteration] = reference
                self.results[name] = their, reference
        missing = [f"`{x}`" for x in own if x not in self.results]
        if missing and other:
            self.notes.append(clipped(f"not compared: {', '.join(missing)}", 200))

    def _drop_repeated(self) -> None:
        """Leaves out a value where it has not changed since it was compared."""
        crossings = self.program.crossings
        for number, index in sorted(self.slots):
            key, before = (number, index), crossings[number].before
            while before is not None:
                earlier = before.number, index[: len(before.loops)]
                earlier = self.alias.get(earlier, earlier)
                if earlier in self.slots:
                    if self.slots[earlier].value == self.slots[key].value:
                        self.alias[key] = earlier
                        del self.slots[key]
                    break
                before = before.before


def _kind(slot: Slot) -> Any:
    """Returns what two values have in common that can be compared."""
    return slot.shape, is_inexact(slot), slot.dtype == bool


def _by_shape(slots: list[Slot], others: list[Slot]) -> Iterator[tuple[Slot, Slot]]:
    """Yields pairs, each with the first of its shape that is left."""
    left = list(others)
    for slot in slots:
        found = next((x for x in left if _kind(x) == _kind(slot)), None)
        if found is not None:
            left.remove(found)
            yield slot, found


def _renamed(
    theirs: list[Path], ours: list[Path], names: Mapping[str, str]
) -> dict[Path, Path]:
    """Returns our path for each of theirs that we have, too.

    The outermost name, which is the class of a model, may differ or be missing.
    """
    pairs = {split(x): split(y) for x, y in names.items()}
    best: dict[Path, Path] = {}
    for root, own in itertools.product(_roots(theirs), _roots(ours)):
        known = {_without(own, x): x for x in ours}
        inner = {_without(root, x): _without(own, y) for x, y in pairs.items()}
        found = {x: known.get(_named(_without(root, x), inner)) for x in theirs}
        found = {x: y for x, y in found.items() if y is not None}
        best = found if len(found) > len(best) else best
    for key, (their, our) in zip(names, pairs.items(), strict=True):
        for text, path, known in ((key, their, theirs), (names[key], our, ours)):
            if not any(_is_under(path, x) for x in known):
                raise ValueError(
                    f"`names` has `{clipped(text)}`, but that program has no such "
                    f"path. It has {spelled(known)}."
                )
    return best


def _roots(paths: list[Path]) -> list[str]:
    """Returns what may be left out of paths: nothing, or what most begin with."""
    first = collections.Counter(x[0] for x in paths)
    return ["", *(name for name, count in first.items() if count > len(paths) / 2)]


def _without(root: str, path: Path) -> Path:
    return path[1:] if path[:1] == (root,) else path


def _named(path: Path, names: Mapping[Path, Path]) -> Path:
    for end in range(len(path), 0, -1):
        if path[:end] in names:
            return (*names[path[:end]], *path[end:])
    return path


def _is_under(path: Path, other: Path) -> bool:
    return path in (other[: len(path)], other[1:][: len(path)])


def spelled(paths: list[Path]) -> str:
    """Lists paths in an error."""
    names = ", ".join(f"`{'/'.join(x)}`" for x in sorted(paths, key=len))
    return clipped(names, 300) or "no named modules"
