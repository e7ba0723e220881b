"""Modules of NNX and Equinox have the paths of their attributes, as Linen's have."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
import jaxmp.nnx

X = jnp.asarray(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8))


def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    def __init__(self):
        self.first, self.second = linear(), linear()

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class RematBlock(Block):
    __call__ = nnx.remat(Block.__call__)


class Residual(Block):
    def __call__(self, x):
        return x + self.scaled(super().__call__(x))

    def scaled(self, x):
        return 0.5 * self.second(x)


def stacked(make, size=3):
    return nnx.vmap(lambda key: make(), in_axes=0, out_axes=0)(jnp.arange(size))


class Net(nnx.Module):
    """A body of some kind between an embedding, that is used again, and a head."""

    def __init__(self, body, run=lambda body, x: body(x)):
        self.body, self.run = body, run
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.table = nnx.Embed(5, 8, rngs=nnx.Rngs(0))
        self.head = linear()

    def __call__(self, x):
        x = self.dropout(self.norm(self.run(self.body, x)))
        return self.table.attend(self.head(x))

    def encode(self, x):
        return self.head(x)


def each(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def scanned(block, x):
    step = nnx.scan(
        lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
    )
    return step(x, block)


# A body, how it is run, and the paths of the layers in it.
BLOCK = ["first", "second"]
BODIES = {
    "list": (
        lambda: nnx.List([Block(), Residual()]),
        each,
        [f"{i}/{x}" for i in range(2) for x in BLOCK],
    ),
    "in one of its name": (
        lambda: nnx.Sequential(nnx.Sequential(linear(), linear()), linear()),
        lambda body, x: body(x),
        ["layers/0/layers/0", "layers/0/layers/1", "layers/1"],
    ),
    "remat of a method": (RematBlock, lambda body, x: body(x), BLOCK),
    "jit": (Block, lambda body, x: nnx.jit(lambda b, x: b(x))(body, x), BLOCK),
    "scan": (lambda: stacked(Block), scanned, BLOCK),
}
bodies = pytest.mark.parametrize(("make", "run", "layers"), BODIES.values(), ids=BODIES)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def kept(grad_fn, *args, **options):
    """Returns the modules whose products stay in float32, forward and backward."""
    report = jaxmp.audit(jaxmp.nnx.autocast(grad_fn, "bfloat16", **options))(*args)
    assert not report.leaks
    products = {row.module for row in report.kept}
    assert (report.fraction_16bit == 1) == (not products)
    return products


@bodies
def test_each_module_is_kept_in_float32_by_its_path(make, run, layers):
    model, grad_fn = Net(make(), run), nnx.value_and_grad(loss_fn)
    paths = {f"Net/body/{path}".rstrip("/") for path in layers}
    assert kept(grad_fn, model, X, float32_paths="body") == paths
    last = max(paths)
    for path in {last, last.removeprefix("Net/")}:
        assert kept(grad_fn, model, X, float32_paths=path) == {last}
    assert kept(grad_fn, model, X, float32_paths=("head", "table")) == {
        "Net/head",
        "Net/table",
    }


@pytest.mark.parametrize(
    "order",
    [
        lambda loss, paths: nnx.value_and_grad(
            jaxmp.nnx.autocast(loss, float32_paths=paths)
        ),
        lambda loss, paths: jaxmp.nnx.autocast(
            jaxmp.nnx.value_and_grad(loss), float32_paths=paths
        ),
        lambda loss, paths: jaxmp.nnx.value_and_grad(
            jaxmp.nnx.autocast(loss, float32_paths=paths)
        ),
    ],
)
def test_paths_are_the_same_in_every_order(order):
    grad_fn = order(loss_fn, ("head",))
    report = jaxmp.audit(grad_fn)(Net(Block()), X)
    assert {row.module for row in report.kept} == {"Net/head"}


def test_a_model_in_the_functional_style_has_its_paths():
    graph, params, rest = nnx.split(Net(Block()), nnx.Param, ...)

    def loss(params, rest, x):
        return loss_fn(nnx.merge(graph, params, rest), x)

    grad_fn = jaxmp.autocast(
        jaxmp.value_and_grad(loss), float32_paths=("body/first", "head")
    )
    report = jaxmp.audit(grad_fn)(params, rest, X)
    assert {row.module for row in report.kept} == {"Net/body/first", "Net/head"}


def test_a_part_that_is_called_alone_has_the_path_in_its_model():
    def loss(model, x):
        return jnp.mean(model.encode(model.body(x)) ** 2)

    grad_fn = nnx.value_and_grad(loss)
    for path in ("body/second", "head"):
        assert kept(grad_fn, Net(Block()), X, float32_paths=path) == {f"Net/{path}"}


class Game(nnx.Module):
    def __init__(self):
        self.online = RematBlock()
        self.target = nnx.clone(self.online)
        self.shared = self.online.first

    def __call__(self, x):
        return self.shared(self.online(x)) - self.target(x)


def test_one_module_in_two_places_has_the_path_by_which_it_is_called():
    grad_fn = nnx.value_and_grad(loss_fn)
    assert kept(grad_fn, Game(), X, float32_paths="online") == {
        "Game/online/first",
        "Game/online/second",
    }
    assert kept(grad_fn, Game(), X, float32_paths="target/first") == {
        "Game/target/first"
    }
    assert kept(grad_fn, Game(), X, float32_paths="shared") == {"Game/shared"}


def test_two_models_are_told_apart_by_their_classes():
    def loss(models, x):
        return jnp.mean((models["a"](x) - models["b"](x)) ** 2)

    models = {"a": Block(), "b": Residual()}
    grad_fn = nnx.value_and_grad(loss)
    assert kept(grad_fn, models, X, float32_paths="Residual") == {
        "Residual/first",
        "Residual/second",
    }
    assert kept(grad_fn, models, X, float32_paths="first") == {
        "Block/first",
        "Residual/first",
    }


class Steep(nnx.Module):
    """Has one layer that must be in float32."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.phases = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = jnp.sin(100 * self.phases(x))
        for block in self.blocks:
            x = jax.nn.gelu(block(x))
        return self.dropout(x)


