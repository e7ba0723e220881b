"""Autocast is never worse than casting the operands of matmuls and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_oracle import of_sums

import jaxmp
from benchmarks import law
from benchmarks.counting.measure import AS_WRITTEN
from benchmarks.law import USUAL
from conftest import at_once, bits, in_both_dtypes, normal, rest_is_evidence
from jaxmp._autocast import facts

# By hand there is no scale either.
pytestmark = pytest.mark.needs_no_scale

# Of each dtype and form; the last were wrong before positions were added in float32.
SEEDS = 35, 36, 37, 38, 39, 40, 42, 43, 46, 14, 30, 58, 60


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_is_no_further_from_float32_than_with_its_matmuls_cast(seed):
    program = law.drawn(seed)
    worst = law.worst_of(program)
    assert not worst.breaks_law, (worst, program)


def verdict(program, autocast=jaxmp.autocast):
    """Returns whether a program breaks the law and by what.

    By a rounding of the rules only if their sentences allow each value in 16 bits.
    """
    how, _ = law.verdict(program, autocast)
    if how in law.ROUNDED:
        form = "forward" if program.form == "forward" else "with gradients"
        return "in silence" if of_sums(program, form).beyond else how
    return how


@pytest.mark.evidence
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_no_program_breaks_the_law_in_silence(first):
    seeds = range(first, first + 20)
    found = [seed for seed in seeds if verdict(law.drawn(seed)) == "in silence"]
    jax.clear_caches()
    assert not found


def program(*offsets, factor=USUAL):
    """Returns a program of which the last sum's mean over rows is returned."""
    blocks = tuple(law.Block("two layers", x, factor, USUAL) for x in offsets)
    return law.Program(blocks, (("a mean of rows", 0),), form="forward")


def with_rounded_results(fun, dtype):
    def cast(*args):
        return jax.tree.map(lambda x: x * (1 + 2.0**-6), fun(*args))

    return jaxmp.autocast(cast, dtype)


def with_rounded_inputs(fun, dtype):
    return jaxmp.autocast(with_rounded(fun, dtype), dtype)


ROUNDED = {
    "a far bias": ("by a sum", program("a far bias")),
    "a second update": ("by a sum", program("steps in a row")),
    "a gradient that cancels in a branch": ("by a gradient", law.drawn(1064)),
    "an attention whose rows by hand are alike": ("by hand too", law.drawn(3273)),
}


@pytest.mark.parametrize(
    ("how", "program"), rest_is_evidence(ROUNDED, "a far bias", "a second update")
)
def test_what_the_rules_round_and_breaks_the_law_is_counted_apart(how, program):
    assert verdict(program) == how


@pytest.mark.parametrize("autocast", [with_rounded_results, with_rounded_inputs])
def test_another_defect_of_such_a_program_is_silent(autocast):
    assert verdict(program("a far bias"), autocast) == "in silence"


@pytest.mark.parametrize(
    ("how", "offsets"),
    [("obeys", ["a far input"]), ("by a sum", ["steps in a row", "a far bias"])],
)
def test_positions_that_are_rounded_as_if_they_were_a_bias_are_silent(
    how, offsets, monkeypatch
):
    assert verdict(program(*offsets)) == how
    monkeypatch.setattr(facts, "adds_bias", lambda *args: True)
    assert verdict(program(*offsets)) == "in silence"


# What is rounded as weights are, and breaks the law where it is large and cancels.
NAMED = {
    "a number, neighbours": ("units", "a number", "neighbours"),
    "a number, a norm": ("units", "a number", "a norm"),
    "a number, a scan": ("units", "a number", "a scan"),
    "units, and back": ("units", "units", "less a number"),
    "a far bias, a roll": ("difference", "a far bias", "a roll"),
    "a far bias, a scan": ("difference", "a far bias", "a scan"),
    "a second update, its first row": (
        "difference",
        "steps in a row",
        "less the first row",
    ),
    "a second update, its mean": ("difference", "steps in a row", "less the mean"),
    "a grid, waves": ("phase", "a grid", "waves"),
}


