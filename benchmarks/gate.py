"""Checks that jaxmp costs no more than skipping steps by hand.

Small networks of each kind, compiled for an H200 in seconds and without a GPU, and held
against hand-written 16-bit training that neither scales nor checks nor skips. What is
small is the number of layers; what moves through memory has the size it has in use.
Updates of parameters without float32 masters must move what they read and write once.
Products with weights must be float8 in every form of a gradient that asks for it.
Attention must be that of cuDNN, with no array of length by length.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jaxmp

from . import attention, fp8, memory
from .counting import targets
from .counting.results import Table, by_form
from .counting.steps import AUTOCAST, FLOOR, SKIPPING, contestant
from .machinery import count
from .networks.basic import gpt, mlp, resnet, sequence_model
from .networks.families import Recurrent

NETWORKS = {
    "mlp": mlp(256, features=1024, width=1024, layers=2),
    "gpt": gpt(16, layers=1, width=256, heads=4, vocabulary=1024, length=256),
    "cnn": resnet(32, image=64, stages=(1,), width=128, bottleneck=False),
    "lstm": sequence_model(
        Recurrent(layers=1, width=256, vocabulary=256, length=16), 64
    ),
}
# Network, contestant, micro-batches.
STEPS = [
    ("mlp", "jaxmp cast", 1),
    ("mlp", "jaxmp modules", 1),
    ("mlp", AUTOCAST, 1),
    ("gpt", AUTOCAST, 1),
    ("mlp", "jaxmp cast", 4),
    ("gpt", "jaxmp cast", 1),
    ("gpt", "jaxmp cast", 4),
    ("cnn", "jaxmp cast", 1),
    ("cnn", AUTOCAST, 1),
    ("lstm", AUTOCAST, 1),
]
# The most that autocast may cost in float16, in bytes but for 6N and temporary memory.
# A sum with a norm's result is float32 there, which a residual network feels
# most; and the state of a cell is float32.
MOST = {
    "mlp": (1.05, 1.02),
    "gpt": (1.05, 1.09),
    "cnn": (1.30, 1.46),
    "lstm": (1.05, 1.1),
}
# What attention by cuDNN may leave of the bytes and of the temporary memory.
FUSED = (0.80, 0.94)
DECODER = fp8.Decoder(256, layers=2, vocabulary=1024, rows=4, length=256, head_size=64)


class Check(NamedTuple):
    """A number and the most that it may be."""

    step: str
    what: str
    found: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the number is in its limit."""
        return self.found <= self.limit


def main() -> None:
    """Prints every number with its limit; exits with 1 if one is above."""
    targets.require("gate")
    found = list(gate())
    marks = {True: "", False: "[bold red]too much"}
    rows = [c._asdict() | {"": marks[c.holds]} for c in found]
    Table(targets.hardware(), rows).show()
    raise SystemExit(not all(c.holds for c in found))


def gate() -> Iterator[Check]:
    """Yields the checks of all steps."""
    for name, contestant_name, accum_steps in STEPS:
        step = f"{name}, {contestant_name}, {accum_steps} micro-batches"
        found = measured(name, contestant_name, accum_steps)
        yield from checks(step, found)
    for name in memory.VARIANTS:
        yield from narrow_checks(name)
    for form in fp8.FORMS:
        yield from fp8_checks(form)
    yield from attention_checks()


def attention_checks() -> Iterator[Check]:
    """Yields what must hold of attention by cuDNN, which need not be installed."""
    rows = attention.compared({"gpt": NETWORKS["gpt"]}, "bfloat16")
    forms = by_form(rows)["gpt"]
    for key, what, limit in zip(
        ("bytes", "temp"), ("bytes", "temporary memory"), FUSED, strict=True
    ):
        share = forms["fused"][key] / forms["written"][key]
        step = "gpt, attention by cuDNN"
        yield Check(step, f"{what}, of those written out", share, limit)


