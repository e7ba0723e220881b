"""The losses of generated training steps, of a scope and the last two values."""

# ruff: noqa: D103  (a loss is named after what it is)

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .generated_layers import SIZE, TOKENS, Layer, norm, unit


def of_logits(loss: Callable) -> Layer:
    """A loss of logits and labels."""
    return lambda s, x, _: loss(s.dense(norm(x)), s.batch.labels)


def of_predictions(loss: Callable) -> Layer:
    """A loss of what is predicted and wanted, entry by entry."""
    return lambda s, x, _: loss(s.dense(x), s.batch.y).mean()


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, labels[:, None], 1).mean()


def smoothed(logits, labels):
    target = 0.9 * jax.nn.one_hot(labels, SIZE) + 0.1 / SIZE
    return -(target * jax.nn.log_softmax(logits)).sum(-1).mean()


def focal(logits, labels):
    logs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -((1 - jnp.exp(logs)) ** 2 * logs).mean()


def binary(logits, labels):
    target = jax.nn.one_hot(labels, SIZE)
    return (jax.nn.softplus(logits) - target * logits).mean()


def of_probabilities(logits, labels):
    p = jnp.clip(jax.nn.sigmoid(logits), 1e-6, 1 - 1e-6)
    target = jax.nn.one_hot(labels, SIZE)
    return -(target * jnp.log(p) + (1 - target) * jnp.log(1 - p)).mean()


def dice(logits, labels):
    p, target = jax.nn.sigmoid(logits), jax.nn.one_hot(labels, SIZE)
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


def logsumexp_by_hand(logits, labels):
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    total = jnp.log(jnp.exp(logits - top).sum(-1)) + top[:, 0]
    return (total - (logits * jax.nn.one_hot(labels, SIZE)).sum(-1)).mean()


def with_size_of_sum(logits, labels):
    total = jax.nn.logsumexp(logits, -1)
    return cross_entropy(logits, labels) + 0.01 * (total**2).mean()


def margin(logits, labels):
    right = jnp.take_along_axis(logits, labels[:, None], 1)
    return jax.nn.relu(1 + logits - right).mean()


def hot(logits, labels):
    return cross_entropy(20 * unit(logits), labels)


def forward_algorithm(s, x, _):
    steps, start = s.weight(SIZE, SIZE, scale=1.0), s.dense(norm(x))

    def body(logs, now):
        logs = jax.nn.logsumexp(logs[:, None] + steps, 0) + now
        return logs, None

    logs, _ = lax.scan(body, start[0], start[1:])
    path = jnp.take_along_axis(start, s.batch.labels[:, None], 1).sum()
    path += steps[s.batch.labels[:-1], s.batch.labels[1:]].sum()
    return (jax.nn.logsumexp(logs) - path) / TOKENS


def squares(x, y):
    return (x - y) ** 2


def huber(x, y):
    d = x - y
    return jnp.where(jnp.abs(d) < 1, d * d / 2, jnp.abs(d) - 0.5)


def quantile(x, y):
    return jnp.maximum(0.9 * (y - x), -0.1 * (y - x))


def log_cosh(x, y):
    return jax.nn.softplus(2 * (x - y)) - (x - y) - jnp.log(2.0)


def far_target(s, x, _):
    return ((s.dense(x) + s.batch.far - (s.batch.far + s.batch.y)) ** 2).mean()


def large_target(s, x, _):
    return ((100 * s.dense(x) - s.batch.far * s.batch.y) ** 2).mean() / 1e4


def relative(s, x, _):
    return (jnp.abs(s.dense(x) - s.batch.y) / (jnp.abs(s.batch.y) + 1)).mean()


def gaussian(s, x, _):
    mean, log_variance = s.dense(norm(x)), s.dense(norm(x))
    error = (s.batch.y - mean) ** 2 * jnp.exp(-log_variance)
    return (log_variance + error).mean() / 2


def mixture(s, x, _):
    h = norm(x)
    mean, spread = s.dense(h, 3), jax.nn.softplus(s.dense(h, 3)) + 0.1
    z = (s.batch.y[:, :1] - mean) / spread
    logs = jax.nn.log_softmax(s.dense(h, 3)) - z * z / 2 - jnp.log(spread)
    return -jax.nn.logsumexp(logs, -1).mean()


def variational(s, x, _):
    mean, log_variance = s.dense(norm(x)), s.dense(norm(x)) / 4
    z = mean + jnp.exp(log_variance / 2) * s.batch.y
    kl = (mean**2 + jnp.exp(log_variance) - 1 - log_variance).mean() / 2
    return ((s.dense(z) - s.batch.x) ** 2).mean() + 0.1 * kl


def flow_likelihood(s, x, _):
    scale, shift = jnp.tanh(s.dense(norm(x))), s.dense(norm(x))
    z = (s.batch.y - shift) * jnp.exp(-scale)
    return (z * z / 2 + scale).mean()


