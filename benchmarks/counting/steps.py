"""Training steps: the same network and Adam, in the words of each library.

Every contestant keeps float32 masters, unless its name says otherwise, and computes in
``dtype``. The hand-written one casts once and does nothing else: it is the floor that
the others are measured from. What differs is how a library casts, scales, checks and
skips.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import jaxmp

from ..networks.basic import Network
from .measure import IN_A_HURRY, relative_error

ADAM = optax.adam(1e-3)
FLOOR = "by hand"  # the contestant that the others are measured from
SKIPPING = "by hand, skipping"
AUTOCAST, INT8 = "jaxmp autocast", "autocast int8"
# What it says of a step in float16; one in bfloat16 has one dtype.
BACKWARD = "jaxmp autocast, float16 forward, bfloat16 backward"
# With `nn.remat` around each layer, which is what users do instead of 8 bits.
CHECKPOINT, BOTH = "checkpoint", "checkpoint and int8"
# The loss head as one operation, and both.
HEAD, HEAD_AGAIN = "without logits", "without logits and checkpoint"
HEAD_INT8 = f"{HEAD_AGAIN}, int8 moments"
# The one line that suffices in bfloat16, which checks nothing.
UNCHECKED = f"{AUTOCAST}, no check"
# Of bfloat16 parameters, rounded stochastically: the dtype of the moments.
STATES = {"bfloat16 state": "bfloat16", "int8 state": "int8"}


class State(NamedTuple):
    """What a step changes, and donates."""

    params: Any
    batch_stats: Any  # float32; empty without batch normalisation
    opt_state: Any
    loss_scale: Any = None  # of the libraries that keep one beside the optimizer


class Contestant(NamedTuple):
    """A training step that may be run or compiled."""

    name: str
    init: Callable[..., State]  # of nothing, or of the model's variables; to be jitted
    step: Any  # jitted; `step(state, batch)` is `(state, loss)`; donates the state


class Unavailable(Exception):
    """Says why a contestant does not take part."""


def contestants(
    network: Network,
    names: Iterable[str],
    *,
    dtype: DTypeLike = jnp.float16,
    accum_steps: int = 1,
    report: Callable[[str], Any] = print,
) -> Iterator[Contestant]:
    """Yields contestants, and reports those that cannot take part in one line.

    Args:
        network: What to train.
        names: Keys of :data:`CONTESTANTS`.
        dtype: float16 or bfloat16. The float32 contestant has no use for it.
        accum_steps: The number of micro-batches.
        report: Called with a line for each contestant that is left out.
    """
    for name in names:
        try:
            yield contestant(name, network, dtype=dtype, accum_steps=accum_steps)
        except Unavailable as reason:
            report(f"{name} is left out: {reason}")


def contestant(
    name: str,
    network: Network,
    *,
    dtype: DTypeLike = jnp.float16,
    accum_steps: int = 1,
) -> Contestant:
    """Returns one contestant, of arguments as in :func:`contestants`.

    Raises:
        Unavailable: If its library is not installed, or has no such step.
    """
    made = (CONTESTANTS | HEADS)[name](network, jnp.dtype(dtype), accum_steps)
    tx, loss_scale, step = made
    x, _ = network.batch(1)

    def init(variables=None):
        if variables is None:
            variables = network.model.init(jax.random.key(0), x)
        params = variables["params"]
        if name in STATES:
            params = jaxmp.cast_tree(params, jnp.bfloat16)
        stats = variables.get("batch_stats", {})
        return State(params, stats, tx.init(params), loss_scale())

    return Contestant(name, init, jax.jit(step, donate_argnums=0))


def on_leaves(step: Any, structure: Any) -> Callable[..., Any]:
    """Returns a step of the leaves of a state, for jmp's state cannot be lowered.

    Args:
        step: The ``step`` of a contestant.
        structure: Of its state, as :func:`jax.tree.structure` returns it.
    """

    def flat(leaves, batch):
        state, loss = step(structure.unflatten(leaves), batch)
        return jax.tree.leaves(state), loss

    return flat


def loss_of(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss that all train on, a float32 mean, and the new statistics."""

    def loss_fn(params, batch_stats, x, y):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changed = apply(variables, x, mutable=["batch_stats"])
        logits = logits.astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, changed.get("batch_stats", {})

    return loss_fn


