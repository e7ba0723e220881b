"""Optimizer states that are stored in fewer bits than their optimizer works with."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .._base.checks import check_optimizer, check_state, short
from .._base.dtypes import as_dtype, is_called
from .._base.tree import found_in, is_floating, is_number, path_name, widen
from .blocks import (
    Int8Blocks,
    decode,
    encode,
    extents,
    is_blocks,
    nearest,
    units_from,
)
from .rounding import draws, noise_seeds, round_stochastically

_BFLOAT16, _FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(jnp.float32)
_INT8 = np.dtype(jnp.int8)
# What is smaller stays in float32: all biases of a model are next to nothing of it.
_FEWEST = 4096


class StateDtypeState(NamedTuple):
    """State of :func:`with_state_dtype`."""

    steps: jax.Array  # uint32[], since init; each has random numbers of its own
    inner_state: optax.OptState


def with_state_dtype(
    inner: optax.GradientTransformation,
    state_dtype: DTypeLike | None,
    *,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Stores the state of any optimizer in 8 or 16 bits a number.

    This is like ``mu_dtype`` and ``nu_dtype`` together, for every optimizer. ``inner``
    sees a float32 state. Its new state is rounded stochastically, up or down, so that
    the mean is right. Rounded to nearest, a second moment would stop changing.

    Adam's moments take 8 bytes a parameter in float32, 4 in bfloat16 and 2.02 in
    ``"int8"``, which stores the arrays of a parameter's shape that hold moments. Copies
    of parameters that ``init`` makes stay as they are. So do arrays of fewer than 4,096
    numbers, arrays of other shapes, and scalars. An array in 8 bits is an
    :class:`Int8Blocks`. A block in it with an Inf or NaN becomes NaN, and no derivative
    passes through it.

    For float32 parameters. :func:`jaxmp.stochastic_rounding` and
    :func:`jaxmp.kahan_summation` have the same option for those in 16 bits.

    Args:
        inner: The optimizer, or a part of a chain.
        state_dtype: ``"int8"``, bfloat16, or None to store the state as it is.
        seed: Of the random numbers.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`StateDtypeState`. Its updates are those of ``inner``.

    Raises:
        TypeError: If a parameter is narrower than float32, or an argument is of
            another kind.
        ValueError: If ``state_dtype`` is another dtype, or the state was stored in
            another one.

    Examples:
        >>> tx = jaxmp.with_state_dtype(optax.adamw(1e-3), "int8")
        >>> state = tx.init({"w": jnp.ones((64, 128)), "b": jnp.ones(128)})
        >>> nu = optax.tree.get(state, "nu")
        >>> nu["w"].codes.dtype, nu["w"].units.shape, nu["b"].dtype
        (dtype('int8'), (64, 1), dtype('float32'))

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022,
        https://arxiv.org/abs/2110.02861.
    """
    check_optimizer(inner, 'jaxmp.with_state_dtype(optax.adam(1e-3), "int8")')
    check_seed(seed)
    narrow = as_state_dtype(state_dtype)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        _check_float32(params)
        return StateDtypeState(
            steps=jnp.zeros([], jnp.uint32),
            inner_state=narrow_init(inner, params, narrow),
        )

    # So that an autocast around the whole step leaves it alone.
    @jax.named_scope("jaxmp.float32")
    def update_fn(updates, state, params=None, **extra_args):
        check_state(state, StateDtypeState)
        _check_float32(params)
        updates, inner_state = narrow_update(
            inner,
            (widen(updates), state.inner_state, params, extra_args),
            narrow,
            noise_seeds(seed, state.steps),
        )
        return updates, StateDtypeState(state.steps + np.uint32(1), inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def cast_state(opt_state: Any, like: Any) -> Any:
    """Converts an optimizer state to another ``state_dtype``: 8, 16 or 32 bits.

    Use it to continue a run with another ``state_dtype``. Here numbers are rounded to
    nearest.

    Args:
        opt_state: A state, as it was restored with the optimizer that made it.
        like: A state of the optimizer to go on with, or its shapes and dtypes:
            ``jax.eval_shape(tx.init, params)``.

    Returns:
        The numbers of ``opt_state``, stored as in ``like``.

    Raises:
        ValueError: If the two are not the states of one optimizer, but for
            ``state_dtype``.

    Examples:
        >>> params = {"w": jnp.ones((64, 128))}
        >>> wide = jaxmp.with_state_dtype(optax.adam(1e-3), None)
        >>> narrow = jaxmp.with_state_dtype(optax.adam(1e-3), "int8")
        >>> target = jax.eval_shape(narrow.init, params)
        >>> state = jaxmp.cast_state(wide.init(params), target)
        >>> optax.tree.get(state, "mu")["w"].codes.dtype
        dtype('int8')
    """
    given, structure = jax.tree.flatten_with_path(opt_state, is_leaf=is_blocks)
    wanted = jax.tree.leaves(like, is_leaf=is_blocks)
    if jax.tree.structure(like, is_leaf=is_blocks) != structure:
        raise ValueError(
            "`cast_state` needs two states of one optimizer that differ in their "
            "`state_dtype` alone, but these are of different structure. Restore with "
            "the optimizer that was saved, and pass `jax.eval_shape(tx.init, params)` "
            "of the one to go on with."
        )

    def cast(path, x, like):
        wide = decode(x) if is_blocks(x) else x
        shape = like.codes.shape if is_blocks(like) else jnp.shape(like)
        if jnp.shape(wide) != shape:
            raise ValueError(
                f"`cast_state` needs states of the same parameters, but "
                f"`{path_name(path)}` has the shape {list(jnp.shape(wide))}, and in "
                f"`like` {list(shape)}."
            )
        if is_blocks(like):
            return x if is_blocks(x) else nearest(jnp.asarray(wide, jnp.float32))
        return wide.astype(like.dtype) if is_floating(wide) else wide

    pairs = zip(given, wanted, strict=True)
    return structure.unflatten([cast(path, x, y) for (path, x), y in pairs])


def as_state_dtype(state_dtype: DTypeLike | None) -> np.dtype | None:
    """Returns the dtype in which the inner state is stored, None where as it is."""
    if state_dtype is None:
        return None
    if is_called(state_dtype, _INT8, ["int8"]):
        return _INT8
    dtype = as_dtype(state_dtype, "`state_dtype`")
    if dtype != _BFLOAT16:
        raise ValueError(
            f"`state_dtype` must be int8, bfloat16 or None, but is {dtype.name}. "
            "Float16 has no room for second moments; None leaves the state float32."
        )
    return dtype


def narrow_init(inner: Any, params: Any, narrow: np.dtype | None) -> optax.OptState:
    """Returns the state of ``inner``, stored in ``narrow``.

    Mostly zeros. Other numbers are rounded to the nearest, this once.
    """
    state = inner.init(params)
    if narrow is not None and _holds(state, StateDtypeState):
        raise ValueError(
            "`state_dtype` is given, but there is a `jaxmp.with_state_dtype` inside, "
            "and its state would be rounded twice. Leave one of them out."
        )
    if narrow == _BFLOAT16:
        return jax.tree.map(
            lambda x: x.astype(narrow) if _is_array_of(x, _FLOAT32) else x, state
        )
    if narrow == _INT8:
        leaves, structure = jax.tree.flatten(state)
        # Under `jit` they are constants, and XLA takes minutes to compute with those of
        # a large model while it compiles, unless there is a factor it does not know.
        one = jax.lax.optimization_barrier(np.float32(1))
        for i in _moments(inner, params, leaves):
            leaves[i] = nearest(leaves[i] * one)
        return structure.unflatten(leaves)
    return state


def narrow_update(
    inner: Any,
    args: tuple[Any, optax.OptState, Any, dict[str, Any]],
    narrow: np.dtype | None,
    seeds: tuple[jax.Array, jax.Array],
    number: int = 0,
) -> tuple[Any, optax.OptState]:
    """Updates with a state that is stored in ``narrow``, None where as it is.

    ``args`` are those of the update: gradients, the stored state, parameters, others.
    Each array of the state has noise of its own, made of the ``seeds`` of the step and
    of its number, from ``number`` on.
    """
    grads, state, params, extra_args = args
    stored, structure = jax.tree.flatten(state, is_leaf=is_blocks)
    _check_stored(inner, params, state, narrow)

    def wide(x):
        if is_blocks(x) and narrow == _INT8:
            return decode(x)
        is_narrow = narrow == _BFLOAT16 and _is_array_of(x, _BFLOAT16)
        return x.astype(jnp.float32) if is_narrow else x

    def update(stored):
        state = structure.unflatten(map(wide, stored))
        updates, state = inner.update(grads, state, params, **extra_args)
        return updates, *jax.tree.flatten(state)

    units = {}
    blocks = {i: x for i, x in enumerate(stored) if is_blocks(x) and narrow == _INT8}
    if blocks:
        # A unit needs the whole block, and what needs the unit is another kernel:
        # between the two XLA would write float32 moments to memory. So each computes
        # them, the second one from codes of which XLA is not to know that they are the
        # same, and which are there no sooner than all units.
        zero = jax.lax.optimization_barrier(np.zeros(2, np.uint32))[0]
        blocks = _with_copied_units(blocks, zero)
        _, new, now = update([blocks.get(i, x) for i, x in enumerate(stored)])
        if now != structure:
            raise ValueError(
                "An update changes the structure of the inner optimizer's state, which "
                '`state_dtype="int8"` cannot store. Make its `init` return the '
                "structure that its `update` returns, or leave `state_dtype` out."
            )
        reach = {i: extents(new[i].astype(jnp.float32)) for i in blocks}
        units = {i: units_from(sizes | zero, x) for i, (sizes, x) in reach.items()}
        blocks, units = jax.lax.optimization_barrier((blocks, units))
    updates, new, structure = update([blocks.get(i, x) for i, x in enumerate(stored)])
    for i, x in enumerate(new):
        this = np.uint32(number + i)
        if i in units:
            noise = draws(x.shape, seeds, this)
            codes = encode(x.astype(jnp.float32), units[i], noise)
            new[i] = Int8Blocks(codes, units[i])
        elif narrow == _BFLOAT16 and _is_array_of(x, _FLOAT32):
            new[i] = round_stochastically(x, seeds, this).astype(narrow)
    return updates, structure.unflatten(new)


def _with_copied_units(
    blocks: dict[int, Int8Blocks], zero: jax.Array
) -> dict[int, Int8Blocks]:
    """Returns blocks with copies of their units.

    The new units take the place of the old ones in memory before all that reads these
    has run. XLA would copy each of them by itself. But it merges kernels that read one
    array, and all of these read the one with ``zero``, which it does not know to be 0.
    """
    copies = {}
    for i, x in blocks.items():
        bits = jax.lax.bitcast_convert_type(x.units, jnp.uint16)
        bits = bits | zero.astype(jnp.uint16)
        copies[i] = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    copies = jax.lax.optimization_barrier(copies)
    return {i: x._replace(units=copies[i]) for i, x in blocks.items()}


def check_seed(seed: Any) -> None:
    is_integer = is_number(seed) and jnp.issubdtype(jnp.result_type(seed), jnp.integer)
    if not is_integer or jnp.shape(seed):
        raise TypeError(
            f"`seed` must be an integer, but is {short(seed)}. Pass for example "
            "`seed=0`; it seeds the random numbers of each step."
        )


def _moments(inner: Any, params: Any, leaves: list[Any]) -> list[int]:
    """Returns which arrays of a new state are moments: made of shapes, not of values.

    A copy of a parameter in 8 bits would be another parameter.
    """
    shapes = {x.shape for x in jax.tree.leaves(params) if is_floating(x)}
    found = [
        i
        for i, x in enumerate(leaves)
        if _is_array_of(x, _FLOAT32) and x.size >= _FEWEST and x.shape in shapes
    ]
    if not found:
        return []

    def init(params):
        leaves = jax.tree.leaves(inner.init(params))
        return [leaves[i] for i in found]

    jaxpr = jax.make_jaxpr(init)(params).jaxpr
    of_values = set(map(id, jaxpr.invars))
    for eqn in jaxpr.eqns:
        if any(id(x) in of_values for x in eqn.invars):
            of_values.update(map(id, eqn.outvars))
    made = zip(found, jaxpr.outvars, strict=True)
    return [i for i, x in made if id(x) not in of_values]


def _is_array_of(x: Any, dtype: np.dtype) -> bool:
    return is_floating(x) and x.ndim > 0 and x.dtype == dtype


def _holds(state: Any, kind: type) -> bool:
    """Returns whether a state holds an object of a kind, but not in one of ours."""
    return any(isinstance(x, kind) for x in found_in(state, (kind, StateDtypeState)))


def _check_float32(params: Any) -> None:
    for path, x in jax.tree.leaves_with_path(params):
        if is_floating(x) and x.dtype.itemsize <= 2:
            names = "stochastic_rounding", "kahan_summation"
            raise TypeError(
                "`jaxmp.with_state_dtype` is for float32 parameters, but "
                f"`{path_name(path)}` is {x.dtype.name}, and small updates of it would "
                f"be rounded away. Use `jaxmp.{names[x.dtype == jnp.float16]}("
                'optax.adam(1e-3), state_dtype="int8")`.'
            )


def _check_stored(inner: Any, params: Any, state: Any, narrow: np.dtype | None) -> None:
    """Raises where a state is stored in 8 bits and should not be, or should and is not.

    As after a checkpoint has been restored with another ``state_dtype``.
    """
    cure = (
        "Store it in another way with `opt_state = jaxmp.cast_state(opt_state, "
        "jax.eval_shape(tx.init, params))`."
    )
    in_8_bits = _holds(state, Int8Blocks)
    if in_8_bits and narrow != _INT8:
        raise ValueError(
            "The state is stored in 8 bits, but `state_dtype` is "
            f"{narrow and narrow.name}. {cure}"
        )
    if narrow == _INT8 and not in_8_bits and params is not None:
        expected = jax.eval_shape(lambda p: narrow_init(inner, p, narrow), params)
        if _holds(expected, Int8Blocks):
            raise ValueError(
                f"`state_dtype` is int8, but the state is not stored so. {cure}"
            )
