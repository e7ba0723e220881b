"""The float32 parameters that 16-bit parameters and an optimizer state stand for."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._base.checks import plain_array, warn
from .._base.rounding import join, split
from .._base.tree import path_name, widen
from .narrow_params import KahanSummationState, is_16_bit

T = TypeVar("T")


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
    bare = [
        path_name(path)
        for (path, x), rest in zip(leaves, rests, strict=True)
        if is_16_bit(x) and rest is None
    ]
    if bare:
        warn(
            f"`jaxmp.masters` returns {len(bare)} of {len(leaves)} parameters as they "
            f"are, in float32: `opt_state` has no compensation of `{bare[0]}`. With "
            "`jaxmp.kahan_summation` around the optimizer it has."
        )
    wide = [
        widen(x) if rest is None else join(x, rest)
        for (_, x), rest in zip(leaves, rests, strict=True)
    ]
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
    rests = _compensations(opt_state, leaves)
    made = []
    for i, ((_, x), wide) in enumerate(zip(leaves, given, strict=True)):
        if rests[i] is not None:
            wide = jnp.asarray(wide, jnp.float32)
            wide, rests[i] = split(wide, x.dtype, rests[i].dtype)
        made.append(jnp.asarray(wide).astype(x.dtype))
    return structure.unflatten(made), _with_compensations(opt_state, leaves, rests)


def _is_state(x: Any) -> bool:
    return isinstance(x, KahanSummationState)


def _compensations(opt_state: Any, params: list[tuple[Any, Any]]) -> list[Any]:
    """Returns the compensation of each parameter, None where it has none.

    Parts of a model may have an optimizer of their own. What is theirs stands under
    the path of the parameter in each.
    """
    found = {
        path_name(path): plain_array(rest)
        for state in jax.tree.leaves(opt_state, is_leaf=_is_state)
        if _is_state(state)
        for path, rest in jax.tree.leaves_with_path(state.compensation)
        if jnp.shape(rest)  # that of a float32 parameter is a scalar
    }
    rests = [found.pop(path_name(path), None) for path, _ in params]
    for (path, x), rest in zip(params, rests, strict=True):
        if rest is not None and not (is_16_bit(x) and rest.shape == x.shape):
            found[path_name(path)] = rest
    if found:
        name = next(iter(found))
        raise ValueError(
            f"`opt_state` has a compensation {list(found[name].shape)} of `{name}`, "
            "and there is no such 16-bit parameter. Pass the parameters and the state "
            "of one step."
        )
    return rests


def _with_compensations(
    opt_state: Any, params: list[tuple[Any, Any]], rests: list[Any]
) -> Any:
    """Returns a state with other compensations."""
    new = {
        path_name(path): rest
        for (path, _), rest in zip(params, rests, strict=True)
        if rest is not None
    }

    def replaced(state):
        if not _is_state(state):
            return state
        return state._replace(
            compensation=jax.tree.map_with_path(
                lambda path, rest: new.get(path_name(path), rest), state.compensation
            )
        )

    return jax.tree.map(replaced, opt_state, is_leaf=_is_state)
