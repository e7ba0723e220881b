"""The errors of some choices of modules, and the fewest to keep in float32."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._base.tree import all_finite, is_inexact
from ..._jaxprs.scopes import is_under
from ..wide_replay import compared, compiled
from .report import ModuleSensitivity
from .switches import Program

_TRIED = 4  # modules in each step of the search
# Of more modules, the worst alone are measured in full.
_MANY, _WORST = 40, 10
_FLOPS, _STORED = map(operator.attrgetter, ("share", "stored"))  # what a row costs
_AIM = 0.9  # of the tolerance, as autocast itself differs a little from the switches


class Errors(NamedTuple):
    """Relative errors against float32."""

    loss: float
    gradients: float

    @property
    def worst(self) -> float:
        return max(self)


class Search:
    """One compiled program, and what it gives for some choices of its switches."""

    def __init__(
        self,
        program: Program,
        leaves: Sequence[Any],
        scales: Sequence[float],
        tell: Callable[..., None],
    ):
        """Compiles the program, and runs it with all switches off and all on.

        Args:
            program: The program.
            leaves: Its arguments, behind a loss scale if there are any to try.
            scales: Those, one after the other.
            tell: See :func:`progress_bar`.
        """
        self.program, self.tell, self._known = program, tell, dict[bytes, Errors]()
        first, second = program.parts, program.eight_bit_parts
        self.is_first = np.arange(program.count) < len(first)
        named = {x: tuple(x.split("/")) for x in first if x}
        # What `float32_paths` means by a part, if it can name less than all of them.
        self.inside, self.has_path = {x: {x} for x in first}, set[str]()
        # The switches of each part, and its second ones.
        self.masks, self.masks_of_eight = {}, {}
        for part in first:
            below = {x for x in named if part and is_under(named[part], named[x])}
            if below and (len(below) < len(named) or len(named) == 1):
                self.inside[part] = below
                self.has_path.add(part)
            ours = np.array([x in self.inside[part] for x in (*first, *second)])
            self.masks[part] = ours & self.is_first
            self.masks_of_eight[part] = ours & ~self.is_first
        off = np.zeros(program.count, bool)
        self.scale, self.arrays = 1.0, leaves
        tell("compiling", 1)
        unit = [jnp.float32(1)] * bool(scales)
        self.run = compiled(program.run, off, *unit, *leaves)
        tell()
        if scales:
            self.settle(leaves, scales, off)
        else:
            self.reference = self.run(off, *leaves)
        _check_finite(self.reference, program)
        self.all = self.errors(~off)

    def settle(self, leaves: Sequence[Any], scales: Any, off: np.ndarray) -> None:
        """Takes the first loss scale with which the gradients are finite."""
        on: np.ndarray | None = None
        for self.scale in scales:
            self.arrays = [jnp.float32(self.scale), *leaves]
            self.reference = self.run(off, *self.arrays)
            self._known.clear()
            if on is None:
                # A forward pass that overflows needs a cure before it needs a scale.
                cures = (~mask for mask in (off, *self.masks.values()))
                on = next((x for x in cures if self.errors(x).loss < math.inf), off)
            if self.errors(on).gradients < math.inf:
                return

    def errors(self, switches: np.ndarray) -> Errors:
        key = switches.tobytes()
        if key not in self._known:
            outs = self.run(switches, *self.arrays)
            self._known[key] = relative_errors(outs, self.reference)
            self.tell()
        return self._known[key]

    def errors_of(self, fun: Callable) -> Errors:
        """Returns those of a function of the same arguments."""
        outs = compiled(fun, *self.arrays)(*self.arrays)
        return relative_errors(outs, self.reference)

    def rows(self) -> list[ModuleSensitivity]:
        """Measures each module alone, and everything without it; the worst first."""
        self.tell("modules", 2 * len(self.program.parts))
        parts, in_eight = self.program.parts, bool(self.program.residuals)
        if in_eight or len(parts) <= _MANY or math.isinf(self.all.worst):
            rows = [self.row(part) for part in parts]
            # One module alone stores little in eight bits: it shares the rest.
            return sorted(rows, key=lambda x: x.without if in_eight else -x.alone)
        rows = [self.row(part, estimate=True) for part in parts]
        rows.sort(key=lambda row: -row.alone)
        return [*(self.row(row.path) for row in rows[:_WORST]), *rows[_WORST:]]

    def row(self, part: str, *, estimate: bool = False) -> ModuleSensitivity:
        """Measures one module: its residuals, or what it rounds to 16 bits.

        The error of everything but the module may be estimated: errors add as squares.
        """
        mask, others = self.masks[part], ~self.is_first
        if self.program.residuals:
            mask, others = self.masks_of_eight[part], self.is_first
        alone = self.errors(mask | others)
        pairs = zip(self.all, alone, strict=True)
        left = (math.sqrt(max(x**2 - y**2, 0.0)) for x, y in pairs)
        without = Errors(*left) if estimate else self.errors(~mask)
        inside, by_part = self.inside[part], self.program.flops
        flops, total = sum(by_part[x] for x in inside), sum(by_part.values())
        stored = self.program.stored
        own = sum(stored[parts] for parts in stored if not inside.isdisjoint(parts))
        return ModuleSensitivity(
            part,
            *alone,
            *without,
            flops=flops,
            share=flops / total if total else 0.0,
            has_path=part in self.has_path,
            stored=own / sum(stored.values()) if stored else 0.0,
            is_estimated=estimate,
        )

    def found(
        self, rows: Sequence[ModuleSensitivity], tolerance: float
    ) -> tuple[tuple[str, ...], tuple[str, ...], Errors]:
        """Returns the fewest modules to keep in float32, the fewest of the rest to keep
        out of eight bits, and the errors with both.
        """
        rows, aim = [row for row in rows if row.has_path], _AIM * tolerance
        if self.all.worst <= aim or not rows:
            return (), (), self.all
        paths, on = self.fewest(rows, self.masks, self.is_first, aim, _FLOPS)
        on, milder = on | ~self.is_first, ()
        if not self.is_first.all():
            masks = self.masks_of_eight
            rows = [row for row in rows if masks[row.path].any()]
            cost = _STORED if self.program.residuals else _FLOPS
            milder, on = self.fewest(rows, masks, on, aim, cost)
        return paths, milder, self.errors(on)

    def fewest(
        self,
        rows: Sequence[ModuleSensitivity],
        masks: dict[str, np.ndarray],
        start: np.ndarray,
        aim: float,
        cost: Callable[[ModuleSensitivity], float],
    ) -> tuple[tuple[str, ...], np.ndarray]:
        """Searches for the fewest modules whose switches, off, bring the error down.

        One after the other: the cheapest that is enough, else the one that takes away
        most of the squared error for its cost; at last those that were not needed are
        left out again. Where nothing is enough, as near as all of them come.
        """

        def on(off: Sequence[ModuleSensitivity]) -> np.ndarray:
            return np.all([start, *(~masks[x.path] for x in off)], axis=0)

        def worst(off: Sequence[ModuleSensitivity]) -> float:
            return self.errors(on(off)).worst

        def use(row: ModuleSensitivity) -> tuple[float, float]:
            before, after = worst(chosen), worst([*chosen, row])
            gain = before**2 - after**2 if after < math.inf else 0.0
            return gain / (cost(row) + 0.01), row.alone

        chosen: list[ModuleSensitivity] = []
        if worst([]) <= aim or not rows:
            return (), start
        self.tell("searching", len(rows))
        target = max(aim, 1.1 * worst(rows))
        # Whoever is enough alone is among the worst.
        measured = [row for row in rows if not row.is_estimated] or rows
        left = sorted(measured, key=use, reverse=True)
        order = [*left, *(row for row in rows if row not in left)]
        while worst(chosen) > target and left:
            enough = [x for x in left if worst([*chosen, x]) <= target]
            chosen.append(min(enough, key=cost) if enough else max(left, key=use))
            still = on(chosen)
            left = [x for x in order if (still & masks[x.path]).any()][:_TRIED]
        for row in sorted(chosen, key=cost, reverse=True):  # the dearest first
            rest = [x for x in chosen if x is not row]
            if rest and worst(rest) <= target:
                chosen = rest
        paths = {row.path for row in chosen}
        return tuple(x for x in self.program.parts if x in paths), on(chosen)


def relative_errors(outs: Sequence[Any], reference: Sequence[Any]) -> Errors:
    """Returns the relative errors of the first result and of the others together."""
    bad, away, size = map(np.array, compared(outs, reference))
    parts = np.arange(len(outs)) == 0, np.arange(len(outs)) > 0

    def error(part: np.ndarray) -> float:
        part &= np.array([*map(is_inexact, outs)])
        off, whole = (math.hypot(*map(float, x[part])) for x in (away, size))
        if bad[part].any() or (off and not whole):
            return math.inf
        return off / whole if off else 0.0

    return Errors(*map(error, parts))


def _check_finite(reference: Sequence[Any], program: Program) -> None:
    if bool(all_finite(list(reference))):
        return
    unknown = [x for x in program.numbers if x.written is None]
    if unknown:
        left = "0, as 1e-8 is" if unknown[0].left == 0 else "Inf, as 1e9 is"
        raise FloatingPointError(
            "`sensitivity` compares with float32, but the loss or its gradients are "
            "not finite as far as it can compute them in float32. The function casts "
            f"to {unknown[0].dtype} itself, and a number in its code at "
            f"{unknown[0].place.line or 'some line'} is {left}. Compute that line in "
            "float32, `x.astype(jnp.float32)`."
        )
    what = "the loss is not finite there"
    if bool(all_finite(reference[0])):
        what = "there the gradients are not finite, although the loss is"
    raise FloatingPointError(
        f"`sensitivity` compares with float32, but {what}. Type "
        "`jaxmp.find_overflow(fun)(*args)`, of the loss or of "
        "`jax.value_and_grad(loss)`, to see the line that breaks."
    )


@contextlib.contextmanager
def progress_bar(show: bool | None) -> Iterator[Callable[..., None]]:
    """Shows a progress bar, where there is rich and somebody to look at it.

    Yields a function that takes what comes next and how many steps that has, and is
    called after each step.
    """
    rich: Any = None
    if show is not False:
        try:
            import rich.console
            import rich.progress
        except ModuleNotFoundError as error:
            if show:
                raise ModuleNotFoundError(
                    "`progress=True` needs rich. Install it with pip install rich"
                ) from error
    if rich is None:
        yield lambda *_: None
        return
    console = rich.console.Console(stderr=True)
    options = {"transient": True, "disable": not (show or console.is_terminal)}
    with rich.progress.Progress(console=console, **options) as bar:
        task = bar.add_task("tracing", total=0)

        def tell(text: str | None = None, steps: int = 0) -> None:
            total = bar.tasks[0].total + steps
            bar.update(task, description=text, total=total, advance=text is None)

        yield tell
