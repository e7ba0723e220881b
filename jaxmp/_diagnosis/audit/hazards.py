"""Products that 16 bits make wrong, by what is made of them; numbers that they eat.

No list of operations can know such products: each is like any other, and what comes
after it takes the float32 sums. But its operands were rounded, and that rounding is
absolute: an error of 0.4% of a phase of 300 is a third of a turn. A device rounds the
operands of a float32 product at default precision too, to TF32 or bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._base.dtypes import is_narrow
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place
from ..._ops.lists import (
    ARITHMETIC,
    CASTS,
    CHOOSES,
    DIFFERENCES,
    EXPONENTIALS,
    FACTORS,
    FOLDS,
    INVERTS,
    INVERTS_SYMMETRIC,
    JOINS_TERMS,
    LINEAR,
    LOOKS_UP,
    NEGATES,
    ORDERS,
    PHASES,
    PICKS,
    RANDOM,
    REMAINDERS,
    ROOTS,
    ROUNDS,
    SCALES,
    SELECTS,
    TOTALS,
    VIEWS,
    compares_equal,
    divisor,
    is_iota,
    is_square,
)
from ..._ops.products import (
    PRODUCTS,
    adds_up,
    has_default_precision,
    is_convolution,
    is_float32_at_default,
    is_matrix_product,
    multiplies_matrices,
)
from ..numbers import Numbers
from .report import Hazard

_REGION = 'with jax.named_scope("jaxmp.float32"):'
_HIGHEST = 'with jax.default_matmul_precision("highest"):'

# What is taken away from one is taken away from what it is made of.
_HOLDS = PICKS | ROUNDS
_LARGEST = 2**16  # of the constants of which the numbers are looked at

# Why each kind is one, and the cure where it is another formula.
_WHY = {
    "phase": "its result is a phase, and only the fraction of a turn matters",
    "distance": "|x|² + |y|² - 2xy is a small difference of large numbers",
    "comparison": "its results are compared, and near ties swap places",
    "inverse": "the matrix is inverted or factorised, which amplifies its errors",
    "sum": "it is a sum written as a matmul with ones, which rounds what it adds",
    "covariance": "E[xy] - E[x]E[y] is a small difference of large numbers",
    "difference": "its kernel adds up to 0: a small difference of large numbers",
    "offset": "an input is added to it in 16 bits and something is taken away again: a "
    "small difference of large numbers",
}
# One of them is a way to write another.
_CALLED = {"offset": "difference"}
_FORMULA = {
    "distance": "jnp.sum((x[:, None] - y) ** 2, axis=-1)",
    "sum": "jnp.sum(x, axis=...)",
    "covariance": "(x - x.mean(0)).T @ (y - y.mean(0)) / len(x)",
    "difference": "slices, such as x[1:] - x[:-1]",
}


Products = frozenset[int]  # the numbers of some of them
NONE: Products = frozenset()


class Made(NamedTuple):
    """What a value is made of."""

    products: Products = NONE  # it is a sum of these, scaled
    twice: Products = NONE  # those that are in it twice, as 2xy is
    chosen: Products = NONE  # it is an index that was chosen by these
    rank: int = 0  # of the index, when it was chosen
    compared: Products = NONE  # it says where these are above something
    given: bool = False  # from arguments and numbers alone
    number: Any = None  # what every entry is, where that is known
    numbers: frozenset[float] = frozenset()  # in the code, that are some of the entries
    cancels: bool = False  # its numbers add up to zero, as those of a difference do
    doubled: bool = False  # it is twice something
    squared: bool = False  # a square
    squares: bool = False  # a sum with sums of squares in it
    norm: bool = False  # the root of such a sum
    total: bool = False  # a sum over an axis, scaled
    of_totals: bool = False  # one sum times another
    entries: Products = NONE  # each entry is made of the same entry of these
    shifted: Products = NONE  # an input was added to these, and the sum rounded
    negated: bool = False  # the negative of something
    counts: bool = False  # 0, 1, 2...
    random: bool = False  # with random numbers in it


class Product(NamedTuple):
    """A product that is followed."""

    place: Place
    is_cast: bool  # to 16 bits, by the program itself
    at_default: bool  # in float32, which a device rounds


class Hazards:
    """Follows products through a jaxpr to what is made of them."""

    def __init__(self, default_precision: Any = None):
        """Starts with nothing found.

        Args:
            default_precision: That of products whose lines ask for none.
        """
        self._default_precision = default_precision
        self._followed: list[Product] = []
        self._found: dict[Any, Hazard] = {}

    def found(self, jaxpr: Any, around: Place) -> tuple[Hazard, ...]:
        """Returns the hazards in a jaxpr, in the order of the program."""
        given = [Made(given=True) for _ in _jaxpr.in_vars(jaxpr)]
        outs = self._run(jaxpr, given, around)
        self._note("comparison", _union(x.compared for x in outs))
        return tuple(self._found.values())

    def _run(self, jaxpr: Any, inputs: Sequence[Made], around: Place) -> list[Made]:
        def apply(eqn, ins):
            if _jaxpr.call_kind(eqn):
                return self._call(eqn, ins, around)
            return [self._operation(eqn, ins, around)] * len(eqn.outvars)

        return _jaxpr.interpret(jaxpr, inputs, apply, const=_constant, literal=_literal)

    def _call(self, eqn: Equation, ins: list[Made], around: Place) -> list[Made]:
        layout, place = _jaxpr.call_layout(eqn), around.of(eqn, before=around)
        # What a loop carries is known before the first trip alone.
        ins = [Made() if i in layout.fixed_in else x for i, x in enumerate(ins)]
        results = [
            self._run(
                body.jaxpr,
                [ins[i] for i in body.operands],
                place.inside(eqn, body.jaxpr),
            )
            for body in _jaxpr.on_accelerator(eqn, layout.bodies)
        ]
        if _jaxpr.call_kind(eqn) == "cond":
            return [_either(outs) for outs in zip(*results, strict=True)]
        return results[-1]

    def _operation(self, eqn: Equation, ins: list[Made], around: Place) -> Made:
        """Returns what the results of an equation are made of."""
        if any(_jaxpr.sub_jaxprs(eqn)) or not eqn.outvars:
            return Made()
        name = eqn.primitive.name
        if len(ins) == 1 and name in VIEWS | CASTS:
            if _jaxpr.is_cast(eqn):
                self._look_at_cast(eqn, ins[0], around)
            return ins[0]
        # A choice between values that were computed, such as both sides of a quantile
        # loss, has no jump for certain.
        has_jump = name not in SELECTS or all(x.given for x in ins[1:])
        compared = _union(x.compared for x in ins)
        if compared and has_jump and not around.of(eqn, before=around).backward:
            self._note("comparison", compared)
        if multiplies_matrices(eqn):
            return self._product(eqn, ins, around)
        self._look(eqn, ins, around)
        made = _made(eqn, ins)
        if name in SELECTS:
            made = made._replace(numbers=_numbers(ins))
        if name in CHOOSES:
            # What is sampled is not more random where near results change places.
            chosen = NONE if ins[0].random else ins[0].products
            return made._replace(chosen=chosen, rank=len(eqn.outvars[0].aval.shape))
        # And not with what was computed from scores, such as the second best.
        is_known = any(x.number is not None for x in ins)
        if name in ORDERS and any(x.given for x in ins) and not is_known:
            return made._replace(compared=_union(x.products for x in ins))
        if name in TOTALS:
            return made._replace(products=ins[0].products)
        if name in LOOKS_UP:
            ins = ins[:1]  # without the indices
        if name in LINEAR:
            return made._replace(
                products=_union(x.products for x in ins),
                twice=_union(x.twice for x in ins),
                chosen=_union(x.chosen for x in ins),
                rank=max(x.rank for x in ins),
                shifted=made.shifted | _shifted(eqn, ins),
            )
        if name in SCALES and not is_square(eqn):
            return _scaled(eqn, ins, made)
        return made

    def _product(self, eqn: Equation, ins: list[Made], around: Place) -> Made:
        place = around.of(eqn, before=around)
        is_narrow_one = any(is_narrow(x.aval) for x in eqn.invars[:2])
        is_default = has_default_precision(eqn)
        at_default = is_default and is_float32_at_default(eqn, self._default_precision)
        # What nobody has decided would be in 16 bits in mixed precision.
        is_undecided = is_default and not _scopes.is_decided(place.scopes)
        would_be = is_undecided and _jaxpr.is_float32(eqn.invars[0])
        would_be &= is_matrix_product(eqn)
        if place.backward or not (is_narrow_one or at_default or would_be):
            return Made()
        is_cast = is_narrow_one and _scopes.AUTOCAST not in place.scopes
        number = len(self._followed)
        self._followed.append(Product(place, is_cast, at_default))
        one = frozenset({number})
        uniform = [i for i in range(2) if ins[i].number not in (None, 0)]
        if any(adds_up(eqn, i) for i in uniform):
            self._note("sum", one)
        if is_convolution(eqn) and ins[1].cancels:
            self._note("difference", one)
        return Made(products=one, twice=one if any(x.doubled for x in ins) else NONE)

    def _look(self, eqn: Equation, ins: list[Made], around: Place) -> None:
        """Notes what ``eqn`` makes of products, if that is a hazard."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        is_array = math.prod(shape) > 1
        is_turn = name in EXPONENTIALS and eqn.outvars[0].aval.dtype.kind == "c"
        if name in PHASES or name in REMAINDERS or is_turn:
            self._note("phase", ins[0].products)
        elif name in INVERTS:
            of_entries = ins[0].entries if name in INVERTS_SYMMETRIC else NONE
            self._note("inverse", ins[0].products | of_entries)
        elif name in JOINS_TERMS and is_array:
            if any(x.squares and not x.twice for x in ins):
                self._note("distance", _union(x.twice for x in ins if not x.squares))
            if name in DIFFERENCES and any(x.of_totals for x in ins):
                self._note("covariance", _union(x.products for x in ins))
            if not around.of(eqn, before=around).backward:
                self._note("offset", _taken_away(eqn, ins))
        elif name in LOOKS_UP:
            if not ins[0].products:  # as the values of a choice have
                self._note("comparison", _union(x.chosen for x in ins[1:]))
        elif compares_equal(eqn) and any(x.counts for x in ins):
            # One-hot, and not an accuracy, where labels count. In the backward pass it
            # is the gradient of a lookup.
            is_one_hot = len(shape) > max(x.rank for x in ins)
            if is_one_hot and not around.of(eqn, before=around).backward:
                self._note("comparison", _union(x.chosen for x in ins))

    def _look_at_cast(self, eqn: Equation, x: Made, around: Place) -> None:
        """Notes the numbers of which a cast to 16 bits leaves 0 or Inf.

        `jnp.where(mask, x, -1e9)` casts its number.
        """
        dtype, place = eqn.outvars[0].aval.dtype, around.of(eqn, before=around)
        # Autocast clips what it casts.
        if not is_narrow(dtype) or place.backward or _scopes.AUTOCAST in place.scopes:
            return
        for number in sorted(x.numbers):
            with np.errstate(over="ignore"):
                left = float(np.asarray(number).astype(dtype))
            if number and (left == 0 or np.isinf(left)):
                row = _of_number(number, left, dtype, place)
                self._found.setdefault((row.why, row.module, row.where), row)

    def _note(self, kind: str, products: Products) -> None:
        for number in sorted(products):
            product = self._followed[number]
            row = Hazard(
                kind=_CALLED.get(kind, kind),
                why=_WHY[kind],
                cure=_cure(kind, product),
                module=product.place.module,
                where=product.place.where,
                at_default_precision=product.at_default,
            )
            # A distance is compared, too, and once is enough.
            first = self._found.setdefault((row.module, row.where), row)
            if kind == "distance" and first.kind == "comparison":
                self._found[row.module, row.where] = row


