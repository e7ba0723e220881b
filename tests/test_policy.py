"""Policies: their strings, their casts, and what they refuse."""

import itertools
import pickle
import re
from functools import partial
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import nnx, struct
from hypothesis import given
from hypothesis import strategies as st

import jaxmp

F16, BF16, F32, F64 = (
    np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
)


def dtypes(policy):
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "c=f16": (F32, F16, F16),
        "p=f16": (F16, F16, F16),
        "o=f16": (F32, F32, F16),
        "p=f16,c=bf16": (F16, BF16, BF16),
        "c=f16, o=f32": (F32, F16, F32),
        " params = full , compute = bfloat16 , output = float64 ": (F32, BF16, F64),
        "f16": (F16, F16, F16),
        "bf16": (BF16, BF16, BF16),
        "full": (F32, F32, F32),
        "float64": (F64, F64, F64),
        "mixed_float16": (F32, F16, F32),
        "mixed_bfloat16": (F32, BF16, F32),
        "O0": (F32, F32, F32),
        "O1": (F32, F16, F32),
        "O2": (F32, F16, F32),
        "O3": (F16, F16, F16),
    }.items(),
)
def test_a_string_names_three_dtypes(text, expected):
    assert dtypes(jaxmp.get_policy(text)) == expected


@pytest.mark.parametrize("text", ["c=f16", "p=bf16", "c=bf16,o=f32", "half", "f64"])
def test_jmps_grammar_means_what_it_means_in_jmp(text):
    theirs = jmp.get_policy(text)
    assert dtypes(jaxmp.get_policy(text)) == dtypes(jaxmp.get_policy(theirs))
    ours = jmp.get_policy(str(jaxmp.get_policy(text)))
    assert jaxmp.get_policy(ours) == jaxmp.get_policy(text)


def test_a_policy_is_a_jmp_policy_and_passes_through():
    policy = jaxmp.get_policy("mixed_float16")
    assert isinstance(policy, jmp.Policy)
    assert jaxmp.get_policy(policy) is policy


def test_spellings_of_a_dtype_give_one_policy():
    spellings = [jnp.float16, np.float16, np.dtype("float16"), "f16", "float16"]
    policies = {jaxmp.Policy(jnp.float32, d, "full", [["w", d]]) for d in spellings}
    assert len(policies) == 1
    (policy,) = policies
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert eval(repr(policy), {"get_policy": jaxmp.get_policy}) == policy


names = st.sampled_from(["f16", "bf16", "f32", "f64"])
patterns = st.text().map(re.escape) | st.sampled_from(['a,"b"=f16', r"\d+/w$", "", " "])


@given(names, names, names, st.lists(st.tuples(patterns, names), max_size=3))
def test_the_string_of_a_policy_reads_back(p, c, o, overrides):
    policy = jaxmp.Policy(p, c, o, overrides)
    assert jaxmp.get_policy(str(policy)) == policy


BAD = {
    "fp16": "`fp16` in the policy 'fp16'.*Did you mean `f16`",
    "float": "`float` in the policy",
    "int8": "`int8` in the policy",
    "": "`` in the policy ''",
    "mixed_fp16": "Did you mean `mixed_float16`",
    "o1": "Did you mean `O1`",
    "c=int8": "`int8` in the policy 'c=int8'.*Expected one of half, f16",
    "p=f32=f16": "`f32=f16` in the policy",
    "c=f16,c=f32": "`c=f32` in the policy.*repeats.*`compute_dtype` is float16",
    "c=f16,compute=f16": "`compute=f16` in the policy.*repeats",
    "comput=f16": "`comput=f16`.*p, params, c, compute.*Did you mean `compute`",
    "c=f16,": "`` in the policy 'c=f16,' is not understood",
    "c=f16;o=f32": "`f16;o=f32` in the policy",
    'c=f16,"norm"': '`"norm"` in the policy',
    '"["=f16': "not a regular expression.*unterminated",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=BAD.keys())
