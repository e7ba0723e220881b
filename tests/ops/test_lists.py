import gc
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

import jaxmp
from benchmarks.counting.measure import traced
from conftest import crossed
from jaxmp._jaxprs.jaxpr import CALL_KINDS
from jaxmp._ops import products, table
from jaxmp._ops.lists import DEFAULT_OPS, OpLists
from jaxmp._ops.table import CLASSES, FOLDS, TABLE, named

pytestmark = pytest.mark.usefixtures("few_objects")


def test_every_primitive_of_this_jax_is_listed():
    # In a process of its own, where no other library has made primitives.
    program = """
import jax, jax.numpy, jax.nn, jax.scipy.special, jax.scipy.linalg, jax.export
from jaxmp._jaxprs.jaxpr import live_primitives
print(*live_primitives())
"""
    run = [sys.executable, "-c", program]
    names = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    missing = set(names.split()) - TABLE.keys()
    assert not missing, f"put into a row of `_ops/table.py`: {sorted(missing)}"


def test_each_primitive_has_one_row():
    text = inspect.getsource(table).split('_TABLE = """')[1].split('"""')[0]
    rows = [line.split("|") for line in text.splitlines() if line]
    names = [name for row in rows for name in row[0].split()]
    assert len(names) == len(TABLE)
    assert {row.kind for row in TABLE.values()} == CLASSES.keys()
    lists = [DEFAULT_OPS.allow, DEFAULT_OPS.deny, DEFAULT_OPS.infer, named("call")]
    assert sum(map(len, lists)) == len(TABLE)


def test_what_the_engine_knows_by_name_has_a_row():
    assert named("call") == CALL_KINDS.keys()
    assert named("matmul") == products.PRODUCTS
    assert named("opaque") >= products.SCALED_PRODUCTS
    assert FOLDS.keys() <= TABLE.keys()
    with pytest.raises(AssertionError, match="no_such_primitive"):
        table.one_of("add no_such_primitive")


def test_a_primitive_on_a_frozen_heap_is_known_by_its_derivative():
    frozen = Primitive("a_primitive_on_a_frozen_heap")
    frozen.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[frozen] = lambda primals, tangents: (primals, tangents)
    gc.freeze()
    try:
        assert frozen.name in DEFAULT_OPS.with_allow(frozen).allow
    finally:
        gc.unfreeze()
        del ad.primitive_jvps[frozen]


def test_lists_are_values():
    moved = DEFAULT_OPS.with_deny("tanh")
    assert moved != DEFAULT_OPS
    assert moved.with_infer("tanh") == DEFAULT_OPS
    assert hash(moved.with_infer("tanh")) == hash(DEFAULT_OPS)
    assert moved.with_deny("tanh") == moved


def test_a_primitive_of_the_users_own_can_be_moved():
    own = Primitive("a_primitive_of_these_tests")
    assert own.name in DEFAULT_OPS.with_allow(own).allow
    assert own.name in DEFAULT_OPS.with_infer(own.name).infer


def test_a_name_that_nothing_has_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"`dot_generl` is not.*`dot_general`"):
        DEFAULT_OPS.with_deny("dot_generl")
    with pytest.raises(ValueError, match=r"`scatter_add`.*`scatter-add`"):
        OpLists(allow=frozenset(), deny=frozenset({"scatter_add"}), infer=frozenset())


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="`tanh` is in two lists"):
        OpLists(allow={"tanh"}, deny={"tanh"}, infer=())
    with pytest.raises(ValueError, match=r'`scan` holds.*with_deny\("scan"\)'):
        DEFAULT_OPS.with_allow("scan")


def test_printing_shows_each_list_in_lines_that_fit():
    lines = str(DEFAULT_OPS).splitlines()
    starts = [line.split(":")[0] for line in lines if not line.startswith(" ")]
    assert starts == ["allow", "deny", "infer"]
    assert max(map(len, lines)) <= 88


def test_an_unknown_primitive_sees_the_dtypes_it_was_written_for():
    unknown = Primitive("unknown_to_jaxmp")
    seen = []

    @unknown.def_abstract_eval
    def _(x):
        seen.append(x.dtype)
        return x

    jax.make_jaxpr(jaxmp.autocast(lambda x: unknown.bind(x @ x) @ x))(jax.numpy.eye(8))
    assert set(map(str, seen)) == {"float32"}


def test_lists_are_spelled_by_what_differs_from_the_default():
    ops = jaxmp.DEFAULT_OPS
    names = {"DEFAULT_OPS": ops, "OpLists": jaxmp.OpLists}
    few = jaxmp.OpLists("dot_general", (), ("add", "mul"))
    moved = ops.with_allow("exp").with_deny("tanh", "scan").with_infer("log")
    for lists, length in ((ops, 12), (moved, 100), (few, 80)):
        assert eval(repr(lists), names) == lists
        assert len(repr(lists)) < length
    assert repr(ops.with_deny("tanh")) == "DEFAULT_OPS.with_deny('tanh')"


