"""Where two programs that should agree begin to differ."""

import functools
import json
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxmp

SIZE, HEADS, WORDS, LENGTH, BLOCKS = 16, 2, 20, 8, 2
HEAD = SIZE // HEADS


def rotated(x, base=1e4):
    """Turns pairs of numbers of each head by its position in the row."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    x, y = x[..., :half], x[..., half:]
    return jnp.concatenate([x * cos - y * sin, x * sin + y * cos], -1)


def attended(q, k, v):
    q, k = (rotated(x.reshape(*x.shape[:2], HEADS, HEAD)) for x in (q, k))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / HEAD**0.5
    seen = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    v = v.reshape(*v.shape[:2], HEADS, HEAD)
    out = jnp.einsum("bhts,bshd->bthd", weights, v)
    return out.reshape(*out.shape[:2], SIZE)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, SIZE, use_bias=False)
        q, k, v = (dense(name=name)(x) for name in "qkv")
        return dense(name="out")(attended(q, k, v))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jax.nn.gelu(nn.Dense(4 * SIZE, name="up")(x), approximate=False)
        return nn.Dense(SIZE, name="down")(h)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.LayerNorm, epsilon=1e-5)
        x = x + Attention(name="attn")(norm(name="norm1")(x))
        return x + Mlp(name="mlp")(norm(name="norm2")(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, SIZE, name="embed")
        place = self.param("place", nn.initializers.normal(1.0), (LENGTH, SIZE))
        x = embed(tokens) + place
        for i in range(BLOCKS):
            x = Block(name=f"block_{i}")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        with jax.named_scope("head"):
            return x @ embed.embedding.T


def drawn(params):
    """Returns parameters none of which is 0 or 1 alone."""
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    noise = (0.1 * random.standard_normal(x.shape, np.float32) for x in leaves)
    return tree.unflatten(x + y for x, y in zip(leaves, noise, strict=True))


LINEN = Model().apply
TOKENS = np.random.default_rng(1).integers(0, WORDS, (3, LENGTH))
PARAMS = drawn(Model().init(jax.random.key(0), TOKENS))


def normed(params, x, epsilon=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + epsilon) * params["scale"] + params["bias"]


def attention(params, x, fault):
    def projected(name, x):
        with jax.named_scope(name):
            kernel = params[name]["kernel"]
            return x @ (kernel.T if (fault, name) == ("transposed", "q") else kernel)

    def split(x):
        return x.reshape(*x.shape[:2], HEADS, HEAD)

    q, k, v = (split(projected(name, x)) for name in "qkv")
    base = 1e3 if fault == "rotary" else 1e4
    scores = jnp.einsum("bthd,bshd->bhts", rotated(q, base), rotated(k, base))
    if fault != "scale":
        scores = scores * HEAD**-0.5
    ones = jnp.ones((LENGTH, LENGTH), bool)
    seen = jnp.tril(ones, 1 if fault == "mask" else 0)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * seen
    weights = weights / weights.sum(-1, keepdims=True)
    out = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
    return projected("out", out)


def mlp(params, x, fault):
    with jax.named_scope("up"):
        h = x @ params["up"]["kernel"] + params["up"]["bias"]
    h = jax.nn.gelu(h, approximate=fault == "activation")
    if fault == "dropout":
        with jax.named_scope("dropout"):
            kept = jax.random.bernoulli(jax.random.key(2), 0.9, h.shape)
            h = jnp.where(kept, h / 0.9, 0)
    with jax.named_scope("down"):
        return h @ params["down"]["kernel"] + params["down"]["bias"]


def plain(params, tokens, fault=""):
    """Computes the same without a library, and with a fault in the second block."""
    params, scope = params["params"], jax.named_scope
    with scope("embed"):
        x = params["embed"]["embedding"][tokens]
    place = jnp.arange(LENGTH)
    if fault == "overflow":  # int8 ends at 127
        place = (place.astype(jnp.int8) * jnp.int8(20)) // jnp.int8(20)
    x = x + params["place"][place]
    for i in range(BLOCKS):
        own, here = params[f"block_{i}"], fault if i == 1 else ""
        with scope(f"block_{i}"):
            epsilon = 1e-6 if here == "epsilon" else 1e-5
            if here == "order":
                with scope("attn"):
                    y = attention(own["attn"], x, here)
                with scope("norm1"):
                    x = normed(own["norm1"], x + y)
            else:
                with scope("norm1"):
                    y = normed(own["norm1"], x, epsilon)
                with scope("attn"):
                    y = attention(own["attn"], y, here)
                x = x + y
            with scope("norm2"):
                y = normed(own["norm2"], x)
            with scope("mlp"):
                y = mlp(own["mlp"], y, here)
            x = x + y
    with scope("norm"):
        x = normed(params["norm"], x)
    table = params["embed"]["embedding"]
    if fault == "tied":
        table = PARAMS["params"]["block_0"]["mlp"]["up"]["kernel"].T[:WORDS]
    with scope("head"):
        return x @ table.T


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        for name in ("q", "k", "v", "out"):
            layer = nnx.Linear(SIZE, SIZE, use_bias=False, rngs=rngs)
            setattr(self, name, layer)

    def __call__(self, x):
        return self.out(attended(self.q(x), self.k(x), self.v(x)))


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(SIZE, 4 * SIZE, rngs=rngs)
        self.down = nnx.Linear(4 * SIZE, SIZE, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(SIZE, epsilon=1e-5, rngs=rngs)
        self.norm2 = nnx.LayerNorm(SIZE, epsilon=1e-5, rngs=rngs)
        self.attn, self.mlp = NnxAttention(rngs), NnxMlp(rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, SIZE, rngs=rngs)
        self.place = nnx.Param(jnp.zeros((LENGTH, SIZE)))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(SIZE, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place[...]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        with jax.named_scope("head"):
            return x @ self.embed.embedding[...].T


def in_nnx(params, tokens):
    model = NnxModel(nnx.Rngs(0))
    graph, state = nnx.split(model)
    flat = {}
    for path, _ in nnx.to_flat_state(state):
        own = params["params"]
        names = [str(x) for x in path]
        if names[0] == "blocks":
            names[:2] = [f"block_{names[1]}"]
        for name in names:
            own = own[name]
        flat[path] = nnx.Param(own)
    return nnx.merge(graph, nnx.from_flat_state(flat))(tokens)


BLOCK_NAMES = {f"block_{i}": f"blocks/{i}" for i in range(BLOCKS)}


def compare(f, g, *args, **options):
    return jaxmp.parity(f, g, **options)(*args or (PARAMS, TOKENS))


# Of each fault, the module that has it.
FAULTS = {
    "epsilon": "block_1/norm1",
    "activation": "block_1/mlp",
    "transposed": "block_1/attn/q",
    "scale": "block_1/attn",
    "mask": "block_1/attn",
    "order": "block_1",
    "rotary": "block_1/attn",
    "tied": "head",
    "dropout": "block_1/mlp",
    "overflow": "",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_module_of_a_planted_difference_is_the_first(fault):
    report = compare(LINEN, functools.partial(plain, fault=fault))
    assert report.first is not None, report
    assert report.first.path == FAULTS[fault], report
    assert str(report).startswith(
        f"`{FAULTS[fault]}` is the first" if FAULTS[fault] else "The lines outside"
    )
    # Those before it differ by rounding, and are not behind it.
    assert report.first.handed < 1e-5


NNX_NAMES = {y: x for x, y in BLOCK_NAMES.items()}
EQUAL = {
    "Linen and plain JAX": (LINEN, plain, {}),
    "plain JAX and Linen": (plain, LINEN, {}),
    "Linen and NNX": (LINEN, in_nnx, {"names": BLOCK_NAMES}),
    "NNX and plain JAX": (
        in_nnx,
        plain,
        {"names": NNX_NAMES},
    ),
    "jitted and in bfloat16": (jax.jit(LINEN), jaxmp.autocast(plain), {}),
}


@pytest.mark.parametrize("case", EQUAL)
def test_nothing_is_named_where_programs_are_equal(case):
    f, g, options = EQUAL[case]
    report = compare(f, g, **options)
    assert report.first is None, report
    assert str(report).startswith("No module adds more than rounding explains.")
    # All modules of the model are compared.
    assert len(report.modules) > 20, report


# Small programs

X = np.random.default_rng(2).standard_normal((4, 8), np.float32)
W = np.random.default_rng(3).standard_normal((3, 8, 8), np.float32) / 3


def layer(w, x, slope):
    with jax.named_scope("dense"):
        x = x @ w
    with jax.named_scope("act"):
        return jnp.tanh(slope * x)


def scanned(w, x, slopes=(1.0, 1.0, 1.0), wrap=lambda f: f):
    def step(x, layers):
        with jax.named_scope("layer"):
            return layer(*layers[:1], x, layers[1]), None

    return jax.lax.scan(wrap(step), x, (w, jnp.array(slopes)))[0]


def unrolled(w, x, slopes=(1.0, 1.0, 1.0)):
    for i, slope in enumerate(slopes):
        with jax.named_scope(f"layer_{i}"):
            x = layer(w[i], x, slope)
    return x


BENT = (1.0, 1.1, 1.0)


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_iterations_of_a_scan_are_told_apart(wrap, inner):
    bent = wrap(functools.partial(scanned, slopes=BENT, wrap=inner))
    report = compare(scanned, bent, W, X)
    assert report.first.path == "layer[1]/act"
    paths = [x.path for x in report.modules]
    assert [f"layer[{i}]/dense" for i in range(3)] == [x for x in paths if "den" in x]


def test_a_scan_is_compared_with_its_layers_one_by_one():
    names = {f"layer[{i}]": f"layer_{i}" for i in range(3)}
    report = compare(
        scanned, functools.partial(unrolled, slopes=BENT), W, X, names=names
    )
    assert report.first.path == "layer_1/act"
    assert report.first.reference == "layer[1]/act"
    names = {y: x for x, y in names.items()}
    assert compare(unrolled, scanned, W, X, names=names).first is None


def test_what_is_added_is_told_from_what_was_handed_in():
    def program(w, x, factor):
        with jax.named_scope("first"):
            x = factor * (x @ w[0])
        with jax.named_scope("second"):
            x = x @ w[1]
        with jax.named_scope("third"):
            return factor * (x @ w[2])

    report = compare(*(functools.partial(program, factor=x) for x in (1.0, 1.5)), W, X)
    first, second, third = report.modules
    assert (first.handed, first.added) == (0.0, pytest.approx(0.5))
    assert second.handed == pytest.approx(0.5)
    assert second.error == pytest.approx(0.5)
    assert second.added < 1e-6
    assert third.error == pytest.approx(1.25)
    assert third.added == pytest.approx(0.5)
    assert [x.differs for x in report.modules] == [True, False, True]


def test_a_value_with_a_name_is_compared_where_there_are_no_modules():
    def program(w, x, factor):
        x = checkpoint_name(x @ w[0], "before")
        x = checkpoint_name(jnp.sin(factor * x), "behind")
        return x @ w[2]

    report = compare(*(functools.partial(program, factor=x) for x in (1.0, 1.1)), W, X)
    assert report.first.path == "behind"
    assert report.first.value == "this value"


def test_calls_of_one_module_are_told_apart():
    def program(w, x, factors):
        for factor in factors:
            with jax.named_scope("shared"):
                x = factor * (x @ w[0])
            x = x + 1
        return x

    f = functools.partial(program, factors=(1, 1, 1))
    g = functools.partial(program, factors=(1, 1, 1.5))
    assert compare(f, g, W, X).first.path == "shared#3"
    assert compare(f, f, W, X).first is None


def test_without_common_names_results_are_compared_and_the_report_lists_the_names():
    def other(w, x):
        with jax.named_scope("mine"):
            return 1.5 * unrolled(w, x)

    report = compare(scanned, other, W, X)
    assert report.first.path == ""
    assert report.outputs[0].error == pytest.approx(0.5)
    assert "in no module" in str(report)


def test_a_report_without_a_difference_lists_the_modules_that_one_program_has():
    def other(w, x):
        with jax.named_scope("mine"):
            x = layer(w[0], x, 1.0)
        for i in (1, 2):
            with jax.named_scope(f"layer_{i}"):
                x = layer(w[i], x, 1.0)
        return x

    report = compare(unrolled, other, W, X)
    assert report.first is None
    assert str(report).splitlines()[:3] == [
        "No module adds more than rounding explains.",
        "  in the reference alone: `layer_0/dense`, `layer_0/act`, `layer_0`",
        "  in the second alone: `mine/dense`, `mine/act`, `mine`",
    ]


def test_nothing_in_common_is_refused_with_the_names_of_both():
    def other(w, x):
        with jax.named_scope("mine"):
            return (w[0] @ x.T)[:, :3]

    with pytest.raises(ValueError, match=r"found nothing to compare") as error:
        compare(unrolled, other, W, X)
    assert "float32[4, 8] and float32[8, 3]" in str(error.value)
    assert "`layer_0`" in str(error.value)
    assert "`mine`" in str(error.value)
    assert "names=" in str(error.value)


def test_a_wrong_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"`names` has `layer_9`.*It has `layer_0`"):
        compare(unrolled, unrolled, W, X, names={"layer_9": "layer_0"})


def stored(slopes=(1.0, 1.0, 1.0)):
    """Returns what hooks of PyTorch would store, with its own names."""
    values = jaxmp.named_values(functools.partial(unrolled, slopes=slopes))(W, X)
    return {
        key.replace("layer_", "h.").replace("/", "."): x for key, x in values.items()
    }


NAMES = {f"h.{i}": f"layer_{i}" for i in range(3)}


@pytest.mark.parametrize("place", ["dict", "npz", "second"])
def test_a_function_is_compared_with_stored_arrays(place, tmp_path):
    arrays = stored(BENT)
    if place == "npz":
        np.savez(tmp_path / "run.npz", **arrays)
        arrays = tmp_path / "run.npz"
    both = (unrolled, arrays) if place == "second" else (arrays, unrolled)
    report = compare(*both, W, X, names=NAMES)
    assert report.first.path == "layer_1/act"
    assert report.first.reference == "h/1/act"
    assert compare(stored(), unrolled, W, X, names=NAMES).first is None


def test_without_inputs_a_line_before_a_module_counts_as_one_of_it():
    def program(w, x, factor):
        with jax.named_scope("first"):
            x = x @ w[0]
        x = factor * x
        with jax.named_scope("second"):
            return x @ w[1]

    f, g = (functools.partial(program, factor=x) for x in (1.0, 1.5))
    values = jaxmp.named_values(f)(W, X)
    assert compare(values, g, W, X).first.path == ""
    del values["second:in"]
    assert compare(values, g, W, X).first.path == "second"


def test_two_sets_of_arrays_are_refused():
    with pytest.raises(TypeError, match="needs a function to compare"):
        jaxmp.parity({}, {})
    with pytest.raises(ValueError, match=r"but is -1\. Pass for example `band=0\.01"):
        jaxmp.parity(unrolled, unrolled, band=-1)
    with pytest.raises(TypeError, match="`names` must be a dict of paths"):
        jaxmp.parity(unrolled, unrolled, names=["layer_0"])
    with pytest.raises(TypeError, match="under 'layer_0' there is a list of 1"):
        jaxmp.parity({"layer_0": [1.0]}, unrolled)


def test_stored_values_survive_a_file_in_any_dtype(tmp_path):
    values = jaxmp.named_values(lambda x: x.astype(jnp.bfloat16))(X)
    np.savez(tmp_path / "values.npz", **values)
    assert np.load(tmp_path / "values.npz")["result"].dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_known_for_the_dtypes_that_a_module_has(dtype):
    def narrow(w, x):
        return unrolled(w.astype(dtype), x.astype(dtype))

    eps = float(jnp.finfo(dtype).eps)
    report = compare(unrolled, narrow, W, X)
    assert report.first is None, report
    for x in report.modules:
        assert eps / 8 < x.added < x.typical < 8 * eps
    bent = compare(unrolled, lambda w, x: narrow(w, 1.1 * x), W, X)
    assert bent.first is not None


@pytest.mark.parametrize("size", [512, 20_000])
def test_another_order_of_a_long_sum_is_rounding(size):
    x = np.random.default_rng(4).standard_normal((size // 16, 16), np.float32)
    # Of 512 terms, two orders are further apart than moving each by a unit makes.
    assert compare(jnp.sum, lambda x: jnp.sum(x.T), x).first is None
    assert compare(jnp.sum, lambda x: jnp.sum(x, 0).sum(), x).first is None
    stored = {"result": np.add.accumulate(x.ravel())[-1]}  # one term after the other
    assert jaxmp.parity(stored, jnp.sum)(x).first is None
    report = compare(lambda x: jnp.sum(x**2), lambda x: jnp.sum(x**2) * (1 + 2e-6), x)
    assert report.first is not None


def test_gradients_are_compared_by_their_names():
    def loss(w, x, factor):
        out = unrolled(w["w"], x)
        # Without a change of the value.
        with jax.named_scope("tail"):
            out = out + (factor - 1) * (out - jax.lax.stop_gradient(out))
        return jnp.mean(out**2)

    f, g = (
        jax.value_and_grad(functools.partial(loss, factor=factor))
        for factor in (1.0, 1.5)
    )
    report = compare(f, g, {"w": W}, X)
    assert [x.name for x in report.outputs] == ["result/0", "result/1/w"]
    assert report.outputs[0].error < 1e-6
    assert report.outputs[1].error == pytest.approx(0.5)
    assert report.first.path == "(the backward pass)"
    assert report.first.value == "`result/1/w`"
    assert compare(f, f, {"w": W}, X).first is None
    assert compare(f, jaxmp.autocast(f), {"w": W}, X).first is None


def test_integers_that_differ_are_no_rounding():
    def program(w, x, step):
        with jax.named_scope("index"):
            index = jnp.arange(4, dtype=jnp.int8) * step
        with jax.named_scope("lookup"):
            return (x @ w[0])[index % 4]

    f, g = (functools.partial(program, step=jnp.int8(x)) for x in (43, 42))
    report = compare(f, g, W, X)
    assert report.first.path == "index"
    assert report.modules[-1].path == "index" or not report.modules[-1].differs


@pytest.mark.parametrize(
    ("one", "other"), [(1.0, np.inf), (-np.inf, np.inf), (np.nan, np.inf)]
)
def test_inf_and_nan_in_one_of_the_programs_differ(one, other):
    def program(x, big):
        with jax.named_scope("scale"):
            return x * big

    f, g = (functools.partial(program, big=x) for x in (one, other))
    report = compare(f, g, X)
    assert report.first.path == "scale"
    assert report.outputs[0].error == report.outputs[0].rms == np.inf
    assert report.as_dict()["outputs"][0]["error"] == "inf"
    assert compare(g, g, X).first is None


def test_branches_and_while_loops():
    def program(x, n, factor):
        def then(x):
            with jax.named_scope("then"):
                return jnp.sin(x)

        def other(x):
            with jax.named_scope("other"):
                return jnp.cos(factor * x)

        x = jax.lax.cond(n > 1, then, other, x)

        def body(carry):
            with jax.named_scope("body"):
                return carry[0] + 1, factor * jnp.tanh(carry[1])

        return jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, x))

    f, g = (functools.partial(program, factor=x) for x in (1.0, 1.1))
    assert compare(f, g, X, 0).first.path == "other"
    report = compare(f, g, X, 2)
    assert report.first.path == ""
    assert report.notes[0].endswith("modules inside a `while` are not seen")


def test_a_branch_that_rounding_may_leave_is_not_compared():
    def layer(x):
        with jax.named_scope("layer"):
            return 2 * x

    def program(x):
        return jax.lax.cond(jnp.sum(x * 3) == 12, layer, lambda x: x + x, x)

    report = compare(program, layer, jnp.ones(4))
    assert report.first is None
    assert [x.path for x in report.modules] == [""]
    assert compare(layer, program, jnp.ones(4)).first is None


def test_sharded_arguments_and_shards():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("data"))
    x, bent = jax.device_put(X, rows), functools.partial(unrolled, slopes=BENT)
    assert compare(unrolled, bent, W, x).first.path == "layer_1/act"

    def mapped(f):
        def g(w, x):
            with jax.named_scope("mapped"):
                return jax.shard_map(
                    f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
                )(w, x)

        return g

    assert compare(mapped(unrolled), mapped(bent), W, x).first.path == "mapped"
    assert compare(mapped(unrolled), mapped(unrolled), W, x).first is None


def test_each_function_runs_on_its_device():
    one, two = jax.devices()[1:3]
    report = compare(unrolled, unrolled, W, X, devices=(one, two))
    assert report.first is None
    with pytest.raises(ValueError, match="one for each function, 2 of them"):
        compare(unrolled, unrolled, W, X, devices=(one,))
    with pytest.raises(ValueError, match="Pass for example"):
        compare(unrolled, unrolled, W, X, devices="cpu")


# Results


def test_results_have_their_errors():
    def program(factor):
        return {"loss": jnp.float32(2) * factor, "tokens": jnp.arange(4) * factor}

    report = compare(program, lambda x: program(x + 1), 1)
    loss, tokens = report.outputs
    assert (loss.name, loss.error, loss.largest) == ("loss", 1.0, 2.0)
    assert (tokens.name, tokens.error, tokens.outside) == ("tokens", 0.75, 0.75)


def test_log_probabilities_have_ratios_and_places():
    x = jnp.log(jnp.array([[0.5, 0.25], [0.5, 0.5]]))
    y = jnp.log(jnp.array([[0.5, 0.26], [0.5, 0.502]]))
    report = compare(lambda z: x + z, lambda z: y + z, 0.0, log_probs=True, band=0.01)
    (found,) = report.outputs
    assert found.outside == 0.25
    apart = np.log([[1, 1.04], [1, 1.004]])
    np.testing.assert_allclose(found.by_token, np.sqrt(np.mean(apart**2, 0)), atol=1e-6)
    assert found.rms == pytest.approx(np.sqrt(np.mean(apart**2)), abs=1e-6)
    assert found.largest == pytest.approx(np.log(1.04), abs=1e-6)


def test_limits_of_results_for_tests():
    report = compare(jnp.sum, lambda x: 1.01 * jnp.sum(x), X)
    report.assert_within(loss=0.02)
    report.assert_within(result=0.02)
    with pytest.raises(AssertionError, match=r"`loss` is off by 1.0e-02, more than"):
        report.assert_within(loss=1e-3)
    with pytest.raises(ValueError, match="`gradients`, but that is no result"):
        report.assert_within(gradients=1e-3)
    lost = compare(jnp.sum, lambda x: jnp.nan * jnp.sum(x), X)
    with pytest.raises(AssertionError, match="off by inf"):
        lost.assert_within(loss=1.0)


def test_a_report_is_data_and_fits_a_terminal():
    report = compare(unrolled, functools.partial(unrolled, slopes=BENT), W, X)
    found = json.loads(json.dumps(report.as_dict()))
    assert found["first"]["path"] == "layer_1/act"
    assert len(found["modules"]) == len(report.modules)
    assert max(map(len, str(report).splitlines())) <= 80
    assert report._repr_html_().startswith("<pre>")


def test_traced_arguments_and_models_are_refused():
    with pytest.raises(TypeError, match="`parity` needs values"):
        jax.jit(lambda x: jaxmp.parity(jnp.sin, jnp.sin)(x))(X)
    with pytest.raises(TypeError, match="Pass a function that calls"):
        jaxmp.parity(Model(), plain)


# PyTorch

TORCH = dict(np.load(Path(__file__).parent / "stored" / "gpt.npz"))
WEIGHTS = {
    key.removeprefix("weights/"): TORCH.pop(key)
    for key in [*TORCH]
    if "weights/" in key
}
ROWS = TORCH.pop("tokens")


def port(weights, tokens, fault=""):
    """Computes what the model of PyTorch in `stored/gpt.py` does."""

    def scope(name):
        return jax.named_scope(name.replace(".", "/"))

    def linear(name, x):
        with scope(name.rpartition(".")[2]):
            kernel = weights[f"{name}.weight"].T
            is_wrong = (fault, name) == ("transposed", "h.1.attn.c_proj")
            return x @ (kernel.T if is_wrong else kernel) + weights[f"{name}.bias"]

    def norm(name, x):
        with scope(name.rpartition(".")[2]):
            mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
            x = (x - mean) / jnp.sqrt(variance + 1e-5)
            return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attend(name, x):
        with scope("attn"):
            q, k, v = jnp.split(linear(f"{name}.c_attn", x), 3, -1)
            shape = (*x.shape[:2], HEADS, HEAD)
            out = jax.nn.dot_product_attention(
                *(x.reshape(shape) for x in (q, k, v)), is_causal=True
            )
            return linear(f"{name}.c_proj", out.reshape(x.shape))

    def mlp(name, x):
        with scope("mlp"):
            x = linear(f"{name}.c_fc", x)
            with scope("act"):
                x = jax.nn.gelu(x, approximate=fault == "activation")
            return linear(f"{name}.c_proj", x)

    with scope("wte"):
        x = weights["wte.weight"][tokens]
    with scope("wpe"):
        place = weights["wpe.weight"][jnp.arange(LENGTH)]
    x = x + place
    for i in range(BLOCKS):
        with scope(f"h.{i}"):
            x = x + attend(f"h.{i}.attn", norm(f"h.{i}.ln_1", x))
            x = x + mlp(f"h.{i}.mlp", norm(f"h.{i}.ln_2", x))
    return norm("ln_f", x) @ weights["wte.weight"].T


@pytest.mark.parametrize(
    ("fault", "module"),
    [("", None), ("activation", "h/0/mlp/act"), ("transposed", "h/1/attn/c_proj")],
)
def test_a_port_from_pytorch_is_compared_with_its_stored_run(fault, module):
    report = compare(TORCH, functools.partial(port, fault=fault), WEIGHTS, ROWS)
    assert (report.first and report.first.path) == module, report
    assert len(report.modules) > 18
    assert report.outputs[0].name == "result"
    assert report.reference_only == ()


# Frameworks


def test_modules_of_equinox_and_haiku_are_compared():
    class Net(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear

        def __call__(self, x, slope):
            return self.second(jnp.tanh(slope * self.first(x)))

    keys = jax.random.split(jax.random.key(0))
    net = Net(eqx.nn.Linear(8, 8, key=keys[0]), eqx.nn.Linear(8, 4, key=keys[1]))

    def in_equinox(net, x, slope=1.0):
        return jax.vmap(lambda x: net(x, slope))(x)

    def in_haiku(net, x, slope=1.0):
        def forward(x):
            x = hk.Linear(8, name="first")(x)
            return hk.Linear(4, name="second")(jnp.tanh(slope * x))

        params = {
            name: {"w": layer.weight.T, "b": layer.bias}
            for name, layer in (("first", net.first), ("second", net.second))
        }
        return hk.without_apply_rng(hk.transform(forward)).apply(params, x)

    assert compare(in_equinox, in_haiku, net, X).first is None
    bent = functools.partial(in_haiku, slope=1.1)
    report = compare(in_equinox, bent, net, X)
    assert report.first.path == "", report
    assert report.first.value == "what goes into `second`"
    assert {x.path for x in report.modules} >= {"first", "second"}