def test_a_bad_string_is_quoted_and_corrected(text, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.get_policy(text)


@pytest.mark.parametrize(
    "dtype",
    [jnp.int32, jnp.complex64, bool, None, float, object, "int8", jnp.float8_e5m2],
)
def test_a_dtype_that_no_policy_has_is_refused(dtype):
    with pytest.raises(ValueError, match="compute_dtype"):
        jaxmp.Policy(jnp.float32, dtype, jnp.float32)


@pytest.mark.parametrize(
    "override", ["norm", ("norm",), (3, "f16"), ("(", "f16"), ("a", "i8")]
)
def test_a_bad_override_is_refused(override):
    with pytest.raises(ValueError, match="overrid"):
        jaxmp.get_policy("float16").with_overrides(override)


@pytest.mark.parametrize("policy", [None, 16, jnp.float16])
def test_what_is_neither_string_nor_policy_is_refused(policy):
    with pytest.raises(TypeError, match="needs a string or a policy"):
        jaxmp.get_policy(policy)


def test_only_floating_arrays_are_cast():
    key = jax.random.key(0)
    tree = {
        "f32": jnp.ones(2),
        "bf16": jnp.ones(2, jnp.bfloat16),
        "numpy": np.ones(2),
        "scalar": np.float32(2),
        "int": jnp.arange(2),
        "bool": jnp.array(True),
        "complex": jnp.ones(2, jnp.complex64),
        "key": key,
        "none": None,
        "float": 1.5,
        "text": "relu",
        "function": jnp.sin,
    }
    cast = jaxmp.get_policy("float16").cast_to_compute(tree)
    for name in ("f32", "bf16", "numpy", "scalar"):
        assert cast.pop(name).dtype == jnp.float16
        del tree[name]
    assert cast == tree


def test_a_leaf_of_the_right_dtype_is_the_same_object():
    x = jnp.ones(2)
    assert jaxmp.get_policy("float32").cast_to_compute(x) is x


def test_the_last_matching_override_wins_and_affects_compute_only():
    policy = jaxmp.get_policy("c=f16").with_overrides(
        ("head", "bf16"), ("head/bias", "f32"), ("tail", "f64")
    )
    tree = {"head": {"bias": jnp.ones(1), "w": jnp.ones(1)}, "w": jnp.ones(1)}
    cast = policy.cast_to_compute(tree)
    assert [x.dtype for x in jax.tree.leaves(cast)] == [F32, BF16, F16]
    assert {x.dtype for x in jax.tree.leaves(policy.cast_to_output(tree))} == {F16}
    assert jaxmp.unused_overrides(policy, tree) == ("tail",)


def test_a_path_begins_at_each_argument():
    policy = jaxmp.get_policy("c=f16,o=f32").with_overrides(("^params/w$", "f32"))
    variables = {"params": {"w": jnp.ones(1)}}

    @partial(jaxmp.with_policy, policy=policy)
    def dtypes(variables, x):
        return variables["params"]["w"].dtype, x.dtype

    assert policy.cast_to_compute(variables)["params"]["w"].dtype == F32
    assert dtypes(variables, jnp.ones(1)) == (F32, F16)
    assert dtypes(variables=variables, x=jnp.ones(1)) == (F32, F16)


@pytest.mark.parametrize("cast", ["cast_to_param", "cast_to_compute", "cast_to_output"])
def test_running_statistics_stay_at_least_float32(cast):
    tree = {"params": {"w": jnp.ones(1)}, "batch_stats": {"bn": {"mean": jnp.ones(1)}}}
    policy = jaxmp.get_policy("float16")
    result = getattr(policy, cast)(tree)
    chex.assert_trees_all_equal_dtypes(
        result, {"params": {"w": jnp.ones(1, F16)}, "batch_stats": tree["batch_stats"]}
    )
    narrow = policy.with_overrides(("batch_stats", "bf16"))
    assert narrow.cast_to_compute(tree)["batch_stats"]["bn"]["mean"].dtype == BF16


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        x = nn.LayerNorm(name="ln_1")(x)
        x = nn.GroupNorm(2, name="encoder_norm")(x)
        x = nn.RMSNorm(name="bn1")(x)
        x = nn.Sequential([nn.LayerNorm(use_bias=False), nn.Dense(2)])(x)
        x = nn.LayerNorm(use_scale=False, name="norm_1")(x)
        x = nn.Dense(2, name="normal")(x)
        return x * self.param("scale", nn.initializers.ones, (2,))


def test_o2_keeps_normalisation_parameters_in_float32():
    variables = Norms().init(jax.random.key(0), jnp.ones((1, 4)))
    policy = jaxmp.get_policy("O2")
    cast = policy.cast_to_compute(variables)["params"]
    kept = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in jax.tree.leaves_with_path(cast)
        if x.dtype == F32
    }
    assert kept == {
        "BatchNorm_0/scale",
        "BatchNorm_0/bias",
        "ln_1/scale",
        "ln_1/bias",
        "encoder_norm/scale",
        "encoder_norm/bias",
        "bn1/scale",
        "LayerNorm_0/scale",
        "norm_1/bias",
        "scale",
    }
    assert jaxmp.unused_overrides("O2", variables) == ()


