"""``jaxmp.dot_product_attention`` is that of ``jax.nn``, in float32 and in 16 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from conftest import at_once, crossed, normal

BATCH, QUERIES, KEYS, HEADS, GROUPS, SIZE = 2, 12, 12, 4, 2, 8
HALVES = [jnp.bfloat16, jnp.float16]


def arrays(dtype=jnp.float32, groups=GROUPS, queries=QUERIES):
    return [
        normal(0, BATCH, queries, HEADS, SIZE).astype(dtype),
        normal(1, BATCH, KEYS, groups, SIZE).astype(dtype),
        normal(2, BATCH, KEYS, groups, SIZE).astype(dtype),
    ]


def seen(*shape):
    return normal(4, *shape) > -0.5


# Among the rows that are hidden are some that see no key at all.
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.5},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "causal window": {"local_window_size": 3, "is_causal": True},
    "bias": {"bias": normal(3, 1, HEADS, QUERIES, KEYS)},
    "bias of a head": {"bias": normal(3, BATCH, 1, 1, KEYS)},
    "mask": {"mask": seen(BATCH, 1, QUERIES, KEYS).at[0, 0, 2].set(False)},
    "mask of keys": {"mask": seen(BATCH, 1, 1, KEYS), "is_causal": True},
    "bias and mask": {
        "bias": normal(3, BATCH, 1, QUERIES, KEYS),
        "mask": seen(1, HEADS, QUERIES, KEYS),
    },
    "lengths": {
        "query_seq_lengths": jnp.array([5, 12]),
        "key_value_seq_lengths": jnp.array([7, 0]),
    },
    "causal lengths": {"key_value_seq_lengths": jnp.array([7, 0]), "is_causal": True},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def weighted(fun, **options):
    """Returns a scalar function of query, key, value, and a bias if there is one."""
    weights = normal(9, BATCH, QUERIES, HEADS, SIZE)

    def total(args):
        bias = {"bias": args[3]} if len(args) > 3 else {}
        out = fun(*args[:3], **(options | bias))
        return jnp.sum(out.astype(jnp.float32) * weights)

    return total


def moving(options, args):
    return (*args, options["bias"]) if "bias" in options else tuple(args)


@each_option
def test_in_float32_it_has_the_bits_of_jax(options):
    ours = lambda *args: jaxmp.dot_product_attention(*args, **options)  # noqa: E731
    jaxs = lambda *args: jax.nn.dot_product_attention(*args, **options)  # noqa: E731
    for run in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(run(ours)(*arrays()), run(jaxs)(*arrays()))


@each_option
def test_in_float32_its_derivatives_are_those_of_jax(options):
    args = moving(options, arrays())
    ours = weighted(jaxmp.dot_product_attention, **options)
    jaxs = weighted(jax.nn.dot_product_attention, **options)

    def tangent(fun):
        return lambda args: jax.jvp(fun, (args,), (jax.tree.map(jnp.cos, args),))[1]

    found, expected, *tangents = at_once(
        jax.grad(ours), jax.grad(jaxs), tangent(ours), tangent(jaxs)
    )(args)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(*tangents, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "bias and mask", "lengths"])
def test_in_float32_its_second_derivatives_are_those_of_jax(name):
    options = OPTIONS[name]
    args = moving(options, arrays())

    @functools.partial(jax.jit, static_argnums=1)
    def derivatives(args, fun):
        def squashed(args):
            return jnp.sum(jnp.sin(weighted(fun, **options)(args)))

        def first(args):
            grads = jax.grad(squashed)(args)
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(grads))

        def forward(x):
            return jax.grad(lambda x: squashed((x, *args[1:])))(x)

        row = (slice(None), slice(0, 2), 0)
        hessian = jax.jacfwd(lambda x: forward(args[0].at[row].set(x)))(args[0][row])
        return jax.grad(first)(args), hessian

    found = derivatives(args, jaxmp.dot_product_attention)
    expected = derivatives(args, jax.nn.dot_product_attention)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)


@crossed("options dtype", OPTIONS, HALVES)
def test_in_16_bits_it_is_near_float32_of_the_same_numbers(options, dtype):
    args = moving(options, arrays(dtype))
    wide = tuple(x.astype(jnp.float32) for x in args)
    ours, jaxs = jaxmp.dot_product_attention, jax.nn.dot_product_attention

    def derived(fun):
        out = functools.partial(fun, **options)
        return at_once(lambda x: out(*x[:3]), jax.grad(weighted(fun, **options)))

    (out, grads), (exact, wide_grads) = derived(ours)(args), derived(jaxs)(wide)
    assert out.dtype == dtype
    near = 2 * float(jnp.finfo(dtype).eps)
    for x, y in [(out, exact), *zip(grads, wide_grads, strict=True)]:
        x = x.astype(jnp.float32)
        assert jnp.linalg.norm(x - y) <= near * jnp.linalg.norm(y)


def test_in_16_bits_all_is_16_bits_but_the_bias():
    bias = OPTIONS["bias"]["bias"]
    args = (*arrays(jnp.bfloat16), bias)
    grads = jax.grad(weighted(jaxmp.dot_product_attention))(args)
    assert [x.dtype for x in grads] == [*[jnp.bfloat16] * 3, jnp.float32]


@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
def test_the_backward_pass_keeps_no_weights(dtype):
    args = arrays(dtype)
    _, pull = jax.vjp(jaxmp.dot_product_attention, *args)
    kept = jax.tree.leaves(pull)
    assert (
        sum(x.size for x in kept if x.dtype == dtype)
        <= sum(x.size for x in (*args, args[0]))
        + (dtype == jnp.float32) * BATCH * HEADS * QUERIES
    )
    assert not any(x.shape[-2:] == (QUERIES, KEYS) for x in kept)


def test_examples_without_a_batch():
    args = [x[0] for x in arrays()]
    found = jaxmp.dot_product_attention(*args)
    np.testing.assert_array_equal(found, jax.nn.dot_product_attention(*args))


def test_more_queries_than_keys():
    args = arrays(queries=17)
    options = {"is_causal": True, "local_window_size": 2}
    found = jaxmp.dot_product_attention(*args, **options)
    expected = jax.nn.dot_product_attention(*args, **options)
    np.testing.assert_array_equal(found, expected)


def test_a_scale_that_is_traced_is_differentiated():
    def total(fun):
        return lambda scale: jnp.sum(fun(*arrays(), scale=scale) ** 2)

    both = jaxmp.dot_product_attention, jax.nn.dot_product_attention
    grads = at_once(*[jax.grad(total(fun)) for fun in both])(0.3)
    np.testing.assert_allclose(*grads, rtol=1e-5)


def test_arguments_that_do_not_fit_are_refused():
    query, key, value = arrays()
    attend = jaxmp.dot_product_attention
    with pytest.raises(ValueError, match="multiple"):
        attend(query[:, :, :3], key, value)
    with pytest.raises(ValueError, match="value"):
        attend(query, key, value[:, :5])
    with pytest.raises(ValueError, match="dtype"):
        attend(query.astype(jnp.bfloat16), key, value)
    with pytest.raises(ValueError, match="mask"):
        attend(query, key, value, mask=jnp.ones((1, 1, QUERIES, KEYS)))
    with pytest.raises(ValueError, match="'xla' or 'cudnn'"):
        attend(query, key, value, implementation="flash")


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 12, 12), (3, 12, 12), (2, 4, 12, 7), (2, 1, 1, 12, 12), (2,)]
)
def test_a_mask_and_a_bias_that_do_not_fit_the_scores_are_told_how(name, shape):
    query, key, value = arrays()
    given = {name: seen(*shape).astype(bool if name == "mask" else jnp.float32)}
    message = rf"`{name}` must broadcast to .* here \[2, 4, 12, 12\], but has the shape"
    for attend in (
        jaxmp.dot_product_attention,
        jax.jit(jaxmp.dot_product_attention),
        jaxmp.autocast(jaxmp.dot_product_attention),
    ):
        with pytest.raises(ValueError, match=message):
            attend(query, key, value, **given)
    if shape == (3, 12, 12):  # what the message says
        x = given[name][:BATCH]
        jaxmp.dot_product_attention(query, key, value, **{name: x[:, None]})


def test_too_many_axes_and_an_odd_window_are_named():
    query, key, value = arrays()
    attend = jaxmp.dot_product_attention
    with pytest.raises(ValueError, match=r"`query` must be .*\[1, 2, 12, 4, 8\]"):
        attend(query[None], key[None], value[None])
    for window in ((1, 2, 3), 2.5, "all"):
        with pytest.raises(ValueError, match="`local_window_size` must be an integer"):
            attend(query, key, value, local_window_size=window)


def test_the_kernel_is_refused_where_it_cannot_be():
    with pytest.raises(NotImplementedError, match=r"size 12; .*multiples of 8"):
        jaxmp.dot_product_attention(
            *[x[..., :4].repeat(3, -1) for x in arrays()], implementation="cudnn"
        )
    with pytest.raises(NotImplementedError, match=r"float32, and .*16 bits"):
        jaxmp.dot_product_attention(*arrays(), implementation="cudnn")
    cpu = jax.default_device(jax.devices("cpu")[0])
    with cpu, pytest.raises(NotImplementedError, match="not for an NVIDIA GPU"):
        jaxmp.dot_product_attention(*arrays(jnp.bfloat16), implementation="cudnn")


def axes_of(choice, count):
    """Returns axes to map over, of which some are None and some not the first."""
    return tuple([None, 0, 1, 2][(choice // 4**i) % 4] for i in range(count))


CHOICES = 1, 4, 16, 21, 57, 64, 91, 128, 187, 219, 255


@crossed("choice dtype", CHOICES, [jnp.float32, jnp.bfloat16])
def test_vmap_over_any_arguments_and_axes(choice, dtype):
    options = {"bias": "bias and mask", "mask": "mask"}
    args = [*arrays(dtype), *(OPTIONS[at][name] for name, at in options.items())]
    axes = axes_of(choice, len(args))
    args = [
        x if axis is None else jnp.stack([x, jnp.flip(x, 1), x], axis)
        for x, axis in zip(args, axes, strict=True)
    ]

    def derived(fun):
        def total(moved, mask):
            query, key, value, bias = moved
            out = fun(query, key, value, bias, mask)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        grad = jax.grad(total, has_aux=True)
        return jax.jit(jax.vmap(lambda *x: grad(x[:4], x[4]), axes))

    found = derived(jaxmp.dot_product_attention)(*args)
    wide = [x.astype(jnp.float32) if x.dtype == dtype else x for x in args]
    expected = derived(jax.nn.dot_product_attention)(*wide)
    near = 1e-5 if dtype == jnp.float32 else 2e-2
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x = x.astype(jnp.float32)
        assert jnp.linalg.norm(x - y) <= near * jnp.linalg.norm(y)


def test_vmap_over_lengths_and_over_tangents():
    lengths = jnp.array([[3, 5], [12, 1]])

    def attend(fun):
        return lambda x: fun(*arrays(), key_value_seq_lengths=x)

    ours, jaxs = (
        attend(jaxmp.dot_product_attention),
        attend(jax.nn.dot_product_attention),
    )
    found, expected = at_once(jax.vmap(ours), jax.vmap(jaxs))(lengths)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    query, key, value = arrays()
    jacobians = [
        jax.jacfwd(lambda x, f=f: f(query, key * x, value).sum((0, 1)))
        for f in (jaxmp.dot_product_attention, jax.nn.dot_product_attention)
    ]
    np.testing.assert_allclose(*at_once(*jacobians)(jnp.ones(SIZE)), atol=1e-5)


def test_a_bias_that_all_examples_share_has_one_gradient_of_each():
    args, bias = arrays(), normal(3, 1, HEADS, QUERIES, KEYS)
    stacked = jnp.stack([args[0], 2 * args[0]])

    def grads(fun):
        def total(bias, query):
            return jnp.sum(fun(query, *args[1:], bias) ** 2)

        return jax.vmap(jax.grad(total), (None, 0))

    both = map(grads, (jaxmp.dot_product_attention, jax.nn.dot_product_attention))
    np.testing.assert_allclose(*at_once(*both)(bias, stacked), atol=1e-5)
