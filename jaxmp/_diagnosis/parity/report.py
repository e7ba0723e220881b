"""Where two programs begin to differ, as data and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..._base.checks import as_html, clipped
from ..._jaxprs.places import short_line
from ..text import WIDTH, aligned, as_lists, more, notes, paragraphs, wrapped

_ROWS = 10
_NO_MODULE = "(in no module)"


@dataclasses.dataclass(frozen=True)
class ModuleParity:
    """How far a module's own lines are apart in two programs.

    Errors are norms of differences over the norm of the reference.

    Attributes:
        path: The module in the second program, empty for lines outside of all. In a
            loop it has the number of the iteration: ``layers[3]/mlp``.
        reference: The same module in the reference.
        handed: The error of what goes into the module, as the programs run.
        error: The error of what its lines compute, as the programs run.
        added: The same with the reference's values in the place of all that goes into
            the module and that modules inside of it return.
        typical: What its lines make of that in both programs if all that they round is
            moved by one unit in its last place: more than rounding adds.
        value: What is compared: the output, what another module is given, or a result.
        where: The line that computes it, in the second program.

    Examples:
        >>> def model(x, slope):
        ...     with jax.named_scope("head"):
        ...         return jnp.tanh(slope * x)
        >>> x = jnp.linspace(0, 1, 8)
        >>> report = jaxmp.parity(lambda x: model(x, 1.0), lambda x: model(x, 1.1))(x)
        >>> report.first.path, report.first.handed, report.first.added > 0.01
        ('head', 0.0, True)
    """

    path: str
    reference: str
    handed: float
    error: float
    added: float
    typical: float
    value: str
    where: str

    @property
    def name(self) -> str:
        """The path as the table has it."""
        return self.path or _NO_MODULE

    @property
    def differs(self) -> bool:
        """Whether it adds more than its rounding explains."""
        return not self.added <= self.typical


@dataclasses.dataclass(frozen=True)
class OutputParity:
    """How far a result is apart in two programs.

    Attributes:
        name: The result, as ``result``, ``result/0`` or by its key.
        size: How many numbers it has.
        error: The norm of the difference over the norm of the reference. Of integers
            and truth values, the share that differs, as ``outside`` is then.
        rms: The root of the mean square of the difference.
        largest: The largest difference.
        outside: The share of the numbers that are off by more than ``band`` times the
            root mean square of the reference. Of log-probabilities the share of the
            ratios of probabilities outside of 1 ± ``band``.
        by_token: Of log-probabilities ``[..., length]``, the RMS at each place.

    Examples:
        >>> x = jnp.zeros((2, 3))
        >>> report = jaxmp.parity(jnp.exp, lambda x: x + 1.5)(x)
        >>> report.outputs[0].error, report.outputs[0].largest
        (0.5, 0.5)
    """

    name: str
    size: int
    error: float
    rms: float
    largest: float
    outside: float
    by_token: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What :func:`jaxmp.parity` found; ``str`` of it is a table.

    Attributes:
        first: The first module that adds more than rounding explains, None if none.
        modules: All that were compared, in the order of the second program.
        outputs: The results.
        reference_only: Modules that the reference alone has, at most some of them.
        other_only: Modules that the second program alone has.
        band: The argument of :func:`jaxmp.parity`.
        log_probs: Whether the results are log-probabilities.
        notes: What was not compared.
    """

    first: ModuleParity | None
    modules: tuple[ModuleParity, ...]
    outputs: tuple[OutputParity, ...]
    reference_only: tuple[str, ...]
    other_only: tuple[str, ...]
    band: float
    log_probs: bool
    notes: tuple[str, ...]

    def assert_within(self, **limits: float) -> None:
        """Raises an ``AssertionError`` where a result is off by more than its limit.

        Args:
            **limits: The largest error by the name of a result: ``result=1e-3``. Of a
                name with a slash, ``**{"result/0": 1e-3}``. The first result is
                ``loss``, too, if it is a single number.

        Examples:
            >>> def loss(w, x):
            ...     return jnp.mean((x @ w) ** 2)
            >>> narrow = jaxmp.autocast(loss, "mixed_bfloat16")
            >>> w, x = jnp.ones((8, 2)) / 3, jnp.ones((4, 8))
            >>> jaxmp.parity(loss, narrow)(w, x).assert_within(loss=1e-2)
        """
        errors = {x.name: x.error for x in self.outputs}
        if self.outputs and self.outputs[0].size == 1:
            errors.setdefault("loss", self.outputs[0].error)
        for name, limit in limits.items():
            if name not in errors:
                has = ", ".join(f"`{x}`" for x in errors) or "none"
                raise ValueError(
                    f"`assert_within` has `{clipped(name)}`, but that is no result. "
                    f"Results are {clipped(has, 300)}."
                )
            if not errors[name] <= limit:
                raise AssertionError(
                    f"`{name}` is off by {_error(errors[name])}, more than "
                    f"{_error(limit)}.\n\n{self}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON."""
        return as_lists(dataclasses.asdict(self))

    def __str__(self) -> str:
        """Renders a table of at most 80 columns, the verdict first."""
        return "\n".join(
            paragraphs(
                [*_verdict(self.first, len(self.modules)), *_unpaired(self)],
                _results(self),
                _table(self),
                notes(self),
            )
        )

    _repr_html_ = as_html


def _verdict(first: ModuleParity | None, count: int) -> Iterator[str]:
    if first is None:
        which = "No module adds" if count > 1 else "Nothing is off by"
        yield from wrapped(f"{which} more than rounding explains.")
        return
    who = "The lines outside of all modules are the first that differ"
    who = f"`{first.path}` is the first that differs" if first.path else who
    is_named = first.path and not first.reference.endswith(first.path)
    other = f" (`{first.reference}` in the reference)" if is_named else ""
    yield from wrapped(
        f"{who}{other} by more than its input and rounding explain: given the same, "
        f"{first.value} is off by {_error(first.added)}, of which rounding explains "
        f"{_error(first.typical)}."
    )
    if first.where:
        yield from wrapped(f"computed at {short_line(first.where)}", "  ", "    ")


def _unpaired(report: ParityReport) -> Iterator[str]:
    """Lists the modules that are in one program alone, of those in the first."""
    if not any(x.path for x in report.modules):
        return  # of which a note speaks
    first = report.first
    ours, theirs = (first.path, first.reference) if first else ("", "")
    sides = ("the reference", report.reference_only, theirs)
    for side, paths, path in (sides, ("the second", report.other_only, ours)):
        inside = [f"`{x}`" for x in paths if x.startswith(f"{path}/" * bool(path))]
        if inside:
            text = f"in {side} alone: {', '.join(inside[:3])}"
            rest = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
            yield from wrapped(text + rest, "  ", "    ")


def _results(report: ParityReport) -> Iterator[str]:
    band = f"outside {report.band:.3g}"
    rows: list[Any] = [("result", "error", "RMS", "largest", band)]
    for x in report.outputs[:_ROWS]:
        numbers = map(_error, (x.error, x.rms, x.largest))
        rows.append((x.name, *numbers, f"{x.outside:.1%}"))
    if report.outputs:
        width = min(max(len(x[0]) for x in rows), WIDTH - 45)
        yield from aligned(rows, (width, -8, -8, -8, -len(band)), first="  ")
        yield from more(report.outputs, _ROWS, "outputs")


def _table(report: ParityReport) -> Iterator[str]:
    if not report.modules:
        return
    order = sorted(report.modules, key=lambda x: (not x.differs, -_ratio(x)))
    shown = [x for x in report.modules if x in order[:_ROWS]]
    rows: list[Any] = [("module", "handed in", "added", "rounding")]
    for x in shown:
        numbers = map(_error, (x.handed, x.added, x.typical))
        rows.append((f"{x.name}{' *' * x.differs}", *numbers))
    width = min(max(len(x[0]) for x in rows), WIDTH - 37)
    yield from aligned(rows, (width, -9, -9, -9), first="  ")
    yield from more(report.modules, len(shown), "modules")


def _ratio(x: ModuleParity) -> float:
    return x.added / x.typical if x.typical else x.added


def _error(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"
