"""Loss scales as optax transformations: how they grow, shrink and skip a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from .._base.around import warn_if_float16
from .._base.checks import (
    as_count,
    check_limits,
    check_optimizer,
    check_positive,
    check_state,
    clipped,
    describe,
    explains,
    known_number,
    short,
)
from .._base.dtypes import is_narrow
from .._base.policy import PolicyLike, dtype_of_gradients, get_policy
from .._base.tree import (
    AxisName,
    all_finite,
    called_in,
    is_floating,
    is_strong,
    path_name,
    varying_axes,
)
from .loss_scale_state import MIGRATE, LossScaleState

if TYPE_CHECKING:

    class LossScaling(optax.GradientTransformationExtraArgs):
        """What type checkers know of our transformations: the type of their state."""

        init: Callable[[optax.Params], LossScaleState]  # pyright: ignore
        update: Callable[..., tuple[Any, LossScaleState]]  # pyright: ignore
else:
    LossScaling = optax.GradientTransformationExtraArgs

_FLOAT32 = np.finfo(np.float32)
# What changes the updates of the transformation inside it, by the name of its state.
_CHANGING = {
    "LookaheadState": "optax.lookahead",
    "ScheduleFreeState": "optax.contrib.schedule_free",
    "SAMState": "optax.contrib.sam",
}
# The states of the two optimizers whose updates nothing may change.
_EXACT = {"StochasticRoundingState", "KahanSummationState"}
_CALL = 'loss_scaling(optax.adam(1e-3), "mixed_float16")'


@explains("jaxmp.dynamic_loss_scale(optax.adam(1e-3))", "")
def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    init_scale: float = 2.0**15,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-5,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
) -> LossScaling:
    """Skips an optimizer's steps that are not finite, and adapts the loss scale.

    Pass it unscaled gradients, as :func:`jaxmp.value_and_grad` returns them. On a step
    with an Inf or NaN gradient, the updates are negative zeros, the state of ``inner``
    stays the same bit for bit, and the scale shrinks. Put transformations that have a
    state or read the parameters (weight decay, momentum, schedules) inside ``inner``:
    only ``inner`` is skipped.

    With the default factors the scale stays a power of two, so that scaling and
    unscaling never round.

    Args:
        inner: The optimizer of the float32 parameters.
        init_scale: The first loss scale.
        growth_factor: Factor on the scale at the ``growth_interval``-th finite step in
            a row.
        backoff_factor: Factor on the scale at a skipped step.
        growth_interval: Finite steps in a row after which the scale grows.
        min_scale: Lower bound of the scale.
        max_scale: Upper bound of the scale, at most float32's largest number.
        hysteresis: Number of skipped steps in a row after which the scale shrinks.
        check_updates: Whether to skip a step also if ``inner`` makes an Inf or NaN of
            finite gradients. That takes one more read of the updates. An optimizer that
            computes gradients inside, such as ``optax.contrib.sam`` with its
            ``grad_fn``, is always checked this way.
        axis_name: Mesh axes over which gradients differ, inside ``shard_map`` or
            ``pmap``: those of sharded parameters, such as experts. All devices then
            skip a step together. Gradients that :func:`jaxmp.value_and_grad` has
            averaged are the same on all devices, and need none.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`LossScaleState`. Its updates have the structure, shapes and dtypes
        that ``inner`` gives them.

    Raises:
        ValueError: If an option is out of range.
        TypeError: If ``growth_interval`` or ``hysteresis`` is not an integer.

    Examples:
        >>> sgd = optax.sgd(1.0)
        >>> tx = jaxmp.dynamic_loss_scale(sgd, init_scale=8, growth_interval=2)
        >>> params = jnp.array(1.0)
        >>> state = tx.init(params)
        >>> for grad in (0.5, jnp.inf, 0.5, 0.25):
        ...     updates, state = tx.update(jnp.array(grad), state, params)
        ...     params = optax.apply_updates(params, updates)
        ...     print(params, state.loss_scale)
        0.5 8.0
        0.5 4.0
        0.0 4.0
        -0.25 8.0

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2,
        https://arxiv.org/abs/1710.03740. Growth on the N-th finite step, as in
        ``torch.amp.GradScaler``.
    """
    check_positive("init_scale", init_scale)
    check_positive("min_scale", min_scale)
    check_positive("max_scale", max_scale)
    # What `optax.inject_hyperparams` sets is traced in an update, and not known here.
    low, first, high = (
        known_number("scale", scale) for scale in (min_scale, init_scale, max_scale)
    )
    if None not in (low, first, high) and not low <= first <= high:
        raise ValueError(
            f"`init_scale` must lie in [min_scale, max_scale], but {short(first)} is "
            f"not in [{short(low)}, {short(high)}]. Move the scale or the bounds."
        )
    above_one = 1 + float(_FLOAT32.eps), float(_FLOAT32.max)
    must, cure = "be above 1 and finite", "The usual one is 2.0."
    check_limits("growth_factor", growth_factor, above_one, must, cure)
    below_one = math.ulp(0.0), 1 - float(_FLOAT32.epsneg)
    must, cure = "lie between 0 and 1", "The usual one is 0.5."
    check_limits("backoff_factor", backoff_factor, below_one, must, cure)
    counts = [("growth_interval", growth_interval), ("hysteresis", hysteresis)]
    interval, patience = (
        jnp.asarray(count, jnp.int32)
        if isinstance(count, jax.core.Tracer)
        else as_count(name, count)
        for name, count in counts
    )
    factor_up, top, factor_down, bottom = map(
        _as_float32, (growth_factor, max_scale, backoff_factor, min_scale)
    )

    def adapt(state: LossScaleState) -> LossScaleState:
        grows = state.good_steps >= interval
        shrinks = state.bad_steps >= patience
        scale = state.loss_scale
        grown = jnp.minimum(scale * factor_up, top)
        shrunk = jnp.maximum(scale * factor_down, bottom)
        scale = jnp.where(grows, grown, jnp.where(shrinks, shrunk, scale))
        good_steps = jnp.where(grows, 0, state.good_steps)
        return state._replace(loss_scale=scale, good_steps=good_steps)

    return _skipping(inner, init_scale, adapt, check_updates, axis_name)


@explains("jaxmp.static_loss_scale(optax.adam(1e-3), 128)", "")
def static_loss_scale(
    inner: optax.GradientTransformation,
    scale: float = 1.0,
    *,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
) -> LossScaling:
    """Skips an optimizer's steps that are not finite, under a fixed loss scale.

    The scale is written to the state on every step, so that a state restored from a
    run with another scale has this one after its first step.

    Args:
        inner: The optimizer of the float32 parameters.
        scale: The loss scale.
        check_updates: As for :func:`dynamic_loss_scale`.
        axis_name: As for :func:`dynamic_loss_scale`.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`LossScaleState`.

    Raises:
        ValueError: If ``scale`` is not finite and positive.

    Examples:
        >>> tx = jaxmp.static_loss_scale(optax.sgd(1.0), 8)
        >>> jaxmp.get_loss_scale(tx.init(jnp.ones(2))).item()
        8.0
    """
    return _static(inner, scale, check_updates, axis_name)


def _static(
    inner: optax.GradientTransformation,
    scale: float,
    check_updates: bool,
    axis_name: AxisName | None,
    policy: str = "",
) -> LossScaling:
    check_optimizer(inner, _CALL)
    check_positive("scale", scale)

    def adapt(state: LossScaleState) -> LossScaleState:
        return state._replace(loss_scale=jnp.full_like(state.loss_scale, scale))

    return _skipping(inner, scale, adapt, check_updates, axis_name, policy)


@explains(
    'jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")',
    "For a fixed scale there is `jaxmp.static_loss_scale`.",
)
def loss_scaling(  # noqa: D417
    inner: optax.GradientTransformation,
    policy: PolicyLike,
    *,
    init_scale: float = 2.0**15,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-5,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    check_updates: bool = False,
    axis_name: AxisName | None = None,
) -> LossScaling:
    """Wraps an optimizer with the loss scale that a policy needs.

    This is :func:`dynamic_loss_scale` if the policy computes gradients in float16.
    Otherwise it is :func:`static_loss_scale` with a scale of 1, because bfloat16 and
    float32 have range enough. Both skip non-finite steps, and both states have the same
    structure, so that you can change the policy and nothing else.

    Warning:
        Put what clips inside, ``loss_scaling(optax.chain(optax.clip(1.0), inner),
        policy)``. Before it in a chain, ``optax.clip`` makes an Inf finite: the step is
        not skipped, and infinite gradients are applied.

    The options are those of :func:`dynamic_loss_scale`. They are checked under every
    policy and used under float16; ``check_updates`` and ``axis_name`` are always used.

    Args:
        inner: The optimizer of the float32 parameters.
        policy: A policy, its string, or a dtype.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`LossScaleState`.

    Raises:
        TypeError: If there is no such option.
        ValueError: If an option is out of range.

    Examples:
        >>> for policy in ("mixed_float16", "mixed_bfloat16"):
        ...     tx = jaxmp.loss_scaling(optax.adam(1e-3), policy, growth_interval=500)
        ...     print(jaxmp.get_loss_scale(tx.init(jnp.ones(2))))
        32768.0
        1.0
    """
    dynamic = dynamic_loss_scale(
        inner,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        check_updates=check_updates,
        axis_name=axis_name,
    )
    if dtype_of_gradients(get_policy(policy)) == jnp.float16:
        return dynamic
    spelled = policy if isinstance(policy, str) else str(get_policy(policy))
    return _static(inner, 1.0, check_updates, axis_name, spelled)


def _skipping(
    inner: optax.GradientTransformation,
    init_scale: float,
    adapt: Callable[[LossScaleState], LossScaleState],
    check_updates: bool,
    axis_name: AxisName | None,
    policy: str = "",
) -> LossScaling:
    """Skips the non-finite steps of ``inner``, counts, and lets ``adapt`` scale.

    A ``policy`` says that there is no scale because it needs none.
    """
    check_optimizer(inner, _CALL)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        inner_state = inner.init(params)
        _check_nothing_follows(inner_state)
        return LossScaleState(
            loss_scale=jnp.array(init_scale, jnp.float32),
            good_steps=jnp.zeros([], jnp.int32),
            bad_steps=jnp.zeros([], jnp.int32),
            skipped=jnp.zeros([], jnp.int32),
            last_finite=jnp.array(True),
            inner_state=inner_state,
        )

    def update_fn(updates, state, params=None, **extra_args):
        if isinstance(params, LossScaleState) and not isinstance(state, LossScaleState):
            raise TypeError(
                "`tx.update` takes the state before the parameters, but got them the "
                "other way round. Type `tx.update(grads, opt_state, params)`."
            )
        check_state(state, LossScaleState, MIGRATE)
        if policy:
            warn_if_float16(state.loss_scale, policy)
        like = updates if params is None else params
        finite = all_finite(updates, axis_name=axis_name)
        _check_agreement(finite, state.loss_scale, axis_name)
        try:
            updates, inner_state = inner.update(
                updates, state.inner_state, params, **extra_args
            )
        except Exception as error:
            _refuse_other_model(inner, like, state.inner_state, cause=error)
            if isinstance(error, TypeError):
                _note_kahan(error, params)
            raise
        _refuse_other_model(inner, like, state.inner_state, inner_state)
        # A function may be differentiated inside, where the gradients are not seen.
        if check_updates or any(map(callable, extra_args.values())):
            finite &= all_finite(updates, axis_name=axis_name)
        # A select fuses into the update; a cond would copy every buffer.
        updates = _updates_or_zeros(finite, updates)
        inner_state = _select_state(finite, inner_state, state.inner_state)
        one_more = optax.safe_increment
        counted = LossScaleState(
            loss_scale=state.loss_scale,
            good_steps=jnp.where(finite, one_more(state.good_steps), 0),
            bad_steps=jnp.where(finite, 0, one_more(state.bad_steps)),
            skipped=jnp.where(finite, state.skipped, one_more(state.skipped)),
            last_finite=finite,
            inner_state=inner_state,
        )
        return updates, adapt(counted)

    return LossScaling(init_fn, update_fn)


def _check_nothing_follows(state: Any) -> None:
    """Raises where something changes the updates of one of the two wrappers."""
    rule = (
        "The updates of `jaxmp.stochastic_rounding` and `jaxmp.kahan_summation` must "
        "reach `optax.apply_updates` as they are, but "
    )

    def look(x: Any) -> bool:
        if not called_in(x, _EXACT):
            return True
        if (name := _CHANGING.get(type(x).__name__)) is not None:
            raise ValueError(
                f"{rule}`{name}` is around one of them. Put it inside: "
                f"`jaxmp.kahan_summation({name}(...))`."
            )
        if type(x) is tuple and called_in(x[:-1], _EXACT):
            raise ValueError(
                f"{rule}something comes after one of them in an `optax.chain`. Put the "
                "whole chain inside: `jaxmp.kahan_summation(optax.chain(...))`."
            )
        return False

    jax.tree.leaves(state, is_leaf=look)


def _note_kahan(error: TypeError, params: Any) -> None:
    """Adds to what an optimizer of 16-bit parameters raises that it needs a wrapper."""
    if isinstance(error, jax.errors.JAXTypeError):
        return
    if any(is_floating(x) and is_narrow(x) for x in jax.tree.leaves(params)):
        error.add_note(
            "There are 16-bit parameters, and `jaxmp.value_and_grad` returns "
            "float32 gradients. Where optax needs both in one dtype (in a "
            "`lax.cond`), wrap its optimizer: `jaxmp.loss_scaling("
            "jaxmp.kahan_summation(optimizer), policy)`, which gives it float32."
        )


def _as_float32(x: Any) -> Any:
    """Returns a checked option as a constant, or kept in float32's range if traced."""
    if not isinstance(x, jax.core.Tracer):
        return np.float32(x)
    return jnp.clip(x.astype(jnp.float32), _FLOAT32.tiny, _FLOAT32.max)


