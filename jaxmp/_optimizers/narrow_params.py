"""Optimizers of parameters that are stored in 16 bits; the masters they do without."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .._base.checks import check_optimizer, check_state, plain_array, short, warn
from .._base.dtypes import is_called
from .._base.tree import found_in, is_floating, path_name, widen
from .rounding import (
    join,
    noise_seeds,
    round_stochastically,
    split,
    split_stochastically,
)
from .state_dtype import as_state_dtype, check_seed, narrow_init, narrow_update

T = TypeVar("T")

_BFLOAT16, _FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(jnp.float16)


class StochasticRoundingState(NamedTuple):
    """State of :func:`stochastic_rounding`."""

    steps: jax.Array  # uint32[], since init; each has random numbers of its own
    inner_state: optax.OptState


class KahanSummationState(NamedTuple):
    """State of :func:`kahan_summation`."""

    steps: jax.Array  # uint32[], since init; each has random numbers of its own
    compensation: Any  # int16 or int8, of the shapes of 16-bit parameters, else []
    inner_state: optax.OptState


def stochastic_rounding(
    inner: optax.GradientTransformation,
    *,
    state_dtype: DTypeLike | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Trains bfloat16 parameters without float32 masters, by stochastic rounding.

    ``inner`` sees parameters and gradients in float32, and its state is float32. The
    new value of a bfloat16 parameter is rounded up or down, with a higher
    probability to the nearer neighbour, so that the mean of many small updates is
    right. ``optax.apply_updates`` rounds to nearest: an update below 1/512 of its
    parameter is lost, and a model stops learning.

    A parameter with Adam takes 10 bytes, with ``state_dtype="bfloat16"`` 6 and with
    ``"int8"`` 4, where float32 masters take 12 and 2 more for their 16-bit copy.
    Float32 parameters are updated as ``inner`` alone would; the program is the same for
    both.

    Its updates are float32, and ``optax.apply_updates`` makes exactly the rounded
    parameters of them. So nothing may change them: in a chain this comes last, with
    everything else inside it, and only :func:`jaxmp.loss_scaling` may wrap it,
    which skips a step without a trace, and refuses a chain in which something follows.

    The random numbers depend on ``seed``, the step and the position of an element:
    not on how arrays are sharded under ``jit``, and they are the same for all replicas,
    also those of ``vmap``. They are made where they are used, never in memory.

    Args:
        inner: The optimizer, of float32 parameters as ever.
        state_dtype: bfloat16 stores the state of ``inner`` so, except its scalars,
            and ``"int8"`` its moments in 8 bits, as :func:`jaxmp.with_state_dtype`
            does; also those of float32 parameters. None leaves it float32.
        seed: Of the random numbers.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`StochasticRoundingState`.

    Raises:
        TypeError: If a parameter is float16 or narrower, or an argument is of another
            kind.
        ValueError: If ``state_dtype`` is another dtype, or there is such a wrapper
            inside already.

    Examples:
        >>> def train(tx, params, state):
        ...     def step(carry, _):
        ...         params, state = carry
        ...         updates, state = tx.update(jnp.ones(1000), state, params)
        ...         return (optax.apply_updates(params, updates), state), None
        ...     (params, _), _ = jax.lax.scan(step, (params, state), length=1000)
        ...     return params.mean(dtype=jnp.float32)
        >>> params = jnp.ones(1000, jnp.bfloat16)
        >>> for tx in (optax.sgd(1e-4), jaxmp.stochastic_rounding(optax.sgd(1e-4))):
        ...     print(f"{train(tx, params, tx.init(params)):.2f}")
        1.00
        0.90

    References:
        Zamirai et al., "Revisiting BFloat16 Training", 2020,
        https://arxiv.org/abs/2010.06192.
    """
    return _without_masters(inner, state_dtype, seed)


