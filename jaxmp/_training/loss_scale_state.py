"""The loss scale in an optimizer state: how it is found, refused, checked and used."""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from .._base.checks import (
    as_count,
    as_html,
    as_scale,
    check_positive,
    plain_array,
    short,
    warn,
)
from .._base.marks import Marked
from .._base.other_scales import refuse_other_scale
from .._base.tree import all_finite, choose, found_in, is_inexact, path_name, widen

T = TypeVar("T")

# What hides gradients from a loss scale inside it, by the name of its state.
_HIDING = {
    "ApplyEvery": "optax.apply_every",
    "ApplyIfFiniteState": "optax.apply_if_finite",
    "ConditionallyMaskState": "optax.conditionally_mask",
    "ConditionallyTransformState": "optax.conditionally_transform",
    "MultiStepsState": "optax.MultiSteps",
    "SAMState": "optax.contrib.sam",
    "ZeroNansState": "optax.zero_nans",
}
# What also makes zeros of them, for what comes after it in a chain.
_ZEROING = _HIDING.keys() - {"ConditionallyTransformState", "SAMState"}


class _Unscaled(float):
    """A scale that nobody gave."""


UNSCALED = _Unscaled(1.0)  # the default, which differs from a 1.0 that is meant

_DIVIDED = Marked()  # gradients, by `value_and_grad`
_FLOAT32 = np.finfo(np.float32)


class LossScaleState(NamedTuple):
    """State of the three loss-scale transformations, the same for every policy.

    Attributes:
        loss_scale: float32[], what the loss is multiplied by; finite and positive.
        good_steps: int32[], finite steps in a row since the scale grew last.
        bad_steps: int32[], skipped steps in a row.
        skipped: int32[], skipped steps since init.
        last_finite: bool[], whether the last step was finite.
        inner_state: The state of the optimizer inside.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    bad_steps: jax.Array
    skipped: jax.Array
    last_finite: jax.Array
    inner_state: optax.OptState

    def __repr__(self) -> str:
        """Spells the state in one line, the inner state by its kind."""
        fields = (f"{name}={_in_words(x)}" for name, x in self._asdict().items())
        return f"LossScaleState({', '.join(fields)})"

    _repr_html_ = as_html


def _in_words(x: Any) -> str:
    """Returns the number in a scalar array, and of all else what it is."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return short(x)
    if isinstance(x, (jax.Array, np.ndarray)) and not x.shape:
        with contextlib.suppress(RuntimeError, TypeError):  # donated, remote or traced
            return str(np.asarray(jax.device_get(x)))
    return f"{x.dtype}{list(x.shape)}"


MIGRATE = (
    "The state of the optimizer alone, from before it was wrapped, goes inside: "
    "`opt_state = tx.init(params)._replace(inner_state=opt_state)`."
)


def get_loss_scale(opt_state: Any) -> jax.Array:
    """Returns the loss scale from anywhere in an optimizer state.

    Args:
        opt_state: A state with one :class:`LossScaleState` in it: of the
            transformation itself, of an ``optax.chain``, a Flax ``TrainState``, an
            ``nnx.Optimizer``. An abstract one, of ``jax.eval_shape``, has an abstract
            scale.

    Returns:
        A float32 array of shape ``[]``.

    Raises:
        ValueError: If there is no loss-scale state in it, or more than one; or if it is
            inside a wrapper that hides gradients from it, such as ``optax.MultiSteps``,
            which belongs inside.

    Examples:
        >>> scaled = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
        >>> tx = optax.chain(optax.clip(1.0), scaled)
        >>> jaxmp.get_loss_scale(tx.init({"loss_scale": jnp.ones(2)})).item()
        32768.0
    """
    return get_loss_scale_state(opt_state).loss_scale


def last_step_finite(opt_state: Any) -> jax.Array:
    """Returns whether the last step was finite, and so was not skipped.

    Args:
        opt_state: As in :func:`get_loss_scale`.

    Returns:
        A bool array of shape ``[]``, true before the first step.

    Raises:
        ValueError: As :func:`get_loss_scale`.

    Examples:
        >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
        >>> params = jnp.ones(2)
        >>> _, opt_state = tx.update(params * jnp.nan, tx.init(params), params)
        >>> jaxmp.last_step_finite(opt_state).item()
        False
    """
    return get_loss_scale_state(opt_state).last_finite


