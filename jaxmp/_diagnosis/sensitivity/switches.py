"""A program in which a switch for each part says whether it rounds to 16 bits.

Autocast has written it in float32, with an operation wherever it rounds
(:mod:`~.rounded`), which is done where the switches of all the parts that decide it are
on. What the program computes in 16 bits by itself is replayed in float32: a value is
rounded where the switch of the part that computes it is on, and what was cast outside
of all modules, as weights are, by each part that reads it. So one compiled program
stands for every choice of modules to keep in float32.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast.emit import emitting
from ..._base.dtypes import is_narrow
from ..._base.tree import is_ref
from ..._devices.varying import in_mesh_here
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, as_array, is_call
from ..._jaxprs.places import Place, equations
from ..._ops.precision import Float32Products, rounded_by_device
from ..._ops.products import PRODUCTS, flops, is_of_float32, multiplies_matrices
from ..._ops.table import is_as_written, is_exact
from ..._residuals.eight_bits import DTYPES
from ..numbers import LostNumber, Numbers
from ..wide_replay import Wide, WideReplay, bind_wide, platform_of
from .rounded import (
    IN_16_BITS,
    Parts,
    RoundingEmitter,
    is_marked,
    part_of,
    rounded,
)


def with_roundings(depth: int | None = None) -> contextlib.AbstractContextManager:
    """Has autocast emit what :class:`Program` takes, with ``depth`` names of a path."""
    return emitting(functools.partial(RoundingEmitter, depth=depth))


class Program:
    """A jaxpr with a switch for each module path in it that touches 16 bits.

    Attributes:
        parts: The module paths, in the order of the program; empty for what is in no
            module.
        eight_bit_parts: Those of them with a second switch, behind all others, for
            products in float8, or what they store or read in eight bits.
        flops: FLOPs of the matrix products and convolutions of each part.
        stored: How many numbers are stored in eight bits, by the parts that share them.
        residuals: In which eight bits; None if there are none.
        dtypes: Names of the 16-bit dtypes, and of those of eight bits.
        multiplies: Whether it multiplies matrices in 16 bits, by itself or by autocast.
        scales: Whether its backward pass, if it has one, is in float16.
        notes: What the switches do not reach.
    """

    def __init__(
        self,
        jaxpr: Any,
        around: Place,
        arrays: Sequence[Any],
        depth: int | None = None,
        numbers: Numbers | None = None,
        float32_matmuls: Float32Products | None = None,
    ):
        """Looks for the parts in a closed jaxpr and its arguments.

        Args:
            jaxpr: The jaxpr.
            around: What is around its operations.
            arrays: Its arguments.
            depth: How many names of a module path tell one part from another.
            numbers: Those in the code that 16 bits have lost.
            float32_matmuls: What a device makes of float32 products without a
                precision. The switch of their module is for that, too.
        """
        self.jaxpr, self.around, self.depth = jaxpr, around, depth
        self.numbers = numbers or Numbers(jaxpr, lambda: None, around)
        self.platform = platform_of(arrays)
        self.float32_matmuls = float32_matmuls
        self.flops: dict[str, float] = collections.defaultdict(float)
        self.stored: dict[Parts, float] = collections.defaultdict(float)
        self.residuals: str | None = None
        self.notes: dict[str, None] = {}  # an ordered set
        self.dtypes: set[str] = set()
        self.multiplies = self.has_autocast = self.has_backward = self.scales = False
        seen: dict[str, None] = {}
        rounds, eight = set[str](), set[str]()
        frame = _Frame(self, ())
        for eqn, place in equations(
            jaxpr, around, lambda eqn: frame.bodies(eqn) if is_call(eqn) else []
        ):
            if is_call(eqn):
                continue
            part = self.part_of(place)
            seen.setdefault(part)
            if found := flops(eqn, back=place.backward) * place.times:
                self.flops[part] += found
            self.has_backward |= place.backward or place.again
            by, dtype, form = (part,), self._narrow(eqn, place), "plain"
            if is_marked(eqn):
                self.has_autocast = True
                by, dtype, form = (eqn.params[x] for x in ("by", "dtype", "form"))
            elif dtype is None and not self.rounds_operands(eqn):
                continue
            rounds.update(by)
            if form in DTYPES:
                self.residuals = form
                self.stored[by] += eqn.outvars[0].aval.size * place.times
            if form not in IN_16_BITS:
                eight.update(by)
            if dtype is not None:
                self.dtypes.add(dtype.name)
                self.scales |= place.backward and dtype == np.float16
        self.multiplies |= self.has_autocast
        ordered = dict.fromkeys((*seen, *sorted(rounds)))
        self.parts = tuple(x for x in ordered if x in rounds)
        self.eight_bit_parts = tuple(x for x in self.parts if x in eight)

    @property
    def count(self) -> int:
        return len(self.parts) + len(self.eight_bit_parts)

    def _narrow(self, eqn: Equation, place: Place) -> np.dtype | None:
        """Returns the 16-bit dtype that the program itself computes in, if it does."""
        atoms, name = (eqn.invars, eqn.outvars), eqn.primitive.name
        ins, outs = ([x.aval for x in xs if is_narrow(x.aval)] for xs in atoms)
        if not ins and not outs:
            return None
        if name in PRODUCTS and all(is_narrow(x.aval) for x in eqn.invars[:2]):
            self.multiplies = True
        if ins and is_as_written(eqn) and not _jaxpr.is_cast(eqn):
            line = place.line or "somewhere"
            self.notes[f"{line}: `{name}` stays in 16 bits throughout"] = None
        return (outs or ins)[0].dtype

    def run(self, switches: Any, *arrays: Any) -> list[Any]:
        """Replays the jaxpr under the ambient trace.

        Args:
            switches: bool[parts + eight_bit_parts], whether each part rounds to 16
                bits, and whether it rounds further.
            *arrays: The arguments of the jaxpr.

        Returns:
            Its results, float32 where they were 16-bit.
        """
        return _Frame(self, jnp.asarray(switches)).outputs(arrays)

    def all_on(self, *arrays: Any) -> list[Any]:
        """Replays it with all of its switches on."""
        return self.run(np.ones(self.count, bool), *arrays)

    def rounds_operands(self, eqn: Equation) -> bool:
        """Whether the device rounds the operands of a product in float32."""
        if self.float32_matmuls is None or not is_of_float32(eqn):
            return False
        return eqn.params["precision"] is None and multiplies_matrices(eqn)

    def part_of(self, place: Place) -> str:
        return part_of(place.scopes, self.depth)


class _Frame(WideReplay):
    """The replay of jaxprs, with the switches as they are here: the scalars."""

    def __init__(self, program: Program, switches: Any, axes: tuple[Any, ...] = ()):
        super().__init__(program, switches, axes)
        self._on: dict[tuple[frozenset[str], bool], Any] = {}

    def on(self, parts: Iterable[str], *, eight: bool = False) -> Any:
        """Returns whether all of these parts round, and in ``eight`` bits."""
        key = frozenset(parts), eight
        if key not in self._on:
            ours = [x in key[0] for x in self.program.parts]
            ours += [eight and x in key[0] for x in self.program.eight_bit_parts]
            self._on[key] = jnp.all(in_mesh_here(self.scalars)[np.flatnonzero(ours)])
        return in_mesh_here(self._on[key])

    def number(self, eqn: Equation, lost: LostNumber) -> Wide | None:
        """Returns a number as it was written, which the consumer rounds again."""
        if lost.written is None:
            return None
        return Wide(np.float32(lost.written), waits=True)

    def operation(self, eqn: Equation, ins: list[Wide], place: Place) -> list[Wide]:
        """Applies an equation, which rounds where the switch of its part is on."""
        arrays, part = [x.array for x in ins], self.program.part_of(place)
        if is_marked(eqn):
            by, dtype, form = (eqn.params[x] for x in ("by", "dtype", "form"))
            x = as_array(arrays[0])
            with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):
                on = self.on(by, eight=form not in IN_16_BITS)
                return [Wide(_rounded_if(x, on, dtype, form))]
        if self.program.rounds_operands(eqn):
            kind: Any = self.program.float32_matmuls
            operands = [as_array(x) for x in arrays[:2]]
            arrays[:2] = [
                jnp.where(self.on([part]), rounded_by_device(x, kind), x)
                for x in operands
            ]
        narrow = [is_narrow(var.aval) for var in eqn.invars]
        if not any(narrow) and not any(is_narrow(var.aval) for var in eqn.outvars):
            return [*map(Wide, bind_wide(eqn, arrays))]
        waits = [x.waits and y for x, y in zip(ins, narrow, strict=True)]
        if is_exact(eqn):
            return [Wide(x, any(waits)) for x in bind_wide(eqn, arrays)]
        for i, var in enumerate(eqn.invars):
            if waits[i]:
                arrays[i] = self.own(arrays[i], var, part)
        outs = bind_wide(eqn, arrays)
        if _jaxpr.is_cast(eqn) and not any(narrow) and not part:
            return [Wide(x, waits=True) for x in outs]
        pairs = zip(outs, eqn.outvars, strict=True)
        return [Wide(self.own(x, var, part)) for x, var in pairs]

    def own(self, array: Any, var: Any, part: str) -> Any:
        """Returns what a part has in 16 bits by itself, rounded if it is to be."""
        if not is_narrow(var.aval) or is_ref(array):
            return array
        return _rounded_if(as_array(array), self.on([part]), var.aval.dtype, "plain")


@functools.partial(jax.jit, static_argnums=(2, 3))  # once for all arrays of one type
def _rounded_if(x: jax.Array, on: jax.Array, dtype: np.dtype, form: Any) -> jax.Array:
    return lax.select(on, rounded(x, dtype, form), x)
