"""Programs of JAX and optax alone, in the spirit of JAX's examples."""

import jax
import jax.numpy as jnp
import optax
from jax import lax, random
from jax.example_libraries import stax
from laws import KEY, Program, drawn, hold, normal, programs


def variational_inference():
    """Fits a normal distribution to a funnel, by samples of a reparametrisation."""

    def log_joint(z, mixing):
        x, y = z @ mixing
        return -0.5 * x**2 - 0.5 * (y / jnp.exp(x / 2)) ** 2 - x / 2

    def loss(params, mixing, keys):
        mean, log_std = params

        def elbo(key):
            z = mean + jnp.exp(log_std) * random.normal(key, mean.shape)
            return log_joint(z, mixing) + log_std.sum()

        return -jax.vmap(elbo)(keys).mean()

    mixing = jnp.array([[1.0, 0.3], [-0.2, 0.9]])
    keys = random.split(KEY, 16)
    params = jnp.array([0.3, -0.4]), jnp.array([-0.5, -1.0])
    return Program(loss, (params, mixing, keys), tolerance=8)


def residual_net():
    """A residual network of combinators, with norms by statistics of the batch."""
    main = stax.serial(
        stax.BatchNorm(), stax.Relu, stax.Conv(8, (3, 3), (1, 1), "SAME")
    )
    block = stax.serial(
        stax.FanOut(2), stax.parallel(main, stax.Identity), stax.FanInSum
    )
    init, apply = stax.serial(
        stax.Conv(8, (3, 3), (2, 2), "SAME"),
        block,
        stax.AvgPool((2, 2)),
        stax.Flatten,
        stax.Dense(5),
        stax.LogSoftmax,
    )
    images, labels = normal(1, 8, 8, 8, 2), jax.nn.one_hot(jnp.arange(8) % 5, 5)
    params = drawn(jax.eval_shape(lambda: init(KEY, (8, 8, 8, 2))[1]))

    def loss(params, images, labels):
        return -jnp.mean(jnp.sum(apply(params, images) * labels, axis=1))

    return Program(loss, (params, images, labels), tolerance=8)


def kernel_regression():
    """Solves with the matrix of a kernel, whose width is learnt."""
    x, y, new = normal(1, 10, 3), normal(2, 10), normal(3, 4, 3)

    def kernel(width, a, b):
        apart = ((a[:, None] - b[None]) ** 2).sum(-1)
        return jnp.exp(-apart / (2 * width**2))

    def loss(params, x, y, new):
        matrix = kernel(params["width"], x, x) + jnp.exp(params["noise"]) * jnp.eye(10)
        weights = jax.scipy.linalg.solve(matrix, y, assume_a="pos")
        predicted = kernel(params["width"], new, x) @ weights
        evidence = 0.5 * y @ weights + 0.5 * jnp.linalg.slogdet(matrix)[1]
        return evidence + (predicted**2).mean()

    params = {"width": jnp.float32(1.3), "noise": jnp.float32(-1.0)}
    # JAX's solvers multiply at the highest precision, which autocast respects.
    return Program(loss, (params, x, y, new), wide=True)


def speech():
    """A recurrent net under the loss of connectionist temporal classification."""
    frames, labels = normal(1, 3, 10, 6), jnp.array([[1, 2, 3], [2, 2, 0], [4, 0, 0]])
    lengths = jnp.array([10, 8, 9])
    shapes = {"into": (6, 12), "again": (12, 12), "out": (12, 5)}
    params = drawn({k: jnp.zeros(shape) for k, shape in shapes.items()})

    def loss(params, frames, labels, lengths):
        def step(h, x):
            h = jnp.tanh(x @ params["into"] + h @ params["again"])
            return h, h @ params["out"]

        start = jnp.zeros((len(frames), 12))
        logits = lax.scan(step, start, frames.swapaxes(0, 1))[1].swapaxes(0, 1)
        padding = (jnp.arange(10) >= lengths[:, None]).astype(jnp.float32)
        ends = (labels == 0).astype(jnp.float32)
        return optax.ctc_loss(logits, padding, labels, ends).mean()

    return Program(loss, (params, frames, labels, lengths))


def many_losses():
    """The losses of optax on the outputs of one layer."""
    x, y, labels = normal(1, 8, 6), normal(2, 8, 4), jnp.arange(8) % 4
    params = drawn({"w": jnp.zeros((6, 4)), "b": jnp.zeros(4)})

    def loss(params, x, y, labels):
        out = x @ params["w"] + params["b"]
        hot = jax.nn.one_hot(labels, 4)
        return (
            optax.huber_loss(out, y).mean()
            + optax.log_cosh(out, y).mean()
            + optax.cosine_distance(out, y, epsilon=1e-6).mean()
            + optax.sigmoid_focal_loss(out, hot).mean()
            + optax.losses.poly_loss_cross_entropy(out, hot).mean()
            + optax.kl_divergence(jax.nn.log_softmax(out), jax.nn.softmax(y)).mean()
            + optax.ntxent(out, labels, temperature=0.5).mean()
            + optax.hinge_loss(out, 2 * hot - 1).mean()
        )

    return Program(loss, (params, x, y, labels))


def clipped_probabilities():
    """A cross-entropy on probabilities, kept away from 0 and 1 by as much as counts."""
    x, labels = normal(1, 8, 16), jnp.arange(8.0)[:, None] % 2

    def loss(w, x, labels):
        p = jnp.clip(jax.nn.sigmoid(8 * x @ w), 1e-7, 1 - 1e-7)
        return -jnp.mean(labels * jnp.log(p) + (1 - labels) * jnp.log(1 - p))

    return Program(loss, (drawn(jnp.zeros((16, 4))), x, labels))


def schedule_lookup():
    """The weights of a diffusion loss, looked up by the step of each row."""
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))
    steps, x, noise = jnp.array([0, 3, 500, 900]), normal(1, 4, 16), normal(2, 4, 16)

    def loss(w, x, noise, steps):
        a = kept[steps]
        noisy = jnp.sqrt(a)[:, None] * x + jnp.sqrt(1 - a)[:, None] * noise
        return (a / (1 - a) * ((noisy @ w - x) ** 2).mean(1)).mean()

    return Program(loss, (drawn(jnp.zeros((16, 16))), x, noise, steps))


@programs(
    variational_inference,
    residual_net,
    kernel_regression,
    speech,
    many_losses,
    clipped_probabilities,
    schedule_lookup,
)
def test_programs_of_jax_are_what_they_were(program, policy, order):
    hold(program, policy, order)
