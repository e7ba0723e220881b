"""What an Inf or NaN means, and what to type: tables of sentences."""

from __future__ import annotations

from typing import Any

from ..._jaxprs.places import short_line
from ..._jaxprs.scopes import AUTOCAST
from .origins import INF_WRITTEN
from .report import Fault

# What it is. `_facts` has what the sentences speak of.
_VERDICTS = {
    # Of what is no fault of an operation.
    "given": "{leaves}, which reaches a result: no precision helps. Look at the data, "
    "or at the step that made these parameters.",
    "written": "An Inf in the code reached a result: it may be there on purpose.",
    "sound": "All results are finite.",
    "not all seen": "All results are finite, but parts of the program could not be "
    "searched: see the notes.",
    "nothing": "Nothing runs in 16 bits: pass the function that you train with, such "
    "as the step, or the loss under the same `autocast`.",
    "hidden": "But {what} at {line} gave Inf where float32 would not, and a later "
    "operation turned it into a finite number, as 1 / Inf is 0: the results may be "
    "wrong. {cure}",
    # Of an Inf or NaN.
    "zeros given": "`{search.zeros}` is float16 and all zeros, as all numbers below "
    "6e-8 are in float16, and that is the cause. Unless it should be zero, pass it in "
    "float32, or in units in which it is near 1.",
    "model": "It is not finite in float32 either: the cause is the model or its data "
    "at {line}, not the precision, and no loss scale helps.{stable}",
    "elsewhere": "Float32 has a fault at another line: {search.elsewhere}. The cause "
    "of that is the model or its data.{stable_elsewhere} Mend that too, and search "
    "again.",
    "number": "{number} in the code at {line} exceeds {fault.largest:.4g}, the largest "
    "number of {fault.dtype}, and became Inf. For a mask, type "
    "`jnp.finfo(x.dtype).min`, with the dtype of the scores. Otherwise: {cure}",
    "optimizer": "It happens only in {fault.dtype}. {cure}",
    "backward": "Only the backward pass overflows {fault.dtype}, which has the range "
    "of float32: no loss scale helps. {cure}",
    "backward, float16": "Only the backward pass overflows: the loss scale is too "
    "large for this step. This is harmless: `jaxmp.loss_scaling` skips the step and "
    "halves the scale. If steps are skipped again and again, search again: the line "
    "may be another. If there is no scale, or it is always this line, the gradients "
    "themselves are too large for float16. {cure}",
    "forward": "The forward pass overflows {fault.dtype} here, and {finite}. No loss "
    "scale helps. {cure}",
    "argument": "`{argument}` has values up to {largest:.4g}, and {line} casts it to "
    "{fault.dtype} (at most {fault.largest:.4g}). No loss scale helps. {cure}",
    # Of zeros.
    "lost": "{lost} No loss scale helps. {cure}",
    "lost, backward": "{lost} If it learns worse than in float32, the loss scale is "
    "too small: `jaxmp.loss_scaling` finds one that fits.",
}
# `suggest_loss_scale(grads)` is no cure for certain: what comes before the gradients of
# the parameters may be much larger than these.

# What is zero, or near it.
_LOST = {
    "number": "The number {written:.4g} in the code at {line} is 0 in "
    "{fault.dtype}, and a result depends on it.",
    "some number": "A number in the code at {line} is 0 in {fault.dtype}. If you wrote "
    "one such as 1e-8, its underflow is the cause. If you wrote 0, float32 may help.",
    "argument": "{part} the values of `{argument}`, which {line} casts, are zero or "
    "subnormal in {fault.dtype} but not in float32, and a result depends on them.",
    "operation": "{part} the values that {fault.operation} gives at {line} are zero or "
    "subnormal in {fault.dtype} but not in float32, and a result depends on them.",
}

# What to type, by what has brought an operation into 16 bits.
_CURES = {
    "optimizer": "The optimizer, or something else after the backward pass, computes "
    "in 16 bits. Keep the parameters and the optimizer state in float32, as "
    '`"mixed_float16"` does: `jaxmp.cast_tree((params, grads), "float32")` before '
    "`tx.init` and `tx.update`.",
    "autocast": "Put `jaxmp.float32_region` around the function of {line}.",
    "autocast, in a module": 'Type `float32_paths=("{fault.module}",)` in `autocast`, '
    "or put `jaxmp.float32_region` around the function of {line}.",
    "with_policy": "Put `with_policy` around the model alone, so that this argument "
    "stays float32; or pass it in units in which it is near 1.",
    "with_policy, a leaf": 'Type `policy.with_overrides(("{leaf}", "float32"))`.',
    "module": "Give the module `{fault.module}` `dtype=jnp.float32`.",
    "code": "Compute {line} in float32: `x.astype(jnp.float32)`.",
    "code, under a policy": "Compute {line} in float32: `x.astype(jnp.float32)`, or "
    '`policy.with_overrides(("{module}", "float32"))`.',
}
# What to write instead of an operation that is not finite in float32 either.
_STABLE = {
    "exp": " Use `jax.nn.softmax` or `jax.nn.logsumexp`: they subtract the maximum.",
    "log": " Use `jax.nn.log_softmax` or `jax.nn.log_sigmoid` of the logits.",
    "div": " If the divisor can be zero, add an epsilon to it. The gradient of a root "
    "or a norm divides by its result: add the epsilon under the root.",
    "rsqrt": " If its argument can be zero, add an epsilon to it.",
    "sub": " The softmax of a row of -Inf is NaN: mask with `jnp.finfo(x.dtype).min`.",
}


