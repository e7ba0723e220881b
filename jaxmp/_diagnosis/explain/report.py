"""What an explanation says of each line of the user's, as data and as a table."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

from ..._autocast import rules
from ..._base.checks import as_html, clipped
from ..._jaxprs.places import cell_of
from ..text import WIDTH, aligned, as_lists, unit, wrapped

NO_SOURCE = "(no source)"
_HINT = "`report.sentences` has the text of the rules and the guards."
_LONGEST = 32  # characters of a line of code, in text


@dataclasses.dataclass(frozen=True)
class ExplainedLine:
    """What one line of the user's code computes.

    Attributes:
        file: Path of the file.
        function: Name of the function that the line is in, such as
            ``"Block.__call__"``; empty for a line of a module.
        number: Number of the line.
        source: The line itself.
        dtype: Dtype of the last number that the line computes; ``"bfloat16, float32"``
            if it is not the same each time the line runs.
        also: Dtypes of intermediate results of the line.
        matmuls: Dtypes to which the matmuls of the line round their inputs.
        rounded: Dtype to which the numbers were rounded that the line returns in
            ``dtype``, as a convolution does; empty if they were not.
        rule: Number of the rule that decided, or the name of a guard; None
            outside of autocast.
        reason: What the result feeds, or what else decided its dtype.
        saved: Pairs of a dtype and the bytes of results of the line that are saved in
            it for the backward pass, for all the times it runs.
        saved_by: 5, the rule that stores some of them in 16 bits, None if none are.
        kept_by: The guard that keeps some of them in float32, empty if none does.

    Examples:
        >>> def model(w, x):
        ...     h = jnp.tanh(x @ w)
        ...     return h @ w
        >>> x = jnp.ones((8, 8))
        >>> hidden, result = jaxmp.explain(jaxmp.autocast(model))(x, x).lines
        >>> hidden.dtype, hidden.rule, result.dtype, result.rule
        ('bfloat16', 2, 'float32', 3)
    """

    file: str
    function: str
    number: int
    source: str
    dtype: str
    also: tuple[str, ...] = ()
    matmuls: tuple[str, ...] = ()
    rule: rules.Rule | None = None
    reason: str = ""
    saved: tuple[tuple[str, int], ...] = ()
    saved_by: int | None = None
    rounded: str = ""
    kept_by: str = ""

    def said(self) -> list[str]:
        """Returns the texts of the last column of the table."""
        words = [self.reason]
        if taken := [x for x in self.matmuls if x not in self.dtype]:
            words.append(f"matmuls in {', '.join(taken)}")
        if self.rounded:
            words.append(f"rounded to {self.rounded}")
        if self.also:
            words.append(f"also {' and '.join(self.also)}")
        if self.saved:
            rule = f" ({self.saved_by})" if self.saved_by else ""
            sizes = (f"{unit(size, 1024)}B in {x}" for x, size in self.saved)
            words.append(f"saves {', '.join(sizes)}{rule}")
        if self.kept_by:
            words.append(f"guard of what is saved: {self.kept_by}")
        return [*filter(None, words)]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`jaxmp.explain` found.

    Attributes:
        lines: What each line computes: files and functions in the order in which the
            program comes to them, the lines of a function as they stand in the file.
    """

    lines: tuple[ExplainedLine, ...]

    @property
    def sentences(self) -> dict[rules.Rule, str]:
        """The text of the rules and the guards that the lines name.

        By number and by name; empty where autocast is not used.
        """
        known = rules.SENTENCES | rules.SAFEGUARDS
        named = {
            x for line in self.lines for x in (line.rule, line.saved_by, line.kept_by)
        }
        return {x: rule for x, rule in known.items() if x in named}

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON.

        Examples:
            >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> (line,) = jaxmp.explain(lambda w: w @ w)(w).as_dict()["lines"]
            >>> line["dtype"]
            'float32'
        """
        rows = as_lists([dataclasses.asdict(line) for line in self.lines])
        sentences = {str(name): x for name, x in self.sentences.items()}
        return {"lines": rows, "sentences": sentences}

    def __str__(self) -> str:
        return "\n".join(_text(self))

    _repr_html_ = as_html


def _text(report: Explanation) -> Iterator[str]:
    """Yields the lines of the table, an empty one behind each of its parts."""
    lines = report.lines
    if not lines:
        yield "No line computes a floating-point number."
        return
    number = max(2, *(len(str(line.number)) for line in lines))
    dtype = max(8, *(len(line.dtype) for line in lines))
    code = min(_LONGEST + 8 - dtype, max(len(line.source) for line in lines))
    widths = -number, code, dtype, min(1, len(report.sentences))
    names = _names({line.file for line in lines})
    why = "why" * any(line.said() for line in lines)
    heads = _heads(number, code, dtype, is_ruled=bool(report.sentences))
    yield from [f"{heads}{why}".rstrip(), ""]
    for (file, function), group in itertools.groupby(
        lines, key=lambda line: (line.file, line.function)
    ):
        yield clipped(", ".join(filter(None, (names[file], function))), WIDTH)
        for row in group:
            # Guards are among the words.
            rule = f"{row.rule}" if isinstance(row.rule, int) else ""
            cells = f"{row.number}", clipped(row.source, code), row.dtype, rule
            first = f"{next(aligned([cells], widths, first='  '))}  "
            for text in row.said() or [""]:
                indent = " " * (len(first) + 2)
                yield from wrapped(text, first, indent) or [first.rstrip()]
                first = " " * len(first)
        yield ""
    yield _HINT if report.sentences else "Autocast is not used."


def _heads(number: int, code: int, dtype: int, *, is_ruled: bool) -> str:
    """Returns the names of the columns, each over its column or to the left of it."""
    rule = f"{'rule':>{dtype - 2}}" if is_ruled else " " * (dtype - 5)
    return f"{'line':>{number + 2}}  {'code':<{code}}  dtype{rule}  "


def _names(files: set[str]) -> dict[str, str]:
    """Returns short names for files, with a folder where two have the same name."""
    found = {}
    for file in files:
        name = os.path.basename(file)
        if any(x != file and os.path.basename(x) == name for x in files):
            name = os.path.join(os.path.basename(os.path.dirname(file)), name)
        found[file] = cell_of(file) or name
    return found
