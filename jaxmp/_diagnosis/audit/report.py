"""What an audit finds, as data and as a table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from ..._base.dtypes import is_wide
from ..._jaxprs.places import short_line
from ..text import more, notes, paragraphs, table, unit, wrapped
from .flops import FlopsReport, by_dtype, verdict

_ON_DEVICES = "TF32 on A100 and later, bfloat16 on a TPU"
_WRONG = "wrong in 16 bits"
# Points that lie far from 0 have wrong distances, and others have good ones.
_DOUBTFUL = "may lose digits in 16 bits"
_SUBJECTS = {"number": "a number", "units": "the sum"}
_MEASURE = ": measure with `sensitivity`"
_ON_DEVICES_TOO = (
    " and in float32 at default precision, TF32 on A100 and later (rounded by 0.05%), "
    "bfloat16 on a TPU (0.2%)"
)
_PARTS = (
    "jax.lax.complex(*jnp.split(jnp.concatenate([a.real, a.imag], -1) @ jnp.block("
    "[[b.real, b.imag], [-b.imag, b.real]]), 2, -1))"
)
ROWS = 10  # of each table


@dataclasses.dataclass(frozen=True)
class Leak:
    """One cause of float32 or float64 matmuls.

    Attributes:
        source: The argument's path, the constant, or the operation that casts.
        kind: ``"argument"``, ``"constant"``, ``"cast"`` or, where an operation that
            JAX alone knows made it float32, ``"unknown"``.
        dtype: The dtype that ``source`` brought in.
        meets_16bit: Whether it promoted 16-bit values to float32. If not, everything
            that it meets is float32 already.
        module: Named scopes (Linen module path) where that happened.
        where: The line of your code, ``file:line``. For a number in the code, the line
            where the number stands. If all the code is a library's, the line that
            called the audit.
        flops: FLOPs of the matmuls that are not 16-bit because of it. Two causes of
            one matmul both count it.
        share: ``flops`` as a share of all the FLOPs.
        meets: ``"float32"`` if it is float64 and promoted float32 values; else empty.

    Examples:
        >>> x, scale = jnp.ones((8, 8), jnp.bfloat16), jnp.ones(8)
        >>> report = jaxmp.audit(lambda x, scale: (x * scale) @ x)(x, scale)
        >>> (leak,) = report.leaks
        >>> leak.source, leak.kind, leak.meets_16bit, leak.share
        ('scale', 'argument', True, 1.0)
    """

    source: str
    kind: str
    dtype: str
    meets_16bit: bool
    module: str
    where: str
    flops: float
    share: float
    meets: str = ""

    def __str__(self) -> str:
        if self.kind == "unknown":
            return self.source
        met = "16-bit" if self.meets_16bit else self.meets or self.dtype
        if self.kind == "cast":
            return f"{self.source} from {met} to {self.dtype}"
        source = f"{self.source} ({self.dtype})"
        if self.kind == "constant":  # whose name says the dtype
            source = self.source
        return f"{source} meets {met}"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A matmul that :func:`jaxmp.autocast` left in float32, or in 16 bits, and why.

    Attributes:
        operation: Name of the JAX primitive.
        reason: Why it was left.
        count: The number of times that it runs.
        flops: FLOPs.
        module: Named scopes.
        where: ``file:line``.
        dtype: The widest dtype that it reads or returns: float32, or one that autocast
            leaves as it was written, such as complex64.

    Examples:
        >>> kept_in_float32 = jaxmp.float32_region(jnp.matmul)
        >>> x = jnp.ones((8, 8))
        >>> report = jaxmp.audit(jaxmp.autocast(kept_in_float32))(x, x)
        >>> (row,) = report.kept
        >>> row.operation, row.count, row.flops
        ('dot_general', 1, 1024.0)
    """

    operation: str
    reason: str
    count: int
    flops: float
    module: str
    where: str
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A matmul that is wrong in 16 bits, or a number that becomes 0 or Inf.

    Attributes:
        kind: ``"phase"`` of a sine, ``"distance"`` from ``|x|² + |y|² - 2xy``,
            ``"covariance"`` from moments, ``"difference"`` by a convolution or of what
            was added before, or ``"inverse"`` of a matrix; ``"units"`` of a sum with a
            number in the code that is taken away again, as in Kelvin; or ``"number"``,
            one in the code such as an epsilon of 1e-8 in float16.
        why: What goes wrong.
        cure: What to type: an argument of :func:`jaxmp.autocast`, a ``with`` statement,
            or another formula.
        module: Named scopes of the product, or of what reads the number.
        where: Its ``file:line``.
        at_default_precision: Whether the matmul is float32 at default precision, and
            so is wrong on a device as it stands: TF32 on an A100 and later, whose
            operands are rounded by up to 0.05%, and bfloat16 on a TPU (0.2%).

    Examples:
        >>> def features(x, w):
        ...     return jnp.sin(2 * jnp.pi * x @ w)
        >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> (risk,) = jaxmp.audit(features)(x, x).hazards
        >>> risk.kind, risk.cure
        ('phase', 'with jax.default_matmul_precision("highest"):')
        >>> risk.at_default_precision
        True
    """

    kind: str
    why: str
    cure: str
    module: str
    where: str
    at_default_precision: bool = False

    @property
    def is_doubtful(self) -> bool:
        """Whether the values decide how wrong it is: measure with ``sensitivity``."""
        return self.kind == "distance"


@dataclasses.dataclass(frozen=True)
class UnfusedAttention:
    """An attention that is not cuDNN's fused kernel on an NVIDIA GPU.

    Attributes:
        why: Why :func:`jaxmp.dot_product_attention`, or its form for Flax, is not, and
            what to change. Empty for an attention that is written out.
        bytes: Of one that is written out, those of its weights, which the forward pass
            writes and the kernel does not: a number for each query and key, in each
            head of each example, in the dtype in which a matmul reads them. All layers
            of a line count.
        module: Named scopes of the first one in this line.
        where: Its ``file:line``.
        device: The GPU by which it was judged, and its compute capability: that of the
            arguments, or JAX's default device, or, if that is none, any GPU that has
            the kernel.

    Examples:
        >>> x = jax.ShapeDtypeStruct((2, 16, 4, 12), jnp.bfloat16)
        >>> report = jaxmp.audit(jaxmp.dot_product_attention)(x, x, x)
        >>> print(report.attention[0].why)
        heads have size 12; the kernel takes multiples of 8 up to 256
    """

    why: str
    bytes: int
    module: str
    where: str
    device: str = ""


@dataclasses.dataclass(frozen=True)
class WrittenHead:
    """A cross-entropy of a matmul that is written out, with an array of its logits.

    :func:`jaxmp.linear_cross_entropy` computes it without one.

    Attributes:
        bytes: Of the float32 logits of all such heads in this line. A gradient of them
            is as large.
        module: Named scopes of the first one.
        where: Its ``file:line``.

    Examples:
        >>> hidden, kernel = jnp.ones((4, 8)), jnp.ones((8, 100))
        >>> fun = lambda h, w: -jax.nn.log_softmax(h @ w)[:, 0].mean()
        >>> jaxmp.audit(fun)(hidden, kernel).loss_heads[0].bytes
        1600
    """

    bytes: int
    module: str
    where: str


@dataclasses.dataclass(frozen=True)
class DtypeReport(FlopsReport):
    """What :func:`jaxmp.audit` found.

    Attributes:
        flops: FLOPs of matmuls and convolutions by the dtype of their inputs, the wider
            one if they differ.
        leaks: Causes of float32 and float64 matmuls, worst first, each once. Where
            nothing is in 16 bits, the text of the report leaves them out.
        kept: The matmuls that autocast left in float32, or in another dtype that is no
            16 bits, the largest first.
        kept_16bit: The matmuls that autocast left in 16 bits under a policy that asks
            for float8.
        residual_bytes: Bytes by dtype that the forward pass stores for the backward
            pass, without the arguments. None if the function computes no gradients.
        notes: What could not be counted exactly.
        hazards: Matmuls whose use makes 16 bits wrong, where the pattern is clear, and
            numbers that become 0 or Inf in 16 bits. A matmul that is in float32 on
            purpose is not a risk.
        default_precision_flops: FLOPs of the float32 matmuls at JAX's default
            precision, which is TF32 on an A100 and later, and bfloat16 on a TPU.
        attention: What keeps an attention from cuDNN's kernel, and those that are
            written out.
        loss_heads: Cross-entropies of a matmul that are written out.
    """

    leaks: tuple[Leak, ...]
    kept: tuple[Kept, ...]
    residual_bytes: dict[str, int] | None
    notes: tuple[str, ...]
    kept_16bit: tuple[Kept, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    default_precision_flops: float = 0.0
    attention: tuple[UnfusedAttention, ...] = ()
    loss_heads: tuple[WrittenHead, ...] = ()

    @property
    def is_uncast(self) -> bool:
        """Whether nothing is in 16 bits, and nothing of it is autocast."""
        narrow = {leak.meets_16bit or leak.dtype == "float64" for leak in self.leaks}
        real = any(map(_is_real, self.flops))
        return real and not self.fraction_16bit and not self.kept and narrow == {False}

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text of the report."""
        return _lines(self)


