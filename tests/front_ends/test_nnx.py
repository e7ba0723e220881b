"""NNX: whatever a function changes in the objects it gets reaches the caller."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import jaxmp
import jaxmp.nnx
from conftest import checking_leaks, crossed, mapped, rest_is_evidence

FULL, HALF = jnp.float32, jnp.float16
POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]
X = jnp.asarray(np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.inner(x)))))


class Noisy(nnx.Module):
    """Takes its random numbers from the caller."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.linear(x), rngs=rngs)


class Counter(nnx.Pytree):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


def net():
    return Net(nnx.Rngs(0))


def snapshot(tree):
    """Copies everything that NNX objects hold, keys as their data."""

    def pure(x):
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.array(x)

    return jax.tree.map(pure, nnx.to_pure_dict(nnx.state([tree])))


def assign(variable, value):
    variable[...] = value


def optimizer():
    return nnx.Optimizer(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param
    )


def update_optimizer(opt):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    opt.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))


# What there is, and what a function may do to it.
KINDS = {
    "rngs": (lambda: nnx.Rngs(5), lambda rngs: rngs.noise()),
    "optimizer": (optimizer, update_optimizer),
    "metric": (lambda: nnx.metrics.Average(), lambda m: m.update(values=jnp.ones(3))),
    "statistics": (
        lambda: nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
        lambda norm: norm(jnp.ones((2, 4)) * 3),
    ),
    "parameters": (
        lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        lambda model: assign(model.kernel, model.kernel[...] * 0.5),
    ),
    "pytree": (Counter, lambda c: assign(c.count, c.count[...] + 1)),
    "variable": (lambda: nnx.Variable(jnp.ones(2)), lambda v: assign(v, v[...] * 2)),
}
# How an object may be passed beside `x`, and how the function finds it again.
POSITIONS = {
    "first": (lambda o: ((o, X), {}), lambda a, k: a[0]),
    "second": (lambda o: ((X, o), {}), lambda a, k: a[1]),
    "keyword": (lambda o: ((X,), {"o": o}), lambda a, k: k["o"]),
    "tuple": (lambda o: ((X, (1, o)), {}), lambda a, k: a[1][1]),
    "dict": (lambda o: ((X, {"a": [o]}), {}), lambda a, k: a[1]["a"][0]),
}
# Every kind as the first argument, and one of them in every other place.
PLACED = {kind: (*KINDS[kind], *POSITIONS["first"]) for kind in KINDS}
PLACED |= {place: (*KINDS["rngs"], *POSITIONS[place]) for place in POSITIONS}


def differentiated(policy):
    def wrap(fun):
        def loss_fn(w, *args, **kwargs):
            return w * fun(*args, **kwargs).sum()

        grad_fn = jaxmp.nnx.value_and_grad(loss_fn, policy=policy, loss_scale=8.0)
        return lambda *args, **kwargs: grad_fn(1.0, *args, **kwargs)[0]

    return wrap


WRAPS = {
    "autocast": lambda f: jaxmp.nnx.autocast(f, "float16"),
    "autocast, jit": lambda f: nnx.jit(jaxmp.nnx.autocast(f, "float16")),
    "value_and_grad": differentiated(None),
    "value_and_grad, 16 bits": differentiated("mixed_float16"),
}


@crossed("placed wrap", PLACED, WRAPS)
def test_every_change_is_brought_back(placed, wrap):
    make, change, place, find = placed

    def fun(*args, **kwargs):
        change(find(args, kwargs))
        return X @ X.T

    expected, changed = make(), make()
    change(expected)
    args, kwargs = place(changed)
    assert wrap(fun)(*args, **kwargs).dtype == FULL
    chex.assert_trees_all_equal(snapshot(changed), snapshot(expected))


def step(model, optimizer, teacher, metric, x, value_and_grad=nnx.value_and_grad):
    """A step of training with all that people do in one."""

    def loss_fn(model, teacher, x):
        target = teacher(x)
        return jnp.mean((model(x) - jax.lax.stop_gradient(target) - x) ** 2)

    loss, grads = value_and_grad(loss_fn)(model, teacher, x)
    optimizer.update(model, grads)
    metric.update(values=loss)
    params, averages = nnx.state(model, nnx.Param), nnx.state(teacher, nnx.Param)
    new = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, averages, params)
    nnx.update(teacher, new)
    return loss


def trained(wrap, steps=3):
    model, teacher, metric = net(), net(), nnx.metrics.Average()
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.5), wrt=nnx.Param)
    run = wrap(step)
    losses = [run(model, optimizer, teacher, metric, X) for _ in range(steps)]
    return losses, snapshot((model, optimizer, teacher, metric))


def ordered(is_around, value_and_grad):
    """Returns what wraps a step by a policy: autocast around all of it, or inside."""

    def by(policy):
        cast = partial(jaxmp.nnx.autocast, policy=policy)
        if is_around:
            return lambda step: cast(partial(step, value_and_grad=value_and_grad))
        inside = lambda f: value_and_grad(cast(f))  # noqa: E731
        return lambda step: partial(step, value_and_grad=inside)

    return by


OURS = partial(jaxmp.nnx.value_and_grad, loss_scale=2.0**10)
ORDERS = {
    "around": ordered(True, nnx.value_and_grad),
    "inside": ordered(False, nnx.value_and_grad),
    "around ours": ordered(True, OURS),
    "inside ours": ordered(False, OURS),
}


