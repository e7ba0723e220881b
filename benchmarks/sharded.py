"""Memory and traffic of a model larger than a device, compiled for many H200s.

Training steps of Llama-like models of 6.7 and 1.6 billion parameters, with a scan
over rematerialised layers and AdamW, in the forms that docs/sharding.md describes, are
compiled for H200s (extra ``aot``) and not run: the peak memory is that of the compiler,
and the collectives are read off the program that would run, those inside of a loop as
often as it runs. Each counts what a ring sends per device and step, as in
:mod:`benchmarks.counting.collectives`.

References:
    Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023,
    table 2, https://arxiv.org/abs/2302.13971.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

from .counting import named, results, targets
from .counting.collectives import launches, sent_bytes
from .counting.results import Table

BF16 = jaxmp.get_policy("mixed_bfloat16")
SUMS_BF16 = jaxmp.get_policy("p=f32,c=bf16,o=f32,r=bf16")
# Of each form: how the gradients are taken, and under which policy.
FORMS = {
    "ZeRO-2": ("whole", BF16),
    "ZeRO-2, r=bf16": ("whole", SUMS_BF16),
    "ZeRO-3": ("layers", BF16),
    "ZeRO-3, r=bf16": ("layers", SUMS_BF16),
    "jit": ("jit", BF16),
    "jit, pinned": ("pinned", BF16),
}


class Llama(NamedTuple):
    """The sizes of a model."""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    key_heads: int | None = None  # as many
    hidden: int = 11008
    vocabulary: int = 32000
    tokens: int = 2048  # of a sequence


MODELS = {
    "6.74 billion": Llama(),
    "1.56 billion": Llama(
        width=2048, layers=22, key_heads=4, hidden=6144, vocabulary=128_256
    ),
}


def main(
    *,
    models: tuple[str, ...] = tuple(MODELS),
    forms: tuple[str, ...] = tuple(FORMS),
    devices: tuple[int, ...] = (8, 64, 256),
    accum_steps: tuple[int, ...] = (1, 4),
) -> None:
    """Counts peak memory and bytes sent.

    Args:
        models: By their parameters.
        forms: How a model is sharded.
        devices: How many there are.
        accum_steps: Micro-batches of a step, each of one sequence per device.
    """
    named.check("model", models, MODELS)
    targets.require("sharded")
    for model, number in itertools.product(models, devices):
        title = f"{number} devices, {model} parameters, by form"
        new = (
            measured(MODELS[model], form, number, steps)
            for steps in accum_steps
            for form in forms
        )
        by = "form", "micro-batches"
        results.update("sharded", title, targets.hardware(), new, *by)


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what was counted for each number of devices."""
    for title, result in found.items():
        yield Table(f"## {title}\n", result["rows"], [result])


def measured(sizes: Llama, form: str, devices: int, accum_steps: int) -> dict[str, Any]:
    """Returns the peak and the bytes of a form."""
    compiled = compile_step(sizes, form, devices, accum_steps)
    text = compiled.as_text()
    sent = sent_bytes(text)
    most = [f"{k} {v / 1e9:.1f}" for k, v in sent.items() if v > 5e7]
    memory = compiled.memory_analysis()
    return {
        "form": form,
        "micro-batches": accum_steps,
        "peak GiB": round(memory.peak_memory_in_bytes / 2**30, 1),
        "GB sent": round(sum(sent.values()) / 1e9, 1),
        "of which": ", ".join(most),
        "collectives": ", ".join(f"{k} {n}" for k, n in launches(text).items()),
    }


