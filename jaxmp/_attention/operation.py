"""Attention as operations of JAX: its result, a tangent of that, and its gradients.

All three have one name, so that lists of operations name them together. The platform is
chosen where each is lowered. Derivatives of a tangent and of a gradient are those of
XLA's form, in which the result and the sums of the rows are not read.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, Rules, operation
from .._ops.products import ATTENTION
from . import by_cudnn, by_xla
from .form import BIAS, MASK, Form

_NO_TANGENT = "a tangent is computed (`jvp`), of which the kernel has none"


def attended(form: Form, precision: Any, args: Sequence[Any]) -> Any:
    """Returns the attention of some operands."""
    return FORWARD.bind(*args, form=form, precision=precision, residual=False)[0]


def why_not_kernel(eqn: Equation) -> str | None:
    """Returns why an equation of an attention is not cuDNN's, and what to change.

    None if it is, on an NVIDIA GPU.
    """
    form, operands = eqn.params["form"], [x.aval for x in eqn.invars]
    if eqn.primitive is TANGENT:
        return _NO_TANGENT
    moving = eqn.params.get("moving", ())
    return by_cudnn.why_not(form, operands[: form.arity], moving)


def takes_16_bits(eqn: Equation) -> Sequence[bool]:
    """Returns which operands of an attention are rounded.

    All but the bias and its tangent, and the sums of the rows.
    """
    form = eqn.params["form"]
    moving = eqn.params["moving"] if eqn.primitive is TANGENT else ()
    wide = {form.place(BIAS), form.arity + 1}
    wide |= {form.arity + 2 + i for i, at in enumerate(moving) if at in wide}
    return [i not in wide for i in range(len(eqn.invars))]


# Types of results.


@functools.lru_cache(maxsize=4096)
def _types(form: Form, avals: tuple) -> list[Any]:
    """Returns the types of the result and of the sums, which JAX finds by tracing."""

    def attend(*args):
        out = by_xla.of_jax(form, args)
        return [out, _sums(out)]

    return _jaxpr.out_avals(_jaxpr.trace(attend, avals))


def _sums(out: jax.Array) -> jax.Array:
    """Returns a float32 number for each row, ``[B, N, T]``.

    The gradient of XLA's form computes the weights again, and reads none.
    """
    return jnp.swapaxes(out[..., 0], 1, 2).astype(np.float32) * 0


def _types_of_forward(*avals, form, precision, residual):
    return _types(form, avals)[: 1 + residual]


def _types_of_tangent(*avals, form, precision, moving):
    return [avals[form.arity].update(weak_type=False)]


def _types_of_gradient(*avals, form, precision, moving):
    return [avals[i].update(weak_type=False) for i in moving]


# What is computed.


def _forward_by_xla(*args, form, precision, residual):
    _refuse(form, by_cudnn.why_not(form, args, ()))
    out = by_xla.attended(form, precision, args)
    return [out, _sums(out)][: 1 + residual]


def _forward_on_cuda(*args, form, precision, residual):
    if by_cudnn.why_not(form, args, ()) is not None:
        return _forward_by_xla(*args, form=form, precision=precision, residual=residual)
    return by_cudnn.attended(form, args, residual=residual)


def _tangent_by_xla(*args, form, precision, moving):
    _refuse(form, _NO_TANGENT)
    primals, tangents = args[: form.arity], args[form.arity + 2 :]
    return [by_xla.tangent(form, precision, primals, moving, tangents)]


def _gradient_by_xla(*args, form, precision, moving):
    _refuse(form, by_cudnn.why_not(form, args, moving))
    return by_xla.gradient(form, precision, args[: form.arity], moving, args[-1])


def _gradient_on_cuda(*args, form, precision, moving):
    operands, residuals = args[: form.arity], args[form.arity :]
    if by_cudnn.why_not(form, operands, moving) is not None:
        return _gradient_by_xla(*args, form=form, precision=precision, moving=moving)
    return by_cudnn.gradient(form, operands, moving, residuals)


def _refuse(form: Form, reason: str | None) -> None:
    """Raises where the kernel is asked for and not used."""
    if form.implementation == "cudnn":
        raise NotImplementedError(
            '`implementation="cudnn"` was asked for, but '
            f"{reason or 'the program is not for an NVIDIA GPU'}. "
            "Leave `implementation` out to have XLA's attention there."
        )


_compiled = functools.lru_cache(maxsize=4096)(
    lambda primitive, params: jax.jit(
        lambda *args: primitive.bind(*args, **dict(params))
    )
)


def _run(make, *args, **params):
    """Runs an operation outside ``jit``, as one that is compiled."""
    return _compiled(make(), tuple(params.items()))(*args)


def _run_forward(*args, form, **params):
    # In float32 one operation of JAX after the other, so that it has the same bits.
    if args[0].dtype.itemsize > 2:
        return _forward_by_xla(*args, form=form, **params)
    return _run(lambda: FORWARD, *args, form=form, **params)


# Derivatives.


def _derived_forward(primals, tangents, *, form, precision, residual):
    same = {"form": form, "precision": precision}
    outs = FORWARD.bind(*primals, **same, residual=True)
    moving = tuple(
        i for i, tangent in enumerate(tangents) if not _jaxpr.is_no_tangent(tangent)
    )
    moved = [tangents[i] for i in moving]
    tangent = TANGENT.bind(*primals, *outs, *moved, **same, moving=moving)[0]
    return outs[: 1 + residual], [tangent, _jaxpr.no_tangent(outs[1])][: 1 + residual]


def _derived_by_xla(run, primals, tangents, *, form, precision, moving):
    """Differentiates a tangent or a gradient, which needs the operands alone."""
    ignored = form.arity, form.arity + 1  # the result, and the sums
    places = [
        i
        for i, tangent in enumerate(tangents)
        if i not in ignored and not _jaxpr.is_no_tangent(tangent)
    ]
    form = form._replace(implementation=None)

    def fun(*moved):
        changed = dict(zip(places, moved, strict=True))
        args = [changed.get(i, x) for i, x in enumerate(primals)]
        return run(*args, form=form, precision=precision, moving=moving)

    if not places:
        outs = fun()
        return outs, [_jaxpr.no_tangent(x) for x in outs]
    return jax.jvp(fun, [primals[i] for i in places], [tangents[i] for i in places])


def _transposed_tangent(cotangents, *args, form, precision, moving):
    (cotangent,) = cotangents
    first = form.arity + 2
    asked = [
        (i, place)
        for i, place in enumerate(moving, first)
        if _jaxpr.is_transposed_for(args[i])
    ]
    found: list[Any] = [None] * len(args)
    if _jaxpr.is_no_tangent(cotangent):
        return found
    gradients = GRADIENT.bind(
        *args[:first],
        cotangent,
        form=form,
        precision=precision,
        moving=tuple(place for _, place in asked),
    )
    for (i, _), x in zip(asked, gradients, strict=True):
        found[i] = x
    return found


# A batch of attentions is an attention of more examples.


def _batched(primitive, args, axes, *, form, **params):
    """Applies an operation to a batch of what it is applied to."""
    bias, mask, moving = form.place(BIAS), form.place(MASK), params.get("moving", ())
    # The bias, and its tangent.
    biases = {bias} if bias is not None else set()
    if primitive is TANGENT:
        biases |= {form.arity + 2 + i for i, at in enumerate(moving) if at == bias}
    of_bias = primitive is GRADIENT and bias in moving
    apart = of_bias or any(axes[i] is not None for i in biases)
    (size,) = {
        x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None
    }
    first = [
        x[None] if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args, axes, strict=True)
    ]  # each [size or 1, examples or 1, ...]
    examples = first[0].shape[1]

    def folded(i, x):
        broadcasts = (i in biases and not apart) or (i == mask and axes[i] is None)
        if broadcasts and x.shape[1] == 1:
            return x[0]
        x = jnp.broadcast_to(x, (size, examples, *x.shape[2:]))
        return x.reshape(size * examples, *x.shape[2:])

    ins = [folded(i, x) for i, x in enumerate(first)]
    outs = primitive.bind(*ins, form=form, **params)
    outs = [x.reshape(size, examples, *x.shape[1:]) for x in outs]
    if of_bias and bias is not None and first[bias].shape[1] == 1:
        at = moving.index(bias)  # one bias for all examples
        outs[at] = jnp.sum(outs[at], 1, keepdims=True)
    return outs, [0] * len(outs)


def _made(run, types, by_xla, on_cuda, derived, transposed=None):
    """Returns one of the operations."""

    def itself():
        return made

    rules = Rules(
        run=run or functools.partial(_run, itself),
        types=types,
        lowered=by_xla,
        on_cuda=on_cuda,
        batched=lambda *args, **params: _batched(made, *args, **params),
        derived=derived,
        transposed=transposed,
    )
    made = operation(ATTENTION, rules)
    return made


FORWARD = _made(
    _run_forward, _types_of_forward, _forward_by_xla, _forward_on_cuda, _derived_forward
)
TANGENT = _made(
    None,
    _types_of_tangent,
    _tangent_by_xla,
    _tangent_by_xla,
    functools.partial(_derived_by_xla, _tangent_by_xla),
    _transposed_tangent,
)
GRADIENT = _made(
    None,
    _types_of_gradient,
    _gradient_by_xla,
    _gradient_on_cuda,
    functools.partial(_derived_by_xla, _gradient_by_xla),
)