_UNCAST = "nothing is in 16 bits: use `jaxmp.autocast`, or cast with `with_policy`"
# What to do about a float32 fallback, by its kind.
_CURES = {
    "argument": "Cast the argument: `jaxmp.with_policy`, for a Linen model "
    "`jaxmp.linen.with_policy`, or `jaxmp.autocast`.",
    "constant": "Write a number without a dtype, `2.0`, and an array as "
    "`jnp.asarray(array, x.dtype)`.",
    "cast": "Cast back after what needs float32: `.astype(x.dtype)`.",
}


# The table


def _lines(report: DtypeReport) -> Iterator[str]:
    return paragraphs(
        [_UNCAST] * report.is_uncast,
        _dtype_lines(report),
        _leak_lines(report),
        _kept_lines(report),
        _complex_lines(report),
        _hazard_lines(report.hazards),
        attention_lines(report.attention),
        _head_lines(report),
        _residual_lines(report),
        notes(report),
    )


def _dtype_lines(report: DtypeReport) -> Iterator[str]:
    total = sum(report.flops.values())
    if report.is_uncast:
        yield f"{unit(total, 1000)}FLOP of matmuls and convolutions"
    else:
        yield from verdict(report, bool(report.kept_16bit))
    yield from by_dtype(report.flops)
    if report.default_precision_flops:
        share = f"{report.default_precision_flops / total:.1%} of the FLOPs"
        text = f"{share} in float32 at default precision: {_ON_DEVICES}"
        yield from wrapped(text, "", "  ")


