"""Rules of the user's own see under autocast what JAX would give them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error
from conftest import at_once, crossed, normal, rest_is_evidence

W = normal(0, 8, 8, scale=0.3)
X = normal(4, 8, 8)

AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w)[0],
    "scan": lambda f: (
        lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0]
    ),
}
around = pytest.mark.parametrize("wrap", AROUND.values(), ids=AROUND.keys())
# What is differentiated, as an autocast program is.
ORDERS = {
    "jax": jax.grad,
    "outside": lambda f, i: jaxmp.autocast(jax.grad(f, i), jnp.float16),
    "inside": lambda f, i: jax.grad(jaxmp.autocast(f, jnp.float16), i),
}


def watched_vjp(seen):
    """Returns a product whose rules note what they are told of zeros."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w, x + w

    def forward(x, w):
        seen.append(("perturbed", x.perturbed, w.perturbed))
        return (x.value @ w.value, x.value + w.value), (x.value, w.value)

    def backward(kept, cotangents):
        x, w = kept
        zeros = [isinstance(c, SymbolicZero) for c in cotangents]
        seen.append(("zero", *zeros))
        y, s = (
            jnp.zeros(c.aval.shape) if zero else c
            for c, zero in zip(cotangents, zeros, strict=True)
        )
        return y @ w.T + s, x.T @ y + s

    product.defvjp(forward, backward, symbolic_zeros=True)
    return product


def watched_jvp(seen):
    @jax.custom_jvp
    def product(x, w):
        return x @ w, x + w

    def rule(primals, tangents):
        (x, w), zeros = primals, [isinstance(t, SymbolicZero) for t in tangents]
        seen.append(("zero", *zeros))
        t, u = (
            jnp.zeros(t.shape) if zero else t
            for t, zero in zip(tangents, zeros, strict=True)
        )
        return product(x, w), (t @ w + x @ u, t + u)

    product.defjvp(rule, symbolic_zeros=True)
    return product


RULES = {"vjp": watched_vjp, "jvp": watched_jvp}
ARGNUMS = {"x": 0, "w": 1, "both": (0, 1)}


@pytest.mark.needs_no_scale
@crossed("rule argnums wrap", RULES, ARGNUMS, AROUND)
def test_rules_are_told_the_same_zeros_as_by_jax(rule, argnums, wrap):
    told, grads = {}, {}
    for name, order in ORDERS.items():
        seen = []
        product = rule(seen)

        def loss(x, w, product=product):
            # The second result is not used, so that its cotangent is zero.
            return jnp.square(wrap(lambda x, w: product(x, w)[0])(x, w)).sum()

        grads[name] = order(loss, argnums)(X, W)
        told[name] = set(seen)
    # Until 0.10.1 what `jax.vjp` returns takes no symbolic zeros.
    takes_zeros = rule is watched_jvp or jax.__version_info__ >= (0, 10, 1)
    # Where JAX itself asks twice, and for more.
    if takes_zeros and wrap is not AROUND["remat"]:
        assert told["inside"] == told["jax"]
    for name in ("outside", "inside"):
        assert relative_error(grads[name], grads["jax"]) < 5e-3


@pytest.mark.needs_no_scale
@around
def test_a_rule_without_symbolic_zeros_gets_arrays(wrap):
    @jax.custom_vjp
    def product(x, w):
        return x @ w, x + w

    def backward(kept, cotangents):
        assert all(isinstance(c, jax.Array) for c in cotangents)
        x, w = kept
        return cotangents[0] @ w.T + cotangents[1], x.T @ cotangents[0] + cotangents[1]

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)

    def loss(x, w):
        return jnp.square(wrap(lambda x, w: product(x, w)[0])(x, w)).sum()

    for order in ("outside", "inside"):
        grad = ORDERS[order](loss, (0, 1))(X, W)
        assert relative_error(grad, jax.jit(jax.grad(loss, (0, 1)))(X, W)) < 5e-3


TABLE = jnp.asarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8) / 2)


@jax.custom_vjp
def turned(x):
    return x @ TABLE


turned.defvjp(lambda x: (x @ TABLE, None), lambda _, g: (g @ TABLE.T,))


@jax.custom_jvp
def turned_forward(x):
    return x @ TABLE


turned_forward.defjvp(lambda p, t: (p[0] @ TABLE, t[0] @ TABLE))


CLOSED_OVER = {
    f"{order}-{name}": (order, rule)
    for order in ("outside", "inside")
    for name, rule in (("vjp", turned), ("jvp", turned_forward))
}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("order", "rule"), rest_is_evidence(CLOSED_OVER, "outside-vjp", "inside-jvp")
)
def test_a_rule_may_close_over_an_array_inside_scan_inside_vmap(rule, order):
    def net(w, x):
        def layer(h, w):
            return rule(jnp.tanh(h @ w)), None

        return (lax.scan(layer, x, w)[0] ** 2).mean()

    def loss(w):
        return jax.vmap(net, (None, 0))(w, X).mean()

    stacked = jnp.stack([W, W])
    grad = ORDERS[order](loss, 0)
    found, expected = jax.jit(lambda w: (grad(w), jax.grad(loss)(w)))(stacked)
    assert relative_error(found, expected) < 5e-3
    assert all(dtypes == {"float16"} for dtypes in product_dtypes(grad, stacked))


