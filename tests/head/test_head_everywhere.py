"""The loss head wherever autocast works: policies, loops, batches, many devices."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting import collectives
from benchmarks.counting.measure import relative_error, traced
from conftest import at_once, crossed, normal

BATCH, LENGTH, WIDTH, WORDS = 8, 24, 16, 104
TOKENS = normal(0, BATCH, LENGTH, WIDTH)
LABELS = jax.random.randint(jax.random.key(3), (BATCH, LENGTH), 0, WORDS)
PARAMS = {"up": normal(4, WIDTH, WIDTH), "out": normal(1, WIDTH, WORDS, scale=0.3)}
POLICIES = (
    "float32",
    "mixed_bfloat16",
    "mixed_float16",
    "mixed_float16_bfloat16",
    "mixed_fp8",
)
pytestmark = pytest.mark.filterwarnings("ignore:.*float(16|8).*:UserWarning")


def head(*args, **options):
    return jaxmp.linear_cross_entropy(*args, tile_rows=8, **options)


def rows(*args, **options):
    return jnp.mean(head(*args, reduction="none", **options))


def written(hidden, kernel, labels):
    logits = hidden @ kernel
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss(params, x, labels, head: Any = head):
    return head(jnp.tanh(x @ params["up"]), params["out"], labels)


def equations(fun, *args) -> list[Any]:
    """Returns the heads in a program."""
    found = traced(fun, *args)
    return [x for x in found if x.primitive.name == "linear_cross_entropy"]


def heads(fun, *args):
    """Returns the dtypes of hidden and kernel of each head in a program."""
    return [
        tuple(str(x.aval.dtype) for x in eqn.invars[:2])
        for eqn in equations(fun, *args)
    ]


def text_of(jitted, args):
    return str(jitted.lower(*args).compile().as_text())


def check_near(found, expected, limit=2e-2):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert relative_error(x, y) < limit


@functools.cache
def exact():
    grad = jax.value_and_grad(functools.partial(loss, head=written))
    return jax.jit(grad)(PARAMS, TOKENS, LABELS)


@crossed("policy inside head", POLICIES, [True, False], [head, rows])
def test_all_policies_in_both_orders(policy, inside, head):
    fun = functools.partial(loss, head=head)
    if inside:
        grad = jax.value_and_grad(jaxmp.autocast(fun, policy))
    else:
        grad = jaxmp.autocast(jax.value_and_grad(fun), policy)
    check_near(jax.jit(grad)(PARAMS, TOKENS, LABELS), exact())
    dtypes = {"mixed_float16_bfloat16": {"float16"}, "mixed_fp8": {"bfloat16"}}
    if policy not in dtypes:
        dtypes[policy] = {policy.removeprefix("mixed_")}
    elif head is rows and "_bfloat16" in policy:  # the backward pass
        dtypes[policy].add("bfloat16")
    found = heads(grad, PARAMS, TOKENS, LABELS)
    assert {x for pair in found for x in pair} == dtypes[policy]


def kept_by_list(fun):
    ops = jaxmp.DEFAULT_OPS.with_deny("linear_cross_entropy")
    return jaxmp.autocast(fun, ops=ops)


def kept_by_region(fun):
    return jaxmp.autocast(
        jax.grad(functools.partial(loss, head=jaxmp.float32_region(head)))
    )


@pytest.mark.parametrize("kept", [kept_by_list, kept_by_region])
def test_what_is_kept_in_float32_is_float32(kept):
    assert heads(kept(jax.grad(loss)), PARAMS, TOKENS, LABELS) == [("float32",) * 2]


@pytest.mark.parametrize("inside", [True, False])
def test_the_gradient_of_a_float32_kernel_is_not_rounded(inside):
    def total(kernel):
        return head(TOKENS, kernel, LABELS)

    grad = (
        jax.grad(jaxmp.autocast(total)) if inside else jaxmp.autocast(jax.grad(total))
    )
    found = jax.jit(grad)(PARAMS["out"])
    assert np.mean(found != found.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9


def test_without_gradients_none_are_computed():
    (eqn,) = equations(jaxmp.autocast(loss), PARAMS, TOKENS, LABELS)
    assert [x.aval.shape for x in eqn.outvars] == [(), ()]
    frozen = jax.grad(lambda x: loss(PARAMS, x, LABELS))
    (eqn,) = equations(frozen, TOKENS)
    assert PARAMS["out"].shape not in [x.aval.shape for x in eqn.outvars]


@pytest.mark.parametrize("residuals", ["int8", "fp8"])
@pytest.mark.parametrize("head", [head, rows])
def test_what_it_keeps_is_not_stored_in_eight_bits(residuals, head):
    def total(x, kernel):
        return head(jnp.sin(x), kernel, LABELS)

    grad = jax.grad(total, 1)
    both = at_once(jaxmp.autocast(grad, residuals=residuals), jaxmp.autocast(grad))
    np.testing.assert_array_equal(*both(TOKENS, PARAMS["out"]))
    grad = jaxmp.autocast(
        jax.grad(functools.partial(loss, head=head)), residuals=residuals
    )
    check_near(jax.jit(grad)(PARAMS, TOKENS, LABELS), exact()[1], 5e-2)


@crossed("inside head", [True, False], [head, rows])
def test_in_a_scan_and_computed_again(inside, head):
    def chunks(params, x, labels):
        call = jax.checkpoint(functools.partial(loss, head=head))

        def add(total, xs):
            return total + call(params, *xs) / BATCH, None

        return lax.scan(add, 0.0, (x, labels))[0]

    grad = jax.value_and_grad(chunks)
    cast = (
        jax.value_and_grad(jaxmp.autocast(chunks)) if inside else jaxmp.autocast(grad)
    )
    check_near(jax.jit(cast)(PARAMS, TOKENS, LABELS), exact())


def test_micro_batches():
    grad = jaxmp.value_and_grad(loss, accum_steps=2, batch_argnums=(1, 2))
    check_near(jax.jit(jaxmp.autocast(grad))(PARAMS, TOKENS, LABELS), exact())


@crossed("head cast", [head, rows], [True, False])
def test_vmap(head, cast):
    def fun(head):
        each = functools.partial(loss, head=head)
        each = jaxmp.autocast(each) if cast and head is not written else each
        many = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), PARAMS)

        def run(x, labels):
            mean = jax.grad(
                lambda p: jnp.mean(jax.vmap(each, (None, 0, 0))(p, x, labels))
            )
            models = jax.vmap(jax.grad(each), (0, None, None))(many, x, labels)
            examples = jax.vmap(jax.grad(each), (None, 0, 0))(PARAMS, x, labels)
            both: Any = jax.vmap(jax.vmap(each, (None, 0, None)), (0, None, None))
            same = jax.vmap(lambda y: each(PARAMS, x[0], y))(labels)
            return mean(PARAMS), models, examples, both(many, x, labels[0]), same

        return run

    found, expected = at_once(fun(head), fun(written))(TOKENS, LABELS)
    check_near(found, expected, 3e-2 if cast else 1e-5)


def test_export_with_any_number_of_rows():
    sizes = jax.export.symbolic_shape("b")[0]
    x = jax.ShapeDtypeStruct((sizes, WIDTH), jnp.float32)
    y = jax.ShapeDtypeStruct((sizes,), jnp.int32)
    fun = jax.jit(jax.value_and_grad(lambda x, y: head(x, PARAMS["out"], y)))
    exported = jax.export.export(fun)(x, y)
    found = exported.call(TOKENS[0], LABELS[0])
    check_near(found, fun(TOKENS[0], LABELS[0]), 1e-6)


def on_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


SHARDED = {  # tokens, kernel
    "batch": (P("data"), P()),
    "batch over all": (P(("data", "model")), P()),
    "sequence": (P("data", "model"), P()),
    "words": (P("data"), P(None, "model")),
    "parameters": (P("data"), P("data")),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("head", [head, rows])
def test_each_device_tiles_its_own_rows(name, head):
    """Devices send what they send for the written form, and no tokens."""
    mesh = on_mesh()
    tokens, kernel = (NamedSharding(mesh, spec) for spec in SHARDED[name])
    args = [
        jax.device_put(TOKENS, tokens),
        jax.device_put(PARAMS["out"], kernel),
        jax.device_put(LABELS, tokens),
    ]

    def sent(head):
        grad = jaxmp.autocast(jax.value_and_grad(head, (0, 1)))
        jitted = jax.jit(grad, out_shardings=(None, (tokens, kernel)))
        check_near(jitted(*args), jax.value_and_grad(written, (0, 1))(*args), 1e-2)
        found = collectives.collectives(text_of(jitted, args))
        return sum(x.sent for x in found), {x.kind for x in found}

    (ours, kinds), (theirs, others) = sent(head), sent(written)
    assert kinds <= others
    if name == "words":  # the losses of the rows are looked up on both sides
        assert ours <= 1.25 * theirs
    else:
        assert ours <= theirs + 64


def megatron(hidden, kernel, labels):
    logits = hidden @ kernel
    top = lax.pmax(lax.stop_gradient(jnp.max(logits, -1)), "model")
    mass = lax.psum(jnp.sum(jnp.exp(logits - top[..., None]), -1), "model")
    first = lax.axis_index("model") * kernel.shape[1]
    is_label = jnp.arange(kernel.shape[1]) == (labels - first)[..., None]
    at = lax.psum(jnp.sum(jnp.where(is_label, logits, 0), -1), "model")
    return jnp.mean(jnp.log(mass) + top - at)


@crossed("check_vma outside cast head", *[[True, False]] * 3, [head, rows])
def test_in_shard_map_it_is_as_the_written_form(check_vma, outside, cast, head):
    """Also where JAX counts gradients more than once."""
    by_words = functools.partial(head, vocab_axis_name="model")
    pairs = [(written, head, P()), (megatron, by_words, P(None, "model"))]
    for theirs, ours, kernel in pairs:
        grads = []
        for fun in (theirs, ours):
            grad = functools.partial(jax.value_and_grad, argnums=(0, 1))
            specs = {"in_specs": (P("data"), kernel, P("data")), "mesh": on_mesh()}
            shard = functools.partial(jax.shard_map, **specs, check_vma=check_vma)

            def mean(*args, fun=fun):
                return lax.pmean(fun(*args), "data")

            if outside:
                fun = grad(shard(mean, out_specs=P()))
                fun = jaxmp.autocast(fun) if cast else fun
            else:
                fun = grad(mean)
                fun = jaxmp.autocast(fun) if cast else fun
                fun = shard(fun, out_specs=(P(), (P("data"), kernel)))
            grads.append(jax.jit(fun)(TOKENS, PARAMS["out"], LABELS))
        check_near(grads[1], grads[0], 1e-2 if cast else 1e-5)


def put_on(mesh, specs):
    """Returns the arguments of a head, sharded as two specs say."""
    tokens, kernel = (NamedSharding(mesh, spec) for spec in specs)
    return [
        jax.device_put(TOKENS, tokens),
        jax.device_put(PARAMS["out"], kernel),
        jax.device_put(LABELS, tokens),
    ]


@crossed("is_set head specs", [True, False], [head, rows], SHARDED)
def test_types_that_name_how_arrays_are_sharded(is_set, head, specs):
    mesh = on_mesh(AxisType.Explicit)
    args = put_on(mesh, specs)
    grad: Any = jax.jit(jaxmp.autocast(jax.value_and_grad(head, (0, 1))))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        found = grad(*args)
        kinds = {x.kind for x in collectives.collectives(text_of(grad, args))}
    for x, y in zip(found[1], args, strict=False):
        assert x.sharding.is_equivalent_to(y.sharding, y.ndim)
    if specs != SHARDED["parameters"]:
        assert kinds == {"all-reduce"}
    expected = jax.value_and_grad(written, (0, 1))(TOKENS, PARAMS["out"], LABELS)
    check_near(found, expected, 1e-2)


@crossed("head specs", [head, rows], SHARDED)
def test_derivatives_of_gradients_where_types_name_shardings(head, specs):
    mesh = on_mesh(AxisType.Explicit)
    args = put_on(mesh, specs)

    def products(head):
        grad = jax.grad(head, (0, 1))

        def along(*args):
            moved = args[:2]
            return jax.jvp(lambda *x: grad(*x, args[2]), moved, moved)[1]

        def back(*args):
            squares = [jnp.sum(x**2) for x in grad(*args)]
            return squares[0] + squares[1]

        return lambda *args: (along(*args), jax.grad(back, (0, 1))(*args))

    expected = jax.jit(products(written))(TOKENS, PARAMS["out"], LABELS)
    with jax.set_mesh(mesh):
        found = jax.jit(products(head))(*args)
    for several in found:
        for x, y in zip(several, args, strict=False):
            assert x.sharding.is_equivalent_to(y.sharding, y.ndim)
    check_near(found, expected, 1e-5)