class Own(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A box that calls what it holds by another name."""

    array: Any

    def unbox(self):
        return self.array

    def replace_boxed(self, val):
        return self.replace(array=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


BOXES = {
    "Partitioned": lambda x: nn.Partitioned(x, ("model",)),
    "LogicallyPartitioned": lambda x: nn.LogicallyPartitioned(x, ("embed",)),
    "own": Own,
    "box in a box": lambda x: nn.Partitioned(Own(x), (None,)),
    "nnx.Param": nnx.Param,
}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES.keys())
def test_overrides_match_boxed_parameters_as_unboxed_ones(box):
    # Two of the names are those that boxes give to what they hold.
    names = "scale", "kernel", "value", "array"
    unboxed = {"layer": {name: jnp.ones(2) for name in names}}
    boxed = jax.tree.map(box, unboxed)
    patterns = "scale$", "^layer/value$", "/array$", "value/", "kernel/value", "kernel"
    for used in itertools.permutations(patterns, 2):
        policy = jaxmp.get_policy("c=bf16").with_overrides(*((p, F32) for p in used))
        expected = policy.cast_to_compute(unboxed)
        chex.assert_trees_all_equal_dtypes(
            jax.tree.leaves(policy.cast_to_compute(boxed)), jax.tree.leaves(expected)
        )
        unused = jaxmp.unused_overrides(policy, unboxed)
        assert jaxmp.unused_overrides(policy, boxed) == unused
    assert jax.tree.structure(policy.cast_to_compute(boxed)) == jax.tree.structure(
        boxed
    )


def test_a_tree_in_a_box_keeps_its_own_names():
    policy = jaxmp.get_policy("c=bf16").with_overrides(("^cell/value$", "f32"))
    tree = {"cell": nn.Partitioned({"kernel": jnp.ones(2), "value": jnp.ones(2)}, ())}
    held = policy.cast_to_compute(tree)["cell"].value
    assert (held["kernel"].dtype, held["value"].dtype) == (BF16, F32)


def test_overrides_match_the_parameters_of_an_nnx_module_by_their_names():
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    policy = jaxmp.get_policy("c=bf16").with_overrides(("^scale$", "f32"))
    for tree in (model, nnx.state(model, nnx.Param)):
        cast = nnx.state(policy.cast_to_compute(tree))
        assert (cast["scale"].dtype, cast["bias"].dtype) == (F32, BF16)
        assert jaxmp.unused_overrides(policy, tree) == ()


def test_other_output_dtypes_keep_the_overrides():
    policy = jaxmp.get_policy("O2").with_output_dtype("bf16")
    assert policy.output_dtype == BF16
    assert policy.overrides == jaxmp.get_policy("O2").overrides