@pytest.fixture(scope="module")
def plainly_trained():
    return trained(nnx.jit)


@pytest.mark.parametrize("order", rest_is_evidence(ORDERS, "around", "inside ours"))
def test_a_whole_step_in_float32_is_that_of_flax_bit_for_bit(order, plainly_trained):
    actual = trained(lambda step: nnx.jit(order("float32")(step)))
    chex.assert_trees_all_equal(actual, plainly_trained)


@pytest.mark.parametrize("order", rest_is_evidence(ORDERS, "inside", "around ours"))
def test_a_whole_step_in_16_bits_keeps_every_dtype(order, plainly_trained):
    losses, state = trained(lambda step: nnx.jit(order(HALF)(step)))
    expected, plain_state = plainly_trained
    chex.assert_trees_all_equal_shapes_and_dtypes(state, plain_state)
    np.testing.assert_allclose(losses, expected, rtol=16 * jnp.finfo(HALF).eps)
    assert state[0][1]["step"] == 3
    assert losses != expected  # or nothing ran in 16 bits


def test_shared_references_are_shared_inside_and_afterwards():
    model = net()

    def fun(pair, again, *, rest):
        assert pair[0] is again is rest["model"]
        again.head.bias[...] += 1
        again.extra = pair[0].inner
        return pair[0].head.bias[...]

    out = jaxmp.nnx.autocast(fun)((model, 1), model, rest={"model": model})
    assert out.tolist() == model.head.bias[...].tolist() == [1, 1, 1, 1]
    assert model.extra is model.inner


def test_modules_may_be_returned():
    model = net()

    def fun(model, x):
        new = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        new.kernel[...] = x.T @ x
        return model, {"new": new}, model.head, x

    same, made, head, _ = jaxmp.nnx.autocast(fun, "float16")(model, X)
    assert same is model
    assert head is model.head
    assert made["new"].kernel.dtype == FULL
    np.testing.assert_allclose(made["new"].kernel[...], X.T @ X, rtol=1e-3)

    (_, aux), _ = jaxmp.nnx.value_and_grad(
        lambda model, x: (model(x).sum(), fun(model, x)),
        policy="float16",
        loss_scale=1.0,
        has_aux=True,
    )(model, X)
    assert aux[0] is model
    assert aux[2] is model.head
    assert isinstance(aux[1]["new"], nnx.Linear)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_a_function_sows_or_makes_is_there_afterwards():
    def fun(model, x):
        model.sow(nnx.Intermediate, "seen", x.sum())
        model.made = nnx.Variable(x)
        model.name = "called"
        return model(x).sum()

    for wrap in (jaxmp.nnx.autocast, jaxmp.nnx.value_and_grad):
        model = net()
        wrap(fun)(model, X)
        np.testing.assert_array_equal(model.made[...], X)
        assert model.name == "called"
        assert jax.tree.leaves(nnx.pop(model, nnx.Intermediate)) == [X.sum()]


def test_what_is_no_array_reaches_the_function_as_it_is():
    class Flagged(nnx.Module):
        def __init__(self):
            self.flag, self.name = True, "a"
            self.number = nnx.Variable(3)

    def number(model):
        return nnx.to_pure_dict(nnx.state(model))["number"]

    def fun(model, *args):
        values = (model.flag, model.name, number(model), *args)
        types = [bool, str, int, int, str, float, np.ndarray]
        assert [type(x) for x in values] == types
        model.number = nnx.Variable(4)
        return jnp.ones(())

    args = (Flagged(), 1, "s", 2.0, np.ones(2))
    jaxmp.nnx.autocast(fun)(*args)
    assert number(args[0]) == 4
    args[0].number = nnx.Variable(3)
    jaxmp.nnx.value_and_grad(lambda w, *args: w * fun(*args))(1.0, *args)
    assert number(args[0]) == 4


def test_it_works_under_scan_vmap_and_remat():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

    layers = make(jax.random.split(jax.random.key(0), 3))
    counter = Counter()

    def layer(carry, model):
        x, counter = carry
        counter.count[...] += 1
        return nnx.relu(model(x)), counter

    def run(wrap):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def scanned(carry, model):
            return wrap(layer)(carry, model)

        return scanned((X, counter), layers)[0]

    expected = run(lambda f: f)
    for wrap in (
        partial(jaxmp.nnx.autocast, policy="float16"),
        lambda f: nnx.remat(jaxmp.nnx.autocast(f, "float16")),
        lambda f: jaxmp.nnx.autocast(nnx.remat(f), "float16"),
    ):
        np.testing.assert_allclose(run(wrap), expected, atol=0.02)
    outer = jaxmp.nnx.autocast(nnx.vmap(lambda m: m(X), in_axes=0), "float16")
    assert outer(layers).shape == (3, 8, 4)
    grad_fn = nnx.vmap(
        jaxmp.nnx.value_and_grad(
            lambda m, x: jnp.mean(m(x) ** 2), policy="mixed_float16", loss_scale=8.0
        ),
        in_axes=(0, None),
    )
    _, grads = grad_fn(layers, X)
    assert grads["kernel"].shape == (3, 4, 4)
    assert counter.count[...] == 12


# Gradients


def pair_loss(models, x, scale=1.0):
    return jnp.mean(models["a"](models["b"](x)) ** 2) * scale