def keep_if_skipped(opt_state: Any, new: T, old: T) -> T:
    """Returns what a step computed, or what was there before if it was skipped.

    For all that a training step computes outside the optimizer, which skips its own
    state: running statistics of BatchNorm, an average of the parameters, a target
    network, a queue of features. An Inf that the forward pass put into them would stay.

    Args:
        opt_state: The state *after* the step, as :func:`get_loss_scale` takes it.
        new: Any pytree that the step computed.
        old: The same pytree from before the step.

    Returns:
        ``new``, or ``old`` if the step was skipped, in the structure, shapes and dtypes
        of both. If no step is ever skipped, this is always ``new``.

    Raises:
        ValueError: As :func:`get_loss_scale`; or if the trees differ in structure, or a
            leaf in shape or dtype.
        TypeError: If a leaf is not an array, and not the same in both.

    Examples:
        >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
        >>> params, grads = jnp.ones(2), jnp.full(2, jnp.inf)
        >>> _, opt_state = tx.update(grads, tx.init(params), params)
        >>> old, new = {"mean": jnp.array(0.5)}, {"mean": jnp.array(jnp.inf)}
        >>> jaxmp.keep_if_skipped(opt_state, new, old)
        {'mean': Array(0.5, dtype=float32, weak_type=True)}
    """
    finite = last_step_finite(opt_state)
    return choose(finite, new, old, ("keep_if_skipped", "new", "old"))


def skipped_in(tree: Any) -> jax.Array | None:
    """Counts the skipped steps of all loss scales in ``tree``; None if it has none."""
    counts = [plain_array(state.skipped) for state in _loss_scale_states(tree)]
    return functools.reduce(jnp.add, map(jnp.sum, counts)) if counts else None


def get_loss_scale_state(opt_state: Any) -> LossScaleState:
    """Returns the whole loss-scale state, to log its counters.

    Args:
        opt_state: As in :func:`get_loss_scale`.

    Returns:
        A :class:`LossScaleState` of plain arrays, also where NNX had wrapped them;
        its ``inner_state`` is as it was found.

    Raises:
        ValueError: As :func:`get_loss_scale`.

    Examples:
        >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
        >>> jaxmp.get_loss_scale_state(tx.init(jnp.ones(2))).skipped.item()
        0
    """
    found = _loss_scale_states(opt_state)
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError(
            "`opt_state` must be the state of an optimizer, but is the optimizer. Pass "
            "what `tx.init(params)` and `tx.update(grads, opt_state, params)` return."
        )
    if not found:
        refuse_other_scale(opt_state)
        raise ValueError(
            "`opt_state` must hold a loss scale, but there is no `LossScaleState` in "
            f"the {type(opt_state).__name__} given. Wrap the optimizer with "
            "`jaxmp.loss_scaling(optimizer, policy)`; restore a checkpoint with "
            "`tx.init(params)` as the target, so that the state keeps its type. "
            f"{MIGRATE}"
        )
    if len(found) > 1:
        raise ValueError(
            f"`opt_state` must hold one loss scale, but holds {len(found)}. Wrap an "
            "optimizer once, and `optax.partition` as a whole. The states of several "
            "optimizers go one at a time; only `value_and_grad` and `check_loss_scale` "
            "take them together, `(a_state, b_state)`."
        )
    if hiding := _hiding(opt_state):
        name, inside = hiding
        raise ValueError(
            f"The loss scale in `opt_state` does not see every step: `{name}` hides "
            "gradients from it, so that an overflow can pass unseen and the scale stay "
            "too large for ever. Put it inside: "
            f"`jaxmp.loss_scaling({inside}, policy)`."
        )
    *arrays, inner_state = found[0]
    return LossScaleState._make([*map(plain_array, arrays), inner_state])


_CAUSES = """\
The scale no longer helps. Likely causes:
- an operation overflows in the forward pass (a mask of -1e9, a square, a large sum)
- the input data is not finite
- the learning rate is too high
- the loss or a parameter is NaN or Inf already (if the optimizer turns finite
  gradients into NaN, pass `check_updates=True` to `jaxmp.loss_scaling`)
- the gradient of a frozen parameter is NaN (put `jaxmp.loss_scaling` around the
  trained part, inside `optax.partition`)
- the scale was read once, outside the step"""


