"""A program in which a switch for each part says whether it rounds to 16 bits.

A jaxpr that computes in 16 bits is replayed in float32, and what it rounds is rounded
where the switch of its module is on. So one compiled program stands for every choice of
modules to keep in float32.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.dtypes import FLOAT8, is_narrow
from ..._devices.varying import vary
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place, equations
from ..._jaxprs.replay import is_call
from ..._jaxprs.scopes import AUTOCAST, EIGHT_BITS, FLOAT8_SCALED, SATURATED
from ..._ops.precision import Float32Products, rounded_by_device
from ..._ops.products import PRODUCTS, flops, is_rounded_by_device
from ..._ops.table import is_as_written, is_barrier, is_exact, rounds_to_integers
from ..._residuals.eight_bits import DTYPES
from ..numbers import LostNumber, Numbers
from ..wide_replay import (
    NONE,
    Value,
    WideReplay,
    bind_wide,
    bodies_of,
    given,
    platform_of,
)
from .readers import Parts, Readers


class Program:
    """A jaxpr with a switch for each module path in it that touches 16 bits.

    If it is for a device that rounds the operands of float32 products, the switch of
    their module is for that, too.

    Attributes:
        parts: The module paths, in the order of the program; empty for what is in no
            module.
        eight_bit_parts: Those of them that round further: products to float8, and what
            they store for the backward pass, or read of that, to eight bits. They have
            a second switch, behind those of all parts.
        flops: FLOPs of the matrix products and convolutions of each part.
        stored: How many numbers are stored in eight bits, by the parts that share them.
        residuals: In which eight bits; None if there are none.
        dtypes: Names of the 16-bit dtypes, and of those of eight bits.
        multiplies: Whether there is a matrix product of 16-bit operands.
        has_autocast: Whether one of those is inside :func:`jaxmp.autocast`.
        has_backward: Whether there is a backward pass.
        notes: What the switches do not reach.
    """

    def __init__(
        self,
        jaxpr: Any,
        around: Place,
        arrays: Sequence[Any],
        depth: int | None = None,
        numbers: Numbers | None = None,
        float32_products: Float32Products | None = None,
    ):
        """Looks for the parts.

        Args:
            jaxpr: The jaxpr, closed.
            around: What is around its operations.
            arrays: Its arguments.
            depth: How many names of a module path tell one part from another; None is
                all of them.
            numbers: Those in the code that 16 bits have lost.
            float32_products: What a device makes of the operands of float32 products
                that name no precision; None is float32.
        """
        self.jaxpr, self.around, self.depth = jaxpr, around, depth
        self.numbers = numbers or Numbers(jaxpr, lambda: None, around)
        self.platform = platform_of(arrays)
        self.float32_products = float32_products
        self.flops: dict[str, float] = collections.defaultdict(float)
        self.stored: dict[Parts, float] = collections.defaultdict(float)
        self.residuals: str | None = None
        self.notes: dict[str, None] = {}  # an ordered set
        self.dtypes: set[str] = set()
        self.multiplies = self.has_autocast = self.has_backward = False
        self.scales = False  # whether there are gradients in float16
        parts: dict[str, bool] = {}  # whether it rounds
        eight: set[str] = set()
        stores: list[tuple[Equation, Place]] = []
        for eqn, place in equations(jaxpr, around, self._bodies):
            if is_call(eqn):
                continue
            part = self.part_of(place)
            found = flops(eqn, back=place.backward) * place.trips
            parts.setdefault(part, False)
            atoms = (*eqn.invars, *eqn.outvars)
            narrow = {x.aval.dtype.name for x in atoms if is_narrow(x.aval)}
            self.dtypes |= narrow
            self.has_backward |= place.backward or place.again
            made = {x.aval.dtype.name for x in eqn.outvars}
            self.scales |= place.backward and "float16" in made
            if found and all(is_narrow(x.aval) for x in eqn.invars[:2]):
                self.multiplies = True
                self.has_autocast |= AUTOCAST in place.scopes
            if narrow or SATURATED in place.scopes or self.rounds_operands(eqn):
                parts[part] = True
                self.flops[part] += found
                self._note(eqn, place)
            if FLOAT8_SCALED in place.scopes:
                eight.add(part)
            if _stores(eqn, place):
                stores.append((eqn, place))
        self.readers = Readers(self.part_of, self.platform)
        nobody: list[Parts] = [frozenset()] * len(_jaxpr.out_avals(jaxpr))
        self.readers.find(jaxpr, around, nobody)
        for eqn, place in stores:
            out = eqn.outvars[0].aval
            self.residuals = next(x for x in DTYPES if DTYPES[x] == out.dtype)
            self.dtypes.add(out.dtype.name)
            self.stored[self.sharers(eqn, place)] += out.size * place.trips
        eight = eight.union(*self.stored)
        self.parts = tuple(x for x in parts if parts[x] or x in eight)
        self.eight_bit_parts = tuple(x for x in self.parts if x in eight)

    @property
    def count(self) -> int:
        """The number of switches."""
        return len(self.parts) + len(self.eight_bit_parts)

    def sharers(self, eqn: Equation, place: Place) -> Parts:
        """Returns the parts that store a value in eight bits, and that read it.

        If one of them is left out, the value is stored as it is for all of them.
        """
        return self.readers.of(eqn.outvars[0], place) | {self.part_of(place)}

    def _bodies(self, eqn: Equation) -> list[Any]:
        return bodies_of(eqn, self.platform) if is_call(eqn) else []

    def _note(self, eqn: Equation, place: Place) -> None:
        name = eqn.primitive.name
        if not any(is_narrow(x.aval) for x in eqn.invars) or _jaxpr.is_cast(eqn):
            return
        if FLOAT8_SCALED in place.scopes:
            return  # the product is, and the scale of its operands goes with it
        if is_as_written(eqn):
            line = place.line or "somewhere"
            self.notes[f"{line}: `{name}` stays in 16 bits throughout"] = None

    def run(self, switches: Any, *arrays: Any) -> list[Any]:
        """Replays the jaxpr under the ambient trace.

        Args:
            switches: bool[parts + eight_bit_parts], whether each part rounds to 16
                bits, and whether it rounds further.
            *arrays: The arguments of the jaxpr.

        Returns:
            Its results, float32 where they were 16-bit.
        """
        frame = _Frame(self, switches)
        values = [given(x) for x in arrays]
        return [x.array for x in frame.run(self.jaxpr, values, self.around)]

    def rounds_operands(self, eqn: Equation) -> bool:
        """Whether the device rounds the operands of a product in float32."""
        return self.float32_products is not None and is_rounded_by_device(eqn)

    def part_of(self, place: Place) -> str:
        """Returns the module path of a place, the names that count."""
        names = place.module.split("/")
        return "/".join(names[: self.depth])


class _Frame(WideReplay):
    """The replay of jaxprs, with the switches as they are here."""

    def __init__(self, program: Program, switches: Any, axes: tuple[Any, ...] = ()):
        self.program = program
        self.switches = [switches[i] for i in range(program.count)]
        self.number_of = {part: i for i, part in enumerate(program.parts)}
        self.second = {}  # the second switch of a part, which is off with the first
        for i, part in enumerate(program.eight_bit_parts, len(program.parts)):
            first = self.switches[self.number_of[part]]
            self.second[part] = i, jnp.logical_and(first, self.switches[i])
        # Whether the switches of all readers of a value are on. Here, and not where it
        # is asked for: that may be in the body of a loop.
        self.all_on = {}
        for parts in program.readers.sets():
            numbers = [self.number_of[x] for x in sorted(parts) if x in self.number_of]
            if numbers:
                self.all_on[parts] = _all(self.switches[i] for i in numbers)
        self.stored = {
            parts: _all(self.second[x][1] for x in sorted(parts))
            for parts in program.stored
        }
        super().__init__(program.platform, program.numbers, self.switches, axes)

    def among(self, scalars: Any, axes: tuple[Any, ...]) -> _Frame:
        """Returns the same replay on the shards of a shard_map."""
        return _Frame(self.program, vary(scalars, axes), axes)

    def number(self, eqn: Equation, lost: LostNumber) -> Value | None:
        """Returns a number as it was written, which the reader may round again."""
        return None if lost.written is None else Value(np.float32(lost.written))

    def operation(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Applies an equation, which rounds where the switch of its part is on.

        A product rounds what it takes. All else is 16-bit work only if what it takes is
        16-bit: so do autocast and JAX's promotion have it. By autocast's rules a result
        has 16 bits only if those who read it take them.
        """
        if EIGHT_BITS in place.scopes and (outs := self.narrowed(eqn, ins, place)):
            return outs
        name, pairs = eqn.primitive.name, zip(ins, eqn.invars, strict=True)
        read = [x for x, var in pairs if is_narrow(var.aval)]  # written for 16 bits
        if SATURATED in place.scopes:
            ins = self.limited(eqn, ins, place)
        if is_barrier(eqn):
            outs = bind_wide(eqn, [x.array for x in ins])
            return [x._replace(array=y) for x, y in zip(ins, outs, strict=True)]
        if _jaxpr.is_cast(eqn) and eqn.invars[0].aval.dtype == FLOAT8:
            return [Value(x) for x in bind_wide(eqn, [x.array for x in ins])]
        if is_exact(eqn):
            narrow, part = _together(read)
            outs = bind_wide(eqn, [x.array for x in ins])
            return [Value(x, narrow, part) for x in outs]
        if self.program.rounds_operands(eqn):
            ins = self.rounded_by_device(ins, place)
        if not read and not any(is_narrow(x.aval) for x in eqn.outvars):
            return [Value(x) for x in bind_wide(eqn, [x.array for x in ins])]
        part = self.program.part_of(place)
        number = self.number_of[part]
        is_product = name in PRODUCTS
        switch = self.switches[number]
        if not is_product:
            switch = functools.reduce(_both, (x.narrow for x in read), switch)
        owner = number if switch is self.switches[number] else NONE
        arrays = []
        for x, var in zip(ins, eqn.invars, strict=True):
            if is_narrow(var.aval) and (x.narrow is None or is_product):
                decided = self.decided(part, switch, owner, var.aval.dtype)
                x = _rounded(x, *decided, var.aval.dtype)
            arrays.append(x.array)
        outs = [Value(x) for x in bind_wide(eqn, arrays)]
        if _jaxpr.is_cast(eqn) and not read and not part:
            return outs  # weights, which are cast as a whole: their readers round
        rounded = []
        for x, var in zip(outs, eqn.outvars, strict=True):
            if is_narrow(var.aval):
                readers = self.program.readers.of(var, place)
                on = _both(switch, self.all_on.get(readers))
                by = owner if on is switch else NONE
                decided = self.decided(part, on, by, var.aval.dtype)
                x = _rounded(x, *decided, var.aval.dtype)
            rounded.append(x)
        return rounded

    def narrowed(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Returns what is stored in eight bits; nothing where ``eqn`` does not round.

        Where a switch is off, the numbers stay what they are, in float32.
        """
        if _stores(eqn, place):
            (x,), dtype = ins, eqn.outvars[0].aval.dtype
            on = self.stored[self.program.sharers(eqn, place)]
            return [Value(_stored_if(x.array, on, dtype))]
        return ins if rounds_to_integers(eqn) else []

    def decided(
        self, part: str, switch: Any, owner: int, dtype: np.dtype
    ) -> tuple[Any, int]:
        """Returns the switch of a rounding, and its number if it decides alone."""
        if dtype == FLOAT8 and part in self.second:
            number, switch = self.second[part]
            return switch, number
        return switch, owner

    def rounded_by_device(self, ins: list[Value], place: Place) -> list[Value]:
        """Returns the operands of a float32 product, and what else it takes."""
        switch = self.switches[self.number_of[self.program.part_of(place)]]
        kind: Any = self.program.float32_products
        operands = [jnp.asarray(x.array) for x in ins[:2]]
        rounded = [jnp.where(switch, rounded_by_device(x, kind), x) for x in operands]
        return [*map(Value, rounded), *ins[2:]]

    def limited(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Returns the inputs of a clip to the range of 16 bits, or of its derivative.

        In float32 its limits are Inf.
        """
        switch = self.switches[self.number_of[self.program.part_of(place)]]
        return [
            Value(jnp.where(switch, x.array, np.copysign(np.float32(np.inf), x.array)))
            if isinstance(var, _jaxpr.Literal) and x.array  # zero is no limit
            else x
            for x, var in zip(ins, eqn.invars, strict=True)
        ]


def _stores(eqn: Equation, place: Place) -> bool:
    """Whether an equation rounds what is stored for the backward pass."""
    if EIGHT_BITS not in place.scopes or not _jaxpr.is_cast(eqn):
        return False
    return eqn.outvars[0].aval.dtype in DTYPES.values()


def _all(switches: Iterable[Any]) -> Any:
    return jnp.all(jnp.stack([*switches]))


def _both(x: Any, y: Any) -> Any:
    """Returns whether both are true, where None says nothing."""
    return x if y is None or y is True or y is x else jnp.logical_and(x, y)


def _together(values: list[Value]) -> tuple[Any, int]:
    """Returns whether what is moved or chosen from has been rounded, and by whom."""
    values = [x for x in values if x.narrow is not True]
    if not values:
        return True, NONE
    parts = {x.part for x in values}
    if len(parts) == 1 and NONE not in parts:
        return values[0].narrow, values[0].part
    if any(x.narrow is None for x in values):
        return None, NONE
    return functools.reduce(_both, (x.narrow for x in values)), NONE


def _rounded(value: Value, switch: Any, part: int, dtype: np.dtype) -> Value:
    """Returns a value that is rounded if a switch is on."""
    if value.narrow is True or (part != NONE and value.part == part):
        return value
    array = _rounded_if(jnp.asarray(value.array), switch, dtype)
    return Value(array, switch, part)


@functools.partial(jax.jit, static_argnums=2)  # traced once for all arrays of one type
def _rounded_if(x: jax.Array, switch: jax.Array, dtype: np.dtype) -> jax.Array:
    narrow = lax.convert_element_type(x, dtype)
    return jnp.where(switch, lax.convert_element_type(narrow, x.dtype), x)


def _stored_if(x: jax.Array, switch: jax.Array, dtype: np.dtype) -> jax.Array:
    narrow = jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x
    narrow = lax.convert_element_type(narrow, dtype)
    return jnp.where(switch, lax.convert_element_type(narrow, x.dtype), x)
