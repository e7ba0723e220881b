"""NumPyro and Distrax: densities, evidence and flows."""

import jax
import jax.numpy as jnp
import pytest
from laws import Program, drawn, hold, normal, programs


def numpyro_model():
    """A regression whose mean is a small network, with a prior on its weights."""
    reason = "numpyro is in the extra `programs`"
    numpyro = pytest.importorskip("numpyro", reason=reason)
    dist = pytest.importorskip("numpyro.distributions")

    def model(x, y):
        first = numpyro.sample("first", dist.Normal(0, jnp.ones((3, 8))).to_event(2))
        last = numpyro.sample("last", dist.Normal(0, jnp.ones(8)).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        with numpyro.plate("rows", len(x)):
            mean = jnp.tanh(x @ first) @ last
            numpyro.sample("y", dist.StudentT(4.0, mean, noise), obs=y)

    return model


def potential_energy():
    """What Hamiltonian Monte Carlo differentiates at each leap."""
    model = numpyro_model()
    util = pytest.importorskip("numpyro.infer.util")
    unconstrained = {
        "first": normal(1, 3, 8),
        "last": normal(2, 8),
        "noise": jnp.float32(-0.3),
    }
    x, y = normal(3, 16, 3), normal(4, 16)

    def loss(unconstrained, x, y):
        return util.potential_energy(model, (x, y), {}, unconstrained)

    return Program(loss, (unconstrained, x, y))


def evidence():
    """The negative evidence lower bound of a normal guide."""
    model = numpyro_model()
    numpyro = pytest.importorskip("numpyro")
    dist = pytest.importorskip("numpyro.distributions")
    elbo = pytest.importorskip("numpyro.infer").Trace_ELBO(num_particles=2)
    shapes = {"first": (3, 8), "last": (8,), "noise": ()}

    def guide(x, y):
        for name, shape in shapes.items():
            mean = numpyro.param(f"{name} mean", jnp.zeros(shape))
            log_std = numpyro.param(f"{name} std", jnp.zeros(shape))
            sample = dist.Normal(mean, jnp.exp(log_std)).to_event(len(shape))
            if name == "noise":
                positive = dist.transforms.ExpTransform()
                sample = dist.TransformedDistribution(sample, positive)
            numpyro.sample(name, sample)

    params = {f"{k} mean": normal(1, *shape) for k, shape in shapes.items()}
    params |= {f"{k} std": normal(2, *shape) - 2 for k, shape in shapes.items()}

    def loss(params, key, x, y):
        return elbo.loss(key, params, model, guide, x, y)

    return Program(loss, (params, jax.random.key(1), normal(3, 16, 3), normal(4, 16)))


def random_effects():
    """Groups with effects of their own, looked up by number; categories; a scan."""
    reason = "numpyro is in the extra `programs`"
    numpyro = pytest.importorskip("numpyro", reason=reason)
    dist = pytest.importorskip("numpyro.distributions")
    util = pytest.importorskip("numpyro.infer.util")
    groups, x = jnp.arange(16) % 4, normal(1, 16, 5)
    labels = jnp.arange(16) % 3

    def model(groups, x, labels):
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("groups", 4):
            effects = numpyro.sample("effects", dist.Normal(0, scale).expand([4]))
        weights = numpyro.sample("weights", dist.Normal(0, jnp.ones((5, 3))).to_event())
        logits = x @ weights + effects[groups][:, None] * jnp.arange(3)
        numpyro.sample("labels", dist.Categorical(logits=logits), obs=labels)

    unconstrained = {
        "scale": jnp.float32(0.2),
        "effects": normal(2, 4),
        "weights": normal(3, 5, 3),
    }

    def loss(unconstrained, *args):
        return util.potential_energy(model, args, {}, unconstrained)

    return Program(loss, (unconstrained, groups, x, labels))


def flow():
    """A density of coupling layers with splines, whose knots a network places."""
    reason = "distrax is in the extra `programs`"
    distrax = pytest.importorskip("distrax", reason=reason)
    bins = 4
    shapes = [
        {"into": jnp.zeros((2, 16)), "out": jnp.zeros((16, 2 * (3 * bins + 1)))}
        for _ in range(2)
    ]
    params, x = drawn(shapes), normal(1, 8, 4)

    def density(params):
        layers = []
        for i, layer in enumerate(params):

            def conditioner(half, layer=layer):
                hidden = jnp.tanh(half @ layer["into"]) @ layer["out"]
                return hidden.reshape(*half.shape[:-1], 2, -1)

            def bijector(knots):
                return distrax.RationalQuadraticSpline(knots, -3.0, 3.0)

            coupling = distrax.SplitCoupling(
                2, 1, conditioner, bijector, swap=bool(i % 2)
            )
            layers.append(coupling)
        base = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))

    def loss(params, x):
        return -density(params).log_prob(x).mean()

    return Program(loss, (params, x), tolerance=8)


@programs(potential_energy, evidence, random_effects, flow)
def test_densities_are_what_they_were(program, policy, order):
    hold(program, policy, order)