def check_loss_scale(
    opt_state: Any,
    *,
    max_skipped_in_a_row: int = 30,
    max_scale: float = 2.0**24,
    grads: Any = None,
    loss: Any = None,
) -> None:
    """Raises an error if a run goes wrong. Call it on the host now and then.

    With the default options, 29 skipped steps in a row lead from the largest scale to
    the smallest. If gradients still overflow then, the scale is not the cause.

    A loss may be NaN while its gradients are finite: no step is skipped then, and
    nothing is learned. Pass the ``loss`` to find out.

    Warns of a scale that has grown to ``max_scale`` without one skipped step, because
    most likely nothing uses it, and of ``grads`` that are all 0, because most likely
    they underflow. Neither is an error, because very small gradients lead to it too.

    Args:
        opt_state: As in :func:`get_loss_scale`, with concrete values, of any leading
            shape when the training step is vmapped; or a tuple of the states of the
            optimizers that share a loss.
        max_skipped_in_a_row: The number of skipped steps at which this raises.
        max_scale: That of :func:`jaxmp.dynamic_loss_scale`, where it was given.
        grads: The gradients of the last step, if it returns them: those that are not
            finite are named, also where the wrapper did not see them.
        loss: The loss of the last step, of the leading shape of the state.

    Raises:
        FloatingPointError: If as many steps in a row have been skipped, or the ``loss``
            or one of the ``grads`` is not finite and the step was not skipped.
        ValueError: As :func:`get_loss_scale`; or if the scale is not finite and
            positive, as in a broken checkpoint.
        TypeError: If the state has no values: in ``jax.jit``, or an abstract one.

    Examples:
        >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
        >>> jaxmp.check_loss_scale(tx.init(jnp.ones(2)))
    """
    limit = as_count("max_skipped_in_a_row", max_skipped_in_a_row)
    check_positive("max_scale", max_scale)
    parts = opt_state if _are_scales(opt_state) else [opt_state]
    states = [get_loss_scale_state(part) for part in parts]
    for state in states:
        if isinstance(state.bad_steps, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(
                "`check_loss_scale` needs concrete values, but was given a state that "
                "is abstract, or traced by JAX. Call it outside `jax.jit`, between two "
                "steps."
            )
        scale = np.asarray(state.loss_scale)
        if (wrong := ~((scale >= _FLOAT32.tiny) & (scale <= _FLOAT32.max))).any():
            raise ValueError(
                "The loss scale in `opt_state` must be finite and positive, but is "
                f"{scale[wrong].flat[0]}. Was it restored from a broken checkpoint? "
                "Restore another, or set the scale: `opt_state = optax.tree.set("
                "opt_state, loss_scale=jnp.float32(2.0**15))`."
            )
        if (bad_steps := np.max(state.bad_steps)) >= limit:
            raise FloatingPointError(
                f"The last {bad_steps} steps met an Inf or NaN and were skipped "
                f"(loss_scale {state.loss_scale}, {state.skipped} skipped "
                f"since init). {_nonfinite(grads)}To find the operation, type"
                f"\n\n    print(jaxmp.find_overflow(train_step)(*args))\n\n{_CAUSES}"
            )
    finite = [np.asarray(state.last_finite) for state in states]
    finite = functools.reduce(np.logical_and, finite)
    if loss is not None:
        _check_loss(loss, finite)
    _check_grads(grads, finite, states[0].loss_scale)
    top = float(max_scale)
    if all(np.any(looks_unused(x.loss_scale, x.skipped, top)) for x in states):
        warn(
            "The loss scale has reached `max_scale` without a skipped step. Is "
            "`loss_scale=opt_state` passed to `value_and_grad`? If not, the scale "
            "grows without being used, and small gradients become 0 in float16. If it "
            "is passed, raise the maximum, so that the scale grows until it skips a "
            "step: `jaxmp.loss_scaling(..., max_scale=2.0**40)`, with the same "
            "`max_scale` in `jaxmp.check_loss_scale`."
        )


def _check_loss(loss: Any, finite: Any) -> None:
    """Refuses a loss that is not finite, of a step whose gradients are."""
    try:
        if not _is_number(loss):
            raise TypeError
        loss = np.broadcast_to(np.asarray(loss, np.float64), finite.shape)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"`loss` must be the loss of the last step, but is {short(loss)}. Type "
            "`check_loss_scale(opt_state, loss=loss)`."
        ) from None
    if np.any(wrong := ~np.isfinite(loss) & finite):
        value = loss[wrong].flat[0]
        raise FloatingPointError(
            f"The loss is {value}, but its gradients are finite, so the step was "
            "not skipped. The model learns nothing from these terms of the loss. Type "
            "`print(jaxmp.find_overflow(train_step)(*args))`, with the arguments of "
            "the step, to find the operation. Likely causes: a row in which a mask of "
            "-1e9 or -inf excludes every entry (mask with `jnp.finfo(x.dtype).min`, "
            "and leave the row out of the mean); a sum or a mean over nothing; or an "
            "infinite metric that was added to the loss."
        )