def without_logits(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same of a language model, whose head and loss are one operation."""
    model: Any = apply.__self__  # pyright: ignore[reportFunctionMemberAccess]

    def loss_fn(params, batch_stats, x, y):
        heads = []

        def head(call, args, kwargs, context):
            layer, is_tied = context.module, context.method_name == "attend"
            is_head = getattr(layer, "features", None) == model.vocabulary
            if not (is_tied or (is_head and not layer.use_bias)):
                return call(*args, **kwargs)
            (kernel,) = jax.tree.leaves(layer.variables["params"])
            heads.append(
                jaxmp.linear_cross_entropy(args[0], kernel, y, transposed=is_tied)
            )
            return args[0]

        with nn.intercept_methods(head):
            apply({"params": params}, x, mutable=["batch_stats"])
        return heads[0], batch_stats

    return loss_fn


def errors_of(
    network: Network, grad: Callable, forms: dict[str, Callable], seeds: int
) -> dict[str, float]:
    """Returns how far loss and gradients of each form are from those of float32.

    Args:
        network: A small network.
        grad: Value and gradient of its loss with auxiliary results, in float32.
        forms: The same function in other forms, by name.
        seeds: For how many batches and parameters to take the mean.
    """
    rows, compiled = [], dict[str, Any]()
    for seed in range(seeds):
        x, y = network.batch(seed=seed)
        variables = jax.jit(network.model.init)(jax.random.key(seed), x)
        args = variables["params"], variables.get("batch_stats", {}), x, y
        compiled = compiled or {
            form: jax.jit(fun).lower(*args).compile(compiler_options=IN_A_HURRY)
            for form, fun in {"float32": grad, **forms}.items()
        }
        (loss, _), grads = compiled["float32"](*args)
        row = {}
        for form in forms:
            (got, _), got_grads = compiled[form](*args)
            row[f"loss, {form}"] = float(abs(got - loss) / abs(loss))
            row[f"gradient, {form}"] = float(relative_error(got_grads, grads))
        rows.append(row)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def by_hand(network, dtype, accum_steps, tx: Any = ADAM, skips=False):
    """Casts once, and neither scales nor checks: the least that can be done."""
    grad_fn = jax.value_and_grad(loss_of(network.model.apply), has_aux=True)

    def step(state, batch):
        params = _cast(state.params, dtype)  # outside of the loop
        (loss, stats), grads = accumulated(grad_fn, accum_steps)(
            params, state.batch_stats, *_cast(batch, dtype)
        )
        updates, opt_state = tx.update(
            _cast(grads, jnp.float32), state.opt_state, state.params
        )
        new = State(optax.apply_updates(state.params, updates), stats, opt_state)
        if skips:
            finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
            finite = jnp.stack(finite).all()
            new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, state)
        return new, loss

    return tx, _nothing, step


def accumulated(grad_fn, steps):
    """Adds up the gradients of micro-batches, in float32, in one scan."""
    if steps == 1:
        return grad_fn

    def summed(params, batch_stats, x, y):
        def add(carry, part):
            total, totals, stats = carry
            (loss, stats), grads = grad_fn(params, stats, *part)
            totals = jax.tree.map(lambda t, g: t + g.astype(t.dtype), totals, grads)
            return (total + loss, totals, stats), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        (loss, grads, stats), _ = jax.lax.scan(
            add, (jnp.float32(0), zeros, batch_stats), _micro_batches((x, y), steps)
        )
        loss, grads = jax.tree.map(lambda g: g / steps, (loss, grads))
        return (loss, stats), grads

    return summed


def jaxmp_cast(network, dtype, accum_steps):
    """Casts the parameters and the model's inputs, by a policy."""
    policy = jaxmp.get_policy(f"mixed_{dtype}")
    loss_fn = loss_of(jaxmp.with_policy(network.model.apply, policy))
    grad_fn = partial(jaxmp.value_and_grad, loss_fn, policy=policy)
    return _jaxmp_step(grad_fn, policy, accum_steps)


def jaxmp_modules(network, dtype, accum_steps):
    """Flax's own ``dtype`` casts; jaxmp scales, checks and skips."""
    policy = jaxmp.get_policy(f"mixed_{dtype}")
    loss_fn = loss_of(network.with_dtype(dtype).apply)
    # Given the policy, micro-batches share one cast of the parameters.
    casts = policy if accum_steps > 1 else None
    grad_fn = partial(jaxmp.value_and_grad, loss_fn, policy=casts)
    return _jaxmp_step(grad_fn, policy, accum_steps)


def jaxmp_autocast(
    network,
    dtype,
    accum_steps,
    policy=None,
    again=False,
    loss=loss_of,
    tx: Any = ADAM,
    **options,
):
    """Autocast around the gradient of the float32 loss."""
    policy = jaxmp.get_policy(policy or f"mixed_{dtype}")
    model = network.model
    loss_fn = loss(model.clone(again=again or model.again).apply)

    def grad_fn(**how):
        grad = jaxmp.value_and_grad(loss_fn, **how)
        return jaxmp.autocast(grad, policy, **options)

    return _jaxmp_step(grad_fn, policy, accum_steps, tx)


def jaxmp_autocast_inside(network, dtype, accum_steps):
    """Autocast around the float32 loss, inside the gradient."""
    policy = jaxmp.get_policy(f"mixed_{dtype}")
    loss_fn = jaxmp.autocast(loss_of(network.model.apply), policy)
    grad_fn = partial(jaxmp.value_and_grad, loss_fn)
    return _jaxmp_step(grad_fn, policy, accum_steps)


def _jaxmp_step(value_and_grad, policy, accum_steps, tx: Any = ADAM):
    tx = jaxmp.loss_scaling(tx, policy)

    def step(state, batch):
        grad_fn = value_and_grad(
            loss_scale=state.opt_state,
            has_aux=True,
            accum_steps=accum_steps,
            batch_argnums=(2, 3),
        )
        (loss, stats), grads = grad_fn(state.params, state.batch_stats, *batch)
        if accum_steps > 1:
            stats = jax.tree.map(lambda s: s.mean(0), stats)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jaxmp.last_step_finite(opt_state)
        stats = jaxmp.select_tree(finite, stats, state.batch_stats)
        return State(params, stats, opt_state), loss

    return tx, _nothing, step


def unchecked(network, dtype, accum_steps, tx):
    """Autocast around JAX's own gradient: no loss scale and no check."""
    grad_fn = jax.value_and_grad(loss_of(network.model.apply), has_aux=True)
    grad_fn = jaxmp.autocast(grad_fn, f"mixed_{dtype}")
    if accum_steps > 1:
        raise Unavailable("it is timed in one batch")

    def step(state, batch):
        (loss, stats), grads = grad_fn(state.params, state.batch_stats, *batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, stats, opt_state), loss

    return tx, _nothing, step


def jmp_recipe(network, dtype, accum_steps):
    """The recipe of jmp's README: cast, scale, unscale, check, adjust, select."""
    jmp = _library("jmp")
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=float32")

    def apply(variables, x, **options):
        variables["params"], x = policy.cast_to_compute((variables["params"], x))
        logits, changed = network.model.apply(variables, x, **options)
        return policy.cast_to_output(logits), changed

    def step(state, batch):
        loss_scale = state.loss_scale

        def scaled_loss_fn(*args):
            loss, stats = loss_of(apply)(*args)
            return loss_scale.scale(loss), stats

        grad_fn = jax.value_and_grad(scaled_loss_fn, has_aux=True)
        (loss, stats), grads = accumulated(grad_fn, accum_steps)(
            state.params, state.batch_stats, *batch
        )
        loss, grads = loss_scale.unscale((loss, grads))
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), stats, opt_state
        params, stats, opt_state = jmp.select_tree(finite, new, state[:3])
        return State(params, stats, opt_state, loss_scale), loss

    def loss_scale():
        if dtype == jnp.float16:
            return jmp.DynamicLossScale(jnp.float32(2**15))
        return jmp.NoOpLossScale()

    return ADAM, loss_scale, step