def fp8_checks(name: str, decoder: fp8.Decoder = DECODER) -> Iterator[Check]:
    """Yields what must hold of a gradient whose products are to be float8."""
    form, ops = fp8.FORMS[name], jaxmp.DEFAULT_OPS.with_fp8(min_size=256)
    found, floor = (
        fp8.count(decoder, form, policy, ops) for policy in reversed(fp8.POLICIES)
    )
    linear, attention = decoder.products(form)
    step = f"gradient in float8, {name}"
    yield Check(step, "products with weights in 16 bits", linear - found["float8"], 0)
    yield Check(step, "products of attention in 8 bits", attention - found["others"], 0)
    # Of one this small, the numbers that scales are found from are many. What is
    # computed again finds them again, from weights that bfloat16 has rounded once.
    share = found["bytes"] / floor["bytes"]
    limit = 1.25
    yield Check(step, "bytes, of those in bfloat16", share, limit)


def narrow_checks(name: str) -> Iterator[Check]:
    """Yields what must hold of an update without float32 masters."""
    found = memory.count(memory.VARIANTS[name], NETWORKS["mlp"])
    for what, limit in memory.limits(memory.VARIANTS[name]).items():
        yield Check(f"update, {name}", what, found[what], limit)


@functools.cache
def floor(name: str, accum_steps: int, form: str = FLOOR) -> dict[str, Any]:
    """Counts in a hand-written step of a network, once."""
    return measured(name, form, accum_steps)


def measured(name: str, contestant_name: str, accum_steps: int) -> dict[str, Any]:
    """Compiles a step of one of the gate's networks and counts."""
    step = contestant(contestant_name, NETWORKS[name], accum_steps=accum_steps)
    which = {
        "network": name,
        "contestant": contestant_name,
        "accum_steps": accum_steps,
    }
    return which | count(step, NETWORKS[name])


def checks(step: str, found: dict[str, Any]) -> Iterator[Check]:
    """Yields what must hold of a step.

    Args:
        step: Its name.
        found: What :func:`measured` counted in it.
    """
    which = found["network"], found["accum_steps"]
    least = floor(*which)
    n = least["parameters"]
    wide = sum(k for kind, k in found["products"].items() if _is_wide(kind))
    yield Check(step, "products of float32 operands", wide, 0)
    # `last_finite` is written and not read, so that JAX drops it from the arguments.
    yield Check(step, "bytes not donated", found["state"] - found["aliased"], 1)
    copies = found["parameter_copies"] - least["parameter_copies"]
    yield Check(step, "more copies of a parameter", copies, 0)
    if found["contestant"] == AUTOCAST:
        # It keeps float32 weight gradients on purpose: 6N, and all that an MLP has.
        share = (found["bytes"] - 6 * n) / least["bytes"]
        most, most_memory = MOST[found["network"]]
        yield Check(step, "bytes but for 6N", share, most)
        if least["bytes"] > 400 * n:
            yield Check(step, "temporary memory", memory_of(found, least), most_memory)
        return
    more = (found["bytes"] - least["bytes"]) / n
    if found["accum_steps"] == 1:
        # The check reads 16-bit gradients once more: 2N.
        yield Check(step, "more bytes, in N", more, 2.1)
    else:
        # It reads their float32 sums. Where weights are most of what moves, as in the
        # MLP, that alone is more than 1%.
        yield Check(step, "more bytes, in N", more, 4.1)
        if least["bytes"] > 400 * n:
            yield Check(step, "bytes", found["bytes"] / least["bytes"], 1.01)
    # To skip a step takes some memory, on JAX 0.12 a sixth of a small network's, and
    # each program is scheduled in its own way, which makes up to 2%.
    share = memory_of(found, floor(*which, SKIPPING))
    yield Check(step, "temporary memory", share, 1.03)


def memory_of(found: dict[str, Any], of: dict[str, Any]) -> float:
    """Returns the share of temporary memory, without the workspaces of libraries."""
    memory, least = (x["temp"] - x["workspace"] for x in (found, of))
    return memory / least


def _is_wide(kind: str) -> bool:
    """Tells whether a product such as ``matmul f16 x f32 -> f32`` reads float32."""
    return "f32" in kind.split(" -> ")[0].split()