def of_numbers(numbers: Numbers) -> tuple[Hazard, ...]:
    """Returns the numbers in the code that are 0 or Inf in 16 bits, each line once."""
    found: dict[Any, Hazard] = {}
    for x in numbers:
        if x.written is None or x.place.backward:
            continue
        row = _of_number(x.written, x.left, x.dtype, x.place)
        found.setdefault((row.why, row.module, row.where), row)
    return tuple(found.values())


def _of_number(written: float, left: float, dtype: Any, place: Place) -> Hazard:
    """Returns the hazard of a number of which 16 bits leave another."""
    limit = "finfo(x.dtype).min" if written < 0 else "finfo(x.dtype).max"
    return Hazard(
        kind="number",
        why=f"{written:.4g} is {'0' if left == 0 else 'Inf'} in {dtype}",
        cure="x.astype(jnp.float32)" if left == 0 else f"jnp.{limit}",
        module=place.module,
        where=place.where,
    )


def _made(eqn: Equation, ins: Sequence[Made]) -> Made:
    """Returns what an operation says of its result, whatever it is made of."""
    name, first = eqn.primitive.name, ins[0] if ins else Made()
    squares = name in PRODUCTS and eqn.invars[0] is eqn.invars[1]
    squares |= name in TOTALS and (first.squared or first.squares)
    squares |= name in LINEAR and any(x.squares for x in ins)
    is_product = name in FACTORS or name in PRODUCTS
    return Made(
        given=all(x.given for x in ins),
        number=_number_of(name, ins),
        squared=is_square(eqn),
        squares=squares or (is_square(eqn) and first.norm),
        norm=name in ROOTS and first.squares,
        total=name in TOTALS,
        of_totals=is_product and all(x.total for x in ins[:2]),
        entries=_union(x.products | x.entries for x in ins if name in ARITHMETIC),
        counts=is_iota(eqn),
        random=name in RANDOM or any(x.random for x in ins),
        shifted=_union(x.shifted for x in ins if name in _HOLDS),
        negated=name in NEGATES and not first.negated,
    )