def _check_grads(grads: Any, finite: Any, loss_scale: Any) -> None:
    """Refuses gradients that no wrapper has seen as they are; warns if all are 0."""
    are_zero, unseen = [], []
    for path, x in jax.tree.leaves_with_path(grads):
        if not is_inexact(x):
            continue
        runs = finite.ndim if np.shape(x)[: finite.ndim] == finite.shape else 0
        is_finite, is_zero = map(np.asarray, _look(x, runs))
        are_zero.append(is_zero.all())
        if np.any(~is_finite & (finite if runs else finite.all())):
            unseen.append(path_name(path)[-60:] or "the gradient")
    if unseen:
        raise FloatingPointError(
            f"Not finite in `grads`: {_first(unseen)}; but the step was not skipped. "
            "The loss scale did not see that, most likely because something before it "
            "in a chain makes Inf finite, such as `optax.clip`. Put it inside: `jaxmp."
            "loss_scaling(optax.chain(optax.clip(1.0), optimizer), policy)`. If "
            "these are gradients of parameters that you do not train, or of another "
            "step, leave them out of `grads`."
        )
    if are_zero and all(are_zero) and finite.all():
        warn(
            f"All gradients are 0, at a loss scale of {loss_scale}. In float16 small "
            "gradients underflow so: pass `loss_scale=opt_state` to `value_and_grad`, "
            "and to `jaxmp.loss_scaling(optimizer, policy)` the policy of autocast. If "
            "both are right, or nothing runs in float16, the loss does not depend on "
            "the parameters here."
        )


@functools.partial(jax.jit, static_argnums=1)
def _look(x: jax.Array, runs: int) -> tuple[jax.Array, jax.Array]:
    """Returns whether an array is finite and whether it is 0, for each of some runs."""
    axes = tuple(range(runs, x.ndim))
    return jnp.isfinite(x).all(axes), (x == 0).all(axes)


# Jitted, because a number in eager code is sent to the device where it is used, which
# `jax.transfer_guard` forbids.
@functools.partial(jax.jit, static_argnums=2)
def looks_unused(scale: jax.Array, skipped: jax.Array, max_scale: float) -> jax.Array:
    """Returns whether a scale has grown as far as it may, and no step was skipped."""
    return (scale >= max_scale) & (skipped == 0)


def _nonfinite(grads: Any) -> str:
    """Says which gradients are not finite, for a message; nothing where all are."""
    names = [
        path_name(path)[-60:] or "the gradient"
        for path, x in jax.tree.leaves_with_path(grads)
        if not all_finite(x)
    ]
    if not names:
        return ""
    return f"Not finite in `grads`: {_first(names)}. "


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def unscale(tree: T, loss_scale: Any) -> T:
    """Divides scaled gradients by the loss scale, in at least float32.

    For hand-written loops, in which the loss was multiplied by the scale. What
    :func:`jaxmp.value_and_grad` returns has been divided, and is refused.

    Args:
        tree: Pytree of gradients of the scaled loss, of any shapes.
        loss_scale: The positive scalar that the loss was multiplied by, or an
            optimizer state with it.

    Returns:
        A pytree of the same structure, its floating leaves at least float32. Leaves
        that are neither floating nor complex pass through. Inf and NaN stay visible.

    Raises:
        ValueError: If ``loss_scale`` is not a scalar, or is known and not positive; or
            if :func:`jaxmp.value_and_grad` has divided one of the gradients by a scale.
        TypeError: If the arguments are swapped.

    Examples:
        >>> jaxmp.unscale({"w": jnp.array([2.0**-14], jnp.float16)}, 2.0**15)
        {'w': Array([1.8626451e-09], dtype=float32)}
    """
    if _is_scale(tree) and not _is_scale(loss_scale):
        raise TypeError(
            "`unscale(grads, loss_scale)` takes the gradients first, but the first "
            f"argument is {short(tree)} and the second {short(loss_scale)}. Swap them."
        )
    if any(x in _DIVIDED for x in jax.tree.leaves(tree)):
        raise ValueError(
            "`unscale` was given gradients that `jaxmp.value_and_grad` returned, which "
            "has divided them by its loss scale already. Use them as they are. "
            "`unscale` is for loops that multiply the loss by hand."
        )
    return _unscaled(tree, scale_in(loss_scale))


def divided(grads: T, loss_scale: Any) -> T:
    """Unscales the gradients of ``value_and_grad``, which are not to be so again."""
    grads = _unscaled(grads, loss_scale)
    if not _is_one(loss_scale):
        _DIVIDED.add(jax.tree.leaves(grads))
    return grads