def flax_dynamic_scale(network, dtype, accum_steps):
    """Flax's ``DynamicScale`` as in its ImageNet example, on modules with a dtype."""
    flax = _library("flax.training.dynamic_scale")
    loss_fn = loss_of(network.with_dtype(dtype).apply)

    def step(state, batch):
        def grad_fn(scale, stats, x, y):
            result = scale.value_and_grad(loss_fn, has_aux=True)(
                state.params, stats, x, y
            )
            scale, finite, (loss, stats), grads = result
            return scale, finite, loss, stats, grads

        if accum_steps == 1:
            scale, finite, loss, stats, grads = grad_fn(
                state.loss_scale, state.batch_stats, *batch
            )
        else:  # which unscales, checks and adjusts for each micro-batch

            def add(carry, part):
                scale, all_finite, total, stats, totals = carry
                scale, finite, loss, stats, grads = grad_fn(scale, stats, *part)
                totals = jax.tree.map(jnp.add, totals, grads)
                return (scale, all_finite & finite, total + loss, stats, totals), None

            zeros = jax.tree.map(jnp.zeros_like, state.params)
            start = (
                state.loss_scale,
                jnp.array(True),
                jnp.float32(0),
                state.batch_stats,
                zeros,
            )
            (scale, finite, loss, stats, grads), _ = jax.lax.scan(
                add, start, _micro_batches(batch, accum_steps)
            )
            loss, grads = jax.tree.map(lambda g: g / accum_steps, (loss, grads))
        updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        old = state.params, state.opt_state
        params, opt_state = jax.tree.map(partial(jnp.where, finite), new, old)
        return State(params, stats, opt_state, scale), loss

    def loss_scale():
        # Arrays, because with its Python numbers a jitted step compiles twice.
        return flax.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536))

    if dtype != jnp.float16:
        raise Unavailable("its example scales float16 alone")
    return ADAM, loss_scale, step


