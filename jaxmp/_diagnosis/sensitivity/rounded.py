"""Who decides a rounding: the part of a program that rounds, and those that read it.

A float32 operation reads what it is given as it is stored. So a value is stored in 16
bits while the part that computes it and all that read it are in 16 bits; and a part in
16 bits rounds what it reads for itself. That is how autocast works: what it is to keep
in float32 takes, and returns, all digits.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.dtypes import is_narrow
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, is_inexact
from ..._jaxprs.places import Place
from ..._jaxprs.scopes import (
    FLOAT8_PRODUCT,
    FLOAT8_SCALED,
    Scopes,
    all_scopes,
    module_of,
)
from ..._jaxprs.walk import At, Backward
from ..._ops.fp8 import scaled
from ..._ops.products import PRODUCTS
from ..._ops.table import ROUNDED, is_rounding, one_of, picks
from ..._residuals.eight_bits import DTYPES, How, Stored, dequantized, quantized
from ..._residuals.replay import STORE_OF

# Returns what it is given. Its parameters say which parts store it in which eight bits.
stored_p = _jaxpr.mark(ROUNDED)
is_marked = one_of({ROUNDED})
is_product = one_of(PRODUCTS)

Parts = tuple[str, ...]
# What is rounded to 16 bits; an operand of a product in float8, which has a scale; and
# the two formats of what is stored in eight bits.
Form = Literal["plain", "scaled", "int8", "fp8"]
_FORMATS = {(8, 7): jnp.bfloat16, (5, 10): jnp.float16}


def rounded(x: Any, dtype: np.dtype, form: Form) -> jax.Array:
    """Returns a float32 array with the digits and the limits of a dtype."""
    if form in DTYPES:
        few, scale = quantized(x, form)
        return dequantized(few, scale, x.dtype)
    if form == "scaled":
        few, unit = scaled(lax.convert_element_type(x, jnp.bfloat16))
        return few.astype(x.dtype) * unit.astype(x.dtype)
    return lax.convert_element_type(lax.convert_element_type(x, dtype), x.dtype)


def part_of(scopes: Scopes, depth: int | None = None) -> str:
    """Returns the module path in ``scopes``, so many names of it."""
    return "/".join(module_of(scopes).split("/")[:depth])


def is_float8(eqn: Equation, scopes: Scopes) -> bool:
    """Whether ``eqn`` calls a product in float8, whose operands have 16 bits."""
    is_call = _jaxpr.call_kind(eqn) == "jit" and FLOAT8_PRODUCT in scopes
    return is_call and FLOAT8_SCALED not in scopes


def dtypes_rounded_to(eqn: Equation) -> list[np.dtype | None]:
    """Returns to which 16 bits ``eqn`` rounds each of its results, None if to none."""
    if "mantissa_bits" in eqn.params and not is_narrow(eqn.outvars[0].aval):
        bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
        found = _FORMATS.get(bits)
        return [found and np.dtype(found)]
    return [x.aval.dtype if is_narrow(x.aval) else None for x in eqn.outvars]


def hands_on(eqn: Equation) -> bool:
    """Whether ``eqn`` reads nothing itself: it casts, moves or chooses numbers."""
    if is_rounding(eqn):
        return all(map(is_inexact, (*eqn.invars, *eqn.outvars)))
    return picks(eqn)


class Readers:
    """Who reads the values of a jaxpr, directly or by 16-bit work in between."""

    def __init__(self, jaxpr: Any, depth: int | None):
        self.depth, self._bits = depth, dict[str, int]()
        self._of: Any = collections.defaultdict(int)
        self._walk = Backward(self._transfer, enter=self._enter)
        self._walk.through(jaxpr, [0] * len(_jaxpr.out_avals(jaxpr)))

    def part_of(self, place: Place) -> str:
        return part_of(place.scopes, self.depth)

    def of(self, eqn: Equation, place: Place) -> tuple[int, int]:
        """Returns who decides in which digits ``eqn`` reads, and returns, as bits."""
        part, after = self.part_of(place), self._of[id(eqn), place.module]
        own = self._bit(part)
        reads = own | (after if _is_in_16_bits(eqn) else 0)
        casts_for_others = is_rounding(eqn) and not part
        return reads, (0 if casts_for_others and after else own) | after

    def parts(self, bits: int) -> Iterator[str]:
        return (x for x, bit in self._bits.items() if bits & bit)

    def _bit(self, part: str) -> int:
        return self._bits.setdefault(part, 1 << len(self._bits))

    def _transfer(self, eqn: Equation, outs: list[int], at: At) -> list[int]:
        after = functools.reduce(int.__or__, outs, 0)
        self._of[id(eqn), module_of(at.scopes)] |= after
        if hands_on(eqn) or is_marked(eqn):
            return [after] * len(eqn.invars)
        own = self._bit(part_of(at.scopes, self.depth))
        return [own | (after if _is_in_16_bits(eqn) else 0)] * len(eqn.invars)

    def _enter(self, eqn: Equation, outs: list[int], at: At) -> Sequence[int]:
        if is_float8(eqn, at.scopes):
            return self._transfer(eqn, outs, at)
        return self._walk.around(eqn, outs, at)


def _is_in_16_bits(eqn: Equation) -> bool:
    """Whether ``eqn`` is no product, and takes and returns 16 bits."""
    if is_product(eqn) or _jaxpr.call_kind(eqn):
        return False
    ins, outs = ([is_narrow(x.aval) for x in xs] for xs in (eqn.invars, eqn.outvars))
    return any(ins) and any(outs)


def marking(depth: int | None = None) -> contextlib.AbstractContextManager:
    """Has autocast mark what it would store in eight bits, and store it whole.

    With the parts that decide it, for each of which it is asked what is left.
    """

    def store_of(decided: Callable, jaxpr: Any, kind: str) -> Callable:
        parts = dict.fromkeys(part_of(x, depth) for x in all_scopes(jaxpr))
        eight = {
            part: decided(lambda scopes, part=part: part_of(scopes, depth) == part)
            for part in parts
        }

        def store(var: Any, x: Any, how: How, maker: Equation | None) -> Stored:
            del maker
            if how == "eight":
                by = tuple(part for part in eight if var not in eight[part])
                x = stored_p.bind(x, dtype=DTYPES[kind], by=by, form=kind)
            return Stored("whole", jax.typeof(x), (x,))

        return store

    return STORE_OF(store_of)
