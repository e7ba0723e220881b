"""What Flax's layers take as ``attention_fn=``, with every argument that they pass."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import attentions
from flax import nnx

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from conftest import at_once, crossed, normal

# Layers and ways to sow that Flax will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
X = normal(0, 2, 12, 32)
LINEN = jaxmp.linen.dot_product_attention
NNX = jaxmp.nnx.dot_product_attention


def linen(attention, *, kind=nn.MultiHeadDotProductAttention, call=None, **options):
    """Returns a function of the parameters of a layer of Linen, and those."""
    layer = kind(num_heads=4, attention_fn=attention, **options)
    call = call or {}
    init = jax.jit(functools.partial(layer.init, **INIT))
    variables = init({"params": jax.random.key(1)}, X)

    def apply(variables, x=X):
        rngs = {"dropout": jax.random.key(2)}
        return layer.apply(variables, x, rngs=rngs, **call)

    return apply, variables


INIT = {"deterministic": True}


def same(attention, theirs=nn.dot_product_attention, **options):
    """Checks that two attentions are the same, values and gradients."""
    ours, variables = linen(attention, **options)
    others, _ = linen(theirs, **options)

    def both(apply):
        return apply, jax.grad(lambda v: jnp.sum(apply(v) ** 2))

    found, expected = (at_once(*both(x))(variables) for x in (ours, others))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4)
    return len(attentions(ours, variables))


MASK = nn.make_attention_mask(
    jnp.arange(12) < jnp.array([[5], [12]]), jnp.ones((2, 12))
)
CAUSAL = nn.make_causal_mask(X[..., 0])
# Layers of NNX take `is_causal` from Flax 0.12.8 on.
_TAKEN = inspect.signature(nnx.MultiHeadAttention.__call__).parameters
CAUSAL_NNX = {"is_causal": True} if "is_causal" in _TAKEN else {"mask": CAUSAL}


@crossed(
    "kind mask",
    [nn.MultiHeadDotProductAttention, nn.MultiHeadAttention, nn.SelfAttention],
    {"all": None, "causal": CAUSAL, "masked": MASK},
)
def test_layers_of_linen(kind, mask):
    assert same(LINEN, kind=kind, call={"mask": mask}) == 1


def test_several_axes_of_a_batch_and_none():
    for shape in ((12, 32), (2, 3, 12, 32), (1, 2, 1, 12, 32)):
        x = normal(3, *shape)
        masks = [None, nn.make_causal_mask(x[..., 0]), CAUSAL[0]]
        for mask in masks:
            q = x.reshape(*shape[:-1], 4, 8)
            both = (
                functools.partial(f, mask=mask)
                for f in (LINEN, nn.dot_product_attention)
            )
            np.testing.assert_allclose(*at_once(*both)(q, q, q), atol=1e-5)


def test_dropout_that_is_off_is_fused_and_dropout_that_is_on_is_flaxs():
    off = {"deterministic": True}
    assert same(LINEN, dropout_rate=0.5, call=off) == 1
    assert same(LINEN, dropout_rate=0.5, call={"deterministic": False}) == 0


def test_weights_that_are_sown_are_flaxs():
    layer = nn.MultiHeadDotProductAttention(4, attention_fn=LINEN)
    variables = layer.init(jax.random.key(1), X)
    _, sown = layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    (weights,) = jax.tree.leaves(sown)
    assert weights.shape == (2, 4, 12, 12)


def test_products_of_ones_own_are_flaxs():
    assert same(LINEN, precision="highest") == 0
    assert same(LINEN, force_fp32_for_softmax=True) == 1


def test_steps_of_decoding_are_flaxs():
    layer = nn.MultiHeadDotProductAttention(4, attention_fn=LINEN, decode=True)
    variables = layer.init(jax.random.key(1), X)
    step = functools.partial(layer.apply, mutable=["cache"])
    assert not attentions(step, variables, X[:, :1])
    others = layer.clone(attention_fn=nn.dot_product_attention)
    found, _ = step(variables, X[:, :1])
    expected, _ = others.apply(variables, X[:, :1], mutable=["cache"])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_causal_one_and_lengths_stand_for_masks():
    causal = functools.partial(LINEN, is_causal=True)
    lengths = functools.partial(LINEN, key_value_seq_lengths=jnp.array([5, 12]))
    keys = nn.make_attention_mask(
        jnp.ones((2, 12)), jnp.arange(12) < jnp.array([[5], [12]])
    )
    for ours, mask in ((causal, CAUSAL), (lengths, keys)):
        theirs = masked(mask)
        assert same(ours, theirs) == 1
        # Where Flax drops weights they are masked, too.
        dropped = {"dropout_rate": 0.5, "call": {"deterministic": False}}
        assert same(ours, theirs, **dropped) == 0


def masked(mask):
    """Returns Flax's attention with a mask, whatever the layer passes."""

    def attend(query, key, value, dropout_rng=None, dropout_rate=0.0, deterministic=0):
        return nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=bool(deterministic),
        )

    return attend


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_layer_with_a_dtype_attends_in_it(dtype):
    apply, variables = linen(LINEN, dtype=dtype)
    out = apply(variables)
    assert out.dtype == dtype
    exact, _ = linen(nn.dot_product_attention)
    assert jnp.linalg.norm(out - exact(variables)) < 0.02 * jnp.linalg.norm(out)


