"""The loss head as operations of JAX: its losses, their tangents, and its gradients.

All three have one name, so that lists of operations name them together. Where the sum
of the losses is differentiated, its gradients are computed with it, and no logits
twice. Where each loss has a cotangent of its own, the logits of a tile are computed
again. Derivatives of gradients and of tangents are those of plain JAX.

Behind its operands the forward pass may be given ``hidden`` and ``kernel`` as they were
before they were rounded. Its gradients are those of these, so that the gradient of a
float32 kernel is not rounded on its way.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._devices.varying import vary
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import operation
from .._ops.products import LOSS_HEAD
from .shards import sharded, sharded_like, whole
from .tiles import BIAS, HIDDEN, LABELS, WEIGHTS, computed


def _forward(form, precision, args, *, summed, by=computed):
    losses = by(form, precision, (), args[: form.arity])
    return [_weighted(args[WEIGHTS], x, summed) for x in losses]


def _weighted(weights, losses, summed):
    losses = jnp.where(weights == 0, 0, weights * losses)
    return jnp.sum(losses) if summed else losses


def _tangent(form, precision, args, *, moving):
    """Returns the tangents of the losses, without their weights."""
    tangents = map(_widened, args[form.arity :])

    def losses(*moved):
        operands = dict(zip(moving, moved, strict=True))
        operands = [operands.get(i, x) for i, x in enumerate(args[: form.arity])]
        return computed(form, precision, (), operands)[0]

    primals = [_widened(args[i]) for i in moving]
    return [jax.jvp(losses, primals, list(tangents))[1]]


# Derivatives.


def _derived_forward(primals, tangents, *, form, precision, summed):
    args, tangents = primals[: form.arity], list(tangents)
    if len(primals) > form.arity:  # what was rounded moves as what it was
        tangents[:LABELS] = tangents[form.arity :]
    moved = {
        i: x
        for i, x in enumerate(tangents[: form.arity])
        if i != LABELS and type(x) is not _jaxpr.Zero
    }
    of_weights, weights = moved.pop(WEIGHTS, None), args[WEIGHTS]
    same, moving = {"form": form, "precision": precision}, tuple(moved)
    if not summed:
        losses, z_losses = FORWARD.bind(*args, **same, summed=False)
        (tangent,) = TANGENT.bind(*args, *moved.values(), **same, moving=moving)
        tangent = weights * tangent
        if of_weights is not None:
            each = args[:WEIGHTS], jnp.ones_like(weights), args[BIAS:]
            plain = FORWARD.bind(*each[0], each[1], *each[2], **same, summed=False)[0]
            tangent += of_weights * plain
        return [losses, z_losses], [tangent, _jaxpr.no_tangent(z_losses)]
    losses, z_losses, *gradients = GRADIENT.bind(*args, **same, moving=moving)
    tangent = jnp.zeros((), losses.dtype)
    for i, x in zip(moving, gradients, strict=True):
        of_rows = weights[..., None] if i == HIDDEN else 1
        tangent += jnp.sum(of_rows * x * moved[i].astype(losses.dtype))
    tangent = lax.psum(tangent, form.axis) if form.axis else tangent
    if of_weights is not None:
        tangent += jnp.sum(of_weights * losses)
    outs = [_weighted(weights, x, True) for x in (losses, z_losses)]
    return outs, [tangent, _jaxpr.no_tangent(outs[1])]


def _derived(run, types, primals, tangents, **params):
    """Differentiates a tangent or a gradient as plain JAX, in float32."""
    places = [i for i, x in enumerate(tangents) if type(x) is not _jaxpr.Zero]
    types = types(*map(jax.typeof, primals), **params)

    def fun(*moved):
        changed = dict(zip(places, moved, strict=True))
        args = [_widened(changed.get(i, x)) for i, x in enumerate(primals)]
        outs = run(args=whole(args), **params)
        outs = [x.astype(like.dtype) for x, like in zip(outs, types, strict=True)]
        return sharded_like(types, outs)

    return jax.jvp(fun, [primals[i] for i in places], [tangents[i] for i in places])


def _widened(x):
    narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float32) if narrow else x


def _transposed_tangent(cotangents, *args, form, precision, moving):
    found: list[Any] = [None] * len(args)
    asked = [
        (i, place)
        for i, place in enumerate(moving, form.arity)
        if _jaxpr.is_undefined_primal(args[i])
    ]
    (cotangent,) = cotangents
    if type(cotangent) is _jaxpr.Zero:
        return found
    if form.axis:  # the tangents are sums over its devices
        like = vary(cotangent, (form.axis,))
        transpose = jax.linear_transpose(lambda x: lax.psum(x, form.axis), like)
        (cotangent,) = transpose(cotangent)
    operands = [*args[:WEIGHTS], cotangent, *args[BIAS : form.arity]]
    places = tuple(place for _, place in asked)
    same = {"form": form, "precision": precision}
    gradients = GRADIENT.bind(*operands, **same, moving=places)[2:]
    for (i, place), x in zip(asked, gradients, strict=True):
        x = cotangent[..., None] * x if place == HIDDEN else x
        found[i] = x.astype(args[i].aval.dtype)
    return found


def _batched(primitive, args, axes, *, form, **params):
    """Makes one head of more rows of a batch, or has one after the other."""
    moving, tail = params.get("moving", ()), range(form.arity, len(args))
    places = moving if primitive is TANGENT else range(len(tail))  # of what follows
    of_rows = {HIDDEN, LABELS, WEIGHTS}
    of_rows |= {i for i, at in zip(tail, places, strict=True) if at == HIDDEN}
    batched = {i for i, axis in enumerate(axes) if axis is not None}
    first = {i: jnp.moveaxis(args[i], axes[i], 0) for i in batched}
    alone = primitive is GRADIENT and {*moving} - {HIDDEN}  # gradients of each kernel
    if alone or not batched <= of_rows:

        def one(xs):
            ins = [xs.get(i, x) for i, x in enumerate(args)]
            return primitive.bind(*ins, form=form, **params)

        outs = lax.map(one, first)
        return outs, [0] * len(outs)
    size = next(iter(first.values())).shape[0]
    ins = [
        first.get(i, jnp.broadcast_to(x, (size, *x.shape)) if i in of_rows else x)
        for i, x in enumerate(args)
    ]
    summed = params.get("summed", False)
    params |= {"summed": False} if summed else {}
    outs = primitive.bind(*ins, form=form, **params)
    outs = [jnp.sum(x, range(1, x.ndim)) for x in outs] if summed else outs
    return outs, [0] * len(outs)


def _types(*avals, form, summed=False, moving=None, **_):
    """Returns the types of losses and z-losses, and of gradients."""
    hidden, kernel, _, weights = avals[:BIAS]
    losses = weights.update(weak_type=False)
    if summed:
        (losses,) = _jaxpr.out_avals(_jaxpr.trace(jnp.sum, [losses]))
    dtypes = {HIDDEN: jnp.result_type(hidden, kernel)}
    return [losses, losses] + [
        avals[i].update(dtype=dtypes.get(i, weights.dtype), weak_type=False)
        for i in moving or ()
    ]


def _made(types, run, lowered, derived=None, transposed=None):
    """Returns one of the operations.

    Args:
        types: Returns the types of its results, from those of its operands.
        run: Computes it in plain JAX.
        lowered: The same, of operands that may be sharded.
        derived: Its rule for tangents, by default that of ``run``.
        transposed: Its rule for cotangents, if it is linear.
    """

    made = operation(
        LOSS_HEAD,
        types=types,
        lowered=lambda *args, **params: lowered(args=args, **params),
        batched=lambda *args, **params: _batched(made, *args, **params),
        derived=derived or functools.partial(_derived, run, types),
        transposed=transposed,
    )
    return made


FORWARD = _made(
    _types, _forward, functools.partial(_forward, by=sharded), _derived_forward
)
TANGENT = _made(
    lambda *avals, moving, **params: _types(*avals, **params)[:1],
    _tangent,
    _tangent,
    transposed=_transposed_tangent,
)
GRADIENT = _made(_types, computed, sharded)