def test_what_sensitivity_finds_can_be_pasted():
    report = jaxmp.sensitivity(loss_fn, "mixed_bfloat16", progress=False)(Steep(), X)
    rows = {row.path for row in report.modules}
    assert {"Steep/phases", "Steep/blocks/0", "Steep/blocks/1"} <= rows
    assert report.line == 'float32_paths=("Steep/phases",)'
    assert report.meets_tolerance
    grad_fn = nnx.value_and_grad(loss_fn)
    assert kept(grad_fn, Steep(), X, **eval(f"dict({report.line})")) == {"Steep/phases"}
    (hazard,) = jaxmp.audit(jaxmp.nnx.autocast(loss_fn))(Steep(), X).hazards
    assert hazard.module == "Steep/phases"
    assert kept(grad_fn, Steep(), X, **eval(f"dict({hazard.cure})")) == {"Steep/phases"}


def test_an_overflow_is_found_in_its_module():
    model = Steep()
    model.eval()  # without masks, which take long to compile
    model.blocks[1].kernel[...] = jnp.full((16, 16), 3e4)
    grad_fn = jaxmp.nnx.value_and_grad(loss_fn, loss_scale=1.0)
    grad_fn = jaxmp.nnx.autocast(grad_fn, "mixed_float16")
    report = jaxmp.find_overflow(grad_fn)(model, X)
    assert report.first.module == "Steep/blocks/1"
    report = jaxmp.find_overflow(lambda model, x: model(x))(
        nnx.merge(*jaxmp.cast_tree(nnx.split(model), jnp.float16)), X.astype("float16")
    )
    assert report.first.module == "Steep/blocks/1"


def test_a_path_that_is_not_there_is_answered_with_those_that_are():
    run = jaxmp.nnx.autocast(loss_fn, float32_paths="haed")
    with pytest.raises(ValueError, match=r"`haed`.* Net/body/first,.* Net/head"):
        run(Net(Block()), X)


