"""A program in which a switch for each part says whether it rounds to 16 bits.

The program is replayed in float32. A value is rounded where the switches of all parts
that decide it are on (:mod:`~.rounded`). So one compiled program stands for every
choice of modules to keep in float32, of autocast or of a model cast by hand.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.dtypes import FLOAT8, is_narrow
from ..._base.tree import is_ref
from ..._devices.varying import in_mesh_here
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, as_array, is_call, is_inexact
from ..._jaxprs.places import Place, equations
from ..._jaxprs.scopes import AUTOCAST, FLOAT8_SCALED, SATURATED
from ..._ops.precision import Float32Products, rounded_by_device
from ..._ops.products import (
    flops,
    is_of_float32,
    multiplies_matrices,
    with_precision,
)
from ..._ops.table import is_as_written, is_rounding
from ..numbers import LostNumber, Numbers
from ..wide_replay import WideReplay, bind_wide, platform_of, wide_literal, widened
from .rounded import (
    Form,
    Parts,
    Readers,
    dtypes_rounded_to,
    hands_on,
    is_float8,
    is_marked,
    is_product,
    rounded,
)

_HIGHEST = (lax.Precision.HIGHEST,) * 2


class Switched(NamedTuple):
    """An array, float32 where it was written for 16 bits."""

    array: Any
    dtype: np.dtype | None = None  # of 16 bits, also where it was widened from them
    by: int | None = None  # who has rounded it to them, as bits, if that is known
    is_lost: bool = False  # a number in the code, for its consumers to round


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
        self.jaxpr, self.around = jaxpr, around
        self.numbers = numbers or Numbers(jaxpr, lambda: None, around)
        self.platform = platform_of(arrays)
        self.float32_matmuls = float32_matmuls
        self.flops: dict[str, float] = collections.defaultdict(float)
        self.stored: dict[Parts, float] = collections.defaultdict(float)
        self.residuals: str | None = None
        self.notes: dict[str, None] = {}  # an ordered set
        self.dtypes: set[str] = set()
        self.multiplies = self.has_autocast = self.has_backward = self.scales = False
        self.readers = Readers(jaxpr, depth)
        seen: dict[str, None] = {}
        rounds, eight = set[str](), set[str]()
        frame = _Frame(self, ())
        for eqn, place in equations(
            jaxpr, around, lambda eqn: frame.bodies(eqn) if is_call(eqn) else []
        ):
            part = self.readers.part_of(place)
            if is_float8(eqn, place.scopes):
                self.dtypes.add(np.dtype(FLOAT8).name)
                eight.add(part)
            if is_call(eqn):
                continue
            seen.setdefault(part)
            self.has_autocast |= AUTOCAST in place.scopes
            if found := flops(eqn, back=place.backward) * place.times:
                self.flops[part] += found
            self.has_backward |= place.backward or place.again
            if FLOAT8_SCALED in place.scopes:
                continue
            if is_marked(eqn):
                by, self.residuals = eqn.params["by"], eqn.params["form"]
                self.stored[by] += eqn.outvars[0].aval.size * place.times
                self.dtypes.add(eqn.params["dtype"].name)
                eight.update(by)
                rounds.update(by)
                continue
            if self.rounds_operands(eqn):
                rounds.add(part)
            for dtype, by in self._narrow(eqn, place):
                rounds.update(self.readers.parts(by))
                self.dtypes.add(dtype.name)
                self.scales |= place.backward and dtype == np.float16
        self.multiplies |= self.has_autocast and bool(rounds)
        ordered = dict.fromkeys((*seen, *sorted(rounds | eight)))
        self.parts = tuple(x for x in ordered if x in rounds | eight)
        self.eight_bit_parts = tuple(x for x in self.parts if x in eight)

    @property
    def count(self) -> int:
        return len(self.parts) + len(self.eight_bit_parts)

    def _narrow(self, eqn: Equation, place: Place) -> Iterator[tuple[np.dtype, int]]:
        """Yields the 16 bits to which an equation rounds, and who decides it."""
        narrow = [x.aval.dtype for x in eqn.invars if is_narrow(x.aval)]
        reads, made = self.readers.of(eqn, place)
        if not hands_on(eqn):
            yield from ((dtype, reads) for dtype in narrow)
        if not (hands_on(eqn) and narrow):
            yield from ((dtype, made) for dtype in dtypes_rounded_to(eqn) if dtype)
        if is_product(eqn) and all(is_narrow(x.aval) for x in eqn.invars[:2]):
            self.multiplies = True
        if narrow and is_as_written(eqn) and not hands_on(eqn):
            line = place.line or "somewhere"
            self.notes[f"{line}: `{eqn.primitive}` stays in 16 bits throughout"] = None

    def run(self, switches: Any, *arrays: Any) -> list[Any]:
        """Replays the jaxpr under the ambient trace.

        Args:
            switches: bool[parts + eight_bit_parts], whether each part rounds to 16
                bits, and whether it rounds further.
            *arrays: The arguments of the jaxpr.

        Returns:
            Its results, float32 where they were 16-bit.
        """
        frame = _Frame(self, jnp.asarray(switches))
        values = [*map(frame.constant, arrays)]
        return [x.array for x in frame.run(self.jaxpr, values, self.around)]

    def all_on(self, *arrays: Any) -> list[Any]:
        """Replays it with all of its switches on."""
        return self.run(np.ones(self.count, bool), *arrays)

    def rounds_operands(self, eqn: Equation) -> bool:
        """Whether the device rounds the operands of a product in float32."""
        if self.float32_matmuls is None or not is_of_float32(eqn):
            return False
        return eqn.params["precision"] is None and multiplies_matrices(eqn)


class _Frame(WideReplay):
    """The replay of jaxprs, with the switches as they are here: the scalars."""

    value = Switched

    def __init__(self, program: Program, switches: Any, axes: tuple[Any, ...] = ()):
        super().__init__(program, switches, axes)
        self._on: dict[tuple[frozenset[str], bool], Any] = {}

    def rounded(
        self, x: Any, by: int | Iterable[str], dtype: np.dtype, form: Form = "plain"
    ) -> jax.Array:
        """Returns an array, rounded if all who decide it are on."""
        x = as_array(x)
        parts = self.program.readers.parts(by) if isinstance(by, int) else by
        with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):
            return _rounded_if(x, self.on(parts, eight=form != "plain"), dtype, form)

    def on(self, parts: Iterable[str], *, eight: bool = False) -> Any:
        """Returns whether all of these parts round, and in ``eight`` bits."""
        key = frozenset(parts), eight
        if key not in self._on:
            ours = [x in key[0] for x in self.program.parts]
            ours += [eight and x in key[0] for x in self.program.eight_bit_parts]
            self._on[key] = jnp.all(in_mesh_here(self.scalars)[np.flatnonzero(ours)])
        return in_mesh_here(self._on[key])

    def number(self, eqn: Equation, lost: LostNumber) -> Switched | None:
        """Returns a number as it was written, which the consumer rounds again."""
        if lost.written is None:
            return None
        return Switched(np.float32(lost.written), is_lost=True)

    def constant(self, array: Any) -> Switched:
        return Switched(widened(array), by=0)

    def literal(self, literal: Any) -> Switched:
        return Switched(wide_literal(literal), by=0)

    def call(self, eqn: Equation, ins: list[Switched], place: Place) -> list[Switched]:
        if not is_float8(eqn, place.scopes):
            return super().call(eqn, ins, place)
        (body,) = _jaxpr.sub_jaxprs(eqn)
        inside = equations(body, place)
        product = next(inner for inner, _ in inside if is_product(inner))
        reads, made = self.program.readers.of(eqn, place)
        operands = [
            self.rounded(self._read(x, var, reads), reads, FLOAT8, "scaled")
            for x, var in zip(ins, eqn.invars, strict=True)
        ]
        wide = {"preferred_element_type": np.dtype(np.float32)}
        outs = _jaxpr.bind(with_precision(product, _HIGHEST), operands, **wide)
        return self._made(eqn, outs, made)

    def operation(
        self, eqn: Equation, ins: list[Switched], place: Place
    ) -> list[Switched]:
        """Applies an equation, which rounds where the parts that decide it are on."""
        readers = self.program.readers
        reads, made = readers.of(eqn, place)
        if is_marked(eqn):
            by, dtype, form = (eqn.params[x] for x in ("by", "dtype", "form"))
            # What is read of it has as many bits as what was stored.
            made = made if ins[0].by is None else ins[0].by
            x = self.rounded(ins[0].array, by, dtype, form)
            return self._made(eqn, [x], made)
        if hands_on(eqn):
            return self._handed_on(eqn, ins, place, made)
        arrays = [x.array for x in ins]
        pairs = list(zip(ins, eqn.invars, strict=True))
        if is_product(eqn):
            arrays = [self._read(x, var, reads) for x, var in pairs]
        elif any(is_narrow(var.aval) for var in eqn.invars):
            # It is in 16 bits as what it is given is.
            arrays = [
                self._read(x, var, reads) if x.is_lost else x.array for x, var in pairs
            ]
            made |= functools.reduce(
                operator.or_, (x.by or 0 for x, var in pairs if is_narrow(var.aval))
            )
        if self.program.rounds_operands(eqn):
            kind: Any = self.program.float32_matmuls
            on = self.on([readers.part_of(place)])
            arrays[:2] = [
                jnp.where(on, rounded_by_device(x, kind), x)
                for x in map(as_array, arrays[:2])
            ]
        if is_product(eqn) and is_narrow(eqn.invars[0].aval):
            eqn = with_precision(eqn, _HIGHEST)
        return self._made(eqn, bind_wide(eqn, arrays), made)

    def _handed_on(
        self, eqn: Equation, ins: list[Switched], place: Place, made: int
    ) -> list[Switched]:
        """Returns numbers as others read them: in other places, or of another dtype."""
        arrays = [x.array for x in ins]
        if is_rounding(eqn):
            (var,), (dtype,) = eqn.invars, dtypes_rounded_to(eqn)
            digits = jnp.finfo(var.aval.dtype).nmant
            is_coarse = eqn.params.get("mantissa_bits", digits) < digits
            if is_narrow(var.aval) and dtype in (None, var.aval.dtype):
                x = bind_wide(eqn, arrays)[0] if is_coarse else arrays[0]
                return [ins[0]._replace(array=x, dtype=var.aval.dtype)]
            if dtype is None:
                return [*map(Switched, bind_wide(eqn, arrays))]
            x = lax.convert_element_type(as_array(arrays[0]), jnp.float32)
            return self._made(eqn, [x], made)
        outs = bind_wide(eqn, arrays)
        is_limit = SATURATED in place.scopes and eqn.invars[0].aval.dtype != bool
        if is_limit and len(ins) == 3:
            on = self.on(self.program.readers.parts(made))
            outs = [lax.select(on, as_array(outs[0]), as_array(arrays[1]))]
        pairs = zip(ins, eqn.invars, strict=True)
        read = [x for x, var in pairs if is_inexact(var)]
        dtypes, bys = {x.dtype for x in read if x.by != 0}, {x.by for x in read}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        by = None if None in bys else functools.reduce(operator.or_, bys, 0)
        return [Switched(x, dtype, by) for x in outs]

    def _read(self, x: Switched, var: Any, reads: int) -> Any:
        """Returns what is read in 16 bits, rounded where that is not done yet."""
        dtype = var.aval.dtype if is_narrow(var.aval) else x.dtype
        is_done = x.by is not None and not x.by & ~reads
        if dtype is None or is_done or is_ref(x.array):
            return x.array
        return self.rounded(x.array, reads, dtype)

    def _made(self, eqn: Equation, outs: Sequence[Any], made: int) -> list[Switched]:
        """Returns results, rounded where they have 16 bits."""
        values = []
        for x, dtype in zip(outs, dtypes_rounded_to(eqn), strict=True):
            if dtype is not None and not is_ref(x):
                x = self.rounded(x, made, dtype)
            values.append(Switched(x, dtype, made if dtype is not None else None))
        return values


@functools.partial(jax.jit, static_argnums=(2, 3))  # once for all arrays of one type
def _rounded_if(x: jax.Array, on: jax.Array, dtype: np.dtype, form: Any) -> jax.Array:
    return lax.select(on, rounded(x, dtype, form), x)
