"""The error that each module makes in 16 bits, as data and as a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..._base.checks import as_html
from ..text import WIDTH, aligned, as_lists, more, notes, paragraphs, wrapped

_ROWS = 10
_NO_MODULE = "(in no module)"
_HIGHEST = 'with jax.default_matmul_precision("highest"):'
# Of `float32_matmuls`.
_NAMES = {"tf32": "TF32", "bfloat16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class ModuleSensitivity:
    """The error that one module, with everything inside it, makes in 16 bits.

    Or in eight, in a report on residuals. Then "alone in 16 bits" below means that only
    this module stores eight bits, and everything is in 16 bits otherwise.

    Errors are relative. A loss of 2.02 instead of 2 has an error of 0.01. The error of
    the gradients is the norm of their difference over their norm. An error is ``inf``
    if a result is not finite.

    Attributes:
        path: The module path; empty for lines outside all modules.
        loss_alone: Error of the loss with this module alone in 16 bits.
        gradients_alone: Error of the gradients with this module alone in 16 bits.
        loss_without: Error of the loss with everything but this module in 16 bits.
        gradients_without: Error of the gradients, likewise.
        flops: FLOPs of its matmuls and convolutions, forward and backward.
        share: ``flops`` as a share of all the FLOPs.
        has_path: Whether ``float32_paths`` can name it alone. Lines outside all
            modules, and lines of the outermost module itself, have no path of their
            own.
        stored: Share of what is stored in eight bits for the backward pass that the
            module computes or reads.
        is_estimated: Whether the errors without it are estimated, as what is left of
            the squares. So it is of more than 40 modules, but for the worst ten.

    Examples:
        >>> def loss(w, x):
        ...     with jax.named_scope("phase"):
        ...         return jnp.mean(jnp.sin(x @ w))
        >>> w, x = jnp.full((8, 2), 33.3), jnp.full((8, 8), 3.33)
        >>> report = jaxmp.sensitivity(loss, "bfloat16")(w, x)
        >>> (row,) = report.modules
        >>> row.path, row.gradients_alone > 0.1, row.gradients_without, row.share
        ('phase', True, 0.0, 1.0)
    """

    path: str
    loss_alone: float
    gradients_alone: float
    loss_without: float
    gradients_without: float
    flops: float
    share: float
    has_path: bool
    stored: float = 0.0
    is_estimated: bool = False

    @property
    def name(self) -> str:
        """The path as the table has it."""
        if self.has_path:
            return self.path
        return f"{self.path} (its own lines)" if self.path else _NO_MODULE

    @property
    def alone(self) -> float:
        """The larger error with this module alone in 16 bits."""
        return max(self.loss_alone, self.gradients_alone)

    @property
    def without(self) -> float:
        """The larger error with everything but this module in 16 bits."""
        return max(self.loss_without, self.gradients_without)


@dataclasses.dataclass(frozen=True)
class SensitivityReport:
    """What :func:`jaxmp.sensitivity` found.

    Attributes:
        modules: A row for each module path that touches 16 bits, the worst first.
        dtype: The dtypes of 16 bits and of eight; empty if there are none.
        loss: Error of the loss with everything in 16 bits.
        gradients: Error of the gradients with everything in 16 bits.
        tolerance: The largest error that is accepted for either.
        float32_paths: The modules that must stay in float32 to meet it, found greedily;
            empty if none must.
        bfloat16_paths: The modules that must stay out of eight bits besides, likewise.
        loss_with_paths: Error of the loss with these paths.
        gradients_with_paths: Error of the gradients with these paths.
        measured: Both errors again, of :func:`jaxmp.autocast` itself with these paths
            against float32. None for a function that casts by itself,
            and for one in float32.
        is_cast: Whether the function casts by itself. Then use overrides of its policy
            to keep modules in float32.
        loss_scale: The factor on the loss from which the gradients were computed.
        notes: What could not be switched to float32.
        float32_matmuls: The argument of :func:`jaxmp.sensitivity`. The errors include
            those of float32 matmuls on such a device.
        in_float32: Whether it measured a program in float32 on such a device.
        residuals: The eight bits that the program stores for its backward pass; None if
            none. The rows are about these then.
    """

    modules: tuple[ModuleSensitivity, ...]
    dtype: str
    loss: float
    gradients: float
    tolerance: float
    float32_paths: tuple[str, ...]
    bfloat16_paths: tuple[str, ...]
    loss_with_paths: float
    gradients_with_paths: float
    measured: tuple[float, float] | None
    is_cast: bool
    loss_scale: float
    notes: tuple[str, ...]
    float32_matmuls: str | None = None
    in_float32: bool = False
    residuals: str | None = None

    @property
    def narrow(self) -> str:
        """The width that the rows are about, as the table names it."""
        if self.residuals:
            return "8 bits"
        if "float8" in self.dtype:
            return "8/16 bits"  # large matmuls in float8, the others in bfloat16
        return _NAMES[str(self.float32_matmuls)] if self.in_float32 else "16 bits"

    @property
    def meets_tolerance(self) -> bool:
        """Whether the errors stay below the tolerance with the paths."""
        found = self.measured or (self.loss_with_paths, self.gradients_with_paths)
        return max(found) <= self.tolerance

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """The same modules for ``policy.with_overrides(*report.overrides)``.

        They match the parameters of a Linen model, or of any model whose parameters
        have the names of its modules in their paths.
        """
        # Parameters have no path of the outermost module in front.
        inner = [path.partition("/")[2] or path for path in self.float32_paths]
        return tuple((rf"^(params/)?{re.escape(x)}/", "float32") for x in inner)

    @property
    def line(self) -> str:
        """What to paste, empty if no path is needed.

        For a program in float32 this is a ``with`` statement to put around the code of
        each module.
        """
        if self.float32_paths and self.in_float32:
            return _HIGHEST
        if self.is_cast and self.float32_paths:
            pairs = (f'(r"{pattern}", "{dtype}")' for pattern, dtype in self.overrides)
            return f"policy.with_overrides({', '.join(pairs)})"
        options = ("float32_paths", "bfloat16_paths")
        return ", ".join(
            f"{option}={_spelled(getattr(self, option))}"
            for option in options
            if getattr(self, option)
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON.

        An error of a result that is not finite is ``"inf"``: JSON has no such number.
        """
        return {
            **as_lists(dataclasses.asdict(self)),
            "meets_tolerance": self.meets_tolerance,
            "overrides": as_lists(self.overrides),
            "line": self.line,
        }

    def __str__(self) -> str:
        """Renders a table of at most 80 columns, and the line to paste."""
        return "\n".join(_lines(self))

    _repr_html_ = as_html


