"""Errors of autocast and of Flax's own 16 bits against float32, on many models.

Prints four tables and saves them: how exact each model is, how long tracing takes, how
much the backward pass keeps according to JAX, and how much memory the step takes when
compiled for a GPU (extra ``aot``). All of it is computed on a CPU; none of it is a step
time.
"""

import dataclasses
import functools
import gc
import time

import jax
import jax.numpy as jnp
import tyro

import jaxmp

from .counting import h200, results, tables
from .counting.measure import denied_of, product_dtypes_of, relative_error, run
from .networks import models

DTYPES = (jnp.float16, jnp.bfloat16)
LAYERS, REPEATS = 12, 5


@dataclasses.dataclass
class Options:
    """What to print. Only the whole is saved."""

    families: tyro.conf.Positional[tuple[str, ...]] = ()
    """Whose exactness to look at; all if none is named."""


def exactness(names=()):
    """Yields a row for each family, framework and dtype."""
    for library, families in (("linen", models.LINEN), ("nnx", models.NNX)):
        for name, family in families.items():
            if names and name not in names:
                continue
            if library == "linen":
                loss, params = models.linen_loss(family), models.linen_params(family)
                native_loss = functools.partial(models.linen_loss, family)
            else:
                loss, params = models.nnx_loss(family)
                native_loss = functools.partial(_nnx_native, family)
            (value, grads), _ = run(jax.value_and_grad(loss), params)
            for dtype in DTYPES:
                cast = jaxmp.autocast(jax.value_and_grad(loss), dtype)
                (got, cast_grads), jaxpr = run(cast, params)
                native_error = _native_error(native_loss(dtype), params, value, grads)
                found = product_dtypes_of(jaxpr)
                wanted = {jnp.dtype(dtype).name}
                yield {
                    "model": name,
                    "library": library,
                    "dtype": jnp.dtype(dtype).name,
                    "products": len(found),
                    "16-bit products": sum(dtypes == wanted for dtypes in found),
                    "denied in 16 bits": len(denied_of(dtype, jaxpr)),
                    "loss error": float(abs(got - value) / abs(value)),
                    "native loss error": native_error[0],
                    "gradient error": float(relative_error(cast_grads, grads)),
                    "native gradient error": native_error[1],
                }


def tracing():
    """Yields how long tracing takes, in seconds of this process, the best of five."""
    for name, settings in (("plain", {}), ("scanned", {"scanned": True})):
        family = _decoder(**settings)
        params = jax.eval_shape(functools.partial(models.linen_params, family))

        def plain(family=family):
            return jax.value_and_grad(models.linen_loss(family))

        def outside(family=family):
            return jaxmp.autocast(plain(family))

        def inside(family=family):
            return jax.value_and_grad(jaxmp.autocast(models.linen_loss(family)))

        seconds = [_seconds(make, params) for make in (plain, outside, inside)]
        yield {
            "transformer": f"{LAYERS} layers, {name}",
            "float32 (s)": seconds[0],
            "autocast(grad)": seconds[1] / seconds[0],
            "grad(autocast)": seconds[2] / seconds[0],
        }


def residuals():
    """Yields the MiB that the backward pass of a transformer keeps, before XLA."""
    for title, params, losses in _transformers():
        row = {
            name: sum((jaxmp.audit(loss)(params).residual_bytes or {}).values()) / 2**20
            for name, loss in losses.items()
        }
        yield {"transformer": title} | row


def memory():
    """Yields the MiB of temporary memory of its gradients, compiled for a GPU."""
    if reason := h200.unavailable():
        print(f"no memory on a GPU: {reason}")
        return
    for title, params, losses in _transformers():
        grads = {name: jax.value_and_grad(loss) for name, loss in losses.items()}
        outside = jaxmp.autocast(jax.value_and_grad(losses["float32"]))
        grads["autocast around the gradient"] = outside
        row = {name: _temporary(grad, params) for name, grad in grads.items()}
        yield {"transformer": title} | row


def main(arguments: list[str]) -> None:
    """Prints the tables and saves them, unless families are chosen."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks autocast")
    if unknown := set(options.families) - {*models.LINEN, *models.NNX}:
        known = ", ".join(models.LINEN)
        raise SystemExit(f"no family is called {unknown.pop()!r}. There are: {known}")
    jax.config.update("jax_platforms", "cpu")
    sections = {
        "exactness": lambda: exactness(options.families),
        "tracing": tracing,
        "residuals (MiB)": residuals,
        f"temporary memory, compiled for {h200.DEVICE} (MiB)": memory,
    }
    for title, section in sections.items():
        rows = list(section())
        tables.show(title, rows)
        if rows and not options.families:  # a part must not replace the whole
            results.save(
                results.target("autocast"),
                title,
                results.hardware(),
                ["autocast"],
                rows,
            )


def _transformers():
    """Yields a title, parameters and losses: float32, Flax's own bfloat16, autocast."""
    for length in (64, 256):
        sizes = {"width": 256, "length": length}
        tokens = jnp.zeros((models.BATCH, length), jnp.int32)
        data = {"inputs": tokens, "loss": _mean_of_logits}
        family = _decoder(**sizes)._replace(**data)
        exact = _decoder(**sizes, float32_softmax=True)._replace(**data)
        params = jax.eval_shape(functools.partial(models.linen_params, family))
        loss = models.linen_loss(family)
        losses = {
            "float32": loss,
            "native bfloat16": models.linen_loss(family, jnp.bfloat16),
            "native, softmax float32": models.linen_loss(exact, jnp.bfloat16),
            "autocast bfloat16": jaxmp.autocast(loss),
        }
        yield f"{LAYERS} layers, length {length}", params, losses


def _decoder(**settings):
    def model(dtype=None):
        return models.Transformer(dtype, layers=LAYERS, **settings)

    return models.LINEN["transformer"]._replace(model=model)


def _mean_of_logits(logits):
    return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1).mean()


def _nnx_native(family, dtype):
    return models.nnx_loss(family, dtype)[0]


def _native_error(native, params, value, grads):
    try:
        (got, native_grads), _ = run(jax.value_and_grad(native), params)
    except ValueError:  # JAX's own attention in float16 does not run on a CPU
        return None, None
    loss_error = float(abs(got - value) / abs(value))
    return loss_error, float(relative_error(native_grads, grads))


def _seconds(make, params):
    times = []
    for _ in range(REPEATS):
        fun = make()
        gc.collect()
        start = time.process_time()
        jax.make_jaxpr(fun)(params)
        times.append(time.process_time() - start)
    return min(times)


def _temporary(grad, params):
    compiled = h200.compiled(lambda p: (p, grad(p)), params, donated=1)
    return compiled.memory_analysis().temp_size_in_bytes / 2**20