def test_the_smallest_size_is_a_value_of_the_lists():
    ops = jaxmp.DEFAULT_OPS
    small = ops.with_fp8(min_size=16)
    assert (ops.min_size, small.min_size) == (2048, 16)
    assert small != ops
    assert small.with_fp8(min_size=2048) == ops
    assert hash(small.with_fp8(min_size=2048)) == hash(ops)
    both = small.with_deny("tanh").with_rounded_matmuls()
    assert both.min_size == 16
    names = {"DEFAULT_OPS": ops, "OpLists": jaxmp.OpLists}
    few = jaxmp.OpLists("dot_general", (), "add", min_size=16)
    for lists in (small, both, few):
        assert eval(repr(lists), names) == lists
    assert repr(small) == "DEFAULT_OPS.with_fp8(min_size=16)"
    assert "float8: matmuls of sizes from 16 on" in str(small)
    with pytest.raises(ValueError, match="`min_size` must be at least 1"):
        ops.with_fp8(min_size=0)
    with pytest.raises(TypeError, match="`min_size` must be an integer"):
        ops.with_fp8(min_size=16.0)


def test_rounded_products_are_a_value_of_the_lists():
    ops = jaxmp.DEFAULT_OPS
    rounded = ops.with_rounded_matmuls()
    assert rounded != ops
    assert rounded == ops.with_rounded_matmuls().with_rounded_matmuls()
    assert hash(rounded) == hash(ops.with_rounded_matmuls())
    both = ops.with_deny("tanh").with_rounded_matmuls()
    assert both == rounded.with_deny("tanh")
    assert repr(both) == "DEFAULT_OPS.with_deny('tanh').with_rounded_matmuls()"
    assert "16 bits" in str(rounded)
    assert "16 bits" not in str(ops)
    few = jaxmp.OpLists("dot_general", (), "add", rounds_matmuls=True)
    names = {"DEFAULT_OPS": ops, "OpLists": jaxmp.OpLists}
    assert eval(repr(few), names) == few


X, ROWS = jnp.linspace(0.1, 1, 24).reshape(3, 8), jnp.array([0, 1, 1])
# All but the power hold a function of two numbers, which was written for float32.
REDUCE = {
    "scatter-add": lambda h: jnp.zeros((2, 8)).at[ROWS].add(h),
    "scatter-sub": lambda h: jnp.ones((2, 8)).at[ROWS].subtract(h),
    "scatter-mul": lambda h: jnp.ones((2, 8)).at[ROWS[:2]].mul(h[:2]),
    "scatter-min": lambda h: jnp.ones((2, 8)).at[ROWS].min(h),
    "scatter-max": lambda h: jnp.zeros((2, 8)).at[ROWS].max(h),
    "integer_pow": lambda h: h**4,
    "reduce": lambda h: lax.reduce(h, 0.0, lambda a, b: a + 1.5 * b, (0,))[None],
    "reduce_window": lambda h: lax.reduce_window(
        h, 0.0, lambda a, b: a + 1.5 * b, (2, 1), (1, 1), "VALID"
    ),
}


@crossed("name move", [*REDUCE], [OpLists.with_infer, OpLists.with_allow])
def test_reductions_scatters_and_powers_run_in_16_bits_where_the_user_wants_it(
    name, move
):
    def fun(x, w):
        return REDUCE[name](x @ w) @ w

    cast = jaxmp.autocast(fun, "bfloat16", ops=move(DEFAULT_OPS, name))
    eqns = traced(cast, X, jnp.eye(8))
    (eqn,) = [eqn for eqn in eqns if eqn.primitive.name == name]
    assert eqn.outvars[0].aval.dtype == jnp.bfloat16
    found = jax.jit(cast)(X, jnp.eye(8))
    np.testing.assert_allclose(found, fun(X, jnp.eye(8)), rtol=0.02)


def test_both_passes_of_sums_along_edges_run_in_16_bits_where_the_user_wants_it():
    """What the backward pass adds up was divided and chosen from on its way there."""

    def loss(x, w):
        edges = jax.nn.relu(x @ w)[ROWS]
        return (jnp.zeros((3, 8)).at[ROWS[::-1]].add(edges) / 3 @ w).sum()

    ops = DEFAULT_OPS.with_infer("scatter-add")
    cast = jaxmp.autocast(jax.value_and_grad(loss), "bfloat16", ops=ops)
    sums = [e for e in traced(cast, X, jnp.eye(8)) if e.primitive.name == "scatter-add"]
    assert [eqn.outvars[0].aval.dtype for eqn in sums] == [jnp.bfloat16] * 2
