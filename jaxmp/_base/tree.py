"""Casts, checks and selections over whole pytrees."""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import jax.ref
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .checks import as_axes, check_axes_are_bound, clipped, describe, short
from .dtypes import as_dtype, casts_do_nothing, is_narrow

T = TypeVar("T")
AxisName = Hashable | Sequence[Hashable]

# Leaves that are checked in one reduction. XLA's compilers are slow with hundreds.
_AT_ONCE = 32


def cast_tree(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating arrays of a pytree to one dtype.

    Everything else passes through as it is: integers, booleans, complex numbers,
    PRNG keys, None, Python numbers and whatever is not an array. A NumPy scalar such
    as ``np.float32(2)`` has a dtype and is cast.

    Args:
        tree: Any pytree.
        dtype: The floating dtype to cast to.

    Returns:
        A pytree of the same structure. A leaf that has the dtype already is returned
        as the same object.

    Examples:
        >>> jaxmp.cast_tree({"w": jnp.ones(2), "step": jnp.arange(1)}, jnp.bfloat16)
        {'step': Array([0], dtype=int32), 'w': Array([1, 1], dtype=bfloat16)}
    """
    holds_arrays = dtype is not None and not jax.tree_util.all_leaves([dtype])
    if is_array(dtype) or holds_arrays:
        raise TypeError(
            "`cast_tree(tree, dtype)` takes the tree first and a dtype second, but the "
            f"second is {short(dtype)}. Pass for example `jnp.bfloat16` there."
        )
    dtype = as_dtype(dtype, "`dtype`", narrower=True)
    if casts_do_nothing() and is_narrow(dtype):
        dtype = np.dtype(np.float32)

    def cast(x):
        if not is_floating(x) or x.dtype == dtype:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=dtype, weak_type=False)
        return x.astype(dtype)

    return jax.tree.map(cast, tree)


def all_finite(tree: Any, *, axis_name: AxisName | None = None) -> jax.Array:
    """Returns whether a pytree holds no Inf and no NaN.

    Under ``jit`` with sharded arrays the answer is global by itself. Inside
    ``shard_map`` or ``pmap`` it is the answer for this device, unless ``axis_name``
    names the axes over which the devices differ.

    Args:
        tree: Any pytree. Leaves that are neither floating nor complex count as
            finite, and so does an empty tree.
        axis_name: One mesh axis or several, over which to agree.

    Returns:
        A bool array of shape ``[]``.

    Raises:
        ValueError: If there is no such axis.

    Examples:
        >>> jaxmp.all_finite({"w": jnp.array([1.0, jnp.inf])}).item()
        False
    """
    finite = [
        # Without the checks of `jnp.isfinite`, which take longer than this.
        (path, (jnp.isfinite if jnp.iscomplexobj(x) else jax.lax.is_finite)(x))
        for path, x in jax.tree.leaves_with_path(tree)
        if is_inexact(x)
    ]
    flags = []
    # A reduction is a GPU kernel or two, and a deep model has hundreds of leaves.
    for group in alike(finite):
        for start in range(0, len(group), _AT_ONCE):
            arrays = group[start : start + _AT_ONCE]
            true = [jnp.array(True)] * len(arrays)
            flags += jax.lax.reduce(arrays, true, _both, tuple(range(arrays[0].ndim)))
    finite = jnp.stack(flags).all() if flags else jnp.array(True)
    axes = as_axes(axis_name)
    if not axes:
        return finite
    check_axes_are_bound(axes)
    return jax.lax.pmin(finite.astype(jnp.int32), axes).astype(bool)


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """Selects one of two pytrees, leaf by leaf.

    To keep running statistics on a skipped step there is :func:`keep_if_skipped`.

    Args:
        pred: A bool scalar.
        on_true: The pytree to return where ``pred`` is true.
        on_false: A pytree of the same structure, shapes and dtypes.

    Returns:
        A pytree of that structure.

    Raises:
        TypeError: If ``pred`` is not a bool scalar.
        ValueError: If the trees differ in structure, or a leaf in shape or dtype.

    Examples:
        >>> jaxmp.select_tree(jnp.array(False), {"mean": jnp.inf}, {"mean": 0.5})
        {'mean': Array(0.5, dtype=float32, weak_type=True)}
    """
    if not is_number(pred) or jnp.shape(pred) or jnp.result_type(pred) != jnp.bool_:
        raise TypeError(
            f"`select_tree(pred, on_true, on_false)` needs a bool scalar as `pred`, "
            f"but got {describe(pred)}. Pass `jaxmp.last_step_finite(opt_state)` or "
            "`jaxmp.all_finite(grads)` first."
        )
    return choose(pred, on_true, on_false, ("select_tree", "on_true", "on_false"))


def choose(pred: ArrayLike, new: T, old: T, called: tuple[str, str, str]) -> T:
    """Selects as :func:`select_tree`, for a caller who has names of his own.

    Those are ``called`` in messages: his own, that of ``new`` and that of ``old``.
    """
    name, new_name, old_name = called
    structures = jax.tree.structure(new), jax.tree.structure(old)
    if structures[0] != structures[1]:
        raise ValueError(
            f"`{name}` needs two trees of the same structure, but `{new_name}` is\n"
            f"  {clipped(structures[0], 400)}\nand `{old_name}` is\n"
            f"  {clipped(structures[1], 400)}\n"
            "Pass the old and the new version of the same tree."
        )

    def select(path, new, old):
        if not (is_number(new) and is_number(old)):
            if new is old or new == old:  # a function in a module, a name
                return new
            raise TypeError(
                f"`{name}` selects between arrays, but `{path_name(path)}` is "
                f"{short(new)} in `{new_name}` and {short(old)} in `{old_name}`. "
                "Pass the arrays alone, such as `eqx.filter(tree, eqx.is_array)`."
            )
        new, old = jnp.asarray(new), jnp.asarray(old)
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"`{name}` needs leaves of the same shape and dtype, but "
                f"`{path_name(path)}` is {new.dtype}{list(new.shape)} in `{new_name}` "
                f"and {old.dtype}{list(old.shape)} in `{old_name}`. Cast or reshape "
                "one."
            )
        return jnp.where(pred, new, old)

    return jax.tree.map_with_path(select, new, old)


def alike(entries: Iterable[tuple[Any, jax.Array]]) -> list[list[jax.Array]]:
    """Groups arrays with their paths: the same parameter of many layers, of one type.

    It is known by its name, because under ``jit`` shardings are not known here, and
    where arrays that go into one operation are sharded in different ways they move.
    """
    groups = collections.defaultdict(list)
    for path, x in entries:
        name = re.sub(r"\d+", "", path_name(path))
        groups[name, jax.typeof(x)].append(x)
    return list(groups.values())


# One function, so that JAX traces it once for all reductions of as many arrays.
def _both(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    return [jax.lax.bitwise_and(x, y) for x, y in zip(xs, ys, strict=True)]


def widen(tree: T) -> T:
    """Casts the floating leaves that are narrower than float32 to float32."""

    def wide(x):
        if not is_inexact(x) or (is_strong(x) and x.dtype.itemsize >= 4):
            return x
        return jnp.asarray(x, wide_dtype(x))

    return jax.tree.map(wide, tree)


def is_strong(x: Any) -> bool:
    """Returns whether ``x`` is an array of JAX whose dtype does not give way."""
    return isinstance(x, jax.Array) and not x.weak_type


def wide_dtype(x: Any) -> np.dtype:
    """Returns the floating or complex dtype of ``x``, or float32 if that is wider."""
    dtype = jnp.result_type(x)
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def path_name(path: Any) -> str:
    """Spells the path of a leaf, e.g. ``params/Dense_0/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_array(x: Any) -> bool:
    """Returns whether ``x`` is an array, as opposed to a Python number or an object."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_number(x: Any) -> bool:
    """Returns whether ``x`` is an array or a Python number."""
    return is_array(x) or isinstance(x, (bool, int, float, complex))


def is_inexact(x: Any) -> bool:
    """Returns whether ``x`` is a floating or complex array or Python number."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, (float, complex))
    return jnp.issubdtype(dtype, jnp.inexact) and not is_ref(x)


def is_ref(x: Any) -> bool:
    """Returns whether ``x`` is a reference to an array, or the type of one."""
    return isinstance(x, (jax.ref.AbstractRef, jax.ref.Ref))


def is_floating_array(x: Any) -> bool:
    """Returns whether ``x`` is a floating array or NumPy scalar."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def is_floating(x: Any) -> bool:
    """Returns whether ``x`` is a floating array, NumPy scalar or abstract array."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.issubdtype(x.dtype, jnp.floating)
    return is_floating_array(x)


def found_in(tree: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    """Returns the outermost objects of some classes in a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in leaves if isinstance(x, kinds)]


def called_in(tree: Any, names: Collection[str]) -> list[Any]:
    """Returns the outermost objects in a pytree whose class has one of some names.

    So states are found without importing the optimizers that they are of.
    """

    def is_called(x: Any) -> bool:
        return type(x).__name__ in names

    return list(filter(is_called, jax.tree.leaves(tree, is_leaf=is_called)))


def taken_out(
    tree: Any, is_wanted: Callable[[Any], bool] = is_number
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays in a pytree, and a function that puts others in their places.

    That one holds none of them, which may be of a trace that is over by then.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if is_wanted(x)]
    taken = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None

    def put_back(others):
        whole = list(leaves)
        for i, x in zip(places, others, strict=True):
            whole[i] = x
        return structure.unflatten(whole)

    return taken, put_back


def arrays_of_models(params: Any) -> Any:
    """Returns parameters with None for what no gradient of an Equinox model is of.

    What is left are its floating arrays, as for ``eqx.filter_grad``. What is in no
    Equinox model stays.
    """
    eqx = sys.modules.get("equinox")  # who has a model has imported it
    if eqx is None:
        return params

    def is_model(x):
        return isinstance(x, eqx.Module)

    def arrays(x):
        return eqx.filter(x, eqx.is_inexact_array) if is_model(x) else x

    return jax.tree.map(arrays, params, is_leaf=is_model)


def with_rest(arrays: Any, params: Any) -> Any:
    """Puts back what :func:`arrays_of_models` has taken out of ``params``."""
    return jax.tree.map(
        lambda array, old: old if array is None else array,
        arrays,
        params,
        is_leaf=lambda x: x is None,
    )


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mesh axes over which ``shard_map(check_vma=True)`` sees x differ."""
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # JAX 0.9
        return aval.vma
    return aval.manual_axis_type.varying


def is_scalar_key(x: Any) -> bool:
    """Returns whether ``x`` is one PRNG key, made with ``jax.random.key``."""
    return is_array(x) and x.ndim == 0 and is_key(x)


def is_key(x: Any) -> bool:
    """Returns whether an array holds PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
