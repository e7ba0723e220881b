"""What a search for an overflow finds, as data and as a table."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._base.checks import as_html, clipped
from ..._jaxprs.places import short_line
from ..text import as_lists, notes, paragraphs, table, wrapped

_HEALTHY = "no operation made an Inf or NaN that reached a result"
CHECKED = "an `isfinite` check"  # what a fault may reach, beside results
_OTHERS = "other operations that made Inf or NaN from finite inputs"
_LEAST = "fewest bits below overflow (Inf, NaN: exceeded)"
_LOST = "underflow: share of values that are zero or subnormal, but not in float32"
_ROWS = 6  # of each table
# Why an operation of finite numbers is Inf or NaN in every precision.
_UNDEFINED = {"div": "the divisor is 0 in an entry, or nearly 0"} | dict.fromkeys(
    ("log", "rsqrt", "sqrt"), "the input is 0 or negative in an entry"
)
_key = operator.attrgetter("operation", "dtype", "where", "module", "backward", "code")
_SEEN = 0.0005  # of a fraction in percent, with one decimal
# A result is wrong that is off by more than this, a last digit of bfloat16 or ten of
# float16, and by more than twice of what rounding does. A gradient that has lost half
# of itself may train as well.
TOLERANCE, OF_GRADIENTS = 0.01, 0.5
# Of a program without a fault only what is no noise: values within the three bits of
# headroom that a loss scale leaves, and a share without which a sum is off by so much
# that it is wrong. The verdict names half of the share that a gradient may lose.
_NEAR, _FELT, _LARGE = 3, TOLERANCE, OF_GRADIENTS / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """What a line of the user computes in a module, by operation."""

    operation: str
    dtype: str
    where: str
    module: str
    backward: bool
    code: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault(Line):
    """An operation that made an Inf or a NaN, or zeros that make a result wrong.

    Attributes:
        operation: Name of the JAX primitive.
        dtype: Of its result.
        kind: ``"Inf"``, ``"NaN"``, or ``"zeros"``: numbers that float32 holds are zero
            or subnormal here, and change a result.
        where: The line of your code, ``file:line``.
        module: Named scopes: a Linen module's path, or those of ``jax.named_scope``.
        backward: Whether it is in the backward pass. Recomputation in a
            ``jax.checkpoint`` is not.
        iterations: The index of the iteration of each loop around it, the outermost
            first.
        inputs: Dtype, shape and largest magnitude, or Inf, of its first three floating
            inputs, at the first result that was not finite (for zeros: at the last).
        largest: The largest number of ``dtype``.
        code: The expression of the line that it is of, or that it is a derivative of.
        finite_in_float32: Whether float32 holds what it gives.

    Examples:
        >>> x = jnp.array([2.0, 300.0], jnp.float16)
        >>> first = jaxmp.find_overflow(lambda x: x * x)(x).first
        >>> first.operation, first.kind, first.backward, first.inputs[0]
        ('mul', 'Inf', False, ('float16', (2,), 300.0))
    """

    kind: str
    iterations: tuple[int, ...]
    inputs: tuple[tuple[str, tuple[int, ...], float], ...]
    largest: float
    finite_in_float32: bool = False

    def __str__(self) -> str:
        """Says what happened, in one line."""
        line = short_line(self.where)
        words = [f"{self.operation} gives {self.kind} in {self.dtype}"]
        words += [f"at {line}"] if line else []
        words += [f"in {self.module}"] if self.module else []
        words += ["in the backward pass"] if self.backward else []
        loops = ", ".join(map(str, self.iterations))
        words += [f"in iteration {loops}"] if loops else []
        return " ".join(words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationRange(Line):
    """The range of an operation's results, over all calls of its line in its module.

    Attributes:
        operation: Name of the JAX primitive.
        dtype: Of its result.
        where: The line of the caller's code, ``file:line``.
        module: Named scopes.
        backward: Whether it is of the backward pass.
        size: The number of its values.
        max: Their largest finite magnitude.
        min: Their smallest magnitude that is not zero, 0 if there is none.
        headroom: Bits from ``max`` to the largest number of ``dtype``; Inf if
            all is zero.
        lost: The fraction that float32 would hold, and that this operation makes zero
            or subnormal.
        nonfinite: The fraction that is Inf or NaN.
        code: The expression of the line that it is of, or that it is a derivative of.
    """

    size: int
    max: float
    min: float
    headroom: float
    lost: float
    nonfinite: float


@dataclasses.dataclass(frozen=True)
class OverflowReport:
    """What :func:`jaxmp.find_overflow` found; ``str`` of it is a table.

    Attributes:
        first: The first operation that makes an Inf or NaN from finite inputs, if that
            reaches a result or an ``isfinite`` check. If zeros that float32 would not
            have are the cause, the operation that made the zeros. None if there is
            none.
        advice: What it means and what to type.
        reached: The results that it reached. For zeros: the results that are off by
            more than 1%, and gradients that are off by more than half.
        reached_modules: The modules that it reached, in the order of the program.
        given: The arguments with an Inf or NaN, by their path: the number of NaNs and
            of Infs.
        others: All other operations that made an Inf or NaN from finite inputs: a mask
            or a ``where`` removed it, or it came later.
        finite_in_float32: Whether the same program, written in float32, is finite. None
            if there was no fault, or if the program casts by itself and the numbers
            before the cast are lost.
        operations: The range of each operation, in the order of the program.
        notes: The parts of the program that it could not look into.
    """

    first: Fault | None
    advice: str
    reached: tuple[str, ...]
    reached_modules: tuple[str, ...]
    given: dict[str, tuple[int, int]]
    others: tuple[Fault, ...]
    finite_in_float32: bool | None
    operations: tuple[OperationRange, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON.

        Examples:
            >>> report = jaxmp.find_overflow(jnp.exp)(jnp.float16(12.0))
            >>> report.as_dict()["first"]["operation"]
            'exp'
        """
        return as_lists(dataclasses.asdict(self))

    def __str__(self) -> str:
        """Renders a table of at most 80 columns."""
        worst = sorted(self.operations, key=lambda x: -x.lost)
        least = _FELT if _is_healthy(self) else _SEEN
        losing = [(f"{x.lost:.1%}", x) for x in worst if x.lost >= least]
        lines = paragraphs(
            _fault_lines(self),
            wrapped(self.advice, is_code=True),
            _table(self, _OTHERS, [(x.kind, x) for x in self.others], "others"),
            _table(self, _LEAST, _nearest(self)),
            _table(self, _LOST, losing),
            notes(self),
        )
        return "\n".join(lines)

    _repr_html_ = as_html