def test_a_gradient_that_a_rule_refuses_is_refused_with_the_way_out():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        if x.perturbed:
            raise TypeError("no gradient with respect to x")
        return x.value @ w.value, x.value

    product.defvjp(forward, lambda x, g: (None, x.T @ g), symbolic_zeros=True)

    def loss(x, w):
        return product(x, w).sum()

    np.testing.assert_array_equal(
        jax.grad(jaxmp.autocast(loss, "float16"), 1)(jnp.ones((8, 8)), W),
        jax.grad(loss, 1)(jnp.ones((8, 8)), W),
    )
    with pytest.raises(TypeError, match="no gradient with respect to x") as error:
        jax.grad(jaxmp.autocast(loss, "float16"))(X, W)
    assert "autocast(jax.value_and_grad(loss))" in error.value.__notes__[0]


def test_a_value_that_a_rule_closes_over_has_no_gradient_as_in_jax():
    def loss(w):
        @jax.custom_vjp
        def product(x):
            return x @ w

        product.defvjp(lambda x: (product(x), None), lambda _, g: (g,))
        return product(X).sum()

    with pytest.raises(Exception, match=r"closed-over value|closes over a value"):
        jax.grad(jax.jit(loss))(W)
    with pytest.raises(TypeError, match="pass the value as an argument"):
        jax.grad(jaxmp.autocast(loss))(W)


def scaled_by(number):
    """Returns a function with a rule, which the same lines write for each number."""

    @jax.custom_jvp
    def scaled(x, w):
        return number * (x @ w)

    @scaled.defjvp
    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return scaled(x, w), number * (dx @ w + x @ dw)

    return scaled


def test_functions_that_one_line_writes_keep_their_own_numbers():
    def outputs(x, w):
        return scaled_by(2.0)(x, w), scaled_by(8.0)(x, w)

    assert relative_error(jaxmp.autocast(outputs)(X, W), outputs(X, W)) < 0.01


def test_functions_that_one_line_writes_run_in_the_dtypes_of_their_modules():
    def outputs(x, w):
        found = []
        for name in ("kept", "cast"):
            with jax.named_scope(name):
                found.append(scaled_by(2.0)(x, w))
        return found

    cast = jaxmp.autocast(outputs, float32_paths="kept")
    kept, rounded = product_dtypes(cast, X, W)
    assert kept == {"float32"}
    assert rounded == {"bfloat16"}


CODES = normal(2, 5, 8)


@jax.custom_vjp
def quantised(h):
    codes = jnp.argmin(((h[:, None] - CODES) ** 2).sum(-1), -1)
    return CODES[codes] + 0 * h, codes


quantised.defvjp(lambda h: (quantised(h), None), lambda _, g: (g[0],))


@jax.custom_jvp
def levelled(h):
    levels = jnp.round(h * 4)
    return levels / 4, levels.astype(jnp.int32), h > 0


@levelled.defjvp
def _(primals, tangents):
    (h,), (t,) = primals, tangents
    none = np.zeros(h.shape, jax.dtypes.float0)
    return levelled(h), (t, none, none)


WITH_INTEGERS = {"vjp": quantised, "jvp": levelled, "frexp": jnp.frexp}


@pytest.mark.needs_no_scale
@crossed("wrap rule", AROUND, WITH_INTEGERS)
def test_a_rule_may_return_integers(wrap, rule):
    def loss(x, w):
        return jnp.square(wrap(lambda x, w: rule(x @ w)[0] @ w)(x, w)).mean()

    def numbers(x, w):  # which are not rounded before
        return jnp.square(wrap(lambda x, w: rule(x)[0] @ w)(x, w)).mean()

    orders = [ORDERS[x] for x in ("outside", "inside")]
    rounded = at_once(*(order(loss, 1) for order in orders))(X, W)
    assert all(np.isfinite(x).all() for x in rounded)
    exact = ORDERS["jax"](numbers, 1)
    expected, *found = at_once(exact, *(order(numbers, 1) for order in orders))(X, W)
    for one in found:
        assert relative_error(one, expected) < 5e-3


def test_a_tangent_of_integers_goes_through_autocast():
    def pushed(w):
        return jax.jvp(lambda w: jnp.frexp(X[:2] @ w)[0] @ w, (w,), (w,))

    found = jaxmp.autocast(pushed, "float16")(W)
    assert relative_error(found, pushed(W)) < 5e-3