def two():
    return {"a": net(), "b": nnx.Linear(4, 4, rngs=nnx.Rngs(1))}


def three(a, x, b):
    return jnp.mean((a(x) - b(x)) ** 2)


LIKE_FLAX = {
    "module": (lambda m, x: m(x).mean(), lambda: (net(), X), {}),
    "dict and number": (pair_loss, lambda: (two(), X, 2.0), {"argnums": (0, 2)}),
    "two": (three, lambda: (net(), X, net()), {"argnums": (0, 2)}),
    "filters": (
        three,
        lambda: (net(), X, net()),
        {"argnums": (nnx.DiffState(0, nnx.BatchStat), 2, 1)},
    ),
    "variable": (
        lambda v, x: (v[...] * x).sum(),
        lambda: (nnx.BatchStat(jnp.ones(4)), X),
        {},
    ),
    "pytree": (lambda p, x: (p["w"] * x).sum(), lambda: ({"w": jnp.ones(4)}, X), {}),
    "shared": (
        lambda a, b, x: (a(x) + b(x)).mean(),
        lambda: (lambda m: (m, m, X))(net()),
        {"argnums": (0, 1)},
    ),
}


@crossed("like has_aux", LIKE_FLAX, [False, True])
def test_gradients_and_state_are_those_of_flax(like, has_aux):
    fun, make, options = like

    def loss_fn(*args):
        return (fun(*args), {"x": args[1]}) if has_aux else fun(*args)

    options = {**options, "has_aux": has_aux}
    args, own_args = make(), make()
    expected = nnx.value_and_grad(loss_fn, **options)(*args)
    actual = jaxmp.nnx.value_and_grad(loss_fn, **options)(*own_args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    chex.assert_trees_all_equal(jax.tree.leaves(actual), jax.tree.leaves(expected))
    chex.assert_trees_all_equal(snapshot(own_args), snapshot(args))

    scaled = jaxmp.nnx.value_and_grad(loss_fn, policy="mixed_bfloat16", **options)(
        *make()
    )
    assert jax.tree.structure(scaled) == jax.tree.structure(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(scaled[1], expected[1])


def test_the_differentiated_argument_may_come_by_keyword():
    expected = nnx.value_and_grad(three)(net(), X, net())
    actual = jaxmp.nnx.value_and_grad(three)(b=net(), a=net(), x=X)
    chex.assert_trees_all_equal(actual, expected)


def test_a_position_twice_and_one_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="names the argument 0 twice"):
        jaxmp.nnx.value_and_grad(three, argnums=(0, nnx.DiffState(0, nnx.Param)))
    with pytest.raises(TypeError, match="`argnums=3` needs more positional"):
        jaxmp.nnx.value_and_grad(three, argnums=3)(net(), X, net())


def test_a_variable_differentiated_in_one_argument_only_is_refused():
    model = net()
    with pytest.raises(ValueError, match="The Param `bias` is in two arguments"):
        jaxmp.nnx.value_and_grad(lambda a, b: a(X).sum())(model.head, {"b": model.head})


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.low = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.head(self.low(x)))  # float32 after Flax's BatchNorm


# Where a teacher may be, and how the function finds it.
TEACHERS = [
    (nnx.Param, lambda m, t: (((m, t), X), {}), lambda a, k: a[0]),
    (nnx.Param, lambda m, t: ((m, X, t), {}), lambda a, k: (a[0], a[2])),
    (nnx.LoRAParam, lambda m, t: ((m, X), {"t": t}), lambda a, k: (a[0], k["t"])),
]


@pytest.mark.parametrize(
    ("wrt", "place", "find"), TEACHERS, ids=["container", "argument", "keyword"]
)
def test_all_parameters_are_in_compute_dtype_and_come_back_as_they_were(
    wrt, place, find
):
    student, teacher = Lora(nnx.Rngs(0)), Lora(nnx.Rngs(1))
    seen = {}

    def loss_fn(*args, **kwargs):
        outs = []
        for module in find(args, kwargs):
            for path, x in nnx.to_flat_state(nnx.state(module)):
                seen.setdefault(path[-1], set()).add(x.dtype)
            outs.append(jaxmp.with_policy(module, "mixed_float16")(args[1]))
        return jnp.mean((outs[0] - outs[1]) ** 2)

    grad_fn = jaxmp.nnx.value_and_grad(
        loss_fn, policy="mixed_float16", loss_scale=8.0, wrt=wrt
    )
    args, kwargs = place(student, teacher)
    assert jaxmp.audit(grad_fn)(*args, **kwargs).fraction_16bit == 1
    assert seen.pop("mean") == seen.pop("var") == {np.dtype(FULL)}
    assert set.union(*seen.values()) == {np.dtype(HALF)}

    before = jax.tree.leaves(nnx.state((student, teacher), nnx.Param))
    _, grads = nnx.jit(grad_fn)(*args, **kwargs)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(FULL)}
    after = jax.tree.leaves(nnx.state((student, teacher), nnx.Param))
    chex.assert_trees_all_equal(after, before)
    for module in student, teacher:
        assert module.norm.mean.dtype == FULL
        assert (module.norm.mean[...] != 0).all()


