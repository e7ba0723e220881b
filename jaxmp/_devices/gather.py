"""Parameters of which each device has a part: how the parts meet, and come apart."""

from __future__ import annotations

import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._base.checks import as_axes
from .._base.policy import PolicyLike, get_policy
from .._base.tree import is_array, is_inexact, path_name, wide_dtype
from .mesh import as_spec, named_axes, spread_shardings

T = TypeVar("T")

# The dimensions of an array that are sharded, each with its mesh axes.
Dims = tuple[tuple[int, tuple[Any, ...]], ...]


def gather(tree: T, specs: Any, policy: PolicyLike | None = None) -> T:
    """Gathers sharded parameters in 16 bits, at the start of a layer.

    Use it with ``value_and_grad(..., mesh=mesh, shardings=shardings, gather=False)``,
    or in a ``shard_map`` of your own. In the forward pass each device casts its shard
    and receives those of the others in compute dtype. In the backward pass the
    gradients of all devices are added in ``reduce_dtype``, and each device keeps the
    part of its shard. ``value_and_grad`` divides the sum to get a mean.

    Put ``jax.checkpoint`` around the layer that begins with it, so that the backward
    pass gathers again. Otherwise the gathered copies of all layers are stored.

    Args:
        tree: Pytree of shards. A replicated leaf is only cast.
        specs: How the leaves are sharded as they are here: a pytree of
            ``PartitionSpec`` or ``NamedSharding``, or a prefix of it. In a scan over
            stacked layers, leave out the entry of the first axis, which the scan
            removes. Axes that are left out, and those that ``shard_map`` leaves to the
            compiler, are not gathered.
        policy: The policy that casts the leaves with :meth:`Policy.cast_to_compute`
            (paths begin at ``tree``), and whose ``reduce_dtype`` gradients are summed
            in, float32 by default. None gathers the leaves as they are.

    Returns:
        A pytree of the same structure, gathered.

    Raises:
        ValueError: If there is no such mesh axis here, or the specs do not fit.
        TypeError: If the specs are something else.

    Examples:
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(jax.devices(), ("data",))
        >>> def loss_fn(w, x):
        ...     w = jaxmp.gather(w, P("data"), "mixed_bfloat16")
        ...     return jnp.mean(x.astype(w.dtype) @ w, dtype="float32")
        >>> grad_fn = jaxmp.grad(
        ...     loss_fn, mesh=mesh, batch_argnums=1, shardings=P("data"), gather=False
        ... )
        >>> grads = jax.jit(grad_fn)(jnp.ones((16, 2)), jnp.ones((8, 16)))
        >>> grads.shape, grads.dtype, grads.sharding.spec == P("data")
        ((16, 2), dtype('float32'), True)

    References:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models", SC 2020, section 5, https://arxiv.org/abs/1910.02054.
        Zhao et al., "PyTorch FSDP", VLDB 2023, sections 3.1 and 4.4,
        https://arxiv.org/abs/2304.11277.
    """
    policy = None if policy is None else get_policy(policy)
    specs = spread_shardings(specs, tree, "specs", "the tree that is gathered")
    dtypes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, tree
    )
    if policy is not None:
        dtypes = policy.cast_to_compute(dtypes)
    reduce_dtype = None if policy is None else policy.reduce_dtype

    def gathered(path, x, spec, like):
        if not is_array(x):
            return x
        dims = _dims(path, x, as_spec(spec, "specs"))
        if not is_inexact(x):
            return all_gather(x, dims)
        if not dims:
            return x.astype(like.dtype)
        return _gathered(jnp.asarray(x), dims, like.dtype, reduce_dtype)

    return jax.tree.map_with_path(gathered, tree, specs, dtypes)


def all_gather(x: jax.Array, dims: Dims) -> jax.Array:
    """Returns the whole array of which each device has a part."""
    for dim, axes in dims:
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def sum_scatter(x: jax.Array, dims: Dims) -> jax.Array:
    """Returns this device's part of the sum of an array over the axes of ``dims``."""
    for dim, axes in reversed(dims):
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return x


def dims_of(spec: P, axes: Any) -> Dims:
    """Returns which dimensions a spec shards over some mesh axes."""
    named = enumerate(named_axes(spec, axes))
    return tuple((dim, names) for dim, names in named if names)


# A derivative of its own, because that of a gather in 16 bits adds up in 16 bits. As a
# rule for tangents it serves both modes, and JAX transposes gathers to sums.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _gathered(x, dims, dtype, reduce_dtype):
    del reduce_dtype
    return all_gather(x.astype(dtype), dims)


@_gathered.defjvp
def _gathered_jvp(dims, dtype, reduce_dtype, primals, tangents):
    (x,), (tangent,) = primals, tangents
    wide = wide_dtype(x)
    if reduce_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
        reduce_dtype = wide
    tangent, scale = tangent.astype(wide), 1.0
    if reduce_dtype == jnp.float16:
        # The sum of a float16 overflows where the mean does not, which is what the
        # transpose of this sends.
        scale = math.prod(jax.lax.axis_size(axes) for _, axes in dims)
        tangent = tangent * scale
    tangent = all_gather(tangent.astype(reduce_dtype), dims).astype(wide)
    if scale != 1:
        tangent = tangent * (1 / scale)
    return all_gather(x.astype(dtype), dims), tangent.astype(dtype)


def _dims(path: Any, x: Any, spec: P) -> Dims:
    """Returns which dimensions of a leaf are to be gathered here."""
    name = path_name(path) or "the array"
    if len(spec) > x.ndim:
        raise ValueError(
            f"`specs` has {len(spec)} entries for `{name}`, {spec}, but here its shape "
            f"is {list(x.shape)}. Pass the PartitionSpec of what is here: a scan over "
            "layers has taken off the first axis, and so the first entry."
        )
    around = jax.sharding.get_abstract_mesh()
    bound = []
    for axis in (axis for entry in spec for axis in as_axes(entry)):
        try:
            jax.lax.axis_size(axis)
        except NameError:
            if around.manual_axes and axis in around.axis_names:
                continue  # the compiler's, which gathers what is needed
            here = f" but {around.manual_axes}" if around.manual_axes else " here"
            raise ValueError(
                f"`jaxmp.gather` is to gather `{name}` over {axis!r}, but there is no "
                f"such mesh axis{here}. Call it inside the function of "
                "`jaxmp.value_and_grad(..., mesh=mesh, shardings=shardings, "
                "gather=False)` or of `jax.shard_map`, and name one of their axes. "
                "Under plain `jax.jit` the compiler gathers: use "
                "`policy.cast_to_compute(params, shardings=shardings)` there."
            ) from None
        bound.append(axis)
    return dims_of(spec, bound)
