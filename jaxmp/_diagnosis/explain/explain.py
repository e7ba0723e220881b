"""What each line of a program computes, in which dtype, and by which sentence.

The function is traced, never run. Autocast functions in it record their plans, and the
program that comes of it (:mod:`~.flow`) tells who reads what.
"""

from __future__ import annotations

import collections
import functools
import linecache
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec

import jax

from ..._autocast import needs, rules
from ..._autocast.emit import recording
from ..._autocast.graph import joined
from ..._autocast.plan import Step
from ..._base.checks import check_function, clipped, explains, uncalled
from ..._base.text import short_line
from ..._jaxprs.flatten import flatten
from ..._jaxprs.places import Place, caller
from ..._ops.precision import own_precisions
from .flow import Flow, Operation
from .report import NO_SOURCE, ExplainedLine, Explanation

P = ParamSpec("P")


@explains("jaxmp.explain(fun)(*args)")
def explain(fun: Callable[P, Any]) -> Callable[P, Explanation]:
    """Shows the dtype of each line of your code, and the sentence that decided.

    Nothing runs: ``fun`` is traced with the shapes and dtypes of its arguments. Pass a
    model, a loss, a gradient function or a whole training step, with or without
    autocast.

    Each line of the forward pass appears once. It has the dtype of its result, the
    number of the sentence by which autocast decided, or the name of a safeguard, and
    the operation that the result feeds, with its line in parentheses. What a library
    computes belongs to the line that calls it. If ``fun`` computes gradients, the
    report also has the dtype in which results of the line are stored for the backward
    pass.

    Args:
        fun: Function that JAX can trace.

    Returns:
        A function of the arguments of ``fun`` that returns an :class:`Explanation`. You
        may pass ``jax.ShapeDtypeStruct`` instead of arrays. Leaves that are not arrays
        are passed on as they are.

    Raises:
        TypeError: If ``fun`` is not callable.

    Examples:
        >>> def attention(q, k, v):
        ...     scores = q @ k.T
        ...     return jax.nn.softmax(scores) @ v
        >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> scores, _ = jaxmp.explain(jaxmp.autocast(attention))(x, x, x).lines
        >>> scores.dtype, scores.rule
        ('float32', 3)
    """
    check_function(
        "explain", fun, "explain(fun)", "Type `explain(model.apply)(params, x)`."
    )

    @functools.wraps(fun)
    def explained(*args: P.args, **kwargs: P.kwargs) -> Explanation:
        with own_precisions(), recording() as steps:
            flat = flatten(fun, args, kwargs)
            jaxpr = jax.make_jaxpr(flat.fun)(*flat.leaves)
        around = caller()
        found = Flow(steps).follow(jaxpr, Place(user=around))
        inside = [x for x in found if x.frame != around]
        return Explanation(tuple(_lines(inside or found)))

    return uncalled("explain", fun, explained)


# From operations to lines


def _lines(operations: Sequence[Operation]) -> Iterator[ExplainedLine]:
    """Yields the lines: files and functions as the program comes to them."""
    by_line: dict[tuple[str, str, int], list[Operation]] = {}
    for operation in operations:
        if _counts(operation):
            by_line.setdefault(operation.line, []).append(operation)
    saved = _saved(operations)
    order = {line[:2]: i for i, line in reversed([*enumerate(by_line)])}
    for line in sorted(by_line, key=lambda x: (order[x[:2]], x[2])):
        yield _explained(line, by_line[line], saved.get(line, {}))


def _saved(operations: Sequence[Operation]) -> Mapping[Any, Mapping[str, int]]:
    """Returns the bytes that are saved for the backward pass, by line and dtype."""
    values = collections.defaultdict[Operation, dict[str, int]](dict)
    for operation in operations:
        found = values[_behind_moves(operation)]
        for form in operation.results():
            for dtype, size in form.saved.items():
                # Other integers are no numbers that a line computes, as are labels. A
                # value that is moved as well is one value.
                if "int" not in dtype or dtype == "int8":
                    found[dtype] = max(found.get(dtype, 0), size)
    saved = collections.defaultdict[Any, collections.Counter[str]](collections.Counter)
    for computed, sizes in values.items():
        if computed.frame is not None:
            saved[computed.line].update(sizes)
    return saved


def _behind_moves(
    operation: Operation, among: Callable[[Operation], bool] = lambda _: True
) -> Operation:
    """Returns the operation whose result another only moves, itself if there is none.

    Args:
        operation: The operation.
        among: Which operations it may be.
    """
    while operation.moves:
        before = [x.operation for x in operation.ins if x.operation is not None]
        found = next(filter(among, before), operation)
        if found is operation:
            break
        operation = found
    return operation


def _counts(operation: Operation) -> bool:
    """Whether an operation computes numbers of the forward pass, and makes none up."""
    known = operation.frame is not None and bool(operation.dtype)
    computes = bool(operation.ins) or operation.carries
    return known and operation.is_forward and computes


