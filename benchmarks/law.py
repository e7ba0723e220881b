"""Holds autocast to what casting the operands of matmuls and nothing else would give.

That is what a user falls back to, and what `torch.autocast` does to a matmul: its
operands are rounded to 16 bits, it adds up in float32, and its 16-bit result goes on in
float32. *By hand* is the replay of the same jaxpr, gradient included, in which this is
done to each matmul and convolution and to nothing else. No program is written twice.

The law: no result of autocast is further from float32 than :data:`FACTOR` times the
result by hand, or than :data:`DIGITS` last digits of the dtype, whichever is more.

The measure. The results of a program are its loss, each value that it returns beside
that, and its gradient, which is one vector of all leaves. The distance is the root of
the mean square over the entries. It is divided by the size: of a gradient that is the
same of the gradient in float32; of a value, how much that varies from draw to draw, so
that a distance of 1 from a value that is always 300 counts in full. The error is the
median over draws of weights and data. Few draws decide by chance, so a program breaks
the law if it does so on few and on many.

What breaks the law is counted in four parts. *Named*: `jaxmp.audit` names a numerical
risk of the program. *By a sum, by a gradient*: autocast rounds on purpose a sum with a
bias, a number or another result, as all sums of a residual stream but the first are,
and a gradient that float32 work and a matmul read. Where they are large and cancel, the
law is broken. Two experiments must show that of a program: it obeys the law if the
numbers in it that are far from 0 are near it, and it obeys the law if one of these two
kinds of rounding is left out. *By hand too*: it obeys the law if matmuls by hand return
float32, so it is their 16-bit results that happen to hide what their operands lose. *In
silence*: everything else. There must be none.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp._autocast import facts, needs, plan, rules
from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._jaxprs.places import Place
from jaxmp._jaxprs.replay import Replay
from jaxmp._ops import table
from jaxmp._ops.products import has_default_precision, multiplies_matrices

from .counting.measure import AS_WRITTEN
from .generated import ALL_LAYERS, FEW, LOSS_SCALES, MANY, WRAPPERS, weights_of
from .networks.generated_layers import FAR, Asked, Batch, Scope, batch_of
from .networks.generated_sums import FACTORS, NETS, OFFSETS, READS, RESULTS

FACTOR, DIGITS = 3.0, 2.0
# What autocast is asked for, and the dtypes of the two passes.
DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "mixed_float16_bfloat16": ("float16", "bfloat16"),
}
# Autocast around the gradient, in it, or of what nobody differentiates.
FORMS = "outside", "inside", "forward"
ALL_NETS = ALL_LAYERS | NETS
USUAL = "nothing"


class Block(NamedTuple):
    """A network, what its result is added to and becomes, and who reads that."""

    net: str
    offset: str
    factor: str
    read: str
    wrapper: str = "plain"
    earlier: int = 0  # which value is the second that all of them are given


class Program(NamedTuple):
    """A training step, by the names of what it is made of."""

    blocks: tuple[Block, ...]
    results: tuple[tuple[str, int], ...] = ()  # what is returned, of which value
    adds: bool = False  # whether the loss has them in it
    form: str = "outside"
    dtype: str = "bfloat16"
    seed: int = 0  # of weights and data
    is_near: bool = False  # whether nothing in it is far from 0


def drawn(seed: int) -> Program:
    """Returns the program of a seed."""
    rng = np.random.default_rng(seed)

    def one_of(names, usual=0.0):
        return USUAL if rng.random() < usual else str(rng.choice(sorted(names)))

    blocks = tuple(
        Block(
            net=one_of(NETS if rng.random() < 0.7 else ALL_LAYERS),
            offset=one_of(OFFSETS, 0.3),
            factor=one_of(FACTORS, 0.4),
            read=one_of(READS, 0.1),
            wrapper=one_of(WRAPPERS) if rng.random() < 0.3 else "plain",
            earlier=int(rng.integers(8)),
        )
        for _ in range(rng.integers(1, 4))
    )
    results = tuple(
        (one_of(RESULTS), int(rng.integers(8))) for _ in range(rng.integers(3))
    )
    adds, dtype = bool(rng.random() < 0.5), list(DTYPES)[seed % 3]
    form = FORMS[rng.choice(3, p=(0.4, 0.4, 0.2))]
    return Program(blocks, results, adds, form, dtype, seed)


def step_of(program: Program, asked: dict[str, Asked] | None = None) -> Callable:
    """Returns the loss of a program and what it returns beside that.

    Args:
        program: The program.
        asked: Is filled with the weights that it asks for; None if there are weights.
    """

    def loss(weights, batch, scale=1.0):
        def scope(name):
            return Scope(str(name), batch, weights, lambda x: x, asked, program.is_near)

        values, x = [batch.x], batch.x
        for i, block in enumerate(program.blocks):
            y = values[block.earlier % len(values)]

            def layer(x, y, i=i, block=block):
                s = scope(i)
                h = ALL_NETS[block.net](s, x, y)
                h = OFFSETS[block.offset](s, h, y)
                return FACTORS[block.factor](s, h, y)

            def read(h, y, i=i, block=block):
                return READS[block.read](scope(f"{i}.read"), h, y)

            if asked is None:
                layer, read = (WRAPPERS[block.wrapper](f) for f in (layer, read))
            h = layer(x, y)
            x = read(h, y)
            values += [h, x]
        out = scope("loss").dense(x, bias=False)
        total = ((out - batch.y) ** 2).mean()
        results = [
            RESULTS[name](values[-1 - i % len(values)]) for name, i in program.results
        ]
        if program.adds:
            total += 0.1 * sum(jnp.sum(x * x) ** 0.5 for x in results)
        return scale * total, results

    return loss


def inputs(program: Program, draws: int = FEW) -> tuple[dict[str, Any], Batch]:
    """Returns so many draws of the weights and the data of a program."""
    rng = np.random.default_rng(program.seed)
    batches = [batch_of(rng) for _ in range(draws)]
    if program.is_near:
        batches = [x._replace(far=x.far - FAR) for x in batches]
    asked: dict[str, Asked] = {}
    jax.eval_shape(step_of(program, asked), {}, batches[0])
    return weights_of(rng, asked, draws), jax.tree.map(
        lambda *xs: np.stack(xs), *batches
    )


# By hand.


class _Value(NamedTuple):
    array: Any


class _ByHand(Replay):
    """A replay that casts the operands of matmuls, and nothing else."""

    value = _Value

    def __init__(self, dtypes: Sequence[Any], rounds: bool, *options: Any):
        super().__init__("cpu", *options)
        self.dtypes = dtypes  # of the forward and of the backward pass
        self.rounds = rounds

    def inside(self, scalars, axes):
        return type(self)(self.dtypes, self.rounds, scalars, axes)

    def operation(self, eqn, ins, place):
        arrays = [_jaxpr.as_array(x.array) for x in ins]
        if not (multiplies_matrices(eqn) and has_default_precision(eqn)):
            return [*map(_Value, _jaxpr.bind(eqn, arrays))]
        dtype = self.dtypes[place.backward]
        arrays = [_rounded(x, dtype) for x in arrays]
        # A sum of products of 16-bit numbers in float32, which is rounded then.
        outs = _jaxpr.bind(eqn, arrays)
        return [_Value(_rounded(x, dtype) if self.rounds else x) for x in outs]


def _rounded(x, dtype):
    is_wide = x.dtype == jnp.float32
    return x.astype(dtype).astype(jnp.float32) if is_wide else x


def by_hand(fun: Callable, dtype: str, *, rounds: bool = True) -> Callable:
    """Returns a function whose matmuls take and return 16 bits, and nothing else.

    Args:
        fun: The function; gradients are taken in it, not of what is returned.
        dtype: One of :data:`DTYPES`.
        rounds: Whether what they return has 16 bits.
    """

    def cast(*args):
        jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        replay, arrays = _ByHand(DTYPES[dtype], rounds), jax.tree.leaves(args)
        outs = replay.run(jaxpr, [*map(_Value, arrays)], Place())
        leaves = [x.array for x in outs]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return cast


# The measure.


class Finding(NamedTuple):
    """A result of a program, and how far it is from float32, over its size."""

    result: str
    error: float
    by_hand: float
    share: float  # of the error in what the law allows

    @property
    def breaks_law(self) -> bool:
        """Whether it is further from float32 than the law allows."""
        return not self.share <= 1


def worst_of(program: Program, *compared: Callable) -> Finding:
    """Returns the worst result of a program, of many draws if few break the law."""
    found = findings(program, FEW, *compared)[0]
    return findings(program, MANY, *compared)[0] if found.breaks_law else found


def findings(
    program: Program,
    draws: int = FEW,
    autocast: Callable = jaxmp.autocast,
    by_hand: Callable = by_hand,
) -> list[Finding]:
    """Returns all results of a program, the worst first.

    Args:
        program: The program.
        draws: Of how many draws of weights and data.
        autocast: What is compared with casting by hand.
        by_hand: How matmuls are cast by hand.
    """
    args, dtype = inputs(program, draws), program.dtype
    step = _step(program.form, step_of(program))
    steps = [step, by_hand(step, dtype), cast(program, autocast)]
    steps = [jax.vmap(step, in_axes=(0, 0, None)) for step in steps]
    together = jax.jit(lambda *args: [step(*args) for step in steps])
    compiled = together.lower(*args, 1.0).compile(compiler_options=AS_WRITTEN)
    exact, hand, out = _in_range(lambda scale: compiled(*args, scale))
    digit = max(float(jnp.finfo(x).eps) for x in DTYPES[dtype])
    found = []
    for name, x in exact.items():
        if name == "gradient":
            size = _size(x)
        else:  # what is always the same, but for rounding, has no size
            varies = np.sqrt(np.mean((x - x.mean(0)) ** 2))
            size = np.maximum(varies, 1e-6 * _size(x))
        size = np.maximum(size, np.finfo(np.float32).tiny)
        error, usual = (
            float(np.median(_size(y[name] - x) / size)) for y in (out, hand)
        )
        allowed = max(FACTOR * usual, DIGITS * digit)
        share = error / allowed if np.isfinite(usual) else 0.0
        found.append(Finding(name, error, usual, share))
    return sorted(found, key=lambda x: -np.nan_to_num(x.share, nan=np.inf))


def cast(program: Program, autocast: Callable = jaxmp.autocast) -> Callable:
    """Returns the step of a program under autocast, in the form that it asks for."""
    loss, form, dtype = step_of(program), program.form, program.dtype
    if form == "inside":
        return _step(form, autocast(loss, dtype))
    return autocast(_step(form, loss), dtype)


def named(program: Program) -> list[str]:
    """Returns the kinds of the numerical risks that audit names of a program."""
    args = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], inputs(program, 1)))
    report = jaxmp.audit(cast(program))(*args)
    return sorted({x.kind for x in report.hazards})


# Whether a program breaks the law, and by what.
Verdict = Literal[
    "obeys", "named", "by a sum", "by a gradient", "by hand too", "in silence"
]


def verdict(
    program: Program, autocast: Callable = jaxmp.autocast
) -> tuple[Verdict, Finding]:
    """Returns whether a program breaks the law and by what, and its worst result."""
    worst = worst_of(program, autocast)
    if not worst.breaks_law:
        return "obeys", worst
    if named(program):
        return "named", worst
    near = program._replace(is_near=True)
    if not worst_of(near, autocast).breaks_law:
        for how in ROUNDED:
            with without(how):
                if not worst_of(program, autocast).breaks_law:
                    return how, worst
    to_float32 = functools.partial(by_hand, rounds=False)
    if not worst_of(program, autocast, to_float32).breaks_law:
        return "by hand too", worst
    return "in silence", worst


@contextlib.contextmanager
def without(rounding: Verdict) -> Iterator[None]:
    """Lets autocast do without a rounding of the rules, one of :data:`ROUNDED`."""
    decide, made, consumer = plan.decide, facts.of_outputs, needs.consumer

    def decided(row, ins, *args, **kwargs):
        how = decide(row, ins, *args, **kwargs)
        return ("float32", rules.FLOAT32) if _is_rounded_sum(row, ins) else how

    def of_no_product(row, ins, *args):  # whose parts would be rounded
        outs = made(row, ins, *args)
        new = tuple([x._replace(product=0) for x in outs])
        return new if _is_rounded_sum(row, ins) else outs

    def reads(half, back):
        return consumer(half, back) | needs.DIGITS * (back and not half)

    patches: list[tuple[Any, str, Any]] = [(needs, "consumer", reads)]
    if rounding == "by a sum":
        patches = [(plan, "decide", decided), (facts, "of_outputs", of_no_product)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


# The roundings that the rules name: of sums with a bias, a number or another result; of
# gradients that float32 work and a matmul read.
ROUNDED: tuple[Verdict, ...] = "by a sum", "by a gradient"


def _is_rounded_sum(row: Any, ins: Sequence[Any]) -> bool:
    """Whether it is one of these.

    What a bias is, is said here once more: an engine that takes positions for one would
    else be excused by its own mistake.
    """
    shape = row.eqn.outvars[0].aval.shape
    for x, var in zip(ins, row.eqn.invars, strict=True):
        if not x.given or x.scalar is not None:
            continue
        own = var.aval.shape or (1,) * len(shape)
        axes = {i for i, n in enumerate(own) if n > 1} - {*x.repeated}
        if len(axes) != 1 or not any(shape[i] > 1 for i in range(min(axes))):
            return False  # an input of the sum's own rows, such as positions
    return table.joins(row.eqn) and row.kind == "smooth" and not row.back


def _step(form: str, loss: Callable) -> Callable:
    """Returns a function of the loss, the other results, and gradients if there are."""
    if form == "forward":
        return lambda *args: (loss(*args), ())
    return jax.value_and_grad(loss, has_aux=True)


def _in_range(step: Callable[[float], Any]) -> list[dict[str, Any]]:
    """Returns the results at the first loss scale at which those by hand are finite."""
    found: list[dict[str, Any]] = []
    for scale in LOSS_SCALES:
        found = [_named(out, scale) for out in step(scale)]
        if all(np.isfinite(x).all() for x in found[1].values()):
            break
    return found


def _named(out: Any, scale: float) -> dict[str, Any]:
    (loss, results), gradients = out
    named = {"loss": loss / scale}
    named |= {f"result {i}": x for i, x in enumerate(results)}
    if leaves := [x.reshape(len(x), -1) for x in jax.tree.leaves(gradients)]:
        named["gradient"] = np.concatenate(leaves, 1) / scale
    return {name: np.asarray(x, np.float64) for name, x in named.items()}


def _size(x: Any) -> Any:
    """Returns the root of the mean square of the entries, for each draw."""
    return np.sqrt((x.reshape(len(x), -1) ** 2).mean(-1))


# The search.


def smaller(program: Program) -> Iterator[Program]:
    """Yields the programs with one thing less."""
    blocks = program.blocks
    for i, block in enumerate(blocks):
        if len(blocks) > 1:
            yield program._replace(blocks=blocks[:i] + blocks[i + 1 :])
        for name in ("offset", "factor", "read", "wrapper"):
            usual = "plain" if name == "wrapper" else USUAL
            if getattr(block, name) != usual:
                less = block._replace(**{name: usual})
                yield program._replace(blocks=(*blocks[:i], less, *blocks[i + 1 :]))
        if block.net not in ("a layer", USUAL):
            less = block._replace(net="a layer")
            yield program._replace(blocks=(*blocks[:i], less, *blocks[i + 1 :]))
    for i in range(len(program.results)):
        yield program._replace(results=program.results[:i] + program.results[i + 1 :])
    if program.adds:
        yield program._replace(adds=False)


def minimised(program: Program) -> Program:
    """Returns a smallest program that breaks the law in silence as ``program`` does."""
    for other in smaller(program):
        if verdict(other)[0] == "in silence":
            return minimised(other)
    return program


def main(*, seconds: float = 3600.0, first: int = 0, small: bool = True) -> None:
    """Draws programs for a while, prints those that break the law, and counts them.

    Args:
        seconds: For how long.
        first: The first seed.
        small: Whether to look for the smallest program of each that does in silence.
    """
    end, seed, shares = time.monotonic() + seconds, first, []
    found = {x: Counter[str]() for x in get_args(Verdict)[1:]}
    while time.monotonic() < end:
        program = drawn(seed)
        how, worst = verdict(program)
        shares.append(worst.share)
        if how != "obeys":
            print(f"seed {seed}, {how}:", worst, program, flush=True)
            if how == "in silence" and small:
                program = minimised(program)
                print("smallest:", worst_of(program), program, flush=True)
            kinds = ", ".join(named(program)) if how == "named" else _class_of(program)
            found[how][kinds] += 1
        if len(shares) % 25 == 0:
            jax.clear_caches()
        seed += 1
    print(f"{len(shares)} programs, seeds {first} to {seed - 1}.")
    print("The worst error of each, as a share of what the law allows:")
    print(f"{np.median(shares):.2f} (the median), {max(shares):.2f} at most.")
    for how, kinds in found.items():
        print(f"{kinds.total()} break the law, {how}.")
        for name, count in kinds.most_common():
            print(f"{count:5} {name}")


def _class_of(program: Program) -> str:
    return "; ".join(
        ", ".join(x for x in (b.offset, b.factor, b.read) if x != USUAL) or b.net
        for b in program.blocks
    )
