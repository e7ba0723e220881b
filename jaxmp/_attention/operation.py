"""Attention as operations of JAX: its result, a tangent of that, and its gradients.

All three have one name, so that lists of operations name them together. Whether it is
the kernel is decided where each is lowered, by the device for which it is: one traced
program serves all. Derivatives of a tangent and of a gradient are those of XLA's form,
in which the result and the sums of the rows are not read.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.gpus import NEWEST, Gpu
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, at_once, operation
from .._ops.products import ATTENTION
from . import by_cudnn, by_xla
from .form import BIAS, MASK, Form


def attended(form: Form, precision: Any, args: Sequence[Any]) -> Any:
    """Returns the attention of some operands."""
    return FORWARD.bind(*args, form=form, precision=precision, residual=False)[0]


def why_not_kernel(eqn: Equation, gpu: Gpu) -> str | None:
    """Returns why an equation of an attention is not cuDNN's, and what to change.

    None if it is, on a GPU.
    """
    return _why_not(eqn.primitive, [x.aval for x in eqn.invars], gpu, **eqn.params)


def _why_not(primitive, operands, gpu, *, form, moving=(), **_) -> str | None:
    if primitive is TANGENT:
        return "a tangent is computed (`jvp`), of which the kernel has none"
    return by_cudnn.why_not(form, operands[: form.arity], moving, gpu)


def takes_16_bits(eqn: Equation) -> Sequence[bool]:
    """Returns which operands of an attention are rounded.

    All but the bias and its tangent, and the sums of the rows.
    """
    form = eqn.params["form"]
    moving = eqn.params["moving"] if eqn.primitive is TANGENT else ()
    wide = {form.place(BIAS), form.arity + 1}
    wide |= {form.arity + 2 + i for i, at in enumerate(moving) if at in wide}
    return [i not in wide for i in range(len(eqn.invars))]


@_jaxpr.remembered
def _types(form: Form, avals: tuple) -> list[Any]:
    """Returns the types of the result and of the sums, which JAX finds by tracing."""

    def attend(*args):
        out = by_xla.of_jax(form, args)
        return [out, by_xla.sums(out)]

    return _jaxpr.out_avals(_jaxpr.trace(attend, avals))


# Derivatives.


def _derived_forward(primals, tangents, *, form, precision, residual):
    same = {"form": form, "precision": precision}
    outs = FORWARD.bind(*primals, **same, residual=True)
    moving = tuple(
        i for i, tangent in enumerate(tangents) if type(tangent) is not _jaxpr.Zero
    )
    moved = [tangents[i] for i in moving]
    tangent = TANGENT.bind(*primals, *outs, *moved, **same, moving=moving)[0]
    return outs[: 1 + residual], [tangent, _jaxpr.no_tangent(outs[1])][: 1 + residual]


def _derived_by_xla(run, primals, tangents, *, form, precision, **params):
    """Differentiates a tangent or a gradient, which needs the operands alone."""
    ignored = form.arity, form.arity + 1  # the result, and the sums
    places = [
        i
        for i, tangent in enumerate(tangents)
        if i not in ignored and type(tangent) is not _jaxpr.Zero
    ]
    form = form._replace(implementation=None)

    def fun(*moved):
        changed = dict(zip(places, moved, strict=True))
        args = [changed.get(i, x) for i, x in enumerate(primals)]
        return run(form, precision, args, **params)

    return jax.jvp(fun, [primals[i] for i in places], [tangents[i] for i in places])


def _transposed_tangent(cotangents, *args, form, precision, moving):
    (cotangent,) = cotangents
    first = form.arity + 2
    asked = [
        (i, place)
        for i, place in enumerate(moving, first)
        if _jaxpr.is_undefined_primal(args[i])
    ]
    found: list[Any] = [None] * len(args)
    if type(cotangent) is _jaxpr.Zero:
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


def _made(types, by_xla, kernel=None, derived=None, transposed=None):
    """Returns one of the operations.

    Args:
        types: Returns the types of its results, from those of its operands.
        by_xla: Computes it of a form, a precision, and the operands.
        kernel: Computes it of a form and the operands, where cuDNN can.
        derived: Its rule for tangents, by default that of ``by_xla``.
        transposed: Its rule for cotangents, if it is linear.
    """

    def run(*args, **params):
        # In float32 one operation of JAX after the other, so that it has the same bits.
        if args[0].dtype.itemsize > 2:
            return lowered(*args, **params)
        return at_once(made, *args, **params)

    def lowered(*args, form, precision, gpu=NEWEST, **params):
        if form.implementation == "cudnn":
            reason = _why_not(made, args, gpu, form=form, **params)
            raise NotImplementedError(
                '`implementation="cudnn"` was asked for, but '
                f"{reason or 'the program is not for an NVIDIA GPU'}. "
                "Leave `implementation` out to have XLA's attention there."
            )
        return by_xla(form, precision, args, **params)

    def on_cuda(gpu, *args, form, precision, **params):
        # Who asks for the kernel and exports knows the GPU that the program is for.
        # A program for an unknown GPU otherwise runs on all of them.
        is_known = gpu is not None or form.implementation == "cudnn"
        gpu = gpu or NEWEST
        why_not = _why_not(made, args, gpu, form=form, **params)
        if kernel is None or not is_known or why_not is not None:
            return lowered(*args, form=form, precision=precision, gpu=gpu, **params)
        return kernel(form, args, **params)

    made = operation(
        ATTENTION,
        run=run,
        types=types,
        lowered=lowered,
        on_cuda=on_cuda,
        batched=lambda *args, **params: _batched(made, *args, **params),
        derived=derived or functools.partial(_derived_by_xla, by_xla),
        transposed=transposed,
    )
    return made


FORWARD = _made(
    lambda *avals, form, precision, residual: _types(form, avals)[: 1 + residual],
    by_xla.forward,
    by_cudnn.forward,
    _derived_forward,
)
TANGENT = _made(
    lambda *avals, form, **_: [avals[form.arity].update(weak_type=False)],
    by_xla.tangent,
    transposed=_transposed_tangent,
)
GRADIENT = _made(
    lambda *avals, moving, **_: [avals[i].update(weak_type=False) for i in moving],
    by_xla.gradient,
    by_cudnn.gradient,
)
