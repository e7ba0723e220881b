"""Compares generated training steps under autocast with the same steps cast by hand.

Each seed is a training step: some layers, a loss and its gradients. It is compared with
the same step with its products cast by hand: they take 16 bits, add up in float32 and
return 16 bits, with their bias if they have one, and everything else is float32. The
law is that no result of autocast, a loss or a gradient, is further from float32 than
:data:`FACTORS` times that, or than :data:`ULPS` units in the last place of 16 bits,
whichever is more. Errors are medians over draws of weights and data. What is left of an
input that is added and taken away again has no law: there `audit` has to warn.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxmp

from .counting.measure import AS_WRITTEN
from .networks.generated_laws import FAMILIES as LAWS
from .networks.generated_layers import LAYERS, Asked, Batch, Scope, batch_of
from .networks.generated_loops import LOOPS
from .networks.generated_losses import LOSSES
from .networks.generated_traps import TRAPS

# With autocast in the gradient, JAX differentiates what has been rounded. The slope of
# a tanh, for one, is computed from 16 bits. Where the tanh is near one, its error then
# is several times that of a slope that is computed from a rounded product.
FACTORS = {"outside": 4.0, "inside": 6.0}
ULPS = 2.0
# A median of eight errors of one number, such as a loss, is off by a third, and so is
# that by hand: of 130 one is four times the other by chance. So a step breaks the law
# if it does so on few draws and on many.
FEW, MANY = 8, 128
# The loss is multiplied by the first that keeps the step cast by hand in range. A large
# one keeps gradients above the smallest number of float16.
LOSS_SCALES = 256.0, 1.0, 2.0**-8, 2.0**-16

ALL_LAYERS = LAYERS | LOOPS
FAMILIES = LAWS | TRAPS
KNOWN = functools.reduce(dict.__or__, FAMILIES.values(), ALL_LAYERS)
SHARES = 0.5, 0.2, 0.3  # of all layers, of loops, and of the families of traps
Form = Literal["outside", "inside"]
FORMS: tuple[Form, ...] = (
    "outside",
    "inside",
)  # autocast around the gradient, or in it

WRAPPERS: dict[str, Callable] = {
    "plain": lambda layer: layer,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda layer: lambda x, y: jax.vmap(layer)(x[None], y[None])[0],
    "twice": lambda layer: (
        lambda x, y: lax.scan(lambda x, _: (layer(x, y), None), x, None, length=2)[0]
    ),
    "cond": lambda layer: (
        lambda x, y: lax.cond(x[0, 0] * 0 == 0, layer, lambda x, y: x, x, y)
    ),
}


class Program(NamedTuple):
    """A training step, by the names of what it is made of."""

    layers: tuple[tuple[str, str, int], ...]  # name, wrapper, which earlier value
    loss: str
    dtype: str
    seed: int  # of weights and data


def drawn(seed: int, most: int = 5) -> Program:
    """Returns the program of a seed, of at most so many layers."""
    rng = np.random.default_rng(seed)

    def one_of(names):
        return str(rng.choice(list(names)))

    def one_of_all():
        return one_of(
            [ALL_LAYERS, LOOPS, TRAPS[one_of(TRAPS)]][rng.choice(3, p=SHARES)]
        )

    layers = [
        (
            one_of_all(),
            one_of(WRAPPERS) if rng.random() < 0.4 else "plain",
            int(rng.integers(8)),
        )
        for _ in range(rng.integers(1, most + 1))
    ]
    dtype = ("bfloat16", "float16")[seed % 2]
    return Program(tuple(layers), one_of(LOSSES), dtype, seed)


def loss_of(
    program: Program, cast: Callable, asked: dict[str, Asked] | None = None
) -> Callable[..., Any]:
    """Returns the loss of a program, a function of weights, data and a loss scale.

    Args:
        program: The program.
        cast: Rounds what a product takes and returns, or does nothing.
        asked: Is filled with the weights that the program asks for; None if there are
            weights.
    """

    def loss(weights, batch, scale=1.0):
        def scope(name):
            return Scope(str(name), batch, weights, cast, asked)

        values = [batch.x + scope("words").weight(12, 8, scale=1.0)[batch.words]]
        for i, (name, wrapper, earlier) in enumerate(program.layers):

            def layer(x, y, name=name, i=i):
                return KNOWN[name](scope(i), x, y)

            if asked is None:
                layer = WRAPPERS[wrapper](layer)
            values.append(layer(values[-1], values[earlier % len(values)]))
        return scale * LOSSES[program.loss](scope("loss"), values[-1], values[-2])

    return loss


def inputs(program: Program, draws: int = FEW) -> tuple[dict[str, Any], Batch]:
    """Returns so many draws of the weights and the data of a program."""
    rng = np.random.default_rng(program.seed)
    batches = [batch_of(rng) for _ in range(draws)]
    asked: dict[str, Asked] = {}
    jax.eval_shape(loss_of(program, lambda x: x, asked), {}, batches[0])
    return weights_of(rng, asked, draws), jax.tree.map(
        lambda *xs: np.stack(xs), *batches
    )


def weights_of(
    rng: np.random.Generator, asked: dict[str, Asked], draws: int
) -> dict[str, Any]:
    """Returns so many draws of the weights that a program has asked for."""
    return {
        name: (mean + scale * rng.normal(size=(draws, *shape))).astype(np.float32)
        for name, (shape, scale, mean) in asked.items()
    }


class Finding(NamedTuple):
    """A result of a program, and how far it is from float32, over its size."""

    form: str
    result: str
    error: float
    by_hand: float
    share: float  # of the error in what the law allows
    is_warned_of: bool = False  # whether audit names what is lost

    @property
    def breaks_law(self) -> bool:
        """Whether it is further from float32 than the law allows."""
        return not (self.share <= 1 or self.is_warned_of)


def worst_of(program: Program, forms: Sequence[Form] = FORMS) -> Finding:
    """Returns the worst result of a program, of many draws if few break the law."""
    found = findings(program, forms)[0]
    if not found.breaks_law:
        return found
    found = findings(program, forms, MANY)[0]
    return found._replace(is_warned_of=found.breaks_law and is_warned_of(program))


def is_warned_of(program: Program) -> bool:
    """Whether audit names a difference in which a program loses digits."""
    first = jax.tree.map(lambda x: x[0], inputs(program, 1))
    step = jax.value_and_grad(loss_of(program, lambda x: x))
    report = jaxmp.audit(jaxmp.autocast(step, program.dtype))(*first)
    return any(hazard.kind == "difference" for hazard in report.hazards)


def findings(
    program: Program, forms: Sequence[Form] = FORMS, draws: int = FEW
) -> list[Finding]:
    """Returns all results of a program, the worst first."""
    dtype, args = jnp.dtype(program.dtype), inputs(program, draws)
    written = loss_of(program, lambda x: x)
    by_hand = loss_of(program, lambda x: x.astype(dtype).astype(jnp.float32))
    steps = {
        "written": jax.value_and_grad(written),
        # Casts of operands fuse into products, so a product takes 16 bits.
        "by hand": jax.value_and_grad(by_hand),
        "outside": jaxmp.autocast(jax.value_and_grad(written), dtype),
        "inside": jax.value_and_grad(jaxmp.autocast(written, dtype)),
    }
    steps = {
        name: jax.vmap(steps[name], in_axes=(0, 0, None))
        for name in ("written", "by hand", *forms)
    }
    together = jax.jit(lambda *args: [step(*args) for step in steps.values()])
    compiled = together.lower(*args, 1.0).compile(compiler_options=AS_WRITTEN)
    exact, hand, *outs = _in_range(lambda scale: compiled(*args, scale))
    largest = functools.reduce(np.maximum, [_size(exact[x]) for x in exact if x])
    found = []
    for form, out in zip(forms, outs, strict=True):
        for name, x in exact.items():
            size = _size(x)
            if name:  # a gradient that is zero, but for rounding, has no size
                size = np.where(size < 1e-5 * largest, largest, size)
            error, usual = (
                float(np.median(_size(y[name] - x) / size)) for y in (out, hand)
            )
            allowed = max(FACTORS[form] * usual, ULPS * float(jnp.finfo(dtype).eps))
            share = error / allowed if np.isfinite(usual) else 0.0
            found.append(Finding(form, name or "loss", error, usual, share))
    return sorted(found, key=lambda x: -np.nan_to_num(x.share, nan=np.inf))


def _in_range(step: Callable[[float], Any]) -> list[dict[str, Any]]:
    """Returns the results at the first loss scale at which those by hand are finite."""
    found: list[dict[str, Any]] = []
    for scale in LOSS_SCALES:
        found = [_named(*out) for out in step(scale)]
        if all(np.isfinite(x).all() for x in found[1].values()):
            break
    return found


def _named(loss: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    return {"": loss, **gradients}


def _size(x: Any) -> Any:
    """Returns the root mean square of the entries, for each draw."""
    x = np.asarray(x, np.float64)
    x = x.reshape(len(x), -1)
    return np.sqrt((x**2).mean(-1))


def smaller(program: Program) -> Iterator[Program]:
    """Yields the programs with a layer less, without a wrapper, and of a plain loss."""
    layers = program.layers
    for i, (name, wrapper, earlier) in enumerate(layers):
        if len(layers) > 1:
            yield program._replace(layers=layers[:i] + layers[i + 1 :])
        if wrapper != "plain":
            plain = name, "plain", earlier
            yield program._replace(layers=(*layers[:i], plain, *layers[i + 1 :]))
    if program.loss != "squares":
        yield program._replace(loss="squares")


def minimised(program: Program) -> Program:
    """Returns a smallest program that breaks the law as ``program`` does."""
    for other in smaller(program):
        if worst_of(other).breaks_law:
            return minimised(other)
    return program


def main(*, minutes: float = 60.0, first: int = 0) -> None:
    """Draws programs for a while, and prints those that break the law.

    Args:
        minutes: For how long.
        first: The first seed.
    """
    end, seed, found = time.monotonic() + 60 * minutes, first, []
    while time.monotonic() < end:
        program = drawn(seed)
        worst = worst_of(program)
        found.append(worst)
        if worst.breaks_law:
            print(worst, program, sep="\n", flush=True)
            small = minimised(program)
            print("smallest:", worst_of(small), small, sep="\n")
        if len(found) % 25 == 0:
            jax.clear_caches()
        seed += 1
    shares = [x.share for x in found if not x.is_warned_of]
    print(f"{len(found)} programs, seeds {first} to {seed - 1}.")
    print("The worst error of each, as a share of what the law allows:")
    print(f"{np.median(shares):.2f} (the median), {max(shares):.2f} at most.")
    print(f"{sum(x.breaks_law for x in found)} break the law.")
    print(f"Audit warns of {sum(x.is_warned_of for x in found)} others that would.")