def kahan_summation(
    inner: optax.GradientTransformation,
    *,
    state_dtype: DTypeLike | None = None,
    compensation: DTypeLike = "int16",
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Trains 16-bit parameters without float32 masters, keeping what rounding loses.

    ``inner`` sees parameters and gradients in float32, and its state is float32. Its
    updates are added to the parameter and its compensation, 16 bits more in the state:
    how far the sum lies from the 16-bit number nearest to it. A bfloat16 parameter and
    its compensation are a float32 number, bit for bit, so that training is that of
    float32 masters with a bfloat16 copy. So are a float16 parameter (policy ``O3``) and
    its compensation; below 2^-14, where float16 has fewer digits, a multiple of 2^-39.

    A parameter with Adam takes 12 bytes, as with float32 masters but without their
    16-bit copy, with ``state_dtype="bfloat16"`` 8 and with ``"int8"`` 6. With
    ``compensation="int8"`` it is one byte less: the two are the float32 number without
    its lowest 8 bits, which are rounded stochastically, so that no update is lost on
    the average. Float32 parameters are updated as ``inner`` alone would, and their
    compensation is a single 0; the program is the same for all.
    :func:`jaxmp.masters` returns the float32 numbers.

    As for :func:`stochastic_rounding`, nothing may change the updates: in a chain this
    comes last, and only :func:`jaxmp.loss_scaling` may wrap it. The parameters may
    be changed between two steps, because what is left of the compensation is at most
    half of their spacing.

    Args:
        inner: The optimizer, of float32 parameters as ever.
        state_dtype: As in :func:`stochastic_rounding`.
        compensation: Its dtype, int16 or int8.
        seed: Of the random numbers by which ``state_dtype`` and ``compensation="int8"``
            round. Without these there are none.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`KahanSummationState`.

    Raises:
        TypeError: If a parameter is narrower than 16 bits, or an argument is of another
            kind.
        ValueError: If ``state_dtype`` is another dtype, the state is that of parameters
            of other dtypes, or there is such a wrapper inside already.

    Examples:
        >>> tx = jaxmp.kahan_summation(optax.sgd(1.0))
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> updates, state = tx.update(jnp.array([2.0**-12]), tx.init(params), params)
        >>> optax.apply_updates(params, updates), state.compensation
        (Array([1], dtype=bfloat16), Array([-4096], dtype=int16))

    References:
        Kahan, "Further remarks on reducing truncation errors", CACM 8(1), 1965; Zamirai
        et al., "Revisiting BFloat16 Training", 2020, https://arxiv.org/abs/2010.06192;
        https://pypi.org/project/bf16-fused-adam for the lower half of a float32 number
        as the compensation.
    """
    return _without_masters(inner, state_dtype, seed, _as_rest_dtype(compensation))


def masters(params: T, opt_state: Any) -> T:
    """Returns the float32 parameters of a training run without float32 masters.

    A bfloat16 parameter and its compensation of 16 bits are a float32 number, bit for
    bit: what float32 masters would be. Use it for evaluation, averages, checkpoints
    and export.

    Parameters without compensation in ``opt_state`` are cast to float32. For 16-bit
    parameters this is only what 16 bits hold, and a warning says so. Float32 parameters
    are masters themselves, and are returned as they are.

    Args:
        params: The parameters.
        opt_state: The state of an optimizer with :func:`jaxmp.kahan_summation` in it,
            at any depth, or of any other.

    Returns:
        A pytree of the structure of ``params``, its floating leaves in float32.
        :func:`jaxmp.set_masters` goes the way back.

    Raises:
        ValueError: If ``opt_state`` is not that of these parameters.

    Examples:
        >>> tx = jaxmp.kahan_summation(optax.sgd(1.0))
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> updates, state = tx.update(jnp.array([2.0**-12]), tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
        >>> jaxmp.masters(params, state) == 1 - 2.0**-12
        Array([ True], dtype=bool)
    """
    leaves, structure = jax.tree.flatten_with_path(params)
    rests = _compensations(opt_state, leaves)
    wide, bare = [], []
    for (path, x), rest in zip(leaves, rests, strict=True):
        wide.append(widen(x) if rest is None else join(x, rest))
        if _is_16_bit(x) and rest is None:
            bare.append(path_name(path))
    if bare:
        warn(
            f"`jaxmp.masters` returns {len(bare)} of {len(leaves)} parameters as they "
            f"are, in float32: `opt_state` has no compensation of `{bare[0]}`. With "
            "`jaxmp.kahan_summation` around the optimizer it has."
        )
    return structure.unflatten(wide)


def set_masters(masters: Any, params: T, opt_state: Any) -> tuple[T, Any]:
    """Returns parameters and an optimizer state that hold given float32 parameters.

    This is the inverse of :func:`jaxmp.masters`. Use it to continue from a float32
    checkpoint or from an average: ``params, opt_state = set_masters(average, params,
    opt_state)``.

    Args:
        masters: The float32 parameters.
        params: Parameters of the dtypes to return, such as those of the run.
        opt_state: As in :func:`jaxmp.masters`.

    Returns:
        The parameters, rounded to the nearest number of their dtype, and ``opt_state``,
        whose compensation (if it has one) holds the rest. Everything else in it stays.

    Raises:
        ValueError: If the three are not of the same parameters.

    Examples:
        >>> tx = jaxmp.kahan_summation(optax.sgd(1.0))
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> params, state = jaxmp.set_masters(jnp.array([1.01]), params, state)
        >>> params, jaxmp.masters(params, state)
        (Array([1.00781], dtype=bfloat16), Array([1.01], dtype=float32))
    """
    leaves, structure = jax.tree.flatten_with_path(params)
    given, given_structure = jax.tree.flatten(masters)
    shapes = [jnp.shape(x) for _, x in leaves]
    if given_structure != structure or [jnp.shape(x) for x in given] != shapes:
        raise ValueError(
            "`set_masters(masters, params, opt_state)` needs parameters of one "
            "structure and the same shapes. Pass what `jaxmp.masters(params, "
            "opt_state)` returned, or a float32 checkpoint of the same model."
        )
    made, new = [], {}
    rests = _compensations(opt_state, leaves)
    for (path, x), wide, rest in zip(leaves, given, rests, strict=True):
        if rest is not None:
            wide = jnp.asarray(wide, jnp.float32)
            wide, new[path_name(path)] = split(wide, x.dtype, rest.dtype)
        made.append(jnp.asarray(wide).astype(x.dtype))

    def replaced(state):
        if not isinstance(state, KahanSummationState):
            return state
        compensation = jax.tree.map_with_path(
            lambda path, rest: new.get(path_name(path), rest), state.compensation
        )
        return state._replace(compensation=compensation)

    opt_state = jax.tree.map(
        replaced, opt_state, is_leaf=lambda x: isinstance(x, KahanSummationState)
    )
    return structure.unflatten(made), opt_state


def _without_masters(
    inner: optax.GradientTransformation,
    state_dtype: DTypeLike | None,
    seed: Any,
    rest_dtype: np.dtype | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Shows ``inner`` float32 parameters, and stores what it makes of them.

    What rounding loses is stored in ``rest_dtype``. With None it rounds stochastically.
    """
    state_type, name = StochasticRoundingState, "stochastic_rounding"
    if rest_dtype is not None:
        state_type, name = KahanSummationState, "kahan_summation"
    check_optimizer(inner, f"jaxmp.{name}(optax.adam(1e-3))")
    check_seed(seed)
    narrow = as_state_dtype(state_dtype)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        _check_params(name, params)
        inner_state = narrow_init(inner, widen(params), narrow)
        if _has_wrapper(inner_state):
            raise ValueError(
                f"`jaxmp.{name}` has another wrapper of its kind inside, and the "
                "parameters would be rounded twice. Wrap the optimizer once."
            )
        steps = jnp.zeros([], jnp.uint32)
        if rest_dtype is None:
            return StochasticRoundingState(steps, inner_state)
        compensation = jax.tree.map(
            lambda p: jnp.zeros(p.shape if _is_16_bit(p) else (), rest_dtype), params
        )
        return KahanSummationState(steps, compensation, inner_state)

    # So that an autocast around the whole step leaves it alone.
    @jax.named_scope("jaxmp.float32")
    def update_fn(updates, state, params=None, **extra_args):
        check_state(state, state_type)
        _check_params(name, params)
        leaves, structure = jax.tree.flatten(params)
        wide, rests = widen(leaves), []
        if rest_dtype is not None:
            rests = structure.flatten_up_to(state.compensation)
            _check_compensation(leaves, rests, rest_dtype)
            wide = [
                join(p, rest) if _is_16_bit(p) else w
                for p, w, rest in zip(leaves, wide, rests, strict=True)
            ]
        seeds = noise_seeds(seed, state.steps)
        args = widen(updates), state.inner_state, structure.unflatten(wide), extra_args
        updates, inner_state = narrow_update(inner, args, narrow, seeds, len(leaves))

        changes = structure.flatten_up_to(updates)
        for i, p in enumerate(leaves):
            if not _is_16_bit(p):
                continue
            total = jnp.asarray(wide[i] + changes[i], jnp.float32)
            if rest_dtype is None:
                stored = round_stochastically(total, seeds, np.uint32(i))
            elif rest_dtype == jnp.int16:
                stored, rests[i] = split(total, p.dtype)
            else:
                number = np.uint32(i)
                stored, rests[i] = split_stochastically(total, p.dtype, seeds, number)
            changes[i] = _change(p, stored)

        updates, steps = structure.unflatten(changes), state.steps + np.uint32(1)
        if rest_dtype is None:
            return updates, StochasticRoundingState(steps, inner_state)
        rests = structure.unflatten(rests)
        return updates, KahanSummationState(steps, rests, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@jax.jit  # JAX traces it once for all leaves of one shape
def _change(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns what must be added to a 16-bit parameter to make another of it."""
    # The sum is exact: both are numbers of 8 or 11 digits, and where they are of very
    # different size, the smaller one lies on the grid of the update that led there.
    param = param.astype(jnp.float32)
    return jnp.where(stored == param, 0, stored - param)  # Inf - Inf is NaN


def _is_16_bit(x: Any) -> bool:
    """Returns whether a parameter may have a compensation."""
    return is_floating(x) and x.dtype in (_BFLOAT16, _FLOAT16)


def _has_wrapper(state: Any) -> bool:
    return bool(found_in(state, (StochasticRoundingState, KahanSummationState)))


def _compensations(opt_state: Any, params: list[tuple[Any, Any]]) -> list[Any]:
    """Returns the compensation of each parameter, None where it has none.

    Parts of a model may have an optimizer of their own. What is theirs stands under
    the path of the parameter in each.
    """
    found = {
        path_name(path): plain_array(rest)
        for state in found_in(opt_state, KahanSummationState)
        for path, rest in jax.tree.leaves_with_path(state.compensation)
        if jnp.shape(rest)  # that of a float32 parameter is a scalar
    }
    rests = [found.pop(path_name(path), None) for path, _ in params]
    for (path, x), rest in zip(params, rests, strict=True):
        if rest is not None and not (_is_16_bit(x) and rest.shape == x.shape):
            found[path_name(path)] = rest
    if found:
        name = next(iter(found))
        raise ValueError(
            f"`opt_state` has a compensation {list(found[name].shape)} of `{name}`, "
            "and there is no such 16-bit parameter. Pass the parameters and the state "
            "of one step."
        )
    return rests


def _as_rest_dtype(compensation: Any) -> np.dtype:
    for dtype in (np.dtype(jnp.int16), np.dtype(jnp.int8)):
        if is_called(compensation, dtype, [dtype.name]):
            return dtype
    raise ValueError(
        f"`compensation` must be int16 or int8, but is {short(compensation)}. Leave it "
        "out for int16: the parameters are those of float32 masters, bit for bit."
    )


def _check_params(name: str, params: Any) -> None:
    """Raises where there is a parameter that is not for this wrapper."""
    if params is None:
        raise ValueError(
            f"`jaxmp.{name}` rounds parameters and needs them: "
            "`tx.update(grads, opt_state, params)`."
        )
    served, kinds = (_BFLOAT16,), "bfloat16"
    if name == "kahan_summation":
        served, kinds = (_BFLOAT16, _FLOAT16), "16-bit"
    for path, x in jax.tree.leaves_with_path(params):
        if is_floating(x) and x.dtype.itemsize <= 2 and x.dtype not in served:
            is_float16 = x.dtype == _FLOAT16
            cure = (
                "Use `jaxmp.kahan_summation`" if is_float16 else "Cast it to bfloat16"
            )
            raise TypeError(
                f"`jaxmp.{name}` serves {kinds} and float32 parameters, but "
                f"`{path_name(path)}` is {x.dtype.name}. {cure}."
            )


def _check_compensation(
    params: list[Any], rests: list[Any], rest_dtype: np.dtype
) -> None:
    """Raises where the state was made for parameters of other dtypes or shapes."""
    for p, rest in zip(params, rests, strict=True):
        shape = jnp.shape(p) if _is_16_bit(p) else ()
        if rest.shape != shape:
            raise ValueError(
                f"A parameter {jnp.result_type(p)}{list(jnp.shape(p))} has a "
                f"compensation of the shape {list(rest.shape)}, as if it had another "
                "dtype when the state was made. Cast first, "
                "`params = policy.cast_to_param(params)`, then `tx.init(params)`."
            )
        if rest.dtype != rest_dtype:
            raise ValueError(
                f"The compensation of the state is {rest.dtype.name}, but "
                f"`compensation` is {rest_dtype.name}. To continue with the other one, "
                "take `masters = jaxmp.masters(params, opt_state)` and pass it to "
                "`jaxmp.set_masters(masters, params, tx.init(params))`."
            )