def _leak_lines(report: DtypeReport) -> Iterator[str]:
    if not report.leaks or report.is_uncast:
        return
    yield f"{wide_name(report)} because of"
    rows = [(f"{leak.share:.1%}", str(leak), leak) for leak in report.leaks]
    yield from table(rows, ROWS, "leaks")
    for kind in dict.fromkeys(leak.kind for leak in report.leaks if leak.meets_16bit):
        if kind in _CURES:
            yield from wrapped(_CURES[kind], "  ", "    ")
    if any(leak.dtype == "float64" for leak in report.leaks):
        yield "  Autocast leaves float64: cast it first, `x.astype(jnp.float32)`."


def _is_real(dtype: str) -> bool:
    return not dtype.startswith("complex")


def wide_name(report: DtypeReport) -> str:
    """Names what matmuls are: float32, unless some are wider or complex."""
    wide = {name for name in report.flops if is_wide(jnp.dtype(name))}
    return "float32" if wide <= {"float32"} else "not 16-bit"


def _kept_lines(report: DtypeReport) -> Iterator[str]:
    total = sum(report.flops.values())
    in_float32 = [row for row in report.kept if row.dtype == "float32"]
    others = [row for row in report.kept if row.dtype != "float32"]
    for heading, field, kept in (
        ("kept in 16 bits by autocast", "kept_16bit", report.kept_16bit),
        ("kept in float32 by autocast", "kept", in_float32),
        ("not float32, so autocast left it as you wrote it", "kept", others),
    ):
        rows = [
            (f"{row.flops / total:.1%}", f"{row.operation}, {row.reason}", row)
            for row in kept
        ]
        yield from [heading] * bool(rows)
        yield from table(rows, ROWS, field)


def _complex_lines(report: DtypeReport) -> Iterator[str]:
    """Says once what to write for matmuls of which no device has a 16-bit form."""
    if not all(map(_is_real, report.flops)):
        yield "no device has complex 16-bit matmuls: write one real one; four move more"
        yield from wrapped(_PARTS, "    ", "        ", is_code=True)


def _hazard_lines(hazards: Sequence[Hazard]) -> Iterator[str]:
    """Yields two lines or more for each risk: what it is, and what to type."""
    for doubtful, on_devices in itertools.product((False, True), repeat=2):
        wanted = doubtful, on_devices
        rows = [
            x
            for x in hazards[:ROWS]
            if (x.is_doubtful, x.at_default_precision) == wanted
        ]
        heading = f"{_DOUBTFUL if doubtful else _WRONG}{_ON_DEVICES_TOO * on_devices}"
        heading += _MEASURE * doubtful
        yield from wrapped(heading * bool(rows), "", "  ")
        for row in rows:
            subject = _SUBJECTS.get(row.kind, "the matmul")
            yield from wrapped(f"{subject} {_at(row)}", "  ", "    ")
            yield from wrapped(row.cure, "    ", "        ", is_code=True)
    yield from more(hazards, ROWS, "hazards")


def _at(row: Hazard | UnfusedAttention) -> str:
    module = f" in {row.module}" if row.module else ""
    return f"at {short_line(row.where)}{module}: {row.why}"


def attention_lines(attention: Sequence[UnfusedAttention]) -> Iterator[str]:
    """Yields two headings, and what is under them."""
    written = [row for row in attention if not row.why]
    if written:
        text = "attention without a fused kernel: `jaxmp.dot_product_attention` saves"
        yield from wrapped(text, "", "  ")
    rows = [(f"{unit(x.bytes, 1024)}B", "of attention weights", x) for x in written]
    yield from table(rows, ROWS, "attention")
    others = [row for row in attention if row.why]
    if others:
        yield f"attention that is not cuDNN's kernel on {others[0].device}"
    for row in others[:ROWS]:
        yield from wrapped(_at(row), "  ", "    ")
    yield from more(others, ROWS, "attention")


def _head_lines(report: DtypeReport) -> Iterator[str]:
    if report.loss_heads:
        call = "jaxmp.linear_cross_entropy(hidden, kernel, labels)"
        yield f"a loss with an array of its logits: `{call}` has none"
    rows = [(f"{unit(x.bytes, 1024)}B", "of logits", x) for x in report.loss_heads]
    yield from table(rows, ROWS, "loss_heads")


def _residual_lines(report: DtypeReport) -> Iterator[str]:
    if report.residual_bytes:
        yield "saved residuals (for the backward pass)"
    for dtype, size in (report.residual_bytes or {}).items():
        yield f"  {dtype:<10}{unit(size, 1024):>10}B"