def log_determinant(s, x, _):
    w = s.weight(SIZE, SIZE, scale=0.2) + jnp.eye(SIZE)
    z = s.mm(norm(x), w)
    return (z * z).mean() / 2 - jnp.linalg.slogdet(w)[1] / SIZE


def contrastive(s, x, y):
    scores = s.dot("id,jd->ij", unit(s.dense(x)), unit(s.dense(y))) / 0.2
    return -jnp.diagonal(jax.nn.log_softmax(scores)).mean()


def triplet(s, x, y):
    a, b = s.dense(x), s.dense(y)
    far = jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-3)
    return jax.nn.softplus(jnp.diagonal(far)[:, None] - far).mean()


def cross_correlation(s, x, y):
    a, b = norm(s.dense(x), 0), norm(s.dense(y), 0)
    c = s.dot("ti,tj->ij", a, b) / TOKENS
    return ((c - jnp.eye(SIZE)) ** 2).mean()


def spread(s, x, _):
    h = s.dense(x)
    return jax.nn.relu(1 - jnp.sqrt(h.var(0) + 1e-4)).mean() + (h.mean(0) ** 2).mean()


def gram(s, x, y):
    a, b = s.dense(x), s.dense(y)
    g = s.dot("ti,tj->ij", a, a) / TOKENS - s.dot("ti,tj->ij", b, b) / TOKENS
    return (g * g).mean()


def divergence(s, x, y):
    p, q = (jax.nn.log_softmax(s.dense(norm(h))) for h in (x, y))
    return (jnp.exp(p) * (p - q)).sum(-1).mean()


def total_variation(s, x, _):
    h = s.dense(x)
    return jnp.sqrt((h[1:] - h[:-1]) ** 2 + 1e-3).mean() + ((h - s.batch.y) ** 2).mean()


def advantage(s, x, _):
    value, logs = s.dense(x, 1)[:, 0], jax.nn.log_softmax(s.dense(norm(x)))
    target = s.batch.y[:, 0] + 0.9 * jnp.append(value[1:], 0)
    gain = lax.stop_gradient(target - value)
    chosen = jnp.take_along_axis(logs, s.batch.labels[:, None], 1)[:, 0]
    ratio = jnp.exp(chosen - lax.stop_gradient(chosen))
    return ((lax.stop_gradient(target) - value) ** 2).mean() - (ratio * gain).mean()


def decay(s, x, _):
    penalty = sum((w**2).sum() for w in s.weights.values())
    return ((s.dense(x) - s.batch.y) ** 2).mean() + 1e-3 * penalty


def teacher(s, x, y):
    target = lax.stop_gradient(jax.nn.softmax(s.dense(norm(y)) / 0.5))
    return -(target * jax.nn.log_softmax(s.dense(norm(x)))).sum(-1).mean()


def _critic(s):
    w, v = s.weight(SIZE, 16), s.weight(16, 1)
    return lambda x: s.dot("tj,jk->tk", jnp.tanh(s.mm(x, w)), v)


def gradient_penalty(s, x, _):
    critic = _critic(s)
    value, slope = jax.value_and_grad(lambda x: critic(x).sum())(x)
    return value / TOKENS + ((jnp.linalg.norm(slope, axis=-1) - 1) ** 2).mean()


def score_matching(s, x, y):
    critic = _critic(s)
    slope = jax.grad(lambda x: critic(x).sum())
    score, change = jax.jvp(slope, (x,), (y,))
    return ((score**2).sum(-1) / 2 + (change * y).sum(-1)).mean()


def hessian_product(s, x, _):
    critic = _critic(s)
    slope = jax.grad(lambda x: critic(x).sum())
    return ((jax.jvp(slope, (x,), (s.batch.y,))[1] - s.batch.y) ** 2).mean()


def second_derivative(s, x, _):
    critic = _critic(s)

    def along(t, x):
        return critic((x + t * jnp.ones(SIZE))[None])[0, 0]

    second = jax.vmap(jax.grad(jax.grad(along)), (None, 0))(0.0, x)
    return ((second - s.batch.y[:, 0]) ** 2).mean()


def inner_step(s, x, _):
    w = s.weight(SIZE, SIZE)
    half = TOKENS // 2
    error = lambda w, x, y: ((s.mm(x, w) - y) ** 2).mean()  # noqa: E731
    x, y = norm(x), s.batch.y
    new = w - 0.3 * jax.grad(error)(w, x[:half], y[:half])
    return error(new, x[half:], y[half:])


# By what a loss is given first.
_AS_LAYER = {"logits": of_logits, "x": of_predictions, "s": lambda loss: loss}
LOSSES: dict[str, Layer] = {
    loss.__name__.replace("_", " "): _AS_LAYER[loss.__code__.co_varnames[0]](loss)
    for loss in list(globals().values())
    if inspect.isfunction(loss) and loss.__module__ == __name__
    if loss.__code__.co_varnames[0] in _AS_LAYER and loss.__name__[0] != "_"
}
