"""What an Inf or NaN means, and what to type: tables of sentences."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    in_optimizer: bool  # whether it is the optimizer's
    cast_by: str  # what brought it into 16 bits: a key of `_CURES`
    override: str  # of a policy, for the parameters of its module
    lost: float  # which fraction of its values the faulty operation loses
    nearest: OperationRange | None  # the 16-bit operation with the least headroom
    swallowed: Fault | None  # an overflow of 16 bits that reached no result
    is_seen: bool  # whether all could be looked at


# What it is, by the verdict.
_VERDICTS = {
    # Of what is no fault of an operation.
    "given": "{leaves}, which reaches a result: no precision helps. Look at the data, "
    "or at the step that made these parameters.",
    "written": "An Inf that is written in the code reached a result. It may be meant "
    "to.",
    "sound": "All results are finite.",
    "not all seen": "All results are finite, but not all could be looked at: see the "
    "notes.",
    "swallowed": "But {what} at {line} gave Inf where float32 would not, and a later "
    "operation turned it into a finite number, as 1 / Inf is 0: the results may be "
    "wrong. {cure}",
    "near": "But {near.operation} at {near_line} reached {near.max:.4g}, at least half "
    "of the largest number of {near.dtype}.",
    # Of an Inf or NaN.
    "zeros given": "`{zeros}` is float16 and all zeros, as everything below 6e-8 is in "
    "float16, and that is the cause. Unless it should be zero, pass it in float32, or "
    "in units in which it is near 1.",
    "model": "It is not finite in float32 either: the cause is the model or its data "
    "at {line}, not the precision, and no loss scale helps.{stable}",
    "model, elsewhere": "Float32 has a fault at another line: {other}. The cause of "
    "that is the model or its data.{other_stable} Mend that first, and search again.",
    "and elsewhere": "But float32 has a fault at another line: {other}. The cause of "
    "that is the model or its data.{other_stable} Mend both.",
    "number": "{number} in the code at {line} is beyond {fault.dtype}, which ends at "
    "{fault.largest:.4g}, and became Inf. For a mask, type `jnp.finfo(x.dtype).min`, "
    "with the dtype of the scores. For anything else: {cure}",
    "optimizer": "It happens only in {fault.dtype}: the optimizer, or something else "
    "after the backward pass, computes in 16 bits. {masters}",
    "backward": "Only the backward pass overflows {fault.dtype}, which has the range "
    "of float32: no loss scale helps. {cure}",
    "backward, float16": "Only the backward pass overflows: the loss scale is too "
    "large for this step. This is harmless: `jaxmp.loss_scaling` skips the step and "
    "halves the scale. If steps are skipped again and again, search again: the line "
    "may be another. If there is no scale, or it is always this line, the gradients "
    "themselves are too large for float16. {cure}",
    "forward": "The forward pass overflows {fault.dtype} here, and {finite}. No loss "
    "scale helps. {cure}",
    "argument": "`{argument}` has values up to {largest:.4g}, and is cast to "
    "{fault.dtype} at {line}, which ends at {fault.largest:.4g}. No loss scale helps. "
    "{cure}",
    # Of zeros.
    "lost": "{lost} No loss scale helps. {cure}",
    "lost, backward": "{lost} If it learns worse than in float32, the loss scale is "
    "too small: `jaxmp.loss_scaling` finds one that fits.",
    "lost, optimizer": "{lost} The optimizer computes in 16 bits. {masters}",
}
# `suggest_loss_scale(grads)` is no cure for certain: what comes before the gradients of
# the parameters may be much larger than these.

# What is zero, or near it.
_LOST = {
    "number": "The number {eaten.written:.4g} in the code at {line} is 0 in "
    "{fault.dtype}, and a result depends on it.",
    "some number": "A number in the code at {line} is 0 in {fault.dtype}, as 1e-8 is. "
    "If you wrote such a number, that is the cause. If you wrote 0, try float32: it "
    "may help.",
    "argument": "{part} `{argument}`, which is cast at {line}, is zero or subnormal in "
    "{fault.dtype} and not in float32, and a result depends on it.",
    "operation": "{part} what {fault.operation} gives at {line} is zero or subnormal "
    "in {fault.dtype} and not in float32, and a result depends on it.",
}

# What to type, by what has brought an operation into 16 bits.
_CURES = {
    "autocast": "Put `jaxmp.float32_region` around the function of {line}.",
    "autocast, in a module": 'Type `float32_paths=("{fault.module}",)` in `autocast`, '
    "or put `jaxmp.float32_region` around the function of {line}.",
    "with_policy": "Put `with_policy` around the model alone, so that this argument "
    "stays float32; or pass it in units in which it is near 1.",
    "with_policy, a leaf": 'Type `policy.with_overrides(("{leaf}", "float32"))`.',
    "module": "Give the module `{fault.module}` `dtype=jnp.float32`.",
    "code": "Compute {line} in float32: `x.astype(jnp.float32)`.",
    "code, under a policy": "Compute {line} in float32: `x.astype(jnp.float32)`, or "
    '`policy.with_overrides(("{override}", "float32"))`.',
}
_MASTERS = (
    'Keep the parameters and the optimizer state in float32, as `"mixed_float16"` '
    'does: `jaxmp.cast_tree((params, grads), "float32")` before `tx.init` and '
    "`tx.update`."
)
# What to write instead of an operation that is not finite in float32 either.
_STABLE = {
    "exp": " Subtract the largest value first, as `jax.nn.softmax` and "
    "`jax.nn.logsumexp` do.",
    "log": " Take the logarithm of the logits, as `jax.nn.log_softmax` and "
    "`jax.nn.log_sigmoid` do.",
}


def advice(case: Case) -> str:
    """Returns one or more sentences."""
    return " ".join(_VERDICTS[x].format_map(_facts(case)) for x in _verdicts(case))


def _verdicts(case: Case) -> list[str]:
    """Returns what to say of a program, as keys of `_VERDICTS`."""
    found = ["given"] if case.given else []
    if case.first is not None and not case.is_given:
        found += _of_fault(case, case.first)
    if case.written:
        found.append("written")
    if found:
        return found
    found = ["sound" if case.is_seen else "not all seen"]
    near = case.nearest
    if case.swallowed is not None:
        found.append("swallowed")
    elif near is not None and near.headroom < 1 and not near.backward:
        found.append("near")
    return found


def _of_fault(case: Case, fault: Fault) -> list[str]:
    if fault.kind == "zeros":
        if case.in_optimizer:
            return ["lost, optimizer"]
        is_scales = fault.backward and case.number is None
        return ["lost, backward" if is_scales else "lost"]
    if case.finite_in_float32 is False:
        if case.zeros:
            return ["zeros given"]
        if case.fault_in_float32 is None:
            return ["model"]
        if not case.overflows:
            return ["model, elsewhere"]
        case = case._replace(finite_in_float32=True, fault_in_float32=None)
        return [*_of_fault(case, fault), "and elsewhere"]
    if case.number is not None:
        return ["number"]
    if case.in_optimizer:
        return ["optimizer"]
    if fault.backward:
        return ["backward, float16" if fault.dtype == "float16" else "backward"]
    return ["argument" if case.argument else "forward"]


def _facts(case: Case) -> dict[str, Any]:
    """Returns what the sentences speak of."""
    fault, eaten, near = case.first or case.swallowed, case.number, case.nearest
    facts: dict[str, Any] = {
        "leaves": _leaves(case.given),
        "near": near,
        "near_line": _line(near.where) if near else "",
    }
    if fault is None:
        return facts
    written = None if eaten is None else eaten.written
    what = (
        fault.operation if written is None else f"the number {written:.4g} in the code"
    )
    other, cause = case.fault_in_float32, "is finite in float32"
    if case.finite_in_float32 is None:
        cause = "may be finite in float32; jaxmp cannot tell"
    facts |= {
        "fault": fault,
        "line": _line(fault.where),
        "eaten": eaten,
        "number": "A number" if written is None else f"The number {written:.4g}",
        "what": what,
        "argument": case.argument,
        "zeros": case.zeros,
        "largest": fault.inputs[0][2] if fault.inputs else 0.0,
        "finite": cause,
        "stable": _STABLE.get(fault.operation, ""),
        "other": other,
        "other_stable": _STABLE.get(other.operation, "") if other else "",
        "masters": _MASTERS,
        "override": case.override,
        "leaf": "/".join(case.argument.split("/")[-2:]),
        "part": f"{case.lost:.0%} of" if case.lost >= 0.005 else "Some of",
    }
    kind = "argument" if case.argument else "operation"
    if eaten is not None:
        kind = "some number" if written is None else "number"
    cure = {
        "autocast": ", in a module" if "/" in fault.module else "",
        "with_policy": ", a leaf" if "/" in case.argument else "",
        "code": ", under a policy" if case.override else "",
    }.get(case.cast_by, "")
    facts["lost"] = _LOST[kind].format_map(facts)
    facts["cure"] = _CURES[case.cast_by + cure].format_map(facts)
    return facts


def _leaves(given: dict[str, tuple[int, int]]) -> str:
    leaves = []
    for name, (nan, inf) in [*given.items()][:6]:
        counts = [f"{nan} NaN"] * (nan > 0) + [f"{inf} Inf"] * (inf > 0)
        leaves.append(f"`{name}` contains {' and '.join(counts)}")
    more = f", and {len(given) - 6} more do" if len(given) > 6 else ""
    return ", ".join(leaves) + more


def _line(where: str) -> str:
    return short_line(where) or "this operation"
