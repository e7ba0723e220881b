"""What the audit and the sensitivity say of programs of other libraries."""

import contextlib
import importlib
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from laws import KEY, Program, normal

import jaxmp
from jaxmp._diagnosis.audit.hazards import of_products
from jaxmp._jaxprs.places import Place

# The programs that have hazards, and which.
WRONG = {}
LIBRARIES = ("diffrax", "equinox", "graphs", "haiku", "jax", "linen", "probabilistic")


def programs_of(library):
    """Returns the functions that build programs of a library, by name."""
    try:
        module = importlib.import_module(f"test_{library}_programs")
    except pytest.skip.Exception:  # a library that is not installed
        return {}
    return {
        name: fun
        for name, fun in vars(module).items()
        if inspect.isfunction(fun)
        and fun.__module__ == module.__name__
        and not inspect.signature(fun).parameters
        and not name.startswith("test_")
    }


@pytest.mark.evidence
@pytest.mark.parametrize("library", LIBRARIES)
def test_clean_programs_of_a_library_have_no_hazards(library):
    for name, build in programs_of(library).items():
        program = build()
        if isinstance(program, Program):
            grad = jax.value_and_grad(program.loss, has_aux=program.has_aux)
            for fun in (grad, jaxmp.autocast(grad)):
                jaxpr = jax.make_jaxpr(fun)(*program.args)
                kinds = {hazard.kind for hazard in of_products(jaxpr, Place())[0]}
                assert kinds == WRONG.get(name, set()), name


def measure(loss, *args, **options):
    return jaxmp.sensitivity(loss, "bfloat16", progress=False, **options)(*args)


@pytest.mark.evidence
def test_an_equinox_model_is_measured_by_its_layers():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 4, 8, 2, key=KEY)  # with its activation among the leaves

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    report = measure(loss, model, normal(1, 8, 8), normal(2, 8, 4), tolerance=1e-3)
    paths = {row.path for row in report.modules}
    assert {f"MLP/layers/{i}" for i in range(3)} <= paths
    assert 1e-3 < report.gradients < 0.1
    assert set(report.float32_paths) <= paths
    assert report.meets_tolerance


@pytest.mark.evidence
def test_a_haiku_net_with_a_state_is_measured_by_its_modules():
    program = programs_of("haiku")["net_with_state"]()
    report = measure(program.loss, *program.args, has_aux=True, tolerance=2e-3)
    paths = {row.path for row in report.modules}
    assert {"conv2_d", "linear", "linear_1"} <= {x.split("/")[0] for x in paths}
    assert 2e-3 < report.gradients < 0.2
    kept = jaxmp.autocast(program.loss, float32_paths=report.float32_paths)
    jax.eval_shape(kept, *program.args)  # each path is one of autocast's


def test_nnx_modules_are_measured_by_their_attributes():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.features = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.head = nnx.Linear(8, 1, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.head(jnp.sin(60 * self.features(x)))

    net = Net(nnx.Rngs(0))

    def loss(net, x):
        return jnp.mean(net(x) ** 2)

    report = measure(loss, net, normal(1, 8, 8))
    assert report.float32_paths == ("Net/features",)
    assert report.meets_tolerance
    (hazard,) = jaxmp.audit(jaxmp.autocast(loss))(net, normal(1, 8, 8)).hazards
    assert (hazard.kind, hazard.module) == ("phase", "Net/features")


# Where arrays are that not every operation takes, and what of them overflows float16.


def in_a_reference(w, x):
    total = jax.new_ref(jnp.zeros_like(x))
    total[...] += jnp.tanh(x @ w)
    half = jax.new_ref(jnp.zeros(x.shape, jnp.float16))
    half[...] = (x @ w).astype(jnp.float16)
    return jnp.mean((total[...] + half[...]) @ w)


def in_the_memory_of_the_host(w, x):
    names = {
        "names_which_can_be_saved": [],
        "names_which_can_be_offloaded": ["h"],
        "offload_src": "device",
        "offload_dst": "pinned_host",
    }
    policies = jax.checkpoint_policies
    policy = policies.save_and_offload_only_these_names(**names)

    def layer(h, _):
        h = checkpoint_name(h, "h")
        return h + jnp.tanh(h @ w) @ w, None

    layers = jax.checkpoint(layer, policy=policy)
    return jnp.mean(jax.lax.scan(layers, x, None, length=2)[0] ** 2)


def in_a_mesh_of_other_axes(w, x):
    @jax.sharding.auto_axes
    def layer(w, x):
        return jnp.tanh(x @ w)

    def step(h, w):
        return layer(w, h @ w, out_sharding=PartitionSpec("d", None)), None

    return jnp.mean(jax.lax.scan(step, x, jnp.stack([w, w]))[0] ** 2)


def test_what_float32_does_is_unknown_where_a_reference_keeps_16_bits():
    def loss(w, x):
        half = jax.new_ref(jnp.zeros(x.shape, jnp.float16))
        half[...] = (x @ w).astype(jnp.float16) * 1000
        return jnp.mean(half[...].astype(jnp.float32))

    w, x = normal(0, 16, 16, scale=100.0), normal(1, 8, 16)
    report = jaxmp.find_overflow(loss)(w, x)
    assert report.first is not None
    assert report.finite_in_float32 is None


@pytest.mark.parametrize(
    "loss", [in_a_reference, in_the_memory_of_the_host, in_a_mesh_of_other_axes]
)
def test_reports_read_arrays_wherever_they_are(loss):
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    w, x = normal(0, 16, 16, scale=0.25), normal(1, 8, 16)
    with contextlib.ExitStack() as within:
        if loss is in_a_mesh_of_other_axes:
            within.enter_context(jax.set_mesh(mesh))
            x = jax.device_put(x, PartitionSpec("d", None))
        grad_fn = jaxmp.autocast(jax.value_and_grad(loss), "float16")
        assert jaxmp.audit(grad_fn)(w, x).fraction_16bit == 1
        assert jaxmp.explain(grad_fn)(w, x).lines
        assert jaxmp.find_overflow(grad_fn)(w, x).first is None
        fault = jaxmp.find_overflow(grad_fn)(w * 1e5, x).first
        assert fault is not None
        assert "test_diagnosis.py" in fault.where
        assert 0 < measure(loss, w, x).loss < 0.1
        two = jaxmp.autocast(loss, "mixed_float16_bfloat16")
        assert abs(jax.value_and_grad(two)(w, x)[0] - loss(w, x)) < 1e-2
