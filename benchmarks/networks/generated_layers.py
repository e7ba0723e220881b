"""The layers of generated training steps.

A layer takes its :class:`Scope`, the value before it and an earlier one, each of shape
``[TOKENS, SIZE]``, and returns another of that shape, of entries near one.
"""

# ruff: noqa: D103  (a layer is named after what it is)

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TOKENS, SIZE, WORDS = 8, 8, 12
FAR, NEAR = 30, 2.0**-9

Layer = Callable[["Scope", Any, Any], Any]


class Batch(NamedTuple):
    """The data of a step."""

    x: Any  # [TOKENS, SIZE]
    y: Any  # [TOKENS, SIZE]
    far: Any  # [TOKENS, SIZE], around FAR
    words: Any  # int32[TOKENS]
    labels: Any  # int32[TOKENS]


def batch_of(rng: np.random.Generator) -> Batch:
    """Returns random data."""
    x, y, far = rng.normal(size=(3, TOKENS, SIZE)).astype(np.float32)
    words, labels = rng.integers([[WORDS], [SIZE]], size=(2, TOKENS)).astype(np.int32)
    return Batch(x, y, far + FAR, words, labels)


class Asked(NamedTuple):
    """A weight that a layer asks for: normal numbers."""

    shape: tuple[int, ...]
    scale: float
    mean: float


class Scope:
    """What a layer is given: the data, weights, and products."""

    def __init__(
        self,
        name: str,
        batch: Batch,
        weights: dict[str, Any],
        cast: Callable,
        asked: dict[str, Asked] | None,
        is_near: bool = False,
    ):
        """Starts a layer.

        Args:
            name: Of the layer.
            batch: The data.
            weights: By name.
            cast: Rounds what a product takes and returns, or does nothing.
            asked: Is filled with the weights that the layer asks for, while there are
                none; else None.
            is_near: Whether the numbers that are far from 0 are near it instead.
        """
        self.batch, self.weights, self._is_near = batch, weights, is_near
        self._name, self._cast, self._asked, self._count = name, cast, asked, 0

    def weight(self, *shape: int, scale: float | None = None, mean: float = 0.0) -> Any:
        """Returns the next weight, by default one that keeps the size of numbers."""
        name = f"{self._name}.{self._count}"
        self._count += 1
        if self._asked is None:
            return self.weights[name]
        usual = shape[-2] ** -0.5 if scale is None else scale
        self._asked[name] = Asked(shape, float(usual), mean)
        return jnp.zeros(shape)

    def far(self, number: float) -> float:
        """Returns a number that is far from 0, or one near it."""
        return number * NEAR if self._is_near else number

    def dot(self, subscripts: str, a: Any, b: Any) -> Any:
        """Returns a product."""
        return self._cast(jnp.einsum(subscripts, self._cast(a), self._cast(b)))

    def mm(self, x: Any, w: Any) -> Any:
        """Returns a product of vectors or of rows with a matrix."""
        return self.dot("ti,ij->tj" if x.ndim == 2 else "i,ij->j", x, w)

    def convolved(self, x: Any, kernel: Any, groups: int = 1) -> Any:
        """Returns a convolution over the tokens, with a bias."""
        out = lax.conv_general_dilated(
            self._cast(x)[None],
            self._cast(kernel),
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=groups,
        )
        return self._biased(self._cast(out[0]))

    def dense(self, x: Any, size: int = SIZE, *, bias: bool = True) -> Any:
        """Returns a dense layer."""
        y = self.dot("...i,ij->...j", x, self.weight(x.shape[-1], size))
        return self._biased(y) if bias else y

    def _biased(self, y: Any) -> Any:
        """Returns a layer with its bias, which is cast as in layers of Flax or PyTorch.

        The gradient of the bias is a sum of what was rounded. Where its terms cancel,
        as behind a difference of neighbours, their roundings are all that is left.
        """
        bias = self._cast(self.weight(y.shape[-1], scale=0.1))
        return self._cast(y + bias)