def test_methods_come_back_after_an_error():
    class Broken(nnx.Module):
        def __call__(self, x):
            raise FloatingPointError

    before = Broken.__call__, nnx.Linear.__call__
    with pytest.raises(FloatingPointError):
        jaxmp.nnx.autocast(lambda model, x: model(x))(Broken(), X)
    assert (Broken.__call__, nnx.Linear.__call__) == before


def test_threads_have_their_own_scopes():
    """Two trace, each its own model, while a third calls one as it is."""
    running = {name: threading.Event() for name in "abc"}
    found = {}

    class Waiting(nnx.Module):
        def __init__(self, name):
            self.name, self.inner = name, linear()

        def __call__(self, x):
            running[self.name].set()
            assert all(event.wait(10) for event in running.values())
            return self.inner(x)

    class Model(nnx.Module):
        def __init__(self):
            self.part = Waiting("b")

        def __call__(self, x):
            return self.part(x)

    def named(name, model, path):
        run = jaxmp.nnx.autocast(lambda model, x: model(x), float32_paths=path)
        report = jaxmp.audit(run)(model, X)
        found[name] = {row.module for row in report.kept}

    def plain(name, model):
        jaxpr = jax.make_jaxpr(model)(X).pretty_print(name_stack=True)
        found[name] = {"inner" for _ in range("inner" in jaxpr)}

    threads = [
        threading.Thread(target=named, args=("a", Waiting("a"), "inner")),
        threading.Thread(target=named, args=("b", Model(), "part")),
        threading.Thread(target=plain, args=("c", Waiting("c"))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {"a": {"Waiting/inner"}, "b": {"Model/part/inner"}, "c": set()}


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_a_function_makes_has_the_name_of_its_class(size):
    def fun(x):
        models = [Block() for _ in range(size)]
        return each(models, x)

    report = jaxmp.audit(jaxmp.nnx.autocast(fun, float32_paths="first"))(X)
    assert {row.module for row in report.kept} == {"Block/first"}


# Equinox


def equinox_model():
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        norm: object
        mlp: object

        def __call__(self, x):
            return x + self.mlp(self.norm(x))

    class Model(eqx.Module):
        layers: list
        stacked: object
        head: object

        def __init__(self, key):
            def layer(key):
                return Layer(eqx.nn.LayerNorm(8), eqx.nn.MLP(8, 8, 8, 1, key=key))

            keys = jax.random.split(key, 3)
            self.layers = [layer(key) for key in keys]
            self.stacked = eqx.filter_vmap(layer)(keys)
            self.head = eqx.nn.Linear(8, 2, key=key)

        def __call__(self, x):
            x = self.layers[0](x)
            x = jax.checkpoint(lambda x: self.layers[1](x))(x)
            x = eqx.filter_jit(lambda x: self.layers[2](x))(x)
            arrays, static = eqx.partition(self.stacked, eqx.is_array)
            x, _ = jax.lax.scan(
                lambda x, layer: (eqx.combine(layer, static)(x), None), x, arrays
            )
            return self.head(x)

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    return eqx, Model(jax.random.key(0)), loss


def test_equinox_modules_have_the_paths_of_their_fields():
    eqx, model, loss = equinox_model()
    before = eqx.nn.Linear.__call__
    params, static = eqx.partition(model, eqx.is_inexact_array)
    everywhere = "head", "layers/1", "layers/2/mlp/layers/0", "Layer"
    ways = (
        (jaxmp.value_and_grad(loss), model, everywhere),
        (eqx.filter_value_and_grad(loss), model, everywhere[2:3]),
        (
            jaxmp.value_and_grad(lambda p, x: loss(eqx.combine(p, static), x)),
            params,
            everywhere[2:3],
        ),
    )
    for grad_fn, arg, paths_of_fields in ways:
        for path in paths_of_fields:
            paths = f"Model/{path}" if path == "Layer" else path
            run = jaxmp.autocast(grad_fn, float32_paths=paths)
            report = jaxmp.audit(run)(arg, X)
            found = {row.module for row in report.kept}
            assert found
            assert all(f"{x}/".startswith(f"Model/{path}/") for x in found)
            assert report.fraction_16bit > 0.5
    assert eqx.nn.Linear.__call__ is before
