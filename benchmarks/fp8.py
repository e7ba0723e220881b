"""Matmuls in float8 and in bfloat16, counted in code compiled for an H200, or timed.

The gradient of a decoder's loss, forward and backward, with its layers written out or
scanned, rematerialised or not, in one batch or in micro-batches. Needs no GPU (extra
``aot``); nothing runs but with ``--timed``, on your own GPU.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp

from .counting import hlo, results, targets, timing
from .counting.results import Table
from .networks.basic import causal_attention


class Form(NamedTuple):
    """How a gradient is written."""

    scan: bool = False
    remat: bool = False
    accum_steps: int = 1


FORMS = {
    "plain": Form(),
    "scan": Form(scan=True),
    "remat": Form(remat=True),
    "scan, remat": Form(scan=True, remat=True),
    "4 micro-batches": Form(accum_steps=4),
}
POLICIES = ("mixed_bfloat16", "mixed_fp8")
# Smaller than the default, to show what that leaves out.
OPS = jaxmp.DEFAULT_OPS.with_fp8(min_size=1024)


class Decoder(NamedTuple):
    """The sizes of a decoder and of its batch."""

    width: int = 2048
    layers: int = 4
    vocabulary: int = 32768
    rows: int = 8
    length: int = 1024
    head_size: int = 128

    def products(self, form: Form) -> tuple[int, int]:
        """Returns how many products with weights and in attention a gradient has.

        Three for each weight, and six for two in attention; under remat those of the
        forward pass once more, but for the last of a layer, whose result is kept.
        """
        linear, attention = 3 * (4 * self.layers + 1), 6 * self.layers
        if form.remat:
            linear, attention = linear + 3 * self.layers, attention + 2 * self.layers
        return form.accum_steps * linear, form.accum_steps * attention

    def params(self) -> dict[str, Any]:
        """Returns the types of the parameters, all float32."""
        d, shapes = self.width, {}
        shapes["embed"] = self.vocabulary, d
        shapes["head"] = d, self.vocabulary
        shapes["layers"] = {
            "qkv": (self.layers, d, 3 * d),
            "out": (self.layers, d, d),
            "up": (self.layers, d, 4 * d),
            "down": (self.layers, 4 * d, d),
        }
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def batch(self) -> tuple[Any, Any]:
        """Returns the types of tokens and of the tokens that follow them."""
        tokens = jax.ShapeDtypeStruct((self.rows, self.length), jnp.int32)
        return tokens, tokens

    def layer(self, x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        """Maps ``[rows, length, width]`` to the same."""
        heads = self.width // self.head_size
        y = _normed(x) @ weights["qkv"]
        y = y.reshape(*x.shape[:2], 3, heads, self.head_size)
        y = causal_attention(y[:, :, 0], y[:, :, 1], y[:, :, 2]).reshape(x.shape)
        x = x + y @ weights["out"]
        return x + jax.nn.gelu(_normed(x) @ weights["up"]) @ weights["down"]

    def loss(self, form: Form, params: Any, tokens: Any, targets: Any) -> jax.Array:
        """Returns the mean cross-entropy."""
        layer = jax.checkpoint(self.layer) if form.remat else self.layer
        x = params["embed"][tokens]
        if form.scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for i in range(self.layers):
                x = layer(x, jax.tree.map(lambda w: w[i], params["layers"]))  # noqa: B023
        logits = jax.nn.log_softmax(_normed(x) @ params["head"])
        return -jnp.take_along_axis(logits, targets[..., None], -1).mean()

    def gradient(self, form: Form) -> Callable[..., Any]:
        """Returns the function that is compiled, without autocast."""
        return jaxmp.value_and_grad(
            functools.partial(self.loss, form),
            accum_steps=form.accum_steps,
            batch_argnums=(1, 2),
        )


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def main(*, forms: tuple[str, ...] = tuple(FORMS), timed: bool = False) -> None:
    """Counts the gradients of decoders of three widths, or times them.

    Args:
        forms: How they are written.
        timed: Time them on your NVIDIA GPU.
    """
    if not timed:
        targets.require("fp8")
        device, title, measured = targets.hardware(), "width", counts
    elif jax.default_backend() == "gpu":
        device = jax.devices()[0].device_kind
        title, measured = f"{device}, width", times
    else:
        found = f"but JAX finds only {jax.devices()}"
        raise SystemExit(f"fp8 --timed needs an NVIDIA GPU, {found}")
    for width in (1024, 2048, 4096):
        new = measured(Decoder(width), forms)
        results.update("fp8", f"{title} {width}", device, new, "form", "policy")


def counts(decoder: Decoder, forms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields what was counted in each form, under each policy."""
    for form in forms:
        for policy in POLICIES:
            row = {"form": form, "policy": policy}
            yield row | count(decoder, FORMS[form], policy)


def times(decoder: Decoder, forms: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the milliseconds of each form, under each policy, timed in turns."""
    shapes, tokens = decoder.params(), decoder.batch()[0]
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes)) + 1))
    params = jax.tree.map(
        lambda x: jax.random.normal(next(keys), x.shape) * x.shape[-2] ** -0.5, shapes
    )
    batch = jax.random.randint(next(keys), (2, *tokens.shape), 0, decoder.vocabulary)
    compiled, samplers = {}, {}
    for form in forms:
        for policy in POLICIES:
            cast = jaxmp.autocast(decoder.gradient(FORMS[form]), policy, ops=OPS)
            program = jax.jit(cast).lower(params, *batch).compile()
            call = functools.partial(program, params, *batch)
            compiled[form, policy] = program
            samplers[form, policy] = timing.sampler(
                call, jax.block_until_ready, seconds=0.12
            )
    for (form, policy), seconds in timing.interleaved(samplers, 5).items():
        yield {
            "form": form,
            "policy": policy,
            "ms": timing.spread(1e3 * np.array(seconds)),
            "temp": compiled[form, policy].memory_analysis().temp_size_in_bytes,
        }


def count(
    decoder: Decoder,
    form: Form,
    policy: str,
    ops: jaxmp.OpLists = OPS,
) -> dict[str, Any]:
    """Compiles a gradient and returns what was counted in it."""
    cast = jaxmp.autocast(decoder.gradient(form), policy, ops=ops)
    compiled = targets.compiled(cast, decoder.params(), *decoder.batch())
    work = hlo.work(compiled.as_text())
    products = dict(sorted(work.products.items()))
    return {
        "float8": sum(n for kind, n in products.items() if is_float8(kind)),
        "others": sum(n for kind, n in products.items() if not is_float8(kind)),
        "bytes": work.bytes,
        "kernels": work.kernels,
        "temp": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": work.seconds,
        "products": products,
    }


def is_float8(kind: str) -> bool:
    """Tells whether a product, such as ``matmul f16 x f32 -> f32``, reads float8."""
    operands = kind.split(" -> ")[0].split()[1:]
    return all(x.startswith("f8") for x in operands if x != "x")


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what was counted or timed for each width."""
    for title, result in found.items():
        rows = [_row(row) for row in result["rows"]]
        yield Table(f"## 4 layers, 8 x 1024 tokens, {title}\n", rows, [result])


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    named = {"form": row["form"], "policy": row["policy"]}
    temporary = {"temporary MiB": f"{row['temp'] / 2**20:.0f}"}
    if "ms" in row:
        return named | temporary | {"ms": row["ms"]}
    return {
        **named,
        "products in float8": row["float8"],
        "others": row["others"],
        "GB": f"{row['bytes'] / 1e9:.1f}",
        "kernels": row["kernels"],
        **temporary,
        "roofline ms": f"{1e3 * row['seconds']:.1f}",
    }