def _is_one(loss_scale: Any) -> bool:
    return isinstance(loss_scale, (int, float)) and loss_scale == 1


def _unscaled(tree: T, loss_scale: Any) -> T:
    scale = as_scale(loss_scale)
    if _is_one(loss_scale):
        return widen(tree)
    # XLA turns a division by a scalar into a multiplication by its reciprocal, which
    # above 2^126 is subnormal, and so flushed to zero. Both sides are made smaller
    # before; the barrier keeps XLA from seeing through a constant scale.
    scale = jax.lax.optimization_barrier(scale)
    factor = jnp.where(scale > 2.0**64, 2.0**-64, jnp.ones_like(scale))
    divisor = scale * factor
    return jax.tree.map(
        lambda x: _divided(x, factor, divisor) if is_inexact(x) else x, widen(tree)
    )


def scale_in(loss_scale: Any) -> Any:
    """Takes the loss scale out of a state that holds one; a scalar stays as it is.

    Of several states of optimizers that share a loss it is the smaller scale.
    """
    if _is_number(loss_scale):
        return loss_scale
    if _are_scales(loss_scale):
        return functools.reduce(jnp.minimum, scales_in(loss_scale))
    is_policy = isinstance(loss_scale, (str, jmp.Policy))
    if is_policy or loss_scale is None or callable(loss_scale):
        cure = "Leave it out where there is no scale."
        if is_policy:
            cure = "A policy is another argument, `policy=`."
        raise TypeError(
            "`loss_scale` must be a positive scalar, or an optimizer state that holds "
            f"one, but is {short(loss_scale)}. Pass `loss_scale=opt_state`. {cure}"
        )
    return get_loss_scale(loss_scale)


def scales_in(loss_scale: Any) -> list[jax.Array]:
    """Returns the scales that states hold, each as it is there; of a number none."""
    if _is_number(loss_scale):
        return []
    parts = loss_scale if _are_scales(loss_scale) else [loss_scale]
    return [get_loss_scale(part) for part in parts]


def holds_scale(x: Any) -> bool:
    """Returns whether there is a loss scale in ``x``, as in an optimizer state."""
    return bool(found_in(x, LossScaleState))


def _are_scales(x: Any) -> bool:
    """Returns whether ``x`` are states of several optimizers, and not one of a chain.

    In the state of a chain one part holds the scale.
    """
    return type(x) is tuple and len(x) > 1 and all(map(holds_scale, x))


@functools.partial(jax.jit, inline=True)  # traced once for all leaves of one shape
def _divided(x: jax.Array, factor: jax.Array, divisor: jax.Array) -> jax.Array:
    return x * factor.astype(x.dtype) / divisor.astype(x.dtype)


def _is_number(x: Any) -> bool:
    """Returns whether ``x`` is an array or a number, also in a variable of NNX."""
    # Layers have a `dtype`, too.
    is_array = hasattr(x, "dtype") and hasattr(x, "shape")
    return is_array or isinstance(x, numbers.Number)


def _is_scale(x: Any) -> bool:
    """Returns whether ``x`` looks like a loss scale: a scalar, or a state with one."""
    if _is_number(x):
        return getattr(x, "shape", ()) == ()
    return holds_scale(x)


def _loss_scale_states(tree: Any) -> list[LossScaleState]:
    """Returns the loss-scale states in a pytree, also one inside another."""
    found = found_in(tree, LossScaleState)
    inside = (_loss_scale_states(state.inner_state) for state in found)
    return [*found, *itertools.chain.from_iterable(inside)]


def _hiding(tree: Any) -> tuple[str, str] | None:
    """Returns what hides gradients from a loss scale, and how to wrap it, if any."""
    found = []

    def is_zeroing(x: Any) -> bool:
        return type(x).__name__ in _ZEROING

    def look(x: Any) -> bool:
        if isinstance(x, LossScaleState) or not holds_scale(x):
            return True
        name = _HIDING.get(type(x).__name__)
        # An opaque `sam`, which has no cache, hides nothing.
        if name and getattr(x, "cache", ...) is not None:
            found.append((name, f"{name}(...)"))
        if type(x) is tuple:  # the state of a chain
            before = list(itertools.takewhile(lambda part: not holds_scale(part), x))
            for part in filter(is_zeroing, jax.tree.leaves(before, is_leaf=is_zeroing)):
                name = _HIDING[type(part).__name__]
                found.append((name, f"optax.chain({name}(...), optimizer)"))
        return False

    jax.tree.leaves(tree, is_leaf=look)
    return found[0] if found else None
