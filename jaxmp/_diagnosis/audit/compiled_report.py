"""What an audit of compiled code finds, as data and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from ..._base.dtypes import is_wide
from ..text import notes, paragraphs, table, unit, wrapped
from .flops import FlopsReport, by_dtype, verdict
from .report import ROWS, UnfusedAttention, attention_lines

_LOST = (
    "roundings that XLA took away: it computes on in the wider dtype. To keep one, "
    "write `jax.lax.reduce_precision`"
)


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """The matmuls, convolutions or attention kernels of a line, of one dtype.

    Attributes:
        operation: ``"matmul"``, ``"convolution"``, or ``"attention"`` for one that is a
            single kernel.
        targets: The library calls, such as ``"__cublas$lt$matmul"``, or ``"dot"`` in a
            kernel that XLA has written.
        dtype: That of the operands in the call, the wider one if they differ.
        count: How often they run.
        flops: FLOPs of all of them.
        module: Named scopes.
        where: ``file:line``.
    """

    operation: str
    targets: tuple[str, ...]
    dtype: str
    count: int
    flops: float
    module: str
    where: str


@dataclasses.dataclass(frozen=True)
class LostRounding:
    """A cast to fewer bits and back that the compiled code does without.

    Attributes:
        dtype: What was rounded to.
        count: How many casts of this line are gone.
        numbers: How many numbers they would have rounded.
        module: Named scopes.
        where: ``file:line``.
    """

    dtype: str
    count: int
    numbers: int
    module: str
    where: str


@dataclasses.dataclass(frozen=True)
class WideArray:
    """Float32 arrays that are large beside the temporary memory of a program.

    Attributes:
        dtype: float32, or wider.
        shape: Of each array.
        count: How many kernels write one.
        bytes: Of each array.
        share: ``bytes`` as a share of the temporary memory. Arrays that live at
            different times can have the same place in it.
        module: Named scopes.
        where: ``file:line``.
    """

    dtype: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    share: float
    module: str
    where: str


@dataclasses.dataclass(frozen=True)
class CompiledReport(FlopsReport):
    """What :func:`jaxmp.audit` found in the code that XLA compiled for a GPU.

    A ``Lowered`` is compiled, and compared with what comes of it. A ``Compiled`` is
    read as it is, and does not hold what was asked for.

    Attributes:
        flops: FLOPs of matmuls, convolutions and fused attention, by the dtype of the
            operands in the call. With several devices, those of one.
        device: The device, and its compute capability. Empty if the program does not
            say for which one it was compiled.
        products: All of them by line, most FLOPs first.
        asked: ``flops`` as the program asks for them, before XLA. None for a
            ``Compiled``, which does not know.
        lost_roundings: Casts to fewer bits and back that are gone. None like ``asked``.
        attention: Attention that is not one kernel.
        wide_arrays: Arrays in float32 of 5% of the temporary memory or more.
        temporary_bytes: Bytes of the temporary memory, None if XLA does not say.
        calls: Library calls and kernels of which nothing is known, and how often they
            run. They are in no other number.
        why: What the device does not have, and what to type.
        notes: What could not be counted, or is not known.
    """

    device: str
    products: tuple[CompiledProduct, ...]
    asked: dict[str, float] | None
    lost_roundings: tuple[LostRounding, ...] | None
    attention: tuple[UnfusedAttention, ...]
    wide_arrays: tuple[WideArray, ...]
    temporary_bytes: int | None
    calls: dict[str, int]
    why: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text of the report."""
        return paragraphs(
            _verdict_lines(self),
            _wide_lines(self),
            attention_lines(self.attention),
            _rounding_lines(self),
            _array_lines(self),
            _call_lines(self),
            notes(self),
        )


def _verdict_lines(report: CompiledReport) -> Iterator[str]:
    yield from verdict(report)
    yield from by_dtype(report.flops)
    if report.asked is not None and report.asked != report.flops:
        yield "  in the program before XLA"
        yield from (f"  {line}" for line in by_dtype(report.asked))
    yield from wrapped(f"in the code for {report.device or 'an unknown device'}")
    for why in report.why:
        yield from wrapped(why, "", "  ")


def _wide_lines(report: CompiledReport) -> Iterator[str]:
    total = sum(report.flops.values())
    wide = [row for row in report.products if is_wide(jnp.dtype(row.dtype))]
    if wide:
        yield "not 16-bit"
    rows = [
        (f"{row.flops / total:.1%}", f"{row.dtype} {row.operation}", row)
        for row in wide
    ]
    yield from table(rows, ROWS, "products")
    if fused := sum(x.count for x in report.products if x.operation == "attention"):
        yield f"attention: {fused} fused kernel{'s' * (fused > 1)}"


def _rounding_lines(report: CompiledReport) -> Iterator[str]:
    if report.lost_roundings:
        yield from wrapped(_LOST, "", "  ")
    rows = [
        (f"{row.count}", f"to {row.dtype}", row) for row in report.lost_roundings or ()
    ]
    yield from table(rows, ROWS, "lost_roundings")


def _array_lines(report: CompiledReport) -> Iterator[str]:
    if report.wide_arrays:
        size = unit(report.temporary_bytes or 0, 1024)
        yield f"large float32 arrays, and their share of {size}B of temporary memory"
    rows = []
    for row in report.wide_arrays:
        sizes = ",".join(map(str, row.shape))
        times = f"{row.count} x " if row.count > 1 else ""
        rows.append((f"{row.share:.1%}", f"{times}{row.dtype}[{sizes}]", row))
    yield from table(rows, ROWS, "wide_arrays")


def _call_lines(report: CompiledReport) -> Iterator[str]:
    if report.calls:
        yield "calls that are not counted"
    for name, count in report.calls.items():
        yield from wrapped(f"{count} x {name}", "  ", "    ")