def _spelled(paths: tuple[str, ...]) -> str:
    names = ", ".join(f'"{path}"' for path in paths)
    return f"({names}{',' * (len(paths) == 1)})"


def _lines(report: SensitivityReport) -> Iterator[str]:
    scale = f" and a loss scale of {report.loss_scale:g}" * (report.loss_scale != 1)
    errors = _errors(report.loss, report.gradients)
    named = {*report.float32_paths, *report.bfloat16_paths}
    rows = report.modules
    shown = [row for i, row in enumerate(rows) if i < _ROWS or row.path in named]
    return paragraphs(
        wrapped(_conclusion(report)),
        wrapped(report.line, "    ", "        ", is_code=True),
        wrapped(f"relative errors with {_everything(report)}{scale}: {errors}"),
        [*_table(report, shown), *more(rows, len(shown), "modules")],
        notes(report),
    )


def _everything(report: SensitivityReport) -> str:
    """Says what is rounded."""
    narrow = [f"everything in {report.dtype}"] * bool(report.dtype)
    if report.float32_matmuls:
        products = _NAMES[report.float32_matmuls]
        narrow.append(f"float32 matmuls at default precision in {products}")
    return " and ".join(narrow)


def _table(
    report: SensitivityReport, rows: Sequence[ModuleSensitivity]
) -> Iterator[str]:
    share = "stored" if report.residuals else "FLOPs"
    cells = [("module", *["loss", "gradients"] * 2, share)]
    for row in rows:
        alone = row.loss_alone, row.gradients_alone
        errors = map(_error, (*alone, row.loss_without, row.gradients_without))
        share = row.stored if report.residuals else row.share
        cells.append((row.name, *errors, f"{share:.1%}"))
    headings = [
        f"{which} in {report.narrow}" for which in ("only this", "all but this")
    ]
    first, second = (max(19, len(heading)) for heading in headings)
    longest = max(12, *(len(name) for name, *_ in cells))
    width = min(longest, WIDTH - 14 - first - second)
    yield from aligned([("", *headings)], (width, -first, -second), first="  ")
    widths = width, 11 - first, -9, 11 - second, -9, -6
    yield from aligned(cells, widths, first="  ")


def _conclusion(report: SensitivityReport) -> str:
    promised = report.loss_with_paths, report.gradients_with_paths
    errors = _errors(*(report.measured or promised))
    at_most = f"at most {report.tolerance:g}"
    if not report.meets_tolerance and max(promised) <= report.tolerance:
        return (
            f"The rows predict {_error(max(promised))}, but autocast with these paths "
            f"has {errors}: pass a smaller tolerance than {report.tolerance:g}."
        )
    if not report.meets_tolerance:
        left = _left(report)
        return f"No choice of modules brings both errors to {at_most}: {errors}.{left}"
    if not report.line:
        need = "full float32 precision" if report.in_float32 else "float32"
        need = "more than 8 bits" if report.residuals else need
        return f"Nothing needs {need}: both errors are {at_most}."
    if report.in_float32:
        paths = " and ".join(f"`{path}`" for path in report.float32_paths)
        return (
            f"With full float32 precision in {paths}, both errors are {at_most}: "
            f"{errors}. Put this line around the code of each:"
        )
    if report.is_cast:
        device = f" For full precision on the device, put `{_HIGHEST}` around them."
        return (
            f"In float32, these modules should bring both errors to {at_most}: "
            f"{errors}. Run again with the policy below to see."
            f"{device * bool(report.float32_matmuls)}"
        )
    where = ["In float32"] * bool(report.float32_paths)
    where += ["out of 8 bits" if where else "Out of 8 bits"] * bool(
        report.bfloat16_paths
    )
    return (
        f"{' and '.join(where)}, these modules bring both errors to {at_most}: "
        f"{errors}."
    )


def _left(report: SensitivityReport) -> str:
    """Says what no path names, if that is too much."""
    rest = [row for row in report.modules if not row.has_path]
    worst = max(rest, key=lambda row: row.alone, default=None)
    if worst is None or worst.alone <= report.tolerance:
        return ""
    cure = _HIGHEST if report.in_float32 else "jaxmp.float32_region"
    return (
        f" What is left is in {worst.name}: name its parts with `jax.named_scope`, or "
        f"put `{cure}` around them."
    )


def _errors(loss: float, gradients: float) -> str:
    return f"loss {_error(loss)}, gradients {_error(gradients)}"


def _error(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"