def norm(x: Any, axis: int = -1, eps: float = 1e-5) -> Any:
    """Returns what has no mean, and a variance of one."""
    mean, variance = (f(x, axis, keepdims=True) for f in (jnp.mean, jnp.var))
    return (x - mean) * lax.rsqrt(variance + eps)


def rms(x: Any) -> Any:
    """Returns what has a mean square of one."""
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def unit(x: Any) -> Any:
    """Returns vectors of length one."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def layers_of(module: dict[str, Any]) -> dict[str, Layer]:
    """Returns the layers that a module defines: all that begin with a scope."""
    own = (x for x in module.values() if inspect.isfunction(x))
    return {
        x.__name__.replace("_", " "): x
        for x in own
        if x.__module__ == module["__name__"]
        if x.__code__.co_varnames[:1] == ("s",)
    }


ACTIVATIONS: dict[str, Callable] = {
    "relu": jax.nn.relu,
    "maximum": lambda x: jnp.maximum(x, 0),
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "sine": jnp.sin,
    "squared relu": lambda x: jax.nn.relu(x) ** 2 / 2,
    "leaky relu": jax.nn.leaky_relu,
    "soft sign": jax.nn.soft_sign,
    "hard swish": jax.nn.hard_swish,
    "log": lambda x: jnp.sign(x) * jnp.log1p(jnp.abs(x)),
    "cube": lambda x: x - x**3 / 6,
    "root": lambda x: jnp.sqrt(x * x + 1) - 1,
    "snake": lambda x: x + jnp.sin(x) ** 2,
    "clipped": lambda x: jnp.clip(x, -1, 1),
}


def mlp(act: str) -> Layer:
    """Two dense layers."""
    return lambda s, x, _: s.dense(ACTIVATIONS[act](s.dense(x, 16)))


def residual(act: str, before: Callable, scale: float = 1.0) -> Layer:
    """Two dense layers beside a shortcut."""

    def layer(s, x, _):
        return x + scale * s.dense(ACTIVATIONS[act](s.dense(before(x), 16)))

    return layer


def batch_norm(s, x, _):
    h = s.dense(x, bias=False)
    mean = h.mean(0)
    variance = (h * h).mean(0) - mean * mean
    h = (h - mean) * lax.rsqrt(variance + 1e-3)
    return jax.nn.relu(h * s.weight(SIZE, scale=0.1, mean=1))


def group_norm(s, x, _):
    h = s.dense(x).reshape(TOKENS, 2, 4)
    return jax.nn.silu(
        norm(h).reshape(TOKENS, SIZE) * s.weight(SIZE, scale=0.1, mean=1)
    )


def running_statistics(s, x, _):
    mean, variance = (
        s.weight(SIZE, mean=2, scale=0.1),
        s.weight(SIZE, scale=0.1, mean=1),
    )
    return s.dense(jax.nn.relu((s.dense(x) + 2 - mean) * lax.rsqrt(variance)))


def weight_norm(s, x, _):
    v, g = s.weight(SIZE, SIZE), s.weight(SIZE, scale=0.1, mean=1)
    return jnp.tanh(s.mm(x, g * v / jnp.linalg.norm(v, axis=0)))


def attention(
    *,
    mask: bool = False,
    by_hand: bool = False,
    keys: Callable = lambda x: x,
    cap: float | None = None,
    across: bool = False,
    bias: bool = False,
    rotated: bool = False,
) -> Layer:
    """Attention with two heads beside a shortcut."""

    def layer(s, x, y):
        h = norm(x)
        q, k, v = (
            s.dense(z, 16).reshape(TOKENS, 2, 8)
            for z in (h, *([y, y] if across else [h, h]))
        )
        q, k = keys(q), keys(k)
        if rotated:
            q, k = _rotated(q), _rotated(k)
        scores = s.dot("qhd,khd->hqk", q, k) / 3
        if bias:
            places = jnp.arange(TOKENS)
            scores += s.weight(2, 2 * TOKENS)[:, places[:, None] - places + TOKENS]
        if cap:
            scores = cap * jnp.tanh(scores / cap)
        if mask:
            scores = jnp.where(jnp.tri(TOKENS, dtype=bool), scores, -1e9)
        if by_hand:
            p = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
            p = p / p.sum(-1, keepdims=True)
        else:
            p = jax.nn.softmax(scores)
        return x + s.dense(s.dot("hqk,khd->qhd", p, v).reshape(TOKENS, 16))

    return layer


def _rotated(x):
    angle = jnp.arange(TOKENS)[:, None, None] * jnp.array([1.0, 0.3, 0.1, 0.03])
    a, b = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def linear_attention(s, x, _):
    q, k, v = (s.dense(norm(x), 4) for _ in range(3))
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    above = s.dot("ti,tij->tj", q, jnp.cumsum(k[:, :, None] * v[:, None], 0))
    return x + s.dense(above / (q * jnp.cumsum(k, 0)).sum(-1, keepdims=True))


def attention_by_distance(s, x, _):
    q, k, v = (s.dense(norm(x)) for _ in range(3))
    far = (q * q).sum(-1)[:, None] - 2 * s.dot("qd,kd->qk", q, k) + (k * k).sum(-1)
    return x + s.dot("qk,kd->qd", jax.nn.softmax(-far / 4), v)


def balanced_attention(s, x, _):
    q, k, v = (s.dense(norm(x)) for _ in range(3))
    logs = s.dot("qd,kd->qk", q, k) / 3
    for _ in range(4):
        logs -= jax.nn.logsumexp(logs, 0, keepdims=True)
        logs -= jax.nn.logsumexp(logs, 1, keepdims=True)
    return x + s.dot("qk,kd->qd", jnp.exp(logs), v)


def slots(s, x, _):
    seed, slot = norm(x), s.weight(3, SIZE, scale=1.0)
    k, v, w = s.dense(seed), s.dense(seed), s.weight(SIZE, SIZE)
    for _ in range(2):
        p = jax.nn.softmax(s.dot("kd,td->kt", norm(slot), k), 0) + 1e-6
        slot += jnp.tanh(
            s.dot("ki,ij->kj", s.dot("kt,td->kd", p / p.sum(1, keepdims=True), v), w)
        )
    return x + s.dot("tk,kd->td", jax.nn.softmax(x[:, :3]), slot)


def convolution(groups: int = 1, pool: Callable = lambda x: x) -> Layer:
    """A convolution over the tokens, pooled, and a dense layer."""

    def layer(s, x, _):
        kernel = s.weight(3, SIZE // groups, SIZE, scale=(3 * SIZE / groups) ** -0.5)
        return s.dense(jax.nn.gelu(pool(s.convolved(x, kernel, groups))))

    return layer


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")


def mean_pool(x):
    return lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME") / 3


def resized(x):
    return jax.image.resize(x[::2], x.shape, "linear")


def lookup(s, x, _):
    table = s.weight(WORDS, SIZE, scale=1.0)
    return s.dense(x) + table[(s.batch.words + 1) % WORDS]


def gathered(s, x, _):
    order = jnp.argsort(s.batch.words)
    return s.dense(x[order]) + jnp.take_along_axis(x, order[:, None], 0) / 2


def segments(s, x, _):
    messages = jax.nn.relu(s.dense(x))[s.batch.words % TOKENS]
    return x + s.dense(
        jax.ops.segment_sum(messages, s.batch.labels % TOKENS, num_segments=TOKENS)
    )


def graph_attention(s, x, _):
    h, to = s.dense(x), s.batch.labels % TOKENS
    start = s.batch.words % TOKENS
    score = jax.nn.leaky_relu(s.dense(h, 1)[start, 0] + s.dense(h, 1)[to, 0])
    p = jnp.exp(score - jax.ops.segment_max(score, to, TOKENS)[to])
    p = p / jax.ops.segment_sum(p, to, TOKENS)[to]
    return x + jax.ops.segment_sum(p[:, None] * h[start], to, TOKENS)


def one_hot(s, x, _):
    hot = jax.nn.one_hot(s.batch.labels, SIZE)
    return x + s.mm(hot, s.weight(SIZE, SIZE))


def experts(s, x, _):
    p = jax.nn.softmax(s.dense(x, 3))
    h = jax.nn.silu(s.dot("ti,eij->tej", x, s.weight(3, SIZE, 16)))
    return x + (p[..., None] * s.dot("tej,ejk->tek", h, s.weight(3, 16, SIZE))).sum(1)


def routed_experts(s, x, _):
    here = jax.nn.one_hot(s.batch.words % 3, 3)
    h = s.dot("te,ti->eti", here, x)
    h = jax.nn.gelu(s.dot("eti,eij->etj", h, s.weight(3, SIZE, 16)))
    h = s.dot("etj,ejk->etk", h, s.weight(3, 16, SIZE))
    gate = jax.nn.sigmoid(s.dense(x, 3))
    return x + s.dot("te,etk->tk", here * gate, h)


def neighbours(s, x, _):
    h = s.dense(x)
    return s.dense(h - jnp.roll(h, 1, 0))


def slopes(s, x, _):
    h = jnp.tanh(s.dense(x))
    return s.dense(jnp.diff(h, axis=0, append=h[:1]) / 0.1) / 10


def pair_distances(s, x, _):
    h = s.dense(x)
    p = jax.nn.softmax(-((h[:, None] - h[None]) ** 2).mean(-1))
    return x + s.dot("ij,jd->id", p, s.dense(x))


def offset(s, x, _):
    far = s.batch.far
    return s.dense(jax.nn.relu(s.dense(x) + far) - far)


def negative_offset(s, x, _):
    far = -s.batch.far
    return s.dense(jax.nn.softplus(s.dense(x) - far) + far)


def mean_offset(s, x, _):
    mean = s.weight(SIZE, scale=0.1, mean=20)
    return s.dense(jnp.tanh((s.dense(x) + mean) - mean))


def gate(s, x, y):
    return jax.nn.sigmoid(s.dense(x)) * y + s.dense(x)


def highway(s, x, y):
    t = jax.nn.sigmoid(s.dense(x))
    return t * jnp.tanh(s.dense(y)) + (1 - t) * x


def hyper(s, x, y):
    w = s.dense(y.mean(0), SIZE * SIZE).reshape(SIZE, SIZE) / 3
    return jnp.tanh(s.mm(x, w))


def logs(s, x, _):
    p = jax.nn.softmax(s.dense(x))
    return s.dense(p * jnp.log(p + 1e-3))


def noise(s, x, _):
    mean, spread = s.dense(x), jnp.exp(s.dense(x) / 4)
    return s.dense(mean + spread * s.batch.y)


def coupling(s, x, _):
    a, b = jnp.split(x, 2, -1)
    b = b * jnp.exp(jnp.tanh(s.dense(a, 4))) + s.dense(a, 4)
    return jnp.concatenate([b, a], -1)


def squeeze_and_excite(s, x, _):
    h = jax.nn.silu(s.dense(x))
    return s.dense(h * jax.nn.sigmoid(s.dense(jax.nn.relu(s.dense(h.mean(0))))))


def fourier(s, x, _):
    spectrum = jnp.fft.rfft(s.dense(x), axis=0) * s.weight(
        TOKENS // 2 + 1, SIZE, scale=0.3, mean=1
    )
    return x + s.dense(jnp.fft.irfft(spectrum, TOKENS, axis=0))


def solved(s, x, _):
    a = s.dense(x)
    gram = s.dot("ti,tj->ij", a, a) + 4 * jnp.eye(SIZE)
    return x + jnp.linalg.solve(gram, s.dense(x).T).T


def straight_through(s, x, _):
    h = s.dense(x)
    return s.dense(h + lax.stop_gradient(jnp.round(2 * h) / 2 - h))


def gradient_of_energy(s, x, _):
    w = s.weight(SIZE, SIZE)
    energy = jax.grad(lambda x: (jnp.tanh(s.mm(x, w)) ** 2).sum() / 2)
    return x - energy(x)


def jacobian_product(s, x, y):
    w, v = s.weight(SIZE, 16), s.weight(16, SIZE)

    def inner(x):
        return s.dot("tj,jk->tk", jax.nn.gelu(s.mm(x, w)), v)

    return jax.jvp(inner, (x,), (norm(y),))[1]


LAYERS: dict[str, Layer] = {
    **{f"mlp, {act}": mlp(act) for act in ACTIVATIONS},
    "residual of a norm": residual("gelu", norm),
    "residual of rms": residual("relu", rms),
    "residual": residual("tanh", lambda x: x),
    "small residual": residual("silu", norm, 1e-3),
    "layer norm": lambda s, x, _: (
        norm(x) * s.weight(SIZE, scale=0.1, mean=1) + s.weight(SIZE, scale=0.1)
    ),
    "rms norm": lambda s, x, _: rms(x) * s.weight(SIZE, scale=0.1, mean=1),
    "batch norm": batch_norm,
    "group norm": group_norm,
    "running statistics": running_statistics,
    "weight norm": weight_norm,
    "standardised weights": lambda s, x, _: jax.nn.relu(
        s.mm(x, norm(s.weight(SIZE, SIZE), 0) / 3)
    ),
    "attention": attention(),
    "causal attention": attention(mask=True),
    "attention by hand": attention(mask=True, by_hand=True),
    "attention, keys of rms": attention(keys=rms),
    "attention, unit keys": attention(keys=lambda x: 3 * unit(x)),
    "attention with a cap": attention(mask=True, cap=5),
    "attention across": attention(across=True),
    "attention with a bias": attention(bias=True),
    "attention, rotated": attention(mask=True, rotated=True),
    "linear attention": linear_attention,
    "attention by distance": attention_by_distance,
    "balanced attention": balanced_attention,
    "slots": slots,
    "convolution": convolution(),
    "depthwise convolution": convolution(SIZE),
    "convolution and max-pool": convolution(pool=max_pool),
    "convolution and mean-pool": convolution(pool=mean_pool),
    "convolution, resized": convolution(pool=resized),
    "lookup": lookup,
    "gathered": gathered,
    "segments": segments,
    "graph attention": graph_attention,
    "one-hot": one_hot,
    "experts": experts,
    "routed experts": routed_experts,
    "neighbours": neighbours,
    "slopes": slopes,
    "pair distances": pair_distances,
    "offset": offset,
    "negative offset": negative_offset,
    "mean offset": mean_offset,
    "far features": lambda s, x, _: s.dense(
        norm(jnp.concatenate([s.batch.far, s.dense(x)], -1))
    ),
    "ratio": lambda s, x, _: s.dense(s.dense(x) / (jax.nn.softplus(s.dense(x)) + 0.5)),
    "gate": gate,
    "highway": highway,
    "glu": lambda s, x, _: (
        x + s.dense(jax.nn.silu(s.dense(rms(x), 16)) * s.dense(rms(x), 16))
    ),
    "film": lambda s, x, y: norm(x) * (1 + s.dense(y)) + s.dense(y),
    "bilinear": lambda s, x, y: (
        s.dot("ti,tij->tj", x, s.dot("tk,kij->tij", y, s.weight(SIZE, SIZE, SIZE))) / 3
    ),
    "hyper": hyper,
    "logs": logs,
    "unit vectors": lambda s, x, y: s.dense(unit(s.dense(x))) + y / 2,
    "dropout": lambda s, x, _: s.dense(
        jnp.where(s.batch.y > -1, jax.nn.relu(s.dense(x)) / 0.8, 0)
    ),
    "noise": noise,
    "coupling": coupling,
    "squeeze and excite": squeeze_and_excite,
    "fourier": fourier,
    "solved": solved,
    "sorted": lambda s, x, _: s.dense(jnp.sort(s.dense(x), -1)),
    "straight through": straight_through,
    "gradient of an energy": gradient_of_energy,
    "jacobian product": jacobian_product,
}