@pytest.mark.parametrize(("kind", "offset", "read"), NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("form", ["outside", "inside"])
def test_what_breaks_the_law_has_a_name_in_audit(kind, offset, read, form):
    block = law.Block("two layers", offset, USUAL, read)
    assert kind in law.named(law.Program((block,), form=form))


@pytest.mark.parametrize("read", ["a scan", "a roll", "less the first row"])
def test_a_number_above_a_returned_sum_has_a_name_if_a_part_is_rounded(read):
    block = law.Block("an attention", "a number", USUAL, read)
    program = law.Program((block,), (("itself", 1),), form="forward")
    assert law.named(program) == ["units"]


@pytest.mark.parametrize("net", ["two layers", "an attention"])
@pytest.mark.parametrize("read", ["a norm", "rms", "a softmax", "a layer"])
def test_a_residual_stream_that_is_normalised_has_no_risk(net, read):
    block = law.Block(net, "an earlier value", USUAL, read)
    assert not law.named(law.Program((block,) * 3))


def layer(x, w, mm):
    return jnp.tanh(mm(x, w)) + x


def row(x, ws, mm):
    for w in ws:
        x = layer(x, w, mm)
    return x


PROGRAMS = {
    "in a row": row,
    "a scan": lambda x, ws, mm: lax.scan(lambda x, w: (layer(x, w, mm), x), x, ws)[0],
    "checkpoints": lambda x, ws, mm: lax.scan(
        jax.checkpoint(lambda x, w: (layer(x, w, mm), None)), x, ws
    )[0],
    "a loop": lambda x, ws, mm: lax.fori_loop(
        0, len(ws), lambda i, x: layer(x, ws[i], mm), x
    ),
    "a branch": lambda x, ws, mm: lax.cond(
        x[0, 0] < 9, lambda x: row(x, ws, mm), lambda x: x, x
    ),
    "a jit": lambda x, ws, mm: jax.jit(lambda x: row(x, ws, mm))(x),
    "by rows": lambda x, ws, mm: jax.vmap(lambda x: row(x[None], ws, mm)[0])(x),
}


@pytest.mark.parametrize(("program", "dtype"), in_both_dtypes(PROGRAMS, "in a row"))
def test_by_hand_is_what_a_user_casts_by_hand(program, dtype):
    def by_user(x, w):
        x, w = x.astype(dtype), w.astype(dtype)
        out = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return out.astype(dtype).astype(jnp.float32)

    def loss(x, ws, mm=jnp.matmul):
        return (program(x, ws, mm) ** 2).sum()

    args = normal(0, 8, 8), normal(1, 3, 8, 8, scale=0.3)
    by_replay = law.by_hand(jax.value_and_grad(loss, (0, 1)), dtype)
    user = jax.value_and_grad(lambda *args: loss(*args, by_user), (0, 1))
    lowered = at_once(by_replay, user).lower(*args)
    one, two = lowered.compile(compiler_options=AS_WRITTEN)(*args)
    assert bits(one) == bits(two)


def test_the_hybrid_by_hand_has_a_dtype_for_each_pass():
    number = 1 + 2.0**-9  # of float16, not of bfloat16
    x, w = jnp.full((2, 8), number), jnp.ones((8, 2))
    step = jax.value_and_grad(lambda x, w: jnp.sum(x @ w) * number, (0, 1))
    loss, gradients = law.by_hand(step, "mixed_float16_bfloat16")(x, w)
    assert loss == 32 * number**2
    assert all(np.unique(x) == 2 for x in gradients)


def with_rounded(fun, dtype):
    def cast(*args):
        rounded = [
            x.astype(dtype).astype(x.dtype) if x.dtype == jnp.float32 else x
            for x in map(jnp.asarray, jax.tree.leaves(args))
        ]
        return fun(*jax.tree.unflatten(jax.tree.structure(args), rounded))

    return cast


def with_rounded_arguments(fun, dtype):
    return law.by_hand(with_rounded(fun, dtype), dtype)


FAR = {
    "neighbours": law.Block("two layers", "a far input", "nothing", "neighbours"),
    "less the mean": law.Block("two layers", "a far input", "nothing", "less the mean"),
}


@pytest.mark.parametrize("block", FAR.values(), ids=FAR)
def test_the_law_tells_who_rounds_an_input(block):
    program = law.Program((block,))
    assert not law.findings(program, autocast=law.by_hand)[0].breaks_law
    assert law.findings(program, autocast=with_rounded_arguments)[0].breaks_law


def test_a_sum_that_is_always_the_same_counts_by_what_changes():
    """A softmax of rows adds up to their number; its size would hide what is lost."""

    def rounded(fun, dtype):
        def cast(*args):
            (loss, results), gradients = fun(*args)
            return (loss, [x * (1 + 2.0**-12) for x in results]), gradients

        return law.by_hand(cast, dtype)

    block = law.Block("a layer", "nothing", "a softmax", "nothing")
    program = law.Program((block,), (("a sum", 1),), form="forward")
    worst = law.findings(program, autocast=rounded)[0]
    assert worst.result == "result 0"
    assert worst.breaks_law