def _explained(
    line: tuple[str, str, int], operations: list[Operation], saved: Mapping[str, int]
) -> ExplainedLine:
    """Returns what there is to say of a line."""
    results = _results(operations)
    usual = statistics.mode((x.dtype, _rule(x)) for x in results)
    last = next(x for x in results if (x.dtype, _rule(x)) == usual)
    own = dict.fromkeys(x.dtype for x in results)
    dtypes = dict.fromkeys(x.dtype for x in operations if not x.moves)
    products = dict.fromkeys(x.takes for x in operations if x.takes)
    file, function, number = line
    stored = any(x.is_stored or x.is_stacked for x in operations)
    return ExplainedLine(
        file=file,
        function=function,
        number=number,
        source=linecache.getline(file, number).strip() or NO_SOURCE,
        dtype=", ".join(own),
        also=tuple(x for x in dtypes if x not in own and x not in products),
        rule=_rule(last),
        reason=_reason(last, is_library=bool(last.library) and not products),
        products=tuple(products),
        rounded=last.rounded,
        saved=tuple(sorted(saved.items(), key=lambda x: x[0] != "float32")),
        saved_by=rules.STORED if saved and stored else None,
        times=_times(last, operations),
    )


def _times(last: Operation, operations: Sequence[Operation]) -> int:
    """Returns how often a line runs, whose last numbers ``last`` computes.

    Operations on each leaf of a tree do not count if the line has others.
    """
    counts = collections.Counter[Any]()
    for x in operations:
        counts[x.call] += x.times
    others = [counts[x.call] for x in operations if not x.for_leaves and x.times]
    return min(others) if last.for_leaves and others else counts[last.call]


def _rule(operation: Operation) -> rules.Rule | None:
    """Returns what decided how something is computed, None outside of autocast."""
    return operation.step.by if operation.step else None


def _is_half(operation: Operation) -> bool:
    """Whether an operation returns 16 bits under autocast."""
    return operation.step is not None and operation.step.how in ("half", "rounded")


def _moved(operation: Operation) -> Operation:
    """Returns the operation of the same line whose result another moves."""
    return _behind_moves(
        operation, lambda x: bool(x.frame and x.line == operation.line and x.dtype)
    )


def _results(operations: list[Operation]) -> list[Operation]:
    """Returns what computes the last numbers of a line, once for each time it runs."""
    read = [x for x in operations if _is_read_elsewhere(x)]
    last = [_moved(x) for x in read or operations]
    return [x for x in last if x.call == last[-1].call]


def _is_read_elsewhere(operation: Operation) -> bool:
    """Whether another line reads what an operation returns, or it is a result."""
    readers = (x for x in _readers(operation) if x.is_forward and x.frame)
    elsewhere = any(x.line != operation.line for x in readers)
    return elsewhere or operation.carries or _is_returned(operation)


def _readers(operation: Operation) -> list[Operation]:
    return [reader for form in operation.results() for reader in form.readers]


def _is_returned(operation: Operation) -> bool:
    return any(form.is_returned for form in operation.results())


# Reasons


def _reason(operation: Operation, *, is_library: bool) -> str:
    """Names the consumer for which autocast decided, or another reason.

    Args:
        operation: The last operation of a line.
        is_library: Whether a library computes all of the line, and takes no product.
    """
    step = operation.step
    if operation.carries:
        return "carried from iteration to iteration"
    if step is None:
        return ""
    match _rule(operation):
        case str(safeguard):
            return f"safeguard: {safeguard}"
        case rules.AS_WRITTEN:
            return step.why or "as it was written"
        case rules.LOOPS if step.is_summed:
            return "summed over the iterations"
        case rules.FLOAT32 if step.is_read_exactly and _is_returned(operation):
            return "returned"
        case rules.FLOAT32 if not (step.is_read_exactly or operation.is_stored):
            if step.kind in ("keep", "call") or (is_library and step.kind == "smooth"):
                return f"computed by {_named(operation)}"
            if step.kind == "exact":
                return "moves float32 values"
            if step.kind == "smooth" and needs.is_half(step.need):
                return "its inputs are float32"
    return _of_readers(operation, step)


def _of_readers(operation: Operation, step: Step) -> str:
    """Names the consumer that decided."""
    seen: set[Operation] = set()
    readers = [x for x in _through_moves(operation, seen) if x is not operation]
    readers.sort(key=lambda x: (not x.is_forward, not _multiplies(x)))
    wanted = needs.for_product if operation.is_stored else None
    if step.is_read_exactly:
        wanted = needs.has_digits
    elif step.rule == rules.LOOPS:
        wanted = needs.has_gate
    if wanted is not None:
        chosen = [x for x in readers if x.step and wanted(joined(x.step.asks))]
    elif _is_half(operation):
        chosen = [x for x in readers if _multiplies(x) or _is_half(x)]
    else:
        chosen = readers
    chosen = chosen or readers
    if not chosen:
        return "returned" if _is_returned(operation) or step.is_read_exactly else ""
    reader = chosen[0]
    consumer = "a matmul" if _multiplies(reader) else _named(reader)
    return f"feeds {consumer}{_where(reader, operation)}"


def _multiplies(operation: Operation) -> bool:
    """Whether an operation is a matrix product or a convolution in 16 bits."""
    return operation.step is not None and operation.step.kind == "product"


def _named(operation: Operation) -> str:
    return clipped(operation.name, 20)


def _through_moves(operation: Operation, seen: set[Operation]) -> Iterator[Operation]:
    """Yields what reads the results of an operation, moved or not."""
    for reader in _readers(operation):
        if reader not in seen:
            seen.add(reader)
            if reader.moves:
                yield from _through_moves(reader, seen)
            else:
                yield reader


def _where(reader: Operation, operation: Operation) -> str:
    """Returns the line of a reader as it is said beside another line."""
    if reader.frame is None or operation.frame is None:
        return ""
    (file, _, number), here = reader.line, operation.line[0]
    return f" ({number if file == here else short_line(f'{file}:{number}')})"
