"""A loss head whose operands are sharded: each device tiles its own rows and words.

Left alone, JAX adds up the kernel's gradient over the devices in each tile. Here one
sum comes behind all tiles. A vocabulary that is sharded over other axes than the rows
stays so: the maximum and the sums of a row go over its devices.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .tiles import HIDDEN, KERNEL, LABELS, WEIGHTS, HeadForm, computed


def sharded(
    form: HeadForm, precision: Any, moving: Sequence[int], args: Sequence[Any]
) -> list[Any]:
    """Returns what :func:`computed` does, of operands that may be sharded."""
    if form.axis:  # inside `shard_map`
        return computed(form, precision, moving, args)
    by_jax, partition = _partitioned(form, precision, tuple(moving))
    types = [jax.typeof(x) for x in args]
    mesh = types[HIDDEN].sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return list(by_jax(*args))
    _, local, outs, ins = partition(mesh, types, None)
    specs = [tuple(x.spec for x in several) for several in (ins, outs)]
    local = jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    found = local(*map(jax.sharding.reshard, args, ins))
    places = [WEIGHTS, WEIGHTS, *moving]  # like which operand each result is
    return sharded_like([types[i] for i in places], found)


def whole(args: Sequence[Any]) -> list[Any]:
    """Returns operands that each device has whole, where their types say shardings.

    Derivatives of plain JAX would have products whose sharding no type says.
    """
    mesh = jax.typeof(args[HIDDEN]).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return list(args)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return [jax.sharding.reshard(x, everywhere) for x in args]


def sharded_like(types: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Returns arrays with the shardings of types, where these say any."""
    return [
        jax.sharding.reshard(x, like.sharding)
        if AxisType.Explicit in like.sharding.mesh.axis_types
        else x
        for x, like in zip(args, types, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def _partitioned(form: HeadForm, precision: Any, moving: tuple[int, ...]) -> Any:
    """Returns a head that JAX shards, and how."""

    def arranged(rows, words, d=()):
        """Returns the axes of all operands and of all results."""
        kernel = (words, d) if form.is_transposed else (d, words)
        operands = [(*rows, d), kernel, rows, rows, (words,)]
        return operands[: form.arity], [rows, rows, *(operands[i] for i in moving)]

    def layout(mesh, shapes):
        """Returns over which axes of the mesh rows and words are sharded."""

        def axes(i):
            for n, name in zip(shapes[i].shape, _spec(shapes[i]), strict=True):
                names = (
                    name if isinstance(name, tuple) else (name,) * (name is not None)
                )
                is_even = n % math.prod(mesh.shape[x] for x in names) == 0
                yield names if is_even else ()

        rows = [x or y for x, y in zip(axes(HIDDEN), axes(LABELS), strict=False)]
        words = [*axes(KERNEL)][form.words]
        return rows, () if {x for names in rows for x in names} & {*words} else words

    def shardings(mesh, shapes):
        return [
            tuple(NamedSharding(mesh, PartitionSpec(*x)) for x in several)
            for several in arranged(*layout(mesh, shapes))
        ]

    def partition(mesh, shapes, _):
        rows, words = layout(mesh, shapes)
        ins, outs = shardings(mesh, shapes)

        def local(*args):
            one = form._replace(axis=words)
            losses, z_losses, *found = computed(one, precision, moving, args)
            for i, place in enumerate(moving):
                if names := words if place == HIDDEN else sum(rows, ()):
                    total = lax.psum(found[i].astype(losses.dtype), names)
                    found[i] = total.astype(found[i].dtype)
            return losses, z_losses, *found

        return mesh, local, outs, ins

    def rule(mesh, operands, _):
        rows = [f"r{i}" for i in range(len(operands[LABELS].shape))]
        sides = arranged(rows, "v", "d")
        return " -> ".join(", ".join(" ".join(x) for x in side) for side in sides)

    fun = custom_partitioning(
        lambda *args: tuple(computed(form, precision, moving, args))
    )
    fun.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, shapes, _: shardings(mesh, shapes)[1],
        sharding_rule=rule,
    )
    return fun, partition


def _spec(shape: Any) -> Sequence[Any]:
    spec = getattr(shape.sharding, "spec", ())
    return [*spec, *[None] * (len(shape.shape) - len(spec))]
