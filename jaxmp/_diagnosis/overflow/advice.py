"""What an Inf or NaN means, and what to type."""

from __future__ import annotations

from typing import NamedTuple

from ..._base.text import short_line
from ..numbers import Eaten
from .report import Fault, OperationRange


class Case(NamedTuple):
    """What is known of a program that was searched."""

    first: Fault | None
    given: dict[str, tuple[int, int]]  # that reached a result, or led to the fault
    is_given: bool  # whether some of that led to the fault
    written: bool  # whether an Inf that stands in the code reached a result
    finite_in_float32: bool | None
    fault_in_float32: Fault | None  # if that is at another line
    overflows: bool  # whether float32 holds the result of the faulty operation
    number: Eaten | None  # in the code, which the faulty operation reads as 0 or Inf
    argument: str  # that it casts
    zeros: str  # an argument in float16 that is all zeros and led to the fault
    after_backward: bool  # whether it is the optimizer's
    cast_by: str  # what brought it into 16 bits: "autocast", "with_policy", ...
    override: str  # of a policy, for the parameters of its module
    lost: float  # which fraction of its values the faulty operation loses
    nearest: OperationRange | None  # the 16-bit operation with the least headroom
    swallowed: Fault | None  # an overflow of 16 bits that reached no result
    is_seen: bool  # whether all could be looked at


def advice(case: Case) -> str:
    """Returns one or more sentences."""
    sentences = []
    if case.given:
        sentences.append(_of_given(case.given))
    if case.first is not None and not case.is_given:
        sentences.append(_of_fault(case, case.first))
    if case.written:
        sentences.append(
            "An Inf that is written in the code reached a result. It may be meant to."
        )
    return " ".join(sentences or [_of_sound(case)])


def _of_sound(case: Case) -> str:
    text = "All results are finite."
    if not case.is_seen:
        text = "All results are finite, but not all could be looked at: see the notes."
    if case.swallowed is not None:
        what = case.swallowed.operation
        if case.number is not None and case.number.written is not None:
            what = f"the number {case.number.written:.4g} in the code"
        return (
            f"{text} But {what} at {_line(case.swallowed.where)} "
            "gave Inf where float32 would not, and a later operation turned it into "
            "a finite number, as 1 / Inf is 0: the results may be wrong. "
            f"{_cure(case, case.swallowed)}"
        )
    near = case.nearest
    if near is not None and near.headroom < 1 and not near.backward:
        text += (
            f" But {near.operation} at {_line(near.where)} reached {near.max:.4g}, at "
            f"least half of the largest number of {near.dtype}."
        )
    return text


# `suggest_loss_scale(grads)` is no cure for certain: what comes before the gradients of
# the parameters may be much larger than these.
_SCALE = (
    "If it learns worse than in float32, the loss scale is too small: "
    "`jaxmp.loss_scaling` finds one that fits."
)


def _of_given(given: dict[str, tuple[int, int]]) -> str:
    leaves = []
    for name, (nan, inf) in [*given.items()][:6]:
        counts = [f"{nan} NaN"] * (nan > 0) + [f"{inf} Inf"] * (inf > 0)
        leaves.append(f"`{name}` contains {' and '.join(counts)}")
    more = f", and {len(given) - 6} more do" if len(given) > 6 else ""
    return (
        f"{', '.join(leaves)}{more}, which reaches a result: no precision helps. "
        "Look at the data, or at the step that made these parameters."
    )


def _of_fault(case: Case, fault: Fault) -> str:
    if fault.kind == "zeros":
        return _of_zeros(case, fault)
    if case.finite_in_float32 is False and case.zeros:
        return (
            f"`{case.zeros}` is float16 and all zeros, as everything below 6e-8 is in "
            "float16, and that is the cause. Unless it should be zero, pass it in "
            "float32, or in units in which it is near 1."
        )
    if case.fault_in_float32 is not None:
        return _of_two(case, fault, case.fault_in_float32)
    if case.finite_in_float32 is False:
        return (
            "It is not finite in float32 either: the cause is the model or its data at "
            f"{_line(fault.where)}, not the precision, and no loss scale helps."
            f"{_STABLE.get(fault.operation, '')}"
        )
    if case.number is not None:
        written = case.number.written
        number = "A number" if written is None else f"The number {written:.4g}"
        return (
            f"{number} in the code at {_line(fault.where)} is beyond {fault.dtype}, "
            f"which ends at {fault.largest:.4g}, and became Inf. For a mask, type "
            "`jnp.finfo(x.dtype).min`, with the dtype of the scores. For anything "
            f"else: {_cure(case, fault)}"
        )
    if case.after_backward or case.cast_by == "optax":
        return (
            f"It happens only in {fault.dtype}: the optimizer, or something else after "
            f"the backward pass, computes in 16 bits. {_MASTERS}"
        )
    if fault.backward:
        return _of_backward(case, fault)
    finite = "is finite in float32"
    if case.finite_in_float32 is None:
        finite = "may be finite in float32; jaxmp cannot tell"
    what = f"The forward pass overflows {fault.dtype} here, and {finite}."
    if case.argument:
        what = (
            f"`{case.argument}` has values up to {fault.inputs[0][2]:.4g}, and is cast "
            f"to {fault.dtype} at {_line(fault.where)}, which ends at "
            f"{fault.largest:.4g}."
        )
    return f"{what} No loss scale helps. {_cure(case, fault)}"