def advice(search: Any) -> str:
    """Returns one or more sentences on what a `FaultSearch` has found."""
    facts = _facts(search)
    return " ".join(_VERDICTS[x].format_map(facts) for x in _verdicts(search))


def _verdicts(search: Any) -> list[str]:
    """Returns what to say of a program, as keys of `_VERDICTS`."""
    found = ["given"] if search.given else []
    if search.first is not None and not search.leading:
        found += _of_fault(search, search.first)
    if any(x.time[0] == INF_WRITTEN for x in search.run.origins):
        found.append("written")
    if found:
        return found
    found = ["not all seen" if search.run.program.notes else "sound"]
    if not search.dtypes:
        found.append("nothing")
    elif search.hidden is not None:
        found.append("hidden")
    return found


def _of_fault(search: Any, fault: Fault) -> list[str]:
    if fault.kind == "zeros":
        is_scales = fault.backward and search.number is None
        return ["lost, backward" if is_scales else "lost"]
    elsewhere = []
    if search.finite_in_float32 is False:  # it is the model's
        if search.zeros:
            return ["zeros given"]
        if search.elsewhere is None:
            return ["model"]
        elsewhere = ["elsewhere"]
        if not search.site.look.over:
            return elsewhere
    if search.number is not None:
        return ["number", *elsewhere]
    if _is_optimizers(search):
        return ["optimizer", *elsewhere]
    if fault.backward:
        is_half = fault.dtype == "float16"
        return ["backward, float16" if is_half else "backward", *elsewhere]
    return ["argument" if search.site.argument else "forward", *elsewhere]


def _facts(search: Any) -> dict[str, Any]:
    """Returns what the sentences speak of."""
    facts: dict[str, Any] = {"search": search, "leaves": _leaves(search.given)}
    fault, site = search.first or search.hidden, search.site
    if fault is None:
        return facts
    number, argument = search.number, site.argument
    written = number and number.written
    named = None if written is None else f"number {written:.4g}"
    other = search.elsewhere
    may_be = "may be finite in float32; jaxmp cannot tell"
    is_finite = "is finite in float32"
    share = site.look.lost / max(site.runs * site.size, 1)
    facts |= {
        "fault": fault,
        "line": short_line(fault.where) or "this operation",
        "written": written,
        "number": f"The {named}" if named else "A number",
        "what": f"the {named} in the code" if named else fault.operation,
        "argument": argument,
        "largest": fault.inputs[0][2] if fault.inputs else 0.0,
        "finite": may_be if search.finite_in_float32 is None else is_finite,
        "stable": _STABLE.get(fault.operation, ""),
        "stable_elsewhere": _STABLE.get(other.operation, "") if other else "",
        "leaf": "/".join(argument.split("/")[-2:]),
        "module": _overridable(search),
        "part": f"{share:.0%} of" if share >= 0.005 else "Some of",
    }
    lost = "argument" if argument else "operation"
    if number is not None:
        lost = "number" if named else "some number"
    facts["lost"] = _LOST[lost].format_map(facts)
    facts["cure"] = _CURES[_cure(search, fault)].format_map(facts)
    return facts


def _cure(search: Any, fault: Fault) -> str:
    """Returns what has brought a fault into 16 bits, as a key of `_CURES`."""
    place, argument = search.site.place, search.site.argument
    if _is_optimizers(search):
        return "optimizer"
    if AUTOCAST in place.scopes:
        return "autocast, in a module" if "/" in fault.module else "autocast"
    if argument and place.library == "jaxmp":
        return "with_policy, a leaf" if "/" in argument else "with_policy"
    if place.library == "flax" and not search.has_policy:
        return "module"
    return "code, under a policy" if _overridable(search) else "code"


def _overridable(search: Any) -> str:
    """Returns the module of the fault as overrides name it, if it has parameters."""
    module = search.site.place.module
    inner = f"{module.partition('/')[2]}/"
    has = inner != "/" and any(inner in x for x in search.flat.names)
    return inner if has and search.has_policy else ""


def _is_optimizers(search: Any) -> bool:
    """Whether the faulty operation is the optimizer's."""
    place = search.site.place
    if place.library == "optax" and AUTOCAST not in place.scopes:
        return True
    back = [x.number for x in search.run.sites if x.place.backward or x.place.again]
    return bool(back) and search.site.number > back[-1]


def _leaves(given: dict[str, tuple[int, int]]) -> str:
    leaves = []
    for name, (nan, inf) in [*given.items()][:6]:
        counts = [f"{nan} NaN"] * (nan > 0) + [f"{inf} Inf"] * (inf > 0)
        leaves.append(f"`{name}` contains {' and '.join(counts)}")
    more = f", and {len(given) - 6} more do" if len(given) > 6 else ""
    return ", ".join(leaves) + more
