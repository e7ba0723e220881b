"""Trees: casts, checks and selections, leaf by leaf and for every kind of leaf."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from conftest import bits, crossed

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]
KEY = jax.random.key(0)
# Leaves that have no range to lose, and so are never cast and always finite.
OTHERS = {
    "int": jnp.arange(3),
    "bool": jnp.array([True, False]),
    "uint8": np.arange(2, dtype=np.uint8),
    "key": KEY,
    "raw key": jax.random.PRNGKey(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "None": None,
    "MaskedNode": optax.MaskedNode(),
    "empty": {},
    "string": "adam",
}


def same_objects(tree, other):
    """Tells whether every leaf of one tree is that of the other."""
    return jax.tree.structure(tree) == jax.tree.structure(other) and all(
        a is b for a, b in zip(*map(jax.tree.leaves, (tree, other)), strict=True)
    )


# cast_tree


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leaf", [jnp.ones(2), np.ones(2), np.float64(2)], ids=repr)
def test_every_floating_array_is_cast(leaf, dtype):
    cast = jaxmp.cast_tree({"a": leaf}, dtype)["a"]
    assert cast.dtype == dtype
    assert cast.shape == leaf.shape
    np.testing.assert_array_equal(np.float32(cast), np.float32(leaf))


@pytest.mark.parametrize("leaf", [*OTHERS.values(), 2.5, 1j, jnp.ones(1, complex)])
def test_no_other_leaf_is_cast(leaf):
    assert same_objects(jaxmp.cast_tree([leaf], jnp.float16), [leaf])


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_leaf_of_the_dtype_is_the_same_object(dtype):
    x = jnp.ones(2, dtype)
    assert jaxmp.cast_tree([x], dtype)[0] is x


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "full", "half", "bfloat16"])
def test_a_name_is_the_dtype_that_it_is_in_a_policy(name):
    # NumPy's "f16" has 16 bytes, and its "half" and "f32" are not ours either.
    expected = jaxmp.get_policy(name).cast_to_param({"w": np.ones(2)})["w"].dtype
    assert jaxmp.cast_tree({"w": np.ones(2)}, name)["w"].dtype == expected


@pytest.mark.parametrize(
    "dtype",
    [int, float, bool, complex, None, object, np.longdouble, "int8", "f2", "c8", "O",
     jnp.int32, jnp.complex64, np.dtype("V2"), 16, "floa16"],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("tree", [{}, {"w": np.full(2, 1.75, "f")}], ids=["{}", "w"])
def test_what_is_no_floating_dtype_is_refused(tree, dtype):
    with pytest.raises(ValueError, match="`dtype`"):
        jaxmp.cast_tree(tree, dtype)


def test_narrower_floats_are_cast_to_but_are_no_policy():
    assert jaxmp.cast_tree([jnp.ones(2)], jnp.float8_e5m2)[0].dtype == jnp.float8_e5m2
    with pytest.raises(ValueError, match="must be float16"):
        jaxmp.get_policy(jnp.float8_e5m2)


def test_an_abstract_array_is_cast_and_keeps_its_sharding():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    tree = {
        "w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding),
        "weak": jax.eval_shape(lambda: jnp.array(1.0)),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
        "key": jax.eval_shape(lambda: KEY),
    }
    cast = jaxmp.cast_tree(tree, "f16")
    assert cast["w"] == jax.ShapeDtypeStruct((8, 2), jnp.float16, sharding=sharding)
    assert cast["w"].sharding == sharding
    assert cast["weak"] == jax.eval_shape(lambda: jnp.array(1, jnp.float16))
    assert (cast["n"], cast["key"]) == (tree["n"], tree["key"])
    assert jaxmp.cast_tree(cast, "f16")["w"] is cast["w"]


# all_finite


@pytest.mark.parametrize("dtype", [*FLOATS, jnp.float8_e5m2, jnp.complex64])
@pytest.mark.parametrize(
    "poison", [jnp.inf, pytest.param(-jnp.inf, marks=pytest.mark.evidence), jnp.nan]
)
def test_one_bad_entry_of_one_leaf_is_found(dtype, poison):
    bad = jnp.ones(64, dtype).at[-1].set(poison)
    good = jnp.full(64, jnp.finfo(dtype).max, dtype)
    assert jaxmp.all_finite({"a": good, "b": (good, good)})
    assert not jaxmp.all_finite({"a": good, "b": (good, bad)})
    assert not jax.jit(jaxmp.all_finite)((good, bad))


def test_a_bad_entry_is_found_in_every_leaf_of_a_deep_tree():
    # Leaves alike but for a number in their names are looked at together.
    layer = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3, jnp.float16)}
    tree = {"layer_10": layer, "layer_9": layer, "scales": [jnp.ones(()), 1.0, 2]}
    tree |= {f"deep_{i}": jnp.ones(2) for i in range(40)}  # more than at once
    leaves, structure = jax.tree.flatten(tree)
    assert jaxmp.all_finite(tree)
    for i in [0, 31, 32, *range(len(leaves) - 7, len(leaves) - 1)]:
        bad = np.array(leaves[i])
        bad.flat[-1] = np.nan
        bad = jnp.asarray(bad)
        poisoned = structure.unflatten([*leaves[:i], bad, *leaves[i + 1 :]])
        assert not jaxmp.all_finite(poisoned)
        assert not jax.jit(jaxmp.all_finite)(poisoned)


@pytest.mark.parametrize("part", [complex(jnp.nan, 0), complex(0, jnp.inf)])
def test_each_part_of_a_complex_number_counts(part):
    assert not jaxmp.all_finite(jnp.array([1j, part]))


@pytest.mark.parametrize("leaf", OTHERS.values(), ids=OTHERS)
def test_what_is_not_floating_is_finite(leaf):
    assert jaxmp.all_finite([leaf])
    assert not jaxmp.all_finite([leaf, jnp.nan])


@pytest.mark.parametrize("tree", [None, {}, [], [jnp.ones((0, 3))], 1.0, np.float32(2)])
def test_the_answer_is_a_bool_scalar(tree):
    finite = jaxmp.all_finite(tree)
    assert finite
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)


def test_subnormals_and_the_largest_number_are_finite():
    limits = jnp.finfo(jnp.float32)
    assert jaxmp.all_finite(jnp.array([limits.smallest_subnormal, limits.max, -0.0]))


def test_an_axis_makes_devices_agree():
    x = jnp.ones((4, 2)).at[2, 0].set(jnp.inf)
    alone = jax.vmap(jaxmp.all_finite)(x)
    together = jax.vmap(lambda x: jaxmp.all_finite(x, axis_name="i"), axis_name="i")(x)
    assert alone.tolist() == [True, True, False, True]
    assert together.tolist() == [False] * 4


# select_tree

TREE = {
    "w": jnp.array([1.5, -0.0, jnp.nan], jnp.float16),
    "n": jnp.arange(2),
    "key": jax.random.split(KEY),
    "none": None,
    "masked": optax.MaskedNode(),
}
OTHER_TREE = {
    **TREE,
    "w": jnp.array([0.0, 0.0, jnp.inf], jnp.float16),
    "n": -jnp.arange(2),
    "key": jax.random.split(jax.random.key(1)),
}


@pytest.mark.parametrize("select", [jaxmp.select_tree, jax.jit(jaxmp.select_tree)])
@pytest.mark.parametrize("pred", [True, np.False_, jnp.array(True)])
def test_one_tree_is_selected_bit_for_bit(select, pred):
    selected = select(pred, TREE, OTHER_TREE)
    assert bits(selected) == bits(TREE if pred else OTHER_TREE)


@pytest.mark.parametrize(
    "pred", [1, 1.0, jnp.ones(2, bool), np.ones((1,), bool), jnp.int32(0)], ids=repr
)
def test_a_predicate_that_is_no_bool_scalar_is_refused(pred):
    with pytest.raises(TypeError, match=r"bool scalar as `pred`, but got (an array|1)"):
        jaxmp.select_tree(pred, TREE, OTHER_TREE)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": {}}, "same structure"),
        ({"a": {"w": None}}, "same structure"),
        ({"a": {"w": jnp.ones(3)}}, r"`a/w` is float32\[2\] .* float32\[3\]"),
        ({"a": {"w": jnp.ones((1, 2))}}, r"`a/w` is float32\[2\] .* float32\[1, 2\]"),
        ({"a": {"w": jnp.ones(2, jnp.float16)}}, r"float32\[2\] .* float16\[2\]"),
        ({"a": {"w": jnp.ones(2, jnp.int32)}}, r"float32\[2\] .* int32\[2\]"),
    ],
)
def test_two_trees_that_differ_are_named(other, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.select_tree(True, {"a": {"w": jnp.ones(2)}}, other)


# unscale


SCALES = {repr(x): x for x in (2**15, 2.0**15, np.float32(2**15), jnp.float32(2**15))}


@crossed("dtype scale", FLOATS, SCALES)
def test_gradients_are_divided_in_float32(dtype, scale):
    # Also by a weakly typed scale: float16 alone would give 0 for the second.
    grads = jaxmp.unscale(jnp.array([2.0**-10, 2.0**-14], dtype), scale)
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, [2.0**-25, 2.0**-29])


@crossed("exponent constant", [-126, 24, 64, 65, 127], [True, False])
def test_no_scale_is_too_large_to_divide_by(exponent, constant):
    # XLA multiplies by the reciprocal, and that of 2^127 is subnormal: 0.
    scale = np.float32(2.0**exponent)
    exponents = np.arange(-126, 128)
    exponents = exponents[(exponents - exponent >= -126) & (exponents - exponent < 128)]
    x = np.float32([*(1.25 * 2.0**exponents), -0.0, np.inf, -np.inf])
    if constant:
        result = jax.jit(lambda x: jaxmp.unscale(x, jnp.asarray(scale)))(x)
    else:
        result = jax.jit(jaxmp.unscale)(x, scale)
    assert bits(result) == bits(x / scale)


@pytest.mark.parametrize(
    "scale", [3.0, 2.0**126 * 1.5, float(jnp.finfo("float32").max)]
)
def test_a_scale_that_is_no_power_of_two_rounds_once_or_twice(scale):
    x = np.float32(scale) * np.linspace(2.0**-20, 1, 7, dtype=np.float32)
    eps = float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(
        jax.jit(jaxmp.unscale)(x, scale), np.float64(x) / scale, rtol=2 * eps
    )


@pytest.mark.parametrize("poison", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("scale", [1, 2.0**15])
def test_an_overflow_stays_visible(poison, scale):
    grads = jaxmp.unscale({"w": jnp.array([1, poison], jnp.float16)}, scale)
    assert not jaxmp.all_finite(grads)


@crossed("leaf scale", OTHERS, [1, 2.0**15])
def test_unscaling_passes_other_leaves_through(leaf, scale):
    assert same_objects(jaxmp.unscale([leaf], scale), [leaf])


def test_wider_and_complex_gradients_keep_their_dtype():
    with jax.enable_x64(True):
        grads = {"f64": jnp.ones(1, jnp.float64), "c64": jnp.ones(1, jnp.complex64)}
        unscaled = jaxmp.unscale(grads, jnp.float32(2))
        assert {name: g.dtype for name, g in unscaled.items()} == {
            name: g.dtype for name, g in grads.items()
        }
        assert unscaled["f64"] == unscaled["c64"] == 0.5


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0, "`loss_scale` must be finite and positive in float32, but is 0"),
        (float("inf"), "but is inf"),
        (2.0**128, "finite and positive in float32"),
        (1e-39, "finite and positive in float32"),
        (jnp.ones(2), r"`loss_scale` must be a scalar, but has the shape \[2\]"),
        (np.array(np.inf), "but is inf"),
        (np.int64(-1), "but is -1"),
        (jnp.array(jnp.nan), "but is nan"),
        (jnp.array(0, jnp.bfloat16), "but is 0.0"),
        (jnp.int32(0), "but is 0"),
    ],
)
def test_a_scale_that_cannot_be_one_is_refused(scale, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.unscale(jnp.ones(2), scale)
    with pytest.raises(ValueError, match=message):
        jaxmp.value_and_grad(lambda x: x, loss_scale=scale)
    with pytest.raises(ValueError, match=message):  # a constant of the jitted function
        jax.jit(lambda x: jaxmp.unscale(x, scale))(jnp.ones(2))


@pytest.mark.parametrize(
    "scale",
    ["8", None, 8j, True, np.bool_(True), jnp.array(True), jnp.array(8j), KEY,
     jax.ShapeDtypeStruct((), jnp.float32)],
    ids=repr,
)  # fmt: skip
def test_a_scale_that_is_no_number_is_refused(scale):
    message = "`loss_scale` must be a (number|positive scalar, or an optimizer state)"
    with pytest.raises(TypeError, match=message):
        jaxmp.unscale(jnp.ones(2), scale)
    with pytest.raises(TypeError, match=message):
        jaxmp.value_and_grad(lambda x: x, loss_scale=scale)


@pytest.mark.parametrize(
    "scale",
    [8, 8.0, np.int8(8), np.float16(8), np.array(8), jnp.array(8), jnp.array(8.0),
     jnp.array(8, jnp.bfloat16), Fraction(8)],
    ids=repr,
)  # fmt: skip
def test_any_real_number_will_do_as_a_scale(scale):
    assert jaxmp.unscale(jnp.ones(1), scale) == 0.125
    assert jaxmp.grad(lambda x: x**2, loss_scale=scale)(3.0) == 6
    if not isinstance(scale, Fraction):  # which is no argument of a jitted function
        assert jax.jit(jaxmp.unscale)(jnp.ones(1), scale) == 0.125


def test_a_traced_scale_is_not_looked_at():
    # A check of the value would wait for the device in each step, or fail.
    jaxpr = jax.make_jaxpr(jaxmp.unscale)(jnp.ones(1), jnp.array(0.0))
    primitives = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert not primitives & {"pure_callback", "io_callback", "debug_callback"}
    assert jnp.isinf(jax.jit(jaxmp.unscale)(jnp.ones(1), jnp.array(0.0)))


def test_what_is_wide_already_is_handed_on():
    def widened(x, weak, narrow):
        wide = jaxmp.unscale({"x": x, "weak": weak, "narrow": narrow}, 1)
        assert wide["x"] is x
        assert not wide["weak"].weak_type
        return wide

    found = jax.eval_shape(widened, jnp.ones(3), 1.0, jnp.ones(3, jnp.float16))
    assert {x.dtype for x in found.values()} == {jnp.dtype("float32")}
