"""What is reported of float16 in other libraries does not happen under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

SINGLE = jnp.float32


# jax #39899: the sum of squares is cast to float16 before its root is taken, so that a
# norm of 300 is Inf, and its gradient 0.
@pytest.mark.needs_no_scale
@pytest.mark.parametrize("inside", [False, True])
def test_a_norm_that_fits_float16_is_finite_and_has_a_gradient(inside):
    def norm(w, x):
        return jnp.linalg.norm(x @ w)

    w, x = jnp.eye(8) * 100.0, jnp.ones((8, 8))
    if inside:
        grad_fn = jax.value_and_grad(jaxmp.autocast(norm, "mixed_float16"))
    else:
        grad_fn = jaxmp.autocast(jax.value_and_grad(norm), "mixed_float16")
    value, grad = grad_fn(w, x)
    assert value == 800.0
    np.testing.assert_allclose(grad, jax.grad(norm)(w, x), rtol=1e-3)
    assert (grad != 0).all()


# jax #40409: the gradient of `log_softmax` of 2^16 float16 numbers is NaN.
@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    "log_softmax", [jax.nn.log_softmax, jax.scipy.special.logsumexp]
)
def test_the_gradient_of_a_large_log_softmax_is_that_of_float32(log_softmax):
    def loss(w, x):
        return log_softmax(x @ w).sum()

    w = jax.random.normal(jax.random.key(0), (8, 2**16), SINGLE) / 8
    x = jnp.ones((2, 8))
    grad = jaxmp.autocast(jax.grad(loss), "mixed_float16")(w, x)
    assert jnp.isfinite(grad).all()
    np.testing.assert_allclose(grad, jax.grad(loss)(w, x), atol=0.02, rtol=0.01)


# optax #1754, #1784, #1789: with float16 parameters and a zero gradient the epsilon is
# 0, and the update NaN.
OPTIMIZERS = ["adabelief", "adadelta", "adam", "adamax", "adan", "amsgrad", "novograd"]
OPTIMIZERS += ["radam", "rmsprop", "yogi"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_zero_gradient_is_no_nan(name):
    def loss(params, x):
        return jnp.mean((x @ params["used"]) ** 2) + 0.0 * params["unused"].sum()

    params = {"used": jnp.ones((8, 8)), "unused": jnp.ones(3)}
    tx = jaxmp.loss_scaling(getattr(optax, name)(1e-3), "mixed_float16")
    opt_state, x = tx.init(params), jnp.ones((8, 8))
    for _ in range(3):
        grad_fn = jaxmp.value_and_grad(loss, loss_scale=opt_state)
        _, grads = jaxmp.autocast(grad_fn, "mixed_float16")(params, x)
        assert not grads["unused"].any()
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert opt_state.skipped == 0
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(SINGLE)}