def test_overrides_are_searched_in_the_path_of_a_variable():
    policy = jaxmp.get_policy("mixed_float16").with_overrides(("^norm/scale$", FULL))
    seen = {}

    def loss_fn(model):
        seen.update(scale=model.norm.scale.dtype, bias=model.norm.bias.dtype)
        return model(X).sum()

    jaxmp.nnx.value_and_grad(loss_fn, policy=policy, loss_scale=8.0)(net())
    assert seen == {"scale": FULL, "bias": HALF}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_parameter_that_the_function_writes_keeps_its_digits(steps):
    def loss_fn(model, x, teacher, target):
        # An average in bfloat16 would never move.
        teacher.kernel[...] = 0.999 * teacher.kernel[...] + 0.001
        nnx.update(target, nnx.state(model))
        model.bias[...] = model.bias[...] + 2.0**-20
        return model(x).mean() + teacher(x).mean()

    def linear(key):
        return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

    model, teacher, target = linear(0), linear(1), linear(2)
    kernel = np.array(model.kernel[...])
    teacher.kernel[...] = jnp.ones((4, 4)) * 2
    grad_fn = jaxmp.nnx.value_and_grad(
        loss_fn, policy="mixed_bfloat16", accum_steps=steps, batch_argnums=1
    )
    _, grads = grad_fn(model, X, teacher, target)
    expected = 1 + 0.999**steps
    np.testing.assert_allclose(teacher.kernel[...], expected, rtol=1e-6)
    np.testing.assert_array_equal(target.kernel[...], kernel)
    np.testing.assert_array_equal(model.kernel[...], kernel)
    np.testing.assert_array_equal(model.bias[...], 2.0**-20)
    dtypes = {x.dtype for x in jax.tree.leaves(snapshot((model, teacher, target)))}
    assert dtypes == {np.dtype(FULL)}
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(FULL)}


def test_micro_batches_hand_their_state_on():
    def loss_fn(model, x, metric):
        loss = jnp.mean(model(x) ** 2)
        metric.update(values=loss)
        return loss

    ours, theirs = [(net(), nnx.metrics.Average()) for _ in range(2)]
    grad_fn = jaxmp.nnx.value_and_grad(loss_fn, accum_steps=4, batch_argnums=1)
    step = nnx.jit(lambda m, x, metric: grad_fn(m, x, metric))
    loss, grads = step(ours[0], X, ours[1])
    by_flax = nnx.jit(nnx.value_and_grad(loss_fn))
    model, metric = theirs
    found = [by_flax(model, X[i::4], metric) for i in range(4)]  # one after the other
    expected = jax.tree.map(lambda *x: sum(x) / 4, *found)
    chex.assert_trees_all_close((loss, grads), expected, atol=1e-6)
    chex.assert_trees_all_close(snapshot(ours), snapshot(theirs), atol=1e-6)
    assert ours[0].dropout.rngs.count[...] == 4
    assert ours[1].count[...] == 4


def test_each_micro_batch_has_its_own_mask():
    def loss_fn(model, x, rngs):
        mask = model(x, rngs) != 0
        return (model.linear.kernel[...] * 1.0).sum(), mask

    rngs = nnx.Rngs(0)
    ones = jnp.ones((8, 4))
    (_, masks), _ = jaxmp.nnx.value_and_grad(
        loss_fn,
        policy="mixed_float16",
        loss_scale=8.0,
        has_aux=True,
        accum_steps=4,
        batch_argnums=1,
    )(Noisy(nnx.Rngs(1)), ones, rngs)
    assert masks.shape == (4, 2, 4)
    assert len({mask.tobytes() for mask in np.array(masks)}) == 4
    assert rngs.default.count[...] == 4
    assert rngs.default.key[...] == nnx.Rngs(0).default.key[...]


def cached(model, x):
    model.cache = nnx.Cache(x)
    return model.inner(x).mean()


def grown(model, x):
    mean = model.norm.mean[...]
    model.norm.mean = nnx.BatchStat(jnp.concatenate([mean, mean]))
    return model.head(jnp.ones((2, 8))).mean()


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (cached, "creates the variable `0/.*cache.*`nnx.pop`"),
        (grown, r"`0/norm/mean` from float32\[8\] to float32\[16\]"),
    ],
)
@pytest.mark.parametrize("where", ["accum_steps", "mesh"])
def test_with_micro_batches_or_a_mesh_the_state_keeps_its_form(fun, message, where):
    model = net()
    before = snapshot(model)
    option = 2 if where == "accum_steps" else Mesh(jax.devices()[:2], ("data",))
    with pytest.raises(ValueError, match=message):
        jaxmp.nnx.value_and_grad(fun, batch_argnums=1, **{where: option})(model, X)
    chex.assert_trees_all_equal(snapshot(model), before)


def test_variables_are_no_batch():
    with pytest.raises(
        ValueError, match=r"`batch_argnums` names the argument 1.*Cache"
    ):
        jaxmp.nnx.value_and_grad(lambda m, x: m(x[...]).sum(), batch_argnums=1)(
            net(), nnx.Cache(X)
        )


def test_an_argument_that_is_missing_is_said_to_be():
    grad_fn = jaxmp.nnx.value_and_grad(lambda m, x: m(x).sum(), batch_argnums=1)
    with pytest.raises(TypeError, match="needs more positional arguments than the 1"):
        grad_fn(net())