def _shifted(eqn: Equation, ins: Sequence[Made]) -> Products:
    """Returns the products to which a sum in 16 bits adds what was given."""
    if eqn.primitive.name not in JOINS_TERMS or not is_narrow(eqn.outvars[0].aval):
        return NONE
    adds = any(x.given and x.number is None for x in ins)
    return _union(x.products for x in ins) if adds else NONE


def _taken_away(eqn: Equation, ins: Sequence[Made]) -> Products:
    """Returns the products of which a difference takes away what was added to them.

    Or something else that was given, or the same numbers at another place.
    """
    one, other = ins
    if (eqn.primitive.name in DIFFERENCES) == (one.negated != other.negated):
        return NONE
    if one.given or other.given:
        return one.shifted | other.shifted
    return one.shifted & other.shifted


def _scaled(eqn: Equation, ins: Sequence[Made], made: Made) -> Made:
    """Returns what is made by a product of numbers, or a quotient."""
    x, factor = ins
    if divisor(eqn) is None and (x.number is not None or not factor.given):
        x, factor = factor, x
    if not factor.given:
        return made
    divides = divisor(eqn) is not None
    is_two = factor.number is not None and abs(factor.number) == 2
    return made._replace(
        products=x.products,
        twice=x.products if is_two else x.twice,
        # What is divided is no index any more, as of beams.
        chosen=NONE if divides else x.chosen,
        rank=x.rank,
        cancels=x.cancels,
        doubled=is_two,
        squared=x.squared,
        squares=x.squares,
        total=x.total,
        # A factor for each entry, as in a rotation, makes other numbers of it.
        shifted=x.shifted if factor.number is not None or divides else NONE,
        negated=x.negated != (factor.number is not None and factor.number < 0),
    )