def _fault_lines(report: OverflowReport) -> Iterator[str]:
    fault = report.first
    if fault is None:
        yield from wrapped(f"{_HEALTHY}{_loss(report)}", "", "  ")
        return
    yield from wrapped(f"first: {fault}", "", "  ")
    if fault.code and _needs_code(report, fault):
        what = "the derivative of " if fault.backward else ""
        yield from wrapped(f"in {what}`{clipped(fault.code, 60)}`", "  ", "    ")
    for dtype, shape, largest in fault.inputs:
        yield f"  input {dtype}{[*shape]} up to {largest:.4g}".replace(" inf", " ±Inf")
    if fault.kind == "zeros":
        tiny = float(jnp.finfo(fault.dtype).tiny)
        yield f"  the smallest normal number of {fault.dtype} is {tiny:.4g}"
    elif (
        fault.operation in _UNDEFINED
        and not fault.finite_in_float32
        and all(np.isfinite(largest) for *_, largest in fault.inputs)
    ):
        yield f"  {_UNDEFINED[fault.operation]}"
    else:
        yield f"  the largest number of {fault.dtype} is {fault.largest:.4g}"
    what = "wrong" if fault.kind == "zeros" else "not finite"
    reached = [*map(_reached, report.reached)]
    modules = report.reached_modules
    for title, names in ((f"{what} because of it:", reached), ("modules:", modules)):
        if names:
            more = f" and {len(names) - _ROWS} more" if len(names) > _ROWS else ""
            text = f"{title} {', '.join(names[:_ROWS])}{more}"
            yield from wrapped(text, "  ", "    ")


def _is_healthy(report: OverflowReport) -> bool:
    return not (report.first or report.others or report.given)


def _loss(report: OverflowReport) -> str:
    """Says where most values are lost, if these are many."""
    worst = max(report.operations, key=lambda x: x.lost, default=None)
    if worst is None or worst.lost < _LARGE:
        return ""
    line, module = short_line(worst.where), worst.module
    place = f"{f' at {line}' * bool(line)}{f' in {module}' * bool(module)}"
    back = " in the backward pass" * worst.backward
    return (
        f", but {worst.lost:.1%} of what {worst.operation} gives{place}{back} is zero "
        "or subnormal, and is not in float32"
    )


def _reached(name: str) -> str:
    """Returns a result, or the check, as the table names it."""
    if name == CHECKED:
        return name
    if name == "result":
        return "the result"
    return f"`{name}`" if name.startswith("result/") else f"result `{name}`"


def _table(
    report: OverflowReport, title: str, rows: list[tuple[str, Any]], name: str = ""
) -> Iterator[str]:
    """Writes rows, if any; the field of the report with a name has all of them."""
    cells = []
    for number, row in rows:
        text = f"{row.operation} {row.dtype}{' backward' if row.backward else ''}"
        if row.code and _needs_code(report, row):
            text += f" of `{clipped(row.code, 20)}`"
        cells.append((number, text, row))
    if cells:
        yield title
        yield from table(cells, _ROWS, name)


def _nearest(report: OverflowReport) -> list[tuple[str, Any]]:
    """Returns the operations that gave Inf or NaN, and then those that came near."""
    faults = [x for x in (report.first, *report.others) if x and x.kind != "zeros"]
    known: dict[Any, tuple[str, Any]] = {_key(x): (x.kind, x) for x in faults}
    # A mask of `jnp.finfo(dtype).min` is 0 bits below overflow, and is meant.
    near = [x for x in report.operations if x.max > 0 and x.headroom > 0]
    if _is_healthy(report):
        near = [x for x in near if x.headroom < _NEAR]
    for x in sorted(near, key=lambda x: x.headroom):
        known.setdefault(_key(x), (f"{x.headroom:.1f}", x))
    return [*known.values()]


def _needs_code(report: OverflowReport, row: Line) -> bool:
    """Whether the line alone does not tell which part of it an operation is of.

    Derivatives, and what differentiation computes beside an operation for them, are
    written nowhere in the line.
    """
    same = {
        x.operation
        for x in report.operations
        if (x.where, x.module, x.code) == (row.where, row.module, row.code)
        if not x.backward
    }
    return row.backward or len(same) > 1