def _check_agreement(
    finite: jax.Array, loss_scale: jax.Array, axis_name: AxisName | None
) -> None:
    """Refuses a flag that differs over devices where the scale is the same on all."""
    if apart := varying_axes(finite) - varying_axes(loss_scale):
        raise ValueError(
            f"The gradients differ over the mesh axes {sorted(map(str, apart))}, but "
            f"the loss scale is one for all, and `axis_name={axis_name!r}` does not "
            "make the devices agree on it. Pass these axes as `axis_name` to "
            "`jaxmp.loss_scaling`, and reduce the gradients before: "
            "`jaxmp.value_and_grad(..., axis_name=...)`."
        )


def _updates_or_zeros(finite: jax.Array, updates: Any) -> Any:
    """Returns the updates, or the zeros that leave the parameters as they are."""
    zeros = {}  # one for each type: JAX takes its time to trace and to lower them

    def keep_or_skip(update):
        if not _is_selectable(update) or jnp.issubdtype(
            jnp.result_type(update), jax.dtypes.extended
        ):
            return update  # nothing that is added to a parameter: a PRNG key, a name
        if not is_strong(update):
            update = jnp.asarray(update, jnp.result_type(update))
        if (kind := jax.typeof(update)) not in zeros:
            zero = np.zeros([], update.dtype)
            if update.dtype != jnp.bool_:
                zero = -zero  # because -0.0 + 0.0 is 0.0
            zeros[kind] = jax.lax.full_like(update, zero)
        return jax.lax.select(finite, update, zeros[kind])

    return jax.tree.map(keep_or_skip, updates)