def _constant(array: Any) -> Made:
    """Returns what is known of an array that a jaxpr carries."""
    number, cancels, ends = None, False, frozenset()
    is_known = not isinstance(array, _jaxpr.Tracer) and 0 < np.size(array) <= _LARGEST
    if is_known and isinstance(array.dtype, np.dtype):  # and no key
        numbers = np.asarray(array)
        if (numbers == numbers.flat[0]).all():
            number = _real(numbers.flat[0].item())
        else:
            cancels = bool(numbers.astype(complex).sum() == 0)
        if jnp.issubdtype(numbers.dtype, np.floating):  # as a mask has that NumPy made
            ends = frozenset(float(x) for x in (numbers.min(), numbers.max()))
    return Made(given=True, number=number, cancels=cancels, numbers=_large(ends))


def _literal(literal: Any) -> Made:
    """Returns what is known of a number in a jaxpr."""
    number = _real(_jaxpr.number_of(literal))
    numbers: frozenset[float] = frozenset()
    if number is not None and np.isfinite(number):
        numbers = frozenset([float(number)])
    return Made(given=True, number=number, numbers=numbers)


def _large(numbers: frozenset[float]) -> frozenset[float]:
    """Returns the numbers that are not near 0, where small ones may be meant."""
    return frozenset(x for x in numbers if 1 < abs(x) < np.inf)


def _numbers(values: Iterable[Made]) -> frozenset[float]:
    return frozenset[float]().union(*(x.numbers for x in values))


def _real(number: Any) -> Any:
    return None if np.iscomplexobj(number) else number


def _number_of(name: str, ins: Sequence[Made]) -> Any:
    """Returns what every entry of a result is, if that is known."""
    numbers = [x.number for x in ins]
    if name not in FOLDS or not numbers or any(x is None for x in numbers):
        return None
    with np.errstate(all="ignore"):
        return FOLDS[name](*(np.float64(x) for x in numbers))


def _union(sets: Iterable[Products]) -> Products:
    return NONE.union(*sets)


def _either(values: Sequence[Made]) -> Made:
    """Returns what is known of a value that is one of these."""
    first = values[0]
    if all(x == first for x in values):
        return first
    return Made(
        products=_union(x.products for x in values),
        twice=_union(x.twice for x in values),
        chosen=_union(x.chosen for x in values),
        rank=max(x.rank for x in values),
        compared=_union(x.compared for x in values),
        numbers=_numbers(values),
        given=all(x.given for x in values),
        squares=any(x.squares for x in values),
        entries=_union(x.entries for x in values),
        shifted=_union(x.shifted for x in values),
        random=any(x.random for x in values),
    )


def _cure(kind: str, product: Product) -> str:
    """Returns what to type."""
    if kind in _FORMULA:
        return _FORMULA[kind]
    if product.at_default:  # with which autocast, too, leaves it in float32
        return _HIGHEST
    if product.is_cast:
        return 'x.astype(jnp.float32), for both operands, and precision="highest"'
    module = product.place.module
    return f'float32_paths=("{module}",)' if "/" in module else _REGION
