"""What nothing reads is no consumer: a line that nobody reads changes no number."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp
from conftest import bits, normal, rest_is_evidence


def logs(h):
    return jnp.log(jnp.abs(h)).sum()


def two_of(h):
    return jnp.tanh(h), logs(h)


def step():
    return jnp.eye(8) + jnp.float32(1 / 3)  # so that a matmul reads what loops carry


def scanned(h, metric):
    def body(c, _):
        c = jnp.tanh(c @ step())
        return c, metric(c)

    return lax.scan(body, h, None, length=2)[0]


def carried(h, metric):
    def body(_, state):
        h, total = state
        h = jnp.tanh(h @ step())
        return h, total + metric(h)

    return lax.fori_loop(0, 2, body, (h, 0.0))[0]


def carried_while(h, metric):
    def body(state):
        i, h, total = state
        h = jnp.tanh(h @ step())
        return i + 1, h, total + metric(h)

    return lax.while_loop(lambda s: s[0] < 2, body, (0, h, 0.0))[1]


def a_body(h, metric):
    def body(state):
        i, h = state
        metric(h)
        return i + 1, jnp.tanh(h @ step())

    return lax.while_loop(lambda s: s[0] < 2, body, (0, h))[1]


def branch(h, metric):
    def one(h):
        return jnp.tanh(h), metric(h)

    return lax.cond(h[0, 0] < 9, one, lambda h: (h, 0.0), h)[0]


def with_jvp(h, metric):
    @jax.custom_jvp
    def fun(h):
        return jnp.tanh(h), metric(h)

    fun.defjvps(lambda g, out, h: (g * (1 - jnp.tanh(h) ** 2), 0.0 * g.sum()))
    return fun(h)[0]


def with_vjp(h, metric):
    @jax.custom_vjp
    def fun(h):
        metric(h)
        return jnp.tanh(h)

    fun.defvjp(lambda h: (fun(h), h), lambda h, g: (g * (1 - jnp.tanh(h) ** 2),))
    return fun(h)


PROGRAMS = {
    "a line": lambda h, metric: (jnp.tanh(h), metric(h))[0],
    "a jit": lambda h, metric: jax.jit(lambda h: (jnp.tanh(h), metric(h)))(h)[0],
    "jits": lambda h, metric: jax.jit(
        lambda h: jax.jit(lambda h: (jnp.tanh(h), metric(h)))(h)[0]
    )(h),
    "what a jit reads for it alone": lambda h, metric: (
        jnp.tanh(h) + jax.jit(lambda h, z: (metric(h), jnp.tanh(z)))(h, 2 * h)[1]
    ),
    "a checkpoint": lambda h, metric: jax.checkpoint(
        lambda h: (jnp.tanh(h), metric(h))
    )(h)[0],
    "a vmap": lambda h, metric: jax.vmap(lambda h: (jnp.tanh(h), metric(h)))(h)[0],
    "what a scan stacks": scanned,
    "what a loop adds up": carried,
    "what a while adds up": carried_while,
    "the body of a while": a_body,
    "a branch": branch,
    "a custom_jvp": with_jvp,
    "a custom_vjp": with_vjp,
}


def searched(h):
    """A loop that is ended by what it computes, which keeps what it compares with."""
    w = jnp.full((8, 8), 1 / 8)
    start = lax.stop_gradient(h)
    smaller = lambda s: jnp.tanh(s @ w) / 2  # noqa: E731
    return lax.while_loop(lambda s: jnp.abs(s - start).max() < 1, smaller, start).sum()


METRICS = {
    "logarithms": logs,
    "a solver": lambda h: jnp.linalg.norm(h) / h.std(),
    "a loop that compares": searched,
}


def nothing(h):
    return 0.0


def gradient(fun, *args):
    """Returns a result too: alone, a gradient counts as if somebody read that."""
    out, back = jax.vjp(fun, *args)
    return out, back(jnp.ones(out.shape))


@pytest.mark.parametrize(
    "metric", rest_is_evidence(METRICS, "logarithms", "a loop that compares")
)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_value_that_nobody_reads_changes_no_number(program, metric):
    def loss(of):
        return lambda x, w, v: program(x @ w, of) @ v

    args = normal(0, 16, 8), normal(1, 8, 8), normal(2, 8, 8)

    def outs(of):
        fun = jaxmp.autocast(loss(of), "mixed_bfloat16")
        step = jaxmp.autocast(
            lambda *args: (
                gradient(loss(of), *args)
                if program not in (carried_while, a_body)
                else ()
            ),
            "mixed_bfloat16",
        )
        return jax.jit(lambda *args: (fun(*args), step(*args)))(*args)

    assert bits(outs(metric)) == bits(outs(nothing))


@pytest.mark.parametrize("wrapper", [jax.jit, jax.checkpoint])
def test_a_variance_that_nobody_reads_moves_no_mean(wrapper):
    window = jax.nn.softmax(normal(3, 16, 16))

    def program(variance):
        def moments(h):
            mean = window @ h
            return mean, variance(h, mean)

        return lambda x, w, v: jnp.tanh(x @ w + wrapper(moments)(x @ w)[0]) @ v

    def outs(variance):
        fun = program(variance)
        steps = fun, lambda *args: gradient(fun, *args)
        steps = [jaxmp.autocast(step, "mixed_bfloat16") for step in steps]
        return jax.jit(lambda *args: [step(*args) for step in steps])(*args)

    args = normal(0, 16, 8), normal(1, 8, 8), normal(2, 8, 8)
    by_moments = outs(lambda h, mean: window @ (h * h) - mean * mean)
    assert bits(by_moments) == bits(outs(lambda h, mean: 0.0))


def test_prints_and_callbacks_of_what_nobody_returns_stay(capfd):
    seen = []

    @jax.jit
    def f(x, w):
        h = x @ w
        jax.debug.print("largest {}", h.max())
        jax.experimental.io_callback(lambda x: seen.append(float(x)), None, h.sum())
        return h @ w

    w = jnp.full((8, 8), 1 / 8)
    jaxmp.autocast(f, "mixed_bfloat16")(jnp.ones((8, 8)), w).block_until_ready()
    jax.effects_barrier()
    assert "largest 1.0" in capfd.readouterr().out
    assert seen == [64.0]


def test_what_is_written_to_a_reference_stays():
    def f(x, w, ref):
        h = x @ w
        ref[...] = h.sum()
        return h @ w

    ref = jax.new_ref(jnp.float32(0))
    w = jnp.full((8, 8), 1 / 8)
    jaxmp.autocast(f, "mixed_bfloat16")(jnp.ones((8, 8)), w, ref)
    assert ref[...] == 64


def test_reports_do_not_say_that_a_line_feeds_what_nobody_reads():
    def f(x, w):
        h = x @ w
        jnp.log(jnp.abs(h))
        return h @ w

    cast, args = jaxmp.autocast(f, "mixed_bfloat16"), (jnp.ones((8, 8)),) * 2
    first, unread, last = jaxmp.explain(cast)(*args).lines
    assert (first.dtype, first.rule) == ("bfloat16", 2)
    assert "log" in unread.source
    assert last.dtype == "float32"


ERRORS = {
    "units": lambda h, b: h * 5 + 300,
    "a far bias": lambda h, b: h + (300 + b),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("wrapper", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_gradient_alone_is_that_which_comes_with_the_loss(error, wrapper):
    """Though nobody reads the loss: an error of 16-bit numbers near 300 is none."""

    def loss(weights):
        w, v, b = weights
        h = wrapper(lambda x: jnp.tanh(x @ w) @ v)(x)
        return wrapper(lambda h: ((error(h, b) - target) ** 2).mean())(h)

    x, weights = normal(0, 16, 8), (normal(1, 8, 8), normal(2, 8, 8), normal(3, 8))
    target = error(jnp.tanh(x @ weights[0]) @ weights[1], weights[2]) + normal(4, 16, 8)
    alone = jaxmp.autocast(jax.grad(loss), "mixed_bfloat16")
    both = jaxmp.autocast(jax.value_and_grad(loss), "mixed_bfloat16")
    one, two = jax.jit(lambda x: (alone(x), both(x)[1]))(weights)
    assert bits(one) == bits(two)


def test_a_loss_that_a_scan_adds_up_counts_though_nobody_reads_it():
    def loss(w):
        def step(state, row):
            h, total = state
            h = jnp.tanh(h @ w)
            return (h, total + ((h @ w * 5 + 300 - row) ** 2).mean()), None

        return lax.scan(step, (x, 0.0), rows)[0][1]

    x, w = normal(0, 16, 8), normal(1, 8, 8)
    rows = 300 + normal(2, 3, 16, 8)
    alone = jaxmp.autocast(jax.grad(loss), "mixed_bfloat16")
    both = jaxmp.autocast(jax.value_and_grad(loss), "mixed_bfloat16")
    one, two = jax.jit(lambda x: (alone(x), both(x)[1]))(w)
    assert bits(one) == bits(two)


def test_what_only_chooses_a_branch_is_read():
    x, w = jnp.zeros((8, 8)).at[:, :2].set([1, 2.0**-10]), jnp.ones((8, 8))

    def fun(x, w):
        h = x @ w  # of which 16 bits would make 1
        return lax.cond(jnp.log(h).max() > 0, jnp.tanh, jnp.negative, h) @ w

    # Without a jit, in which XLA may leave the rounding out.
    assert (jaxmp.autocast(fun, "bfloat16")(x, w) > 0).all()