def mpx(network, dtype, accum_steps):
    """The recipe of mpx's README (mixed-precision-for-JAX)."""
    library = _library("mpx")
    loss_fn = loss_of(network.model.apply)
    if accum_steps > 1:
        raise Unavailable("its README has no accumulation")

    def step(state, batch):
        library.set_half_precision_datatype(dtype.type)

        def scaled_loss_fn(params, x, y):  # casts its arguments, so not the statistics
            return loss_fn(params, state.batch_stats, x, y)

        grad_fn = library.filter_value_and_grad(
            scaled_loss_fn, state.loss_scale, has_aux=True
        )
        (loss, stats), loss_scale, finite, grads = grad_fn(state.params, *batch)
        params, opt_state = library.optimizer_update(
            state.params, ADAM, state.opt_state, grads, finite
        )
        return State(params, stats, opt_state, loss_scale), loss

    def loss_scale():
        return library.DynamicLossScaling(
            loss_scaling=library.FLOAT16_MAX,
            min_loss_scaling=jnp.ones((), jnp.float32),
            period=2000,
        )

    return ADAM, loss_scale, step


# From a network, a dtype and a number of micro-batches to an optimizer, the first loss
# scale, and a step.
CONTESTANTS: dict[str, Callable[[Network, Any, int], Any]] = {
    FLOOR: by_hand,
    SKIPPING: partial(by_hand, skips=True),
    "jaxmp cast": jaxmp_cast,
    "jaxmp modules": jaxmp_modules,
    AUTOCAST: jaxmp_autocast,
    "jaxmp autocast, rounded": partial(
        jaxmp_autocast, ops=jaxmp.DEFAULT_OPS.with_rounded_matmuls()
    ),
    "jaxmp autocast, inside": jaxmp_autocast_inside,
    "jmp": jmp_recipe,
    "flax DynamicScale": flax_dynamic_scale,
    "optax apply_if_finite": partial(
        by_hand, tx=optax.apply_if_finite(ADAM, max_consecutive_errors=5)
    ),
    "mpx": mpx,
    "float32": lambda network, _, steps: by_hand(network, jnp.dtype("float32"), steps),
}
LIBRARIES = tuple(CONTESTANTS)
CONTESTANTS |= {
    BACKWARD: partial(jaxmp_autocast, policy="mixed_float16_bfloat16"),
    INT8: partial(jaxmp_autocast, residuals="int8"),
    CHECKPOINT: partial(jaxmp_autocast, again=True),
    BOTH: partial(jaxmp_autocast, residuals="int8", again=True),
}
# Of language models alone.
HEADS = {
    HEAD: partial(jaxmp_autocast, loss=without_logits),
    HEAD_AGAIN: partial(jaxmp_autocast, loss=without_logits, again=True),
    HEAD_INT8: partial(
        jaxmp_autocast,
        loss=without_logits,
        again=True,
        tx=jaxmp.with_state_dtype(ADAM, "int8"),
    ),
}
CONTESTANTS |= {UNCHECKED: partial(unchecked, tx=ADAM)} | {
    x: partial(unchecked, tx=jaxmp.stochastic_rounding(ADAM, state_dtype=y))
    for x, y in STATES.items()
}


def _nothing():
    return None


def _cast(tree, dtype):
    """Casts the floating arrays of a tree, and leaves integers alone."""

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def _micro_batches(batch, steps):
    return jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), batch)


def _library(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{error}") from error