@pytest.mark.parametrize("how", ["mesh", "axis_name", "axis_name, unchecked"])
def test_devices_have_their_own_streams_and_agree_on_the_state(how):
    devices, rate, steps = 4, 0.5, 2
    mesh = Mesh(jax.devices()[:devices], ("data",))

    def loss_fn(model, x, rngs, metric):
        noise = jax.random.uniform(rngs(), (2,))
        rngs.seeded.key[...] = rngs.seeded()
        metric.update(values=x)
        model.norm(x)
        return (model(x).mean(), noise) if how == "mesh" else model(x).mean()

    class Plain(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(4, momentum=rate, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(x)

    model, rngs, metric = Plain(), nnx.Rngs(3, seeded=4), nnx.metrics.Average()
    key, seed = rngs.default.key[...], rngs.seeded.key[...]
    x = jnp.arange(64.0).reshape(16, 4) ** 2 / 64
    options = {"accum_steps": steps, "batch_argnums": 1, "axis_name": "data"}
    if how == "mesh":
        grad_fn = jaxmp.nnx.value_and_grad(loss_fn, has_aux=True, mesh=mesh, **options)
        (_, noise), grads = nnx.jit(grad_fn)(model, x, rngs, metric)
        assert len(np.unique(noise)) == 2 * devices * steps
    else:
        spec = jax.sharding.PartitionSpec
        inner = jaxmp.nnx.value_and_grad(loss_fn, shardings=spec(), **options)
        graphdef, state = nnx.split((model, rngs, metric))

        def on_device(state, x):
            model, rngs, metric = nnx.merge(graphdef, state)
            _, grads = inner(model, x, rngs, metric)
            return nnx.state((model, rngs, metric)), grads

        state, grads = jax.jit(
            mapped(
                on_device,
                mesh,
                (spec(), spec("data")),
                spec(),
                check_vma="unchecked" not in how,
            )
        )(state, x)
        nnx.update((model, rngs, metric), state)

    assert rngs.default.key[...] == key
    assert rngs.default.count[...] == steps
    parts = x.reshape(devices, 4 // steps, steps, 4)
    mean = jnp.zeros((devices, 4))
    for i in range(steps):
        mean = (1 - rate) * parts[:, :, i].mean(1) + rate * mean
    np.testing.assert_allclose(model.norm.mean[...], mean.mean(0), rtol=1e-5)
    np.testing.assert_allclose(metric.compute(), x.mean(), rtol=1e-5)
    assert metric.count[...] == 64 // devices
    expected = nnx.grad(lambda m: m(x).mean())(model)
    chex.assert_trees_all_close(grads, expected, rtol=1e-5)
    assert rngs.seeded.key[...] != seed
    seed = jax.random.key_data(rngs.seeded.key[...])
    for leaf in jax.tree.leaves((seed, nnx.state((model, metric)))):
        values = [np.array(shard.data) for shard in leaf.addressable_shards]
        chex.assert_trees_all_equal(*values, values[0])


def test_a_float16_statistic_does_not_overflow_where_its_mean_does_not():
    class Seeing(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))
            self.seen = nnx.BatchStat(jnp.zeros((), HALF))

    def loss_fn(model, x):
        model.seen[...] = x.mean().astype(HALF)
        return jnp.mean(model.w[...] * x)

    model, mesh = Seeing(), Mesh(jax.devices()[:8], ("data",))
    grad_fn = jaxmp.nnx.value_and_grad(loss_fn, mesh=mesh, batch_argnums=1)
    nnx.jit(grad_fn)(model, jnp.full(8, 2e4))  # the sum of eight is Inf
    assert model.seen[...] == 2e4


# Steps that are skipped


class Average(nnx.Variable):
    """A moving average, of which Flax knows nothing."""


class Averaging(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.average = Average(jnp.zeros(4))

    def __call__(self, x):
        self.average[...] = 0.5 * self.average[...] + 0.5 * x.mean(0)
        return super().__call__(x)


def skipping(policy):
    """Returns a model, its optimizer and the loss, whose inputs may be Inf."""
    model = Averaging(nnx.Rngs(0))
    tx = jaxmp.loss_scaling(optax.adam(1e-3), policy, init_scale=2.0**10)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def step_of(model, optimizer, x):
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    grad_fn = jaxmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)
    loss, grads = grad_fn(model, x)
    optimizer.update(model, grads)
    return loss


class Trainer(nnx.Module):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer


# How a step may be given its objects.
GIVEN = {
    "arguments": (step_of, lambda m, opt: (m, opt)),
    "a container": (lambda both, x: step_of(*both, x), lambda m, opt: ([m, opt],)),
    "a module": (
        lambda t, x: step_of(t.model, t.optimizer, x),
        lambda m, opt: (Trainer(m, opt),),
    ),
}


# Each policy, each way to give the objects, and a step that is not compiled.
SKIPPED = {policy: (policy, "arguments", True) for policy in POLICIES}
SKIPPED |= {name: ("mixed_float16", name, True) for name in GIVEN}
SKIPPED["no jit"] = "mixed_bfloat16", "a module", False


@pytest.mark.parametrize(("policy", "given", "jit"), SKIPPED.values(), ids=SKIPPED)
def test_statistics_of_a_skipped_step_are_what_they_were(policy, given, jit):
    model, optimizer = skipping(policy)
    step, arguments = GIVEN[given]
    args = arguments(model, optimizer)
    step = jaxmp.nnx.autocast(step, policy)
    step = nnx.jit(step) if jit else step
    step(*args, X)
    before = snapshot(model)[0]
    assert (before["norm"]["mean"] != 0).any()
    step(*args, X.at[0, 0].set(jnp.inf))
    after = snapshot(model)[0]
    chex.assert_trees_all_equal(after["norm"], before["norm"])
    chex.assert_trees_all_equal(after["inner"], before["inner"])
    assert np.isinf(after["average"]).any()  # nobody has named it
    assert after["dropout"]["rngs"]["count"] == 2  # nor this
    assert jaxmp.get_loss_scale_state(optimizer).skipped == 1
    step(*args, X)
    assert (snapshot(model)[0]["norm"]["mean"] != before["norm"]["mean"]).any()


def test_more_is_restored_where_it_is_named_and_nothing_with_none():
    def after_a_skipped_step(restore):
        model, optimizer = skipping("mixed_float16")
        before = snapshot(model)[0]
        step = jaxmp.nnx.autocast(step_of, "mixed_float16", restore=restore)
        nnx.jit(step)(model, optimizer, X.at[0, 0].set(jnp.inf))
        state = jaxmp.get_loss_scale_state(optimizer)
        assert (state.skipped, state.loss_scale) == (1, 2.0**9)
        after = snapshot(model)[0]
        same = jax.tree.map(lambda a, b: np.array_equal(a, b), before, after)
        return {name for name in same if not all(jax.tree.leaves(same[name]))}

    assert after_a_skipped_step((nnx.BatchStat, Average)) == {"dropout"}
    assert after_a_skipped_step(nnx.BatchStat) == {"dropout", "average"}
    assert after_a_skipped_step(None) == {"dropout", "average", "norm"}
    assert after_a_skipped_step(...) == set()  # and the loss scale is halved
    with pytest.raises(TypeError, match="`restore` must be an NNX filter, but is 3"):
        jaxmp.nnx.autocast(step_of, "mixed_float16", restore=3)


def test_a_call_that_updates_nothing_keeps_what_it_changes():
    # Also after a step that was skipped.
    model, optimizer = skipping("mixed_float16")
    step = nnx.jit(jaxmp.nnx.autocast(step_of, "mixed_float16"))
    step(model, optimizer, X * jnp.nan)
    before = snapshot(model)[0]

    def calibrate(model, optimizer, x):
        return model(x)

    nnx.jit(jaxmp.nnx.autocast(calibrate, "mixed_float16"))(model, optimizer, X)
    assert (snapshot(model)[0]["norm"]["mean"] != before["norm"]["mean"]).any()


def test_two_models_of_which_one_is_skipped_are_both_left_alone():
    pairs = [skipping("mixed_float16") for _ in range(2)]

    def step(pairs, x, y):
        return [step_of(*pair, z) for pair, z in zip(pairs, (x, y), strict=True)]

    step = nnx.jit(jaxmp.nnx.autocast(step, "mixed_float16"))
    step(pairs, X, X)
    before = [snapshot(model.norm.mean) for model, _ in pairs]
    step(pairs, X, X * jnp.inf)
    after = [snapshot(model.norm.mean) for model, _ in pairs]
    chex.assert_trees_all_equal(after, before)


def test_steps_in_a_scan_leave_no_trace_of_the_skipped_one():
    def run(poison):
        model, optimizer = skipping("mixed_float16")
        batches = jnp.stack([X, X, X]).at[1].multiply(poison)

        @nnx.jit
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def epoch(both, x):
            jaxmp.nnx.autocast(step_of, "mixed_float16")(*both, x)
            return both

        epoch((model, optimizer), batches)
        return snapshot(model.norm), int(jaxmp.get_loss_scale_state(optimizer).skipped)

    stats, skipped = run(jnp.nan)
    assert skipped == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(stats))


# The functions that are not in `jaxmp.nnx`


def in_a_gradient(make, *batch, **options):
    """Returns what wraps a function: it is called by the loss of a gradient."""

    def wrap(f):
        def loss(w, *x, args, kwargs):
            return (f(*args, **kwargs), w)[1]

        grad_fn = make(loss, **options)
        return lambda *args, **kwargs: grad_fn(1.0, *batch, args=args, kwargs=kwargs)

    return wrap


PLAIN = {
    "autocast": (jaxmp.autocast, "`jaxmp.nnx.autocast`"),
    "with_policy": (
        partial(jaxmp.with_policy, policy="mixed_float16"),
        r"`jaxmp.with_policy\(model, policy\)\(x\)`.*`jaxmp.nnx.autocast\(fun, ",
    ),
    "value_and_grad": (
        in_a_gradient(jaxmp.value_and_grad),
        "`jaxmp.nnx.value_and_grad`, which takes the same",
    ),
    "grad": (
        in_a_gradient(jaxmp.grad),
        "`jaxmp.nnx.value_and_grad`, which returns the gradients second",
    ),
    "accum_steps": (
        in_a_gradient(jaxmp.value_and_grad, X, accum_steps=2, batch_argnums=1),
        "`jaxmp.nnx.value_and_grad`",
    ),
}
# Each function with one object, and one of them with each object in each place.
CHANGED = {
    f"{name}-{kind}-{place}": (*PLAIN[name], *KINDS[kind], *POSITIONS[place])
    for name, kind, place in (
        *((name, "statistics", "dict") for name in PLAIN),
        *(("autocast", kind, "first") for kind in KINDS),
        *(("value_and_grad", "rngs", place) for place in POSITIONS),
    )
}


# Flax writes a float32 sum into what `with_policy` has cast.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
@pytest.mark.parametrize(
    ("wrap", "cure", "make", "change", "place", "find"), CHANGED.values(), ids=CHANGED
)
def test_an_object_that_is_changed_in_a_copy_is_refused(
    wrap, cure, make, change, place, find
):
    def fun(*args, **kwargs):
        change(find(args, kwargs))
        return jnp.ones(())

    thing = make()
    before = snapshot(thing)
    args, kwargs = place(thing)
    name = type(thing).__name__
    with pytest.raises(TypeError, match=f"`{name}`.*lost.*{cure}"):
        wrap(fun)(*args, **kwargs)
    chex.assert_trees_all_equal(snapshot(thing), before)
    with checking_leaks():
        jax.jit(lambda: 0)()


@pytest.mark.parametrize("wrap", [x for x, _ in PLAIN.values()], ids=PLAIN)
def test_the_message_names_the_variable(wrap):
    with pytest.raises(
        TypeError, match=r"changed its variable `.*m/dropout/rngs/count`"
    ):
        wrap(lambda x, model: model["m"].dropout(x).sum())(X, {"m": net()})


@crossed("wraps kind", PLAIN, KINDS)
def test_an_object_that_is_only_read_passes(wraps, kind):
    (wrap, _), (make, _) = wraps, kind
    thing = make()
    wrap(lambda thing, x: (jax.tree.leaves(thing), x.sum())[1])(thing, X)


class Layers(nnx.Module):
    """Has a layer, a stack of three, statistics and nothing that it must change."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(key):
            return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

        self.stack = stack(jax.random.split(jax.random.key(1), 3))


def call(model, x):
    return model.norm(model.layer(x))


def over_layers(step):
    return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)


# Transformations of NNX, which write each variable back.
WRITING_BACK = {
    "remat": lambda model, x: nnx.remat(call)(model, x),
    "jit": lambda model, x: nnx.jit(call)(model, x),
    "remat in scan": lambda model, x: over_layers(
        nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
    )(x, model.stack),
    "cond": lambda model, x: nnx.cond(
        x.sum() > 0, call, lambda model, x: -call(model, x), model, x
    ),
}


@crossed("wraps run", PLAIN, WRITING_BACK)
def test_a_variable_that_is_written_back_as_it_was_passes(wraps, run):
    wraps[0](lambda model, x: run(model, x).astype(FULL).mean())(Layers(), X)


@pytest.mark.parametrize("run", WRITING_BACK.values(), ids=WRITING_BACK)
def test_a_variable_that_a_transformation_changes_is_refused(run):
    def counted(model, x):
        out = run(model, x)
        return nnx.remat(lambda m: assign(m.norm.mean, m.norm.var[...]) or out)(model)

    with pytest.raises(TypeError, match=r"changed its variable `norm/mean`"):
        jaxmp.autocast(counted)(Layers(), X)


@crossed("run steps", WRITING_BACK, [1, 2])
def test_a_policy_reaches_what_a_transformation_writes_back(run, steps):
    def loss_fn(model, x, run):
        call = jaxmp.with_policy(lambda x: run(model, x), "mixed_bfloat16")
        return jnp.mean(call(x) ** 2)

    def trained(run):
        grad_fn = jaxmp.nnx.value_and_grad(
            partial(loss_fn, run=run),
            policy="mixed_bfloat16",
            accum_steps=steps,
            batch_argnums=1,
        )
        model = Layers()
        report = jaxmp.audit(grad_fn)(model, X)
        return report, *grad_fn(model, X), snapshot(model)

    report, loss, grads, after = trained(run)
    assert report.fraction_16bit == 1, str(report)
    chex.assert_trees_all_equal(after, snapshot(Layers()))
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(FULL)}
    assert jnp.isfinite(loss)


# Flax writes a float32 sum into what `with_policy` has cast.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
@crossed("wraps make", PLAIN, [net, lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))])
def test_what_is_made_of_a_state_is_the_functions_own(wraps, make):
    wrap, _ = wraps
    graph, state = nnx.split(make())
    before = snapshot(state)
    wrap(lambda state, x: nnx.merge(graph, state)(x).astype(FULL).mean())(state, X)
    wrap(lambda both, x: nnx.merge(*both)(x).astype(FULL).mean())((graph, state), X)
    chex.assert_trees_all_equal(snapshot(state), before)


def test_a_state_may_be_returned_as_it_has_become():
    graph, state = nnx.split(net())

    def forward(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    _, new = jaxmp.autocast(forward, "bfloat16")(state, X)
    assert new["norm"]["mean"].dtype == FULL
    assert (new["norm"]["mean"][...] != state["norm"]["mean"][...]).all()


def dropping():
    return nnx.Sequential(
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )


@pytest.mark.parametrize("name", ["value_and_grad", "grad"])
def test_a_stream_among_the_parameters_is_explained(name):
    def loss_fn(model, x):
        return model(x).mean()

    with pytest.raises(
        TypeError,
        match=rf"`jaxmp.{name}` was given the NNX object `Sequential`, whose variable "
        r"`layers/1/rngs/count` has no gradient.*uint32.*`jaxmp.nnx.value_and_grad`",
    ):
        getattr(jaxmp, name)(loss_fn)(dropping(), X)
    model = dropping()
    _, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, X)
    assert set(grads["layers"]) == {0}
    assert model.layers[1].rngs.count[...] == 1


@pytest.mark.parametrize("nnx_too", [False, True])
def test_a_stream_in_a_state_is_to_be_split_off(nnx_too):
    value_and_grad = jaxmp.nnx.value_and_grad if nnx_too else jaxmp.value_and_grad
    model = dropping()
    graph, state = nnx.split(model)

    def loss_fn(state, rest, x):
        return nnx.merge(graph, state, *rest)(x).mean()

    with pytest.raises(TypeError, match=r"uint32. Split .* `graph, params, rest = "):
        value_and_grad(loss_fn)(state, (), X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    _, grads = value_and_grad(loss_fn)(params, (rest,), X)
    assert grads["layers"][0]["kernel"].shape == (4, 4)


@pytest.mark.filterwarnings("error")
def test_a_layer_alone_is_differentiated_without_a_warning():
    layer = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    loss, grads = jaxmp.value_and_grad(lambda layer, x: layer(x).mean())(layer, X)
    assert loss.dtype == FULL
    np.testing.assert_allclose(grads.bias[...], 1)


def test_the_advice_inside_of_a_gradient_works():
    model = net()

    def loss_fn(model, x, call):
        return call(model)(x).mean()

    grad_fn = jaxmp.nnx.value_and_grad(loss_fn, policy="mixed_float16", loss_scale=8.0)
    call = jaxmp.with_policy(lambda m, x: m.dropout(x), "mixed_float16")
    with pytest.raises(TypeError, match=r"close over it: `jaxmp\.with_policy"):
        grad_fn(model, X, lambda m: partial(call, m))
    grad_fn(model, X, lambda m: jaxmp.with_policy(m, "mixed_float16"))
    assert model.dropout.rngs.count[...] == 1


@pytest.mark.parametrize("wrap", [jaxmp.autocast, jaxmp.nnx.autocast])
def test_a_module_from_outside_is_explained(wrap):
    model = net()
    with pytest.raises(Exception, match="different trace level") as error:
        wrap(lambda x: model(x))(X)
    assert any(
        "as an argument of `jaxmp.nnx.autocast`" in n for n in error.value.__notes__
    )


def test_a_cache_is_filled_step_by_step():
    attention = nnx.MultiHeadAttention(
        2, 4, decode=True, rngs=nnx.Rngs(0), use_bias=False
    )
    attention.init_cache((1, 4, 4))
    decode = jaxmp.nnx.autocast(lambda x, state: state["model"](x), "bfloat16")
    decode = nnx.jit(decode)
    outs = [decode(X[None, i : i + 1], {"model": attention}) for i in range(4)]
    assert attention.cache_index[...] == 4
    assert attention.cached_key.dtype == FULL
    assert attention.cached_key[...].all()
    assert {out.dtype for out in outs} == {np.dtype(FULL)}


class Averaged(nnx.Module):
    """A sharded weight and its moving average."""

    def __init__(self, weight):
        self.weight = nnx.Param(weight)
        self.average = nnx.Param(weight)

    def __call__(self, x):
        self.average[...] = 0.5 * self.average[...] + 0.5 * self.weight[...]
        weight = jax.lax.all_gather(self.weight[...], "data", tiled=True)
        return jnp.tanh(x @ weight)


@pytest.mark.parametrize("checked", [True, False])
def test_state_that_is_sharded_is_not_averaged_over_the_shards(checked):
    mesh, spec = Mesh(jax.devices()[:4], ("data",)), jax.sharding.PartitionSpec
    weight = jnp.arange(32.0).reshape(8, 4) / 32
    grad_fn = jaxmp.nnx.value_and_grad(
        lambda model, x: (model(x) ** 2).mean(),
        wrt=nnx.PathContains("weight"),
        axis_name="data",
        shardings=None if checked else spec("data"),
    )

    def step(weight, x):
        model = Averaged(weight)
        grad_fn(model, x)
        return model.average[...]

    rows = spec("data")
    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=checked
        )
    )
    if checked:
        np.testing.assert_array_equal(run(weight, jnp.ones((4, 8))), weight)
        return
    with pytest.raises(ValueError, match=r"`0/average`.*check_vma=True"):
        run(weight, jnp.ones((4, 8)))


def test_a_keyword_argument_is_not_split():
    def loss_fn(model, x, table):
        return (model(x) @ table).mean()

    model, x, table = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((4, 3)), jnp.eye(4)
    grad_fn = jaxmp.nnx.value_and_grad(loss_fn, accum_steps=2, batch_argnums=1)
    loss, _ = grad_fn(model, x, table=table)
    np.testing.assert_allclose(loss, loss_fn(model, x, table), rtol=1e-6)
    with pytest.raises(ValueError, match="pass it by keyword"):
        grad_fn(model, x, table)


def test_state_of_a_weak_type_keeps_its_digits_beside_cast_parameters():
    class Tracked(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(2))
            self.mean = nnx.Variable(jnp.array(1 / 3))  # weakly typed

        def __call__(self):
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * self.weight[...].mean()
            return self.weight[...].sum()

    model = Tracked()
    jaxmp.nnx.value_and_grad(lambda m: m(), policy="mixed_bfloat16")(model)
    expected = 0.3 + float(jnp.bfloat16(0.1))  # of the cast parameter's mean
    np.testing.assert_allclose(model.mean[...], expected, rtol=1e-6)
