"""Loss scales as optax transformations that skip the steps that overflowed."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from ._checks import (
    as_count,
    as_scale,
    check_positive,
    known_number,
    plain_array,
    short,
)
from ._policy import PolicyLike, get_policy
from ._tree import AxisName, all_finite, is_inexact, widen
from ._varying import varying_axes

T = TypeVar("T")


class LossScaleState(NamedTuple):
    """State of the three loss-scale transformations, the same for every policy."""

    loss_scale: jax.Array  # float32[], finite and positive
    good_steps: jax.Array  # int32[], finite steps in a row since the last growth
    bad_steps: jax.Array  # int32[], skipped steps in a row
    skipped: jax.Array  # int32[], skipped steps since init
    last_finite: jax.Array  # bool[], whether the last step was finite
    inner_state: optax.OptState


if TYPE_CHECKING:

    class _Update(Protocol):
        def __call__(
            self,
            updates: optax.Updates,
            state: Any,
            params: optax.Params | None = None,
            **extra_args: Any,
        ) -> tuple[optax.Updates, LossScaleState]: ...

    class LossScaling(optax.GradientTransformationExtraArgs):
        """What type checkers know of our transformations: the type of their state."""

        init: Callable[[optax.Params], LossScaleState]  # pyright: ignore
        update: _Update  # pyright: ignore
else:
    LossScaling = optax.GradientTransformationExtraArgs


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
    axis_name: AxisName | None = None,
) -> LossScaling:
    """Applies ``inner`` on finite steps, skips the others, and adapts the loss scale.

    The gradients come in true units, as :func:`jaxmp.value_and_grad` returns them;
    nothing is unscaled here. On a step with an Inf or NaN anywhere, the updates are
    negative zeros, the state of ``inner`` stays what it was bit for bit, and the
    scale shrinks. What is stateful or depends on the parameters (weight decay,
    momentum, schedules) belongs inside ``inner``, because only that is skipped.

    With the default factors the scale stays a power of two, so that scaling and
    unscaling never round.

    Args:
        inner: The optimizer of the float32 parameters.
        init_scale: The first loss scale.
        growth_factor: What the scale is multiplied by on the ``growth_interval``-th
            finite step in a row.
        backoff_factor: What it is multiplied by on a skipped step.
        growth_interval: Finite steps in a row after which the scale grows.
        min_scale: Lower bound of the scale.
        max_scale: Upper bound of the scale, at most float32's largest number.
        hysteresis: Skipped steps in a row from which on the scale shrinks.
        axis_name: Mesh axes over which the devices must agree, inside
            ``shard_map`` or ``pmap``.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`LossScaleState`. Its updates have the structure, shapes and dtypes
        that ``inner`` gives them.

    Raises:
        ValueError: If an option is out of range.
        TypeError: If ``growth_interval`` or ``hysteresis`` is not an integer.

    Examples:
        >>> tx = dynamic_loss_scale(optax.sgd(1.0), init_scale=8, growth_interval=2)
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
            f"`init_scale` must lie in [min_scale, max_scale], but {first} is not "
            f"in [{low}, {high}]. Move the scale or the bounds."
        )
    growth = known_number("growth_factor", growth_factor)
    backoff = known_number("backoff_factor", backoff_factor)
    limits = np.finfo(np.float32)
    if growth is not None and not 1 + float(limits.eps) <= growth <= float(limits.max):
        raise ValueError(
            f"`growth_factor` must be above 1 and finite in float32, but is "
            f"{growth}. The usual one is 2.0."
        )
    if backoff is not None and not 0 < backoff <= 1 - float(limits.epsneg):
        raise ValueError(
            f"`backoff_factor` must lie between 0 and 1 in float32, but is "
            f"{backoff}. The usual one is 0.5."
        )
    interval, patience = (
        jnp.asarray(count, jnp.int32)
        if isinstance(count, jax.core.Tracer)
        else as_count(name, count)
        for name, count in (
            ("growth_interval", growth_interval),
            ("hysteresis", hysteresis),
        )
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

    return _skipping(inner, init_scale, adapt, axis_name)


def static_loss_scale(
    inner: optax.GradientTransformation,
    scale: float = 1.0,
    *,
    axis_name: AxisName | None = None,
) -> LossScaling:
    """Applies ``inner`` on finite steps and skips the others, under a fixed scale.

    The scale is written to the state on every step, so that a state restored from a
    run with another scale has this one after its first step.

    Args:
        inner: The optimizer of the float32 parameters.
        scale: The loss scale.
        axis_name: Mesh axes over which the devices must agree, inside
            ``shard_map`` or ``pmap``.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`LossScaleState`.

    Raises:
        ValueError: If ``scale`` is not finite and positive.

    Examples:
        >>> tx = static_loss_scale(optax.sgd(1.0), 8)
        >>> get_loss_scale(tx.init(jnp.ones(2))).item()
        8.0
    """
    _check_optimizer(inner)
    check_positive("scale", scale)

    def adapt(state: LossScaleState) -> LossScaleState:
        return state._replace(loss_scale=jnp.full_like(state.loss_scale, scale))

    return _skipping(inner, scale, adapt, axis_name)


def loss_scaling(
    inner: optax.GradientTransformation,
    policy: PolicyLike,
    **options: Any,
) -> LossScaling:
    """Gives ``inner`` the loss scale that a policy needs.

    That is :func:`dynamic_loss_scale` where the policy computes in float16, and
    :func:`static_loss_scale` of 1 otherwise: bfloat16 and float32 have the range of
    the gradients. Non-finite steps are skipped in both, and the state has the same
    structure, so that changing the policy changes nothing else.

    Args:
        inner: The optimizer of the float32 parameters.
        policy: A policy, its string, or a dtype.
        **options: Options of :func:`dynamic_loss_scale`. They are checked under every
            policy and used under float16; ``axis_name`` is always used.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`LossScaleState`.

    Raises:
        TypeError: If :func:`dynamic_loss_scale` has no such option.
        ValueError: If an option is out of range.

    Examples:
        >>> for policy in ("mixed_float16", "mixed_bfloat16"):
        ...     tx = loss_scaling(optax.adam(1e-3), policy, growth_interval=500)
        ...     print(get_loss_scale(tx.init(jnp.ones(2))))
        32768.0
        1.0
    """
    if "options" in options:
        raise TypeError(
            "`optax.inject_hyperparams` does not see the options of `loss_scaling`. "
            "Inject those of the optimizer, `jaxmp.loss_scaling("
            "optax.inject_hyperparams(optax.adam)(1e-3), policy)`, or those of "
            "`jaxmp.dynamic_loss_scale`, which takes no policy."
        )
    known = list(inspect.signature(dynamic_loss_scale).parameters)[1:]
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(
            f"`loss_scaling` has no option `{unknown[0]}`. Expected one of "
            f"{', '.join(known)}. For a fixed scale use `jaxmp.static_loss_scale`."
        )
    dynamic = dynamic_loss_scale(inner, **options)
    if get_policy(policy).compute_dtype == jnp.float16:
        return dynamic
    return static_loss_scale(inner, axis_name=options.get("axis_name"))


def get_loss_scale(opt_state: Any) -> jax.Array:
    """Returns the loss scale, wherever it sits in an optimizer state.

    Args:
        opt_state: A state with one :class:`LossScaleState` in it: of the
            transformation itself, of an ``optax.chain``, a Flax ``TrainState``, an
            ``nnx.Optimizer``. An abstract one, of ``jax.eval_shape``, has an abstract
            scale.

    Returns:
        A float32 array of shape ``[]``.

    Raises:
        ValueError: If there is no loss-scale state in it, or more than one; or if it
            lies inside a wrapper that withholds gradients from it, such as
            ``optax.MultiSteps``, whose place is inside.

    Examples:
        >>> tx = optax.chain(optax.clip(1.0), loss_scaling(optax.sgd(0.1), "float16"))
        >>> get_loss_scale(tx.init({"loss_scale": jnp.ones(2)})).item()
        32768.0
    """
    return get_loss_scale_state(opt_state).loss_scale


def last_step_finite(opt_state: Any) -> jax.Array:
    """Tells whether the last step was finite, and so was not skipped.

    Args:
        opt_state: As in :func:`get_loss_scale`.

    Returns:
        A bool array of shape ``[]``, true before the first step.

    Raises:
        ValueError: As :func:`get_loss_scale`.

    Examples:
        >>> tx = loss_scaling(optax.sgd(0.1), "float16")
        >>> params = jnp.ones(2)
        >>> _, opt_state = tx.update(params * jnp.nan, tx.init(params), params)
        >>> last_step_finite(opt_state).item()
        False
    """
    return get_loss_scale_state(opt_state).last_finite


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
        >>> tx = loss_scaling(optax.sgd(0.1), "float16")
        >>> get_loss_scale_state(tx.init(jnp.ones(2))).skipped.item()
        0
    """
    found = list(_loss_scale_states(opt_state))
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError(
            "`opt_state` must be the state of an optimizer, but is the optimizer. Pass "
            "what `tx.init(params)` and `tx.update(grads, opt_state, params)` return."
        )
    if not found:
        raise ValueError(
            "`opt_state` must hold a loss scale, but there is no `LossScaleState` in "
            f"the {type(opt_state).__name__} given. Wrap the optimizer with "
            "`jaxmp.loss_scaling(optimizer, policy)`; restore a checkpoint with "
            "`tx.init(params)` as the target, so that the state keeps its type."
        )
    if len(found) > 1:
        raise ValueError(
            f"`opt_state` must hold one loss scale, but holds {len(found)}. Wrap an "
            "optimizer once, and pass the state of one optimizer at a time."
        )
    state, hidden_by = found[0]
    if hidden_by is not None:
        raise ValueError(
            f"The loss scale in `opt_state` does not see every step: `{hidden_by}` "
            "withholds gradients from it, so that an overflow can pass unseen and the "
            "scale stay too large for ever. Put it inside: "
            f"`jaxmp.loss_scaling({hidden_by}(...), policy)`."
        )
    arrays = {
        name: plain_array(field)
        for name, field in state._asdict().items()
        if name != "inner_state"
    }
    return state._replace(**arrays)


def check_loss_scale(opt_state: Any, *, max_skipped_in_a_row: int = 30) -> None:
    """Raises once a run skips nothing but steps. Call it on the host now and then.

    With the default options, 29 skipped steps in a row lead from the largest scale to
    the smallest; whatever overflows then is not a matter of the scale.

    Args:
        opt_state: As in :func:`get_loss_scale`, with concrete values, of any leading
            shape when the training step is vmapped.
        max_skipped_in_a_row: The number of steps from which on this raises.

    Raises:
        FloatingPointError: If as many steps in a row have been skipped.
        ValueError: As :func:`get_loss_scale`.
        TypeError: If the state has no values: in ``jax.jit``, or an abstract one.

    Examples:
        >>> tx = loss_scaling(optax.sgd(0.1), "float16")
        >>> check_loss_scale(tx.init(jnp.ones(2)))
    """
    limit = as_count("max_skipped_in_a_row", max_skipped_in_a_row)
    state = get_loss_scale_state(opt_state)
    if isinstance(state.bad_steps, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        raise TypeError(
            "`check_loss_scale` needs concrete values, but was given a state that is "
            "abstract, or traced by JAX. Call it outside `jax.jit`, between two steps."
        )
    bad_steps = np.max(state.bad_steps)
    if bad_steps >= limit:
        raise FloatingPointError(
            f"The last {bad_steps} steps had Inf or NaN gradients and were skipped "
            f"(loss_scale {state.loss_scale}, {state.skipped} skipped since init). "
            "The scale no longer helps. Likely causes: the loss or a parameter is NaN "
            "or Inf already; the learning rate is too high; an operation overflows "
            "float16 in the forward pass (a mask of -1e9, a square, a large sum); or "
            "the input data is not finite. Look at the loss, and try the same step "
            "under the policy `float32` with `jax.debug_nans(True)`."
        )


def unscale(tree: T, loss_scale: Any) -> T:
    """Divides scaled gradients by the loss scale, in at least float32.

    For hand-written loops: :func:`jaxmp.value_and_grad` has done it already.

    Args:
        tree: Pytree of gradients of the scaled loss, of any shapes.
        loss_scale: The positive scalar that the loss was multiplied by, or an
            optimizer state with it.

    Returns:
        A pytree of the same structure, its floating leaves at least float32. Leaves
        that are neither floating nor complex pass through. Inf and NaN stay visible.

    Raises:
        ValueError: If ``loss_scale`` is not a scalar, or is known and not positive.
        TypeError: If the arguments are swapped.

    Examples:
        >>> unscale({"w": jnp.array([2.0**-14], jnp.float16)}, 2.0**15)
        {'w': Array([1.8626451e-09], dtype=float32)}
    """
    if _is_scale(tree) and not _is_scale(loss_scale):
        raise TypeError(
            "`unscale(grads, loss_scale)` takes the gradients first, but the first "
            f"argument is {short(tree)} and the second {short(loss_scale)}. Swap them."
        )
    loss_scale = scale_in(loss_scale)
    scale = as_scale(loss_scale)
    if isinstance(loss_scale, (int, float)) and loss_scale == 1:
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
    """Takes the loss scale out of a state that holds one; a scalar stays as it is."""
    if _is_number(loss_scale):
        return loss_scale
    cure = ""
    if isinstance(loss_scale, (str, jmp.Policy)):
        cure = "A policy is another argument, `policy=`."
    elif isinstance(loss_scale, optax.GradientTransformation):
        cure = "That is the optimizer; its state is what `tx.init(params)` returns."
    elif loss_scale is None or callable(loss_scale):
        cure = "Leave it out where there is no scale."
    if cure:
        raise TypeError(
            "`loss_scale` must be a positive scalar, or an optimizer state that holds "
            f"one, but is {short(loss_scale)}. Pass `loss_scale=opt_state`. {cure}"
        )
    return get_loss_scale(loss_scale)


def _is_number(x: Any) -> bool:
    """Tells whether ``x`` is an array or a number, also in a variable of NNX."""
    return hasattr(x, "dtype") or isinstance(x, numbers.Number)


def _is_scale(x: Any) -> bool:
    """Tells whether ``x`` looks like a loss scale: a scalar, or a state with one."""
    if _is_number(x):
        return jnp.shape(x) == ()
    return any(True for _ in _loss_scale_states(x))


def _check_optimizer(inner: Any) -> None:
    """Raises where what is to be wrapped is not an optimizer."""
    if callable(getattr(inner, "init", None)) and callable(
        getattr(inner, "update", None)
    ):
        return
    cure = "Pass for example `optax.adam(1e-3)`."
    if isinstance(inner, (str, jmp.Policy)):
        cure = 'It comes first: `loss_scaling(optax.adam(1e-3), "mixed_float16")`.'
    elif callable(inner):
        name = getattr(inner, "__name__", "adam")
        cure = f"Call it, with its options: `{name}(1e-3)`."
    raise TypeError(
        f"The optimizer to wrap must be an optax transformation, but is {short(inner)}."
        f" {cure}"
    )


def _skipping(
    inner: optax.GradientTransformation,
    init_scale: float,
    adapt: Callable[[LossScaleState], LossScaleState],
    axis_name: AxisName | None,
) -> LossScaling:
    """Skips the non-finite steps of ``inner``, counts, and lets ``adapt`` scale."""
    _check_optimizer(inner)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        return LossScaleState(
            loss_scale=jnp.array(init_scale, jnp.float32),
            good_steps=jnp.zeros([], jnp.int32),
            bad_steps=jnp.zeros([], jnp.int32),
            skipped=jnp.zeros([], jnp.int32),
            last_finite=jnp.array(True),
            inner_state=inner.init(params),
        )

    def update_fn(updates, state, params=None, **extra_args):
        if not isinstance(state, LossScaleState):
            raise TypeError(
                "`tx.update(grads, opt_state, params)` needs the state that "
                f"`tx.init(params)` made, a `LossScaleState`, but got {short(state)}. "
                "Begin with `opt_state = tx.init(params)`."
            )
        finite = all_finite(updates, axis_name=axis_name)
        _check_agreement(finite, state.loss_scale, axis_name)
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        # A select fuses into the update; a cond would copy every buffer.
        updates = jax.tree.map(lambda u: _keep_or_skip(finite, u), updates)
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


def _as_float32(x: Any) -> Any:
    """Returns a checked option as a constant, or kept in float32's range if traced."""
    if not isinstance(x, jax.core.Tracer):
        return np.float32(x)
    limits = jnp.finfo(jnp.float32)
    return jnp.clip(x.astype(jnp.float32), limits.tiny, limits.max)


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


def _keep_or_skip(finite: jax.Array, update: Any) -> Any:
    """Returns the update, or the zero that leaves a parameter as it is."""
    if _is_array(update) and not jnp.issubdtype(
        jnp.result_type(update), jax.dtypes.extended
    ):
        return _update_or_zero(finite, update)
    return update  # nothing that is added to a parameter: a PRNG key, a name


@jax.jit  # JAX traces it once for all leaves of one shape
def _divided(x: jax.Array, factor: jax.Array, divisor: jax.Array) -> jax.Array:
    return x * factor.astype(x.dtype) / divisor.astype(x.dtype)


@jax.jit
def _update_or_zero(finite: jax.Array, update: jax.Array) -> jax.Array:
    update = jnp.asarray(update)  # a Python number, where `jax.disable_jit` is on
    if update.dtype == jnp.bool_:
        return jnp.logical_and(finite, update)
    # Negative, because -0.0 + 0.0 is 0.0.
    return jnp.where(finite, update, -jnp.zeros([], update.dtype))


def _select_state(finite: jax.Array, new: Any, old: Any) -> Any:
    """Selects one of two states of ``inner``, leaf by leaf where that is possible."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return _choose(finite, new, old)

    def select(new, old):
        if new is old or getattr(new, "dtype", None) == jax.dtypes.float0:
            return new
        if not (_is_array(new) and _is_array(old)):
            return _choose(finite, new, old)
        if jnp.shape(new) != jnp.shape(old) and not isinstance(finite, jax.core.Tracer):
            return _choose(finite, new, old)
        return _new_or_old(finite, new, old)

    return jax.tree.map(select, new, old)


def _choose(finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns one of two things that no array operation can select from."""
    if isinstance(finite, jax.core.Tracer):
        kinds = [jax.tree.map(lambda x: type(x).__name__, x) for x in (old, new)]
        raise TypeError(
            "An update changes the state of the inner optimizer in a way that a "
            f"skipped step could not undo inside `jax.jit`, from\n  {kinds[0]}\nto\n"
            f"  {kinds[1]}\nMake its `init` return the structure that its `update` "
            "returns, or call `tx.update` outside `jax.jit`."
        )
    return new if finite else old


@jax.jit
def _new_or_old(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Selects one of two states of ``inner``, in the dtype of the old one."""
    # Python numbers, where `jax.disable_jit` is on.
    new, old = jnp.asarray(new), jnp.asarray(old)
    if new.dtype != old.dtype:
        new = new.astype(old.dtype)
    return jnp.where(finite, new, old)


def _is_array(x: Any) -> bool:
    """Tells whether ``x`` is an array or a number that JAX can select from."""
    if isinstance(x, (np.ndarray, np.generic)):  # not of float0, nor of strings
        return x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number)
    return isinstance(x, (jax.Array, int, float, complex))


# What withholds gradients from the transformation inside it, by the name of its state.
_WITHHOLDING = {
    "ApplyIfFiniteState": "optax.apply_if_finite",
    "ConditionallyMaskState": "optax.conditionally_mask",
    "ConditionallyTransformState": "optax.conditionally_transform",
    "MaybeUpdateState": "optax.maybe_update",
    "MultiStepsState": "optax.MultiSteps",
    "SAMState": "optax.contrib.sam",
}
# What makes zeros of gradients, and so hides them from what comes after it in a chain.
_ZEROING = {
    "ApplyEvery": "optax.apply_every",
    "ApplyIfFiniteState": "optax.apply_if_finite",
    "ConditionallyMaskState": "optax.conditionally_mask",
    "MultiStepsState": "optax.MultiSteps",
    "ZeroNansState": "optax.zero_nans",
}


def _loss_scale_states(
    tree: Any, hidden_by: str | None = None
) -> Iterator[tuple[LossScaleState, str | None]]:
    """Finds the loss-scale states in a pytree, also one inside another.

    Each comes with the name of the transformation of optax that hides overflows from
    it, or None.
    """
    if isinstance(tree, LossScaleState):
        yield tree, hidden_by
        yield from _loss_scale_states(tree.inner_state)
        return
    # An opaque `sam`, which has no cache, withholds nothing.
    if getattr(tree, "cache", ...) is not None:
        hidden_by = hidden_by or _WITHHOLDING.get(type(tree).__name__)

    def is_part(x: Any) -> bool:
        name = type(x).__name__
        return x is not tree and (
            isinstance(x, LossScaleState)
            or type(x) is tuple  # the state of a chain
            or name in _WITHHOLDING
            or name in _ZEROING
        )

    for part in jax.tree.leaves(tree, is_leaf=is_part):
        if is_part(part):
            yield from _loss_scale_states(part, hidden_by)
            if type(tree) is tuple:
                hidden_by = hidden_by or _zeroing_in(part)


def _zeroing_in(tree: Any) -> str | None:
    """Returns the name of what makes zeros of gradients in a part of a chain."""

    def is_zeroing(x: Any) -> bool:
        return isinstance(x, LossScaleState) or type(x).__name__ in _ZEROING

    parts = jax.tree.leaves(tree, is_leaf=is_zeroing)
    return next(filter(None, (_ZEROING.get(type(x).__name__) for x in parts)), None)