def _select_state(finite: jax.Array, new: Any, old: Any) -> Any:
    """Selects one of two states of ``inner``, leaf by leaf where that is possible."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return _choose(finite, new, old)

    def select(new, old):
        if new is old or _is_float0(new):
            return new
        is_array = _is_selectable(new) and _is_selectable(old)
        if not is_array or jnp.shape(new) != jnp.shape(old):
            return _choose(finite, new, old)
        new, old = jnp.asarray(new), jnp.asarray(old)
        if new.dtype != old.dtype:  # the state keeps that which it has
            new = new.astype(old.dtype)
        return jax.lax.select(finite, new, old)

    return jax.tree.map(select, new, old)


def _refuse_other_model(
    inner: optax.GradientTransformation,
    params: Any,
    state: Any,
    new: Any = None,
    cause: Exception | None = None,
) -> None:
    """Raises where a state that no update takes, or keeps, is not of these parameters.

    Args:
        inner: The optimizer.
        params: The parameters, or something of their shapes.
        state: Its state.
        new: That state after the update, if there was one.
        cause: The error of the update, if it had one.
    """
    if cause is None and [*map(np.shape, jax.tree.leaves(new))] == [
        *map(np.shape, jax.tree.leaves(state))
    ]:
        return
    try:
        made = jax.eval_shape(inner.init, params)
    except Exception:  # it reads values
        return
    # An optimizer whose state grows makes another shape with each update.
    if cause is None and _differs(new, made) is not None:
        return
    if (found := _differs(state, made)) is not None:
        name, got, wanted = found
        raise ValueError(
            f"`opt_state` is that of another model: at `{name}` of its `inner_state` "
            f"it has {got}, but for these parameters {wanted}. Restore the checkpoint "
            "of this model, or begin with `opt_state = tx.init(params)`."
        ) from cause


def _differs(state: Any, other: Any) -> tuple[str, str, str] | None:
    """Returns the first leaf that has not one shape in both: its name and both."""
    shapes, others = (
        {path: np.shape(x) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (state, other)
    )
    for path in [*others, *shapes]:
        got, wanted = shapes.get(path), others.get(path)
        if got != wanted:
            return path_name(path), _of_shape(got), _of_shape(wanted)
    return None


def _of_shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else f"the shape {list(shape)}"


def _choose(finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns one of two things that no array operation can select from."""
    if not isinstance(finite, jax.core.Tracer):
        return new if finite else old
    kinds = [clipped(jax.tree.map(describe, x), 300) for x in (old, new)]
    raise TypeError(
        "An update changes the state of the inner optimizer in a way that a "
        "skipped step could not undo inside `jax.jit`, from\n"
        f"  {kinds[0]}\nto\n  {kinds[1]}\n"
        "Make its `init` return the structure and the shapes that its `update` "
        "returns, or call `tx.update` outside `jax.jit`."
    )


def _is_selectable(x: Any) -> bool:
    """Returns whether ``x`` is an array or a number that JAX can select from."""
    if isinstance(x, (np.ndarray, np.generic)):  # not of strings, nor of float0
        return x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number)
    return isinstance(x, (jax.Array, int, float, complex)) and not _is_float0(x)


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0
