"""What each line of a program computes, in which dtype, and by which rule.

The function is traced, never run. Autocast functions in it record their plans, and the
program that comes of it (:mod:`~jaxmp._diagnosis.flow`) tells who reads what.
"""

from __future__ import annotations

import collections
import functools
import linecache
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec

import jax

from ..._autocast import needs, rules
from ..._autocast.emit import recording
from ..._autocast.graph import joined
from ..._autocast.plan import Step
from ..._base.checks import check_function, clipped, explains
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.flatten import flatten
from ..._jaxprs.places import Frame, Place, caller, is_called_directly, short_line
from ..._ops.precision import own_precisions
from ..flow import Flow, Operation
from ..text import uncalled
from .report import NO_SOURCE, ExplainedLine, Explanation

P = ParamSpec("P")


@explains("jaxmp.explain(fun)(*args)")
def explain(fun: Callable[P, Any]) -> Callable[P, Explanation]:
    """Shows the dtype of each line of your code, and the rule that decided.

    Nothing runs: ``fun`` is traced with the shapes and dtypes of its arguments. Pass a
    model, a loss, a gradient function or a whole training step, with or without
    autocast.

    Each line of the forward pass appears once. It has the dtype of its result, the
    number of the rule by which autocast decided, or the name of a guard, and
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
        flow = Flow(jaxpr, Place(user=around, steps=steps))
        return Explanation(tuple(_lines(flow, around, steps)))

    return uncalled("explain", fun, explained)


# From operations to lines


def _lines(
    flow: Flow, around: Frame | None, steps: Sequence[Step]
) -> Iterator[ExplainedLine]:
    """Yields the lines: files and functions as the program comes to them.

    The line ``around``, the call, is one of them where it alone is the user's. The
    steps are those that were recorded.
    """
    inside = [x for x in flow.operations if x.frame != around] or flow.operations
    by_line: dict[tuple[str, str, int], list[Operation]] = {}
    for x in inside:
        makes_up = all(isinstance(y, _jaxpr.Literal) for y in x.eqn.invars)
        if x.frame and x.dtype and x.is_forward and not makes_up:
            by_line.setdefault(x.line, []).append(x)
    saved = collections.defaultdict[Any, collections.Counter[str]](collections.Counter)
    for size, dtype, x in flow.saved.values():
        # Other integers are no numbers that a line computes, as are labels.
        if x and x.frame and ("int" not in dtype or dtype == "int8"):
            saved[x.line][dtype] += size
    ranged = _ranged(steps)
    stacked = {
        x.line
        for x in inside
        if x.frame and x.step and not ranged.isdisjoint(x.step.eqn.outvars)
    }
    order = {line[:2]: i for i, line in reversed([*enumerate(by_line)])}
    for line in sorted(by_line, key=lambda x: (order[x[:2]], x[2])):
        of_line = by_line[line], saved[line]
        yield _explained(line, *of_line, is_ranged=line in stacked)


def _ranged(steps: Iterable[Step]) -> set[Any]:
    """Returns what scans stack in float32, because float16 has not the range."""
    return {
        var
        for step in steps
        for jaxpr, plan in (step.inside.bodies if step.inside else ())
        for var, end in zip(_jaxpr.open_jaxpr(jaxpr).outvars, plan.ends, strict=True)
        if end == "ranged" and isinstance(var, _jaxpr.Var)
    }


def _explained(
    line: tuple[str, str, int],
    operations: list[Operation],
    saved: collections.Counter[str],
    *,
    is_ranged: bool,
) -> ExplainedLine:
    """Returns what there is to say of a line.

    Args:
        line: Its file, function and number.
        operations: Those of the forward pass.
        saved: The bytes that are saved of it, by dtype.
        is_ranged: Whether a scan stacks some in float32 for the range of float16.
    """
    results = _results(operations)
    usual = statistics.mode((x.dtype, _rule(x)) for x in results)
    last = next(x for x in results if (x.dtype, _rule(x)) == usual)
    own = dict.fromkeys(x.dtype for x in results)
    dtypes = dict.fromkeys(x.dtype for x in operations if not x.moves)
    matmuls = dict.fromkeys(x.takes for x in operations if x.takes)
    file, function, number = line
    stored = any(x.how == "stored" or x.is_stacked for x in operations)
    return ExplainedLine(
        file=file,
        function=function,
        number=number,
        source=linecache.getline(file, number).strip() or NO_SOURCE,
        dtype=", ".join(own),
        also=tuple(x for x in dtypes if x not in own and x not in matmuls),
        rule=_rule(last),
        reason=_reason(last, is_library=bool(last.library) and not matmuls),
        matmuls=tuple(matmuls),
        rounded=last.rounded,
        saved=tuple(sorted(saved.items(), key=lambda x: x[0] != "float32")),
        saved_by=rules.STORED if saved and stored else None,
        kept_by=rules.RANGE if saved and is_ranged else "",
    )


def _results(operations: list[Operation]) -> list[Operation]:
    """Returns what computes the last numbers of a line, once for each time it runs."""
    read = [  # by other lines, or what is returned
        x
        for x in operations
        if x.carried
        or x.is_returned
        or any(y.is_forward and y.frame and y.line != x.line for y in x.consumers)
    ]
    last = [*map(_moved, read or operations)]
    # A loop of Python's around the line runs it again, and reads what it has computed
    # there itself. A library may have such a loop inside of the line.
    every = operations if is_called_directly(last[-1].eqn) else last
    return [x for x in every if x.call == last[-1].call]


def _moved(x: Operation) -> Operation:
    """Returns the operation of the same line whose result another moves."""
    while x.moved and x.moved.frame and x.moved.line == x.line and x.moved.dtype:
        x = x.moved
    return x


def _rule(x: Operation) -> rules.Rule | None:
    """Returns what decided how something is computed, None outside of autocast."""
    if x.step and x.step.by == rules.BETWEEN and _moves_stored(x):
        return rules.STORED
    return x.step.by if x.step else None


def _moves_stored(x: Operation) -> bool:
    """Whether it moves or chooses what is 16 bits because only matmuls read it."""
    step = x.step
    if step is None or step.how == "stored":
        return step is not None
    return step.kind == "exact" and any(map(_moves_stored, x.ins))


# Reasons

_HALF = "half", "rounded"  # how an operation runs that returns 16 bits


def _reason(x: Operation, *, is_library: bool) -> str:
    """Names the consumer for which autocast decided, or another reason.

    Args:
        x: The last operation of a line.
        is_library: Whether a library computes all of the line, and takes no product.
    """
    step = x.step
    if x.carried:
        return "carried from iteration to iteration"
    if step is None:
        return ""
    match step.by:
        case str(guard):
            return f"guard: {guard}"
        case rules.AS_WRITTEN:
            return step.why or "as it was written"
        case rules.LOOPS if step.demand.summed:
            return "summed over the iterations"
        case rules.FLOAT32 if step.is_read_exactly and x.is_returned:
            return "returned"
        case rules.FLOAT32 if not (step.is_read_exactly or x.how == "stored"):
            if step.kind == "keep" or (is_library and step.kind == "smooth"):
                return f"computed by {clipped(x.name, 20)}"
            if step.kind == "exact":
                feeds = _of_consumers(x, step)
                return ", ".join(filter(None, ("moves float32 values", feeds)))
            if step.kind == "smooth" and needs.is_half(step.need):
                if any(out.given for out in step.outs):
                    return "computed from inputs alone"
                return "its inputs are float32"
    return _of_consumers(x, step)


def _of_consumers(x: Operation, step: Step) -> str:
    """Names the consumer that decided."""
    if step.need & needs.REGION and (kept := _kept(x)):
        why = kept.step.why if kept.step else ""
        return f"feeds {why or clipped(kept.name, 20)}{_where(kept, x)}"
    consumers = [y for y in x.consumers if not y.moves]
    # Another line says more than the next iteration of this one.
    consumers.sort(
        key=lambda y: (not y.is_forward, not _multiplies(y), y.frame == x.frame)
    )
    wanted = needs.PRODUCT if x.how == "stored" else needs.NOTHING
    if step.is_read_exactly:
        wanted = needs.DIGITS
    elif step.rule == rules.LOOPS:
        wanted = needs.GATE
    if wanted:
        chosen = [
            y for y in consumers if y.step and wanted & joined(y.step.input_needs)
        ]
    elif x.how in _HALF:
        chosen = [y for y in consumers if _multiplies(y) or y.how in _HALF]
        chosen = chosen or [*_matmul_behind(consumers)]
    else:  # which keeps it in float32, as a 16-bit operation does not
        chosen = [y for y in consumers if not (_multiplies(y) or y.how in _HALF)]
    for consumer in chosen or consumers:
        name = "a matmul" if _multiplies(consumer) else clipped(consumer.name, 20)
        return f"feeds {name}{_where(consumer, x)}"
    return "returned" if x.is_returned or step.is_read_exactly else ""


def _matmul_behind(consumers: Sequence[Operation]) -> Iterator[Operation]:
    """Yields the first matmul that arithmetic of some consumers feeds."""
    left, seen = [x for x in consumers if x.is_forward], set(consumers)
    for x in left:
        if _multiplies(x):
            yield x
            return
        if x.step and x.step.kind in ("smooth", "exact"):
            left += (new := [y for y in x.consumers if y not in seen and y.is_forward])
            seen.update(new)


def _kept(x: Operation) -> Operation | None:
    """Returns what the user keeps in float32 and reads ``x``, or what is made of it."""
    left, seen = [x], {x}
    while left:
        for y in left.pop().consumers:
            if y.step and y.step.by == rules.AS_WRITTEN:
                return y
            if y not in seen and y.step and y.step.need & needs.REGION:
                left.append(y)
                seen.add(y)
    return None


def _multiplies(x: Operation) -> bool:
    """Whether an operation is a matrix product or a convolution in 16 bits."""
    return x.step is not None and x.step.kind == "product"


def _where(consumer: Operation, x: Operation) -> str:
    """Returns the line of a consumer as it is said beside another line."""
    if consumer.frame is None or x.frame is None:
        return ""
    (file, _, number), here = consumer.line, x.line[0]
    return f" ({number if file == here else short_line(f'{file}:{number}')})"
