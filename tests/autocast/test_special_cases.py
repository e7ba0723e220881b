"""The price list: each special case of the decision, and a program in which it fires.

A row says what is lost where the case is turned off: ``bytes``, as more values are
float32, or ``digits``, as more are rounded; the rule or the guard that it serves; and a
program in which that happens. A case that fires in no program has no place in the
engine: give it a program, or take it out. The passes, which are special cases too, have
their laws in ``test_parts.py``.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_rematerialised
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._autocast import analysis, facts, needs, rules, streams, transfer
from jaxmp._autocast.plan import Plan, Planner
from jaxmp._ops import products, table
from jaxmp._ops.precision import own_precisions

BF16, F16 = np.dtype(jnp.bfloat16), np.dtype(jnp.float16)
W, X, B = jnp.ones((16, 16)), jnp.ones((8, 16)), jnp.ones(16)


def never(*args: Any, **kwargs: Any) -> bool:
    return False


class Case(NamedTuple):
    """A special case: how it is turned off, and where it fires."""

    loses: Literal["bytes", "digits"]  # where it is off
    owner: Any
    name: str  # of what is replaced in the owner
    off: Any
    serves: rules.Rule
    program: Callable
    args: tuple[Any, ...]
    dtype: np.dtype = BF16


def softmax_dropped(w, x, keep):
    p = jax.nn.softmax(x @ w)
    return jnp.log((p * keep) @ w)


def softmax_tripled(w, x):
    return jnp.log((jax.nn.softmax(x @ w) * 3.0) @ w)


def softmax_scaled_far(w, x):
    return jnp.log((jax.nn.softmax(x @ w) * 2.0**12) @ w)


def attends(w, x):
    return jnp.log(jax.nn.softmax(x @ w) @ w)


def sigmoid_far_from_matmul(w, x):
    gate = jax.nn.sigmoid(jnp.log1p(x @ w))
    h = gate * (x @ w)
    return h @ w, h.sum()


def gated(w, x):
    return (jax.nn.sigmoid(jnp.log1p(x @ w)) * (x @ w)) @ w


def gated_loop(w, xs):
    def cell(h, x):
        u = jnp.tanh(x @ w)
        return jax.nn.sigmoid(u) * h + u @ w, None

    return lax.scan(cell, jnp.zeros(16), xs)[0]


def adds_up(w, xs):
    def cell(h, x):
        u = jnp.tanh(h @ w)
        return h + u, u @ w

    return lax.scan(cell, xs[0], xs)


def parts_of_a_returned_product(w, x):
    h = x @ w
    q, k = h[:, :8], h[:, 8:]
    return h, q @ k.T


@jax.custom_jvp
def erf(x):
    return lax.erf(x)


@erf.defjvp
def erf_jvp(primals, tangents):  # as JAX has it before 0.12
    (x,), (t,) = primals, tangents
    return erf(x), t * (2 / np.pi**0.5) * jnp.exp(-x * x)


def gelu_gradient(w, x):
    def loss(w):
        h = x @ w
        return jnp.square((h * (erf(h / 2**0.5) + 1)) @ w).sum()

    return jax.grad(loss)(w)


def relu_gradient(w, x):
    return jax.grad(lambda x: (jax.nn.relu(x) @ w).sum())(x)


def bias_of_a_residual(w, b, x, factor):
    def loss(w, b):
        h = jnp.tanh(x @ w)
        return jnp.square((jnp.exp(h + b) * factor) @ w).sum()

    return jax.grad(loss, (0, 1))(w, b)


def bias_behind_a_factor(w, b, x):
    return bias_of_a_residual(w, b, x, 2.0)


def bias_behind_a_loss_scale(w, b, x):
    return bias_of_a_residual(w, b, x, 2.0**12)


def scaled_by_a_third(w, x):
    return ((x @ w) * 0.3) @ w


def beyond_float16(w, x):
    h = jnp.where(x > 0, x @ w, 1e6)
    return h @ w, h.sum()


def few_terms(w, x):
    return jnp.tanh(x[:, :4] @ w[:4]) @ w


def squares(w, x):
    h = x @ w
    return (h * h) @ w


def equal(w, x):
    h = x @ w
    return jnp.where(h == 1.0, h, 0.0) @ w


def position(w, x):
    return (x + x @ w) @ w


def of_a_log(w, x):
    return (jnp.log1p(x @ w) + x @ w) @ w


def whole(w, x):
    h = x @ w
    return jnp.round(h) @ w, h @ w


def divided(w, x):
    h, d = x @ w, x @ w
    return (h / d) @ w


def many_powers(w, x):
    h = x @ w
    return (h[:, :1] * h[:, 1:2] * h[:, 2:3] * h[:, 3:4] * h[:, 4:5] * h) @ w


def sharded_weights(w, x):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def loss(w, x):
        w = lax.all_gather(w, "data", tiled=True)
        return (x @ w) @ w

    specs = (P("data"), P())
    return jax.shard_map(
        loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )(w, x)


def convolution_gradient(k, x):
    def loss(k):
        def conv(x):
            return lax.conv_general_dilated(
                x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )

        return jnp.square(conv(jnp.tanh(conv(x)))).sum()

    return jax.grad(loss)(k)


def gradient_of_a_mean(w, b, x):
    def loss(w, b):
        h = jnp.tanh(x @ w)
        return jnp.square(jnp.exp(h + b).mean(0) @ w).sum()

    return jax.grad(loss, (0, 1))(w, b)


def bias_broadcast_before(w, b, x):
    return (x @ w + jnp.broadcast_to(b, (8, 16))) @ w


def carried(w, x):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w) @ w, x @ w) @ w


def softmax_halved(w, x):
    return jnp.log((jax.nn.softmax(x @ w) * 0.5) @ w)


def with_a_log(x, p):
    """The backward pass does not compute the logarithm again, which needs digits."""
    far = checkpoint_name(lax.stop_gradient(jnp.log(jnp.abs(x) + 2)), "far")
    return test_rematerialised.layer(x, p) + jnp.tanh(far @ p["a"]) @ p["b"]


def all_but_the_log_again(layer):
    kept = jax.checkpoint_policies.save_only_these_names("far")
    return jax.checkpoint(layer, policy=kept)


KERNEL, SIGNAL = jnp.ones((3, 16, 16)), jnp.ones((2, 8, 16))
WS = jnp.ones((3, 16, 16))
KEEP = jnp.ones((8, 16), bool)

CASES = {
    "a mask of dropout before a matmul": Case(
        "bytes",
        analysis,
        "masks_in",
        lambda eqns: set(),
        rules.STORED,
        softmax_dropped,
        (W, X, KEEP),
    ),
    "a number before a matmul": Case(
        "bytes", transfer, "_only_scales", never, rules.STORED, softmax_tripled, (W, X)
    ),
    "a number that takes a value out of range": Case(
        "digits", table, "scales_far", never, rules.STORED, softmax_scaled_far, (W, X)
    ),
    "a float32 value that only matmuls read": Case(
        "bytes", needs, "is_stored", never, rules.STORED, attends, (W, X)
    ),
    "a sigmoid is rounded": Case(
        "bytes", table, "squashes", never, rules.BETWEEN, gated, (W, X)
    ),
    "float32 work behind a sigmoid": Case(
        "digits",
        needs,
        "is_squashed_for_products",
        lambda need, *, behind: True,
        rules.FLOAT32,
        sigmoid_far_from_matmul,
        (W, X),
    ),
    "a sigmoid stops a gate": Case(
        "bytes",
        needs,
        "handed_on",
        lambda need, *, squashed=False: need & (needs.EVERYTHING | needs.MANY),
        rules.LOOPS,
        gated_loop,
        (W, X),
    ),
    "sums of a loop": Case(
        "bytes",
        analysis,
        "accumulated",
        lambda *args: (),
        rules.LOOPS,
        adds_up,
        (W, X),
    ),
    "sums of layers that are computed again": Case(
        "bytes",
        streams,
        "stacked",
        lambda *args: {},
        rules.LOOPS,
        test_rematerialised.loss(test_rematerialised.layer, test_rematerialised.again),
        (test_rematerialised.PARAMS, test_rematerialised.X),
    ),
    "a sum of layers whose digits the forward pass needs": Case(
        "digits",
        streams,
        "_needs_digits",
        never,
        rules.LOOPS,
        test_rematerialised.loss(with_a_log, all_but_the_log_again),
        (test_rematerialised.PARAMS, test_rematerialised.X),
    ),
    "parts of a product": Case(
        "bytes",
        table,
        "cuts",
        never,
        rules.BETWEEN,
        parts_of_a_returned_product,
        (W, X),
    ),
    "the slope of a GELU": Case(
        "bytes", table, "is_exponential", never, rules.BETWEEN, gelu_gradient, (W, X)
    ),
    "weights that devices gather": Case(
        "bytes", table, "gathers", never, rules.STORED, sharded_weights, (W, X)
    ),
    "gradients that are also summed": Case(
        "bytes",
        facts,
        "is_of_cotangent",
        never,
        rules.STORED,
        bias_behind_a_factor,
        (W, B, X),
    ),
    "gradients behind a far factor": Case(
        "digits",
        table,
        "is_far",
        never,
        rules.STORED,
        bias_behind_a_loss_scale,
        (W, B, X),
    ),
    "a number that 16 bits lack": Case(
        "digits",
        facts.Facts,
        "holds",
        lambda self, dtype: True,
        rules.BETWEEN,
        scaled_by_a_third,
        (W, X),
    ),
    "a number out of range": Case(
        "digits",
        facts.Facts,
        "fits",
        lambda self, dtype: True,
        rules.BETWEEN,
        beyond_float16,
        (W, X),
        F16,
    ),
    "fewer than eight terms": Case(
        "digits", products, "FEWEST", 2, rules.BETWEEN, few_terms, (W, X)
    ),
    "a value times itself": Case(
        "digits", table, "multiplies_itself", never, rules.FLOAT32, squares, (W, X)
    ),
    "a test for equality": Case(
        "digits", table, "tests_equal", never, rules.FLOAT32, equal, (W, X)
    ),
    "a bias": Case(
        "digits",
        facts,
        "adds_bias",
        lambda *args: True,
        rules.FLOAT32,
        position,
        (W, X),
    ),
    "whole numbers": Case(
        "digits", table, "counts", never, rules.FLOAT32, whole, (W, X)
    ),
    "a divisor": Case(
        "digits", table, "divisor", lambda eqn: None, rules.FLOAT32, divided, (W, X)
    ),
    "many parts of one value": Case(
        "digits",
        analysis,
        "powers_in",
        lambda eqns: set(),
        rules.GATES,
        many_powers,
        (W, X),
    ),
    "copies of one gradient": Case(
        "digits", table, "copies", never, rules.FLOAT32, gradient_of_a_mean, (W, B, X)
    ),
    "a bias that was broadcast before": Case(
        "bytes",
        facts,
        "_repeated",
        lambda *args: (),
        rules.BETWEEN,
        bias_broadcast_before,
        (W, B, X),
    ),
    "what a loop carries": Case(
        "bytes", needs, "is_carried", never, rules.BETWEEN, carried, (W, X)
    ),
    "a number below one before a matmul": Case(
        "digits", table, "scales_down", never, rules.FLOAT32, softmax_halved, (W, X)
    ),
    "gradients that are summed and handed on": Case(
        "bytes",
        needs,
        "is_summed_and_handed_on",
        never,
        rules.STORED,
        bias_behind_a_factor,
        (W, B, X),
    ),
    "slopes": Case(
        "bytes", needs, "is_for_backward", never, rules.BETWEEN, gelu_gradient, (W, X)
    ),
    "the sign of what a matmul takes": Case(
        "bytes", table, "tests_sign", never, rules.BETWEEN, relu_gradient, (W, X)
    ),
    "the reversed kernel of a convolution": Case(
        "bytes",
        needs,
        "is_rounded_for_products",
        never,
        rules.STORED,
        convolution_gradient,
        (KERNEL, SIGNAL),
    ),
}


def plan_of(case: Case) -> Plan:
    """Returns the plan of its program."""
    leaves, tree = jax.tree.flatten(case.args)
    with jax.softmax_custom_jvp(True), own_precisions():
        jaxpr = jax.make_jaxpr(lambda *xs: case.program(*tree.unflatten(xs)))(*leaves)
    planner = Planner(case.dtype, jaxmp.DEFAULT_OPS)
    return planner.program(jaxpr, needs.FULL | needs.DIGITS)


def in_16_bits(planned: Plan) -> tuple[int, int]:
    """Returns how many entries have 16 bits, and how many are computed in them."""
    rounded = computed = 0
    for inner in planned.plans():
        for step in inner.steps:
            pairs = [*zip(step.outs, step.eqn.outvars, strict=True)]
            stored = step.how == "stored"
            entries = sum(var.aval.size for x, var in pairs if x.half or stored)
            rounded += entries
            computed += sum(var.aval.size for _, var in pairs) * (step.how == "half")
        rounded += sum(end == "half" for end in inner.ends)
    return rounded, computed


@pytest.mark.parametrize("name", CASES)
def test_a_special_case_fires_in_a_program(name, monkeypatch):
    case = CASES[name]
    on = in_16_bits(plan_of(case))
    monkeypatch.setattr(case.owner, case.name, case.off)
    off = in_16_bits(plan_of(case))
    assert off < on if case.loses == "bytes" else off > on