def compile_step(sizes: Llama, form: str, devices: int, accum_steps: int) -> Any:
    """Compiles a training step for a number of H200s."""
    how, policy = FORMS[form]
    mesh = Mesh(np.array(targets.devices(count=devices)), ("data",))
    where = jax.tree.map(lambda x: sharding(x, mesh), shapes(sizes))
    params = jax.tree.map(placed, shapes(sizes), where)
    tx = optax.adamw(1e-4)
    state_where = jaxmp.init_shardings(tx, params)
    state = jax.tree.map(placed, jax.eval_shape(tx.init, params), state_where)
    rows = jax.ShapeDtypeStruct((devices * accum_steps, sizes.tokens + 1), jnp.int32)
    rows = placed(rows, NamedSharding(mesh, P("data")))
    gathered = how == "layers"
    specs = jax.tree.map(lambda s: s.spec, where)
    pin = NamedSharding(mesh, P("data")) if how == "pinned" else None
    loss = functools.partial(loss_fn, sizes, specs if gathered else None, policy, pin)
    extra: dict[str, Any] = {}
    if how in ("whole", "layers"):
        extra = {"mesh": mesh, "shardings": where, "gather": not gathered}
    by_mesh = policy if extra else None  # `jit` sums as it likes
    grad_fn = jaxmp.value_and_grad(
        loss, policy=by_mesh, accum_steps=accum_steps, batch_argnums=1, **extra
    )

    def step(params, state, rows):
        weights = params
        if not extra:
            weights = policy.cast_to_compute(params, shardings=where)
        loss, grads = grad_fn(weights, rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    out = where, state_where, NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    lowered = jitted.lower(params, state, rows)
    return lowered.compile(compiler_options=targets.OPTIONS)


def placed(x: Any, sharding: Any) -> Any:
    """Describes an array that lies somewhere."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


# The model


def shapes(sizes: Llama) -> dict[str, Any]:
    """Describes the parameters; those of the layers are stacked."""
    d, hidden, n = sizes.width, sizes.hidden, sizes.layers

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = {
        "attention_norm": array(n, d),
        "qkv": array(n, d, d + 2 * d * key_heads(sizes) // sizes.heads),
        "out": array(n, d, d),
        "norm": array(n, d),
        "gate": array(n, d, hidden),
        "up": array(n, d, hidden),
        "down": array(n, hidden, d),
    }
    embedding = array(sizes.vocabulary, d)
    head = array(d, sizes.vocabulary)
    return {"embedding": embedding, "layers": layers, "norm": array(d), "head": head}


def key_heads(sizes: Llama) -> int:
    """Returns how many heads the keys have."""
    return sizes.key_heads or sizes.heads


def sharding(x: Any, mesh: Mesh) -> NamedSharding:
    """Splits the rows of what is large; the stacks of vectors stay whole."""
    matrix = x.ndim == 3 or (min(x.shape) > 1 and x.shape[0] > 256)
    rows = (None, "data") if x.ndim == 3 else ("data",)
    return NamedSharding(mesh, P(*rows) if matrix else P())


def loss_fn(
    sizes: Llama, specs: Any, policy: Any, pin: Any, params: Any, rows: Any
) -> jax.Array:
    """Returns the cross-entropy of the next tokens.

    Args:
        sizes: Of the model.
        specs: Of the parameters, to gather each where its layer begins; None where
            they are whole.
        policy: To gather under.
        pin: The sharding of activations, None to leave it to the compiler.
        params: The parameters.
        rows: Sequences of tokens.
    """

    def whole(name, tree):
        if specs is None:
            return tree
        own = jax.tree.map(lambda s: P(*s[1:]) if name == "layers" else s, specs[name])
        return jaxmp.gather(tree, own, policy)

    def pinned(x):
        return x if pin is None else jax.lax.with_sharding_constraint(x, pin)

    def block(x, layer):
        layer = whole("layers", layer)
        x = pinned(x + attention(sizes, normed(x, layer["attention_norm"]), layer))
        h = normed(x, layer["norm"])
        h = jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])
        return pinned(x + h @ layer["down"]), None

    @jax.checkpoint
    def losses(x, norm, head):
        logits = normed(x, norm) @ whole("head", head)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), rows[:, 1:]
        )

    x = pinned(whole("embedding", params["embedding"])[rows[:, :-1]])
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
    return losses(x, whole("norm", params["norm"]), params["head"]).mean()


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide**2, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def attention(sizes: Llama, x: jax.Array, layer: Any) -> jax.Array:
    """Attends to the tokens before, with rotated queries and keys."""
    heads = (*x.shape[:-1], -1, sizes.width // sizes.heads)
    bounds = sizes.heads, sizes.heads + key_heads(sizes)
    q, k, v = jnp.split((x @ layer["qkv"]).reshape(heads), bounds, -2)
    mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    return mixed.reshape(x.shape) @ layer["out"]


def rotated(x: jax.Array) -> jax.Array:
    """Turns pairs of numbers by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