def test_under_autocast_layers_of_linen_attend_in_16_bits():
    apply, variables = linen(functools.partial(LINEN, is_causal=True))
    grad = jaxmp.autocast(jax.grad(lambda v: jnp.mean(apply(v) ** 2)))
    exact = jax.grad(lambda v: jnp.mean(apply(v) ** 2))
    assert len(attentions(grad, variables)) == 2
    assert "bf16[2,12,4,8]" in str(jax.make_jaxpr(grad)(variables))
    found, exact = map(jax.tree.leaves, at_once(grad, exact)(variables))
    largest = max(jnp.linalg.norm(x) for x in exact)
    for x, y in zip(found, exact, strict=True):
        assert jnp.linalg.norm(x - y) < 0.02 * largest


def layer_of_nnx(attention, **options):
    return nnx.MultiHeadAttention(
        num_heads=4,
        in_features=32,
        attention_fn=attention,
        decode=False,
        rngs=nnx.Rngs(0),
        **options,
    )


@pytest.mark.parametrize("call", [{}, {"mask": MASK}, CAUSAL_NNX])
def test_layers_of_nnx(call):
    ours, theirs = layer_of_nnx(NNX), layer_of_nnx(nnx.dot_product_attention)
    np.testing.assert_allclose(ours(X, **call), theirs(X, **call), atol=1e-5)
    assert len(attentions(lambda x: ours(x, **call), X)) == 1


def test_layers_of_nnx_drop_and_sow_as_flax_does():
    ours = layer_of_nnx(NNX, dropout_rate=0.5)
    theirs = layer_of_nnx(nnx.dot_product_attention, dropout_rate=0.5)
    for deterministic, fused in ((True, 1), (False, 0)):
        options = {"deterministic": deterministic, **CAUSAL_NNX}
        found = ours(X, rngs=nnx.Rngs(dropout=1), **options)
        expected = theirs(X, rngs=nnx.Rngs(dropout=1), **options)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        rngs = nnx.Rngs(dropout=1)
        graph, state = nnx.split((ours, rngs))

        def run(state, x, graph=graph, options=options):
            layer, rngs = nnx.merge(graph, state)
            return layer(x, rngs=rngs, **options)

        assert len(attentions(run, state, X)) == fused
    ours(X, deterministic=True, sow_weights=True)
    assert any(x.shape[-2:] == (12, 12) for x in jax.tree.leaves(nnx.state(ours)))


def test_groups_of_queries():
    q, k = normal(1, 2, 12, 4, 8), normal(2, 2, 12, 2, 8)
    found = NNX(q, k, k, is_causal=True)
    expected = nnx.dot_product_attention(q, k, k, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_bias_and_values_of_another_size_are_those_of_flax():
    query, key, value = (normal(i, 2, 3, 12, 4, 8) for i in range(3))
    bias = normal(3, 3, 4, 12, 12)
    for given in ((query, key, value, bias), (query, key, value[..., :4], bias)):
        expected = nn.dot_product_attention(*given)
        np.testing.assert_allclose(LINEN(*given), expected, atol=1e-5)