# What to write instead of an operation that is not finite in float32 either.
_STABLE = {
    "exp": " Subtract the largest value first, as `jax.nn.softmax` and "
    "`jax.nn.logsumexp` do.",
    "log": " Take the logarithm of the logits, as `jax.nn.log_softmax` and "
    "`jax.nn.log_sigmoid` do.",
}


def _of_two(case: Case, fault: Fault, other: Fault) -> str:
    """Says what to do if 16 bits and float32 have a fault each, at two lines."""
    own = (
        f"float32 has a fault at another line: {other}. The cause of that is the model "
        f"or its data.{_STABLE.get(other.operation, '')}"
    )
    if not case.overflows:
        return f"{own[0].upper()}{own[1:]} Mend that first, and search again."
    case = case._replace(finite_in_float32=True, fault_in_float32=None)
    return f"{_of_fault(case, fault)} But {own} Mend both."


_MASTERS = (
    'Keep the parameters and the optimizer state in float32, as `"mixed_float16"` '
    'does: `jaxmp.cast_tree((params, grads), "float32")` before `tx.init` and '
    "`tx.update`."
)


def _of_zeros(case: Case, fault: Fault) -> str:
    line, number = _line(fault.where), case.number
    part = f"{case.lost:.0%} of" if case.lost >= 0.005 else "Some of"
    zero = f"zero or subnormal in {fault.dtype} and not in float32"
    if number is not None and number.written is not None:
        what = f"The number {number.written:.4g} in the code at {line} is 0 in "
        what += f"{fault.dtype}, and a result depends on it."
    elif number is not None:
        what = (
            f"A number in the code at {line} is 0 in {fault.dtype}, as 1e-8 is. If you "
            "wrote such a number, that is the cause. If you wrote 0, try float32: it "
            "may help."
        )
    elif case.argument:
        what = f"{part} `{case.argument}`, which is cast at {line}, is {zero}, and a "
        what += "result depends on it."
    else:
        what = f"{part} what {fault.operation} gives at {line} is {zero}, and a result "
        what += "depends on it."
    if case.after_backward or case.cast_by == "optax":
        return f"{what} The optimizer computes in 16 bits. {_MASTERS}"
    if fault.backward and number is None:
        return f"{what} {_SCALE}"
    return f"{what} No loss scale helps. {_cure(case, fault)}"


def _of_backward(case: Case, fault: Fault) -> str:
    if fault.dtype != "float16":
        return (
            f"Only the backward pass overflows {fault.dtype}, which has the range of "
            f"float32: no loss scale helps. {_cure(case, fault)}"
        )
    return (
        "Only the backward pass overflows: the loss scale is too large for this step. "
        "This is harmless: `jaxmp.loss_scaling` skips the step and halves the scale. "
        "If steps are skipped again and again, search again: the line may be another. "
        "If there is no scale, or it is always this line, the gradients themselves are "
        f"too large for float16. {_cure(case, fault)}"
    )


def _cure(case: Case, fault: Fault) -> str:
    line, module = _line(fault.where), fault.module
    match case.cast_by:
        case "autocast":
            region = f"`jaxmp.float32_region` around the function of {line}"
            if "/" not in module:
                return f"Put {region}."
            paths = f'`float32_paths=("{module}",)`'
            return f"Type {paths} in `autocast`, or put {region}."
        case "with_policy" if "/" in case.argument:
            leaf = "/".join(case.argument.split("/")[-2:])
            return f'Type `policy.with_overrides(("{leaf}", "float32"))`.'
        case "with_policy":
            return (
                "Put `with_policy` around the model alone, so that this argument stays "
                "float32; or pass it in units in which it is near 1."
            )
        case "module":
            return f"Give the module `{module}` `dtype=jnp.float32`."
    cure = f"Compute {line} in float32: `x.astype(jnp.float32)`"
    if not case.override:
        return f"{cure}."
    return f'{cure}, or `policy.with_overrides(("{case.override}", "float32"))`.'


def _line(where: str) -> str:
    return short_line(where) or "this operation"
