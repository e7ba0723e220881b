"""Products that 16 bits make wrong, by what is made of them; numbers that they lose.

No list of operations can know such products: each is like any other, and what comes
after it takes the float32 sums. But its operands were rounded, and that rounding is
absolute: an error of 0.4% of a phase of 300 is a third of a turn. A device rounds the
operands of a float32 product at default precision too, to TF32 or bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._base.dtypes import is_narrow
from ..._base.gpus import NEWEST, Gpu
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place
from ..._jaxprs.walk import At, Forward, the_one
from ..._ops import table
from ..._ops.products import (
    has_default_precision,
    is_convolution,
    is_matrix_product,
    is_of_float32,
    multiplies_matrices,
)
from ..numbers import LostNumber
from .attention import Attentions, Part, made_of
from .loss_head import Heads
from .report import Hazard, UnfusedAttention, WrittenHead

_REGION = 'with jax.named_scope("jaxmp.float32"):'
_HIGHEST = 'with jax.default_matmul_precision("highest"):'
# A number of four times the scale of a value takes two of the eight binary digits that
# bfloat16 has for it, so that its rounding is four times as large as by hand.
_FAR = 4
_LARGEST = 2**16  # of the constants of which the numbers are looked at

_SHIFTED = "shifted", "rows"  # what is said of a sum with an input that is rounded

# What goes wrong in each pattern, and other formulas for some.
_WHY = {
    "phase": "its result is a phase, and only the fraction of a turn matters",
    "inverse": "the matrix is inverted or factorised, which amplifies its errors",
    "distance": "|x|² + |y|² - 2xy is a small difference of large numbers",
    "covariance": "E[xy] - E[x]E[y] is a small difference of large numbers",
    "moments": "E[x²] - E[x]² is a small difference of large numbers",
    "units": "a number is added to it in 16 bits, far above its scale, and then it is "
    "subtracted from or summed: a small difference of large numbers",
    "kernel": "its kernel adds up to 0: a small difference of large numbers",
    "offset": "an input is added to it in 16 bits and it or another row is subtracted "
    "before the next matmul: a small difference of large numbers",
}
_KINDS = {"kernel": "difference", "offset": "difference", "moments": "covariance"}
_FORMULAS = {
    "distance": "jnp.sum((x[:, None] - y) ** 2, axis=-1)",
    "covariance": "(x - x.mean(0)).T @ (y - y.mean(0)) / len(x)",
    "kernel": "slices, such as x[1:] - x[:-1]",
}


# The facts of a value, in pairs of a word and of what that is said.
#
# With the number of a product that is followed:
# sum: it is a sum of products, scaled; twice: and this is in it twice, as 2xy is
# entry: each entry is made of the same entry of the product
# moment: and it adds up squares; squared sum: it has been squared
# added: an input was added to the product in float32
# shifted: an input was added to the product, and the sum rounded
# rows: and each row of it has all that the input has along its last axis
# taken: then something that was given was taken away from it, or another of its rows
#
# With a number: that stands in the code, and is some of the entries; times: the scale
# of the value, by the numbers that have multiplied it.
#
# With the number of a sum that is followed, and a sign:
# high: a number far above the scale was added; raised: and the sum rounded.
#
# With nothing: squared; squares: a sum with sums of squares in it; norm: the root of
# one; length: one of these, or a reciprocal; unit: something divided by its length;
# total: a sum over an axis; totals: one total times another; doubled; balanced: numbers
# that add up to 0.
Marks = frozenset[tuple[str, Any]]


class Made(NamedTuple):
    """What a value is made of."""

    marks: Marks = frozenset()
    given: bool = False  # from arguments and numbers alone
    number: Any = None  # what every entry is, if it is a number in the code
    part: Part | None = None  # of an attention or a loss head that is written out

    def of(self, *words: str) -> set[Any]:
        """Returns of what any of some words is said."""
        return {x for word, x in self.marks if word in words}


class Product(NamedTuple):
    """A product that is followed, or a sum."""

    place: Place
    is_cast: bool  # to 16 bits, by the program itself
    at_default: bool  # in float32, which a device rounds
    is_unit: bool = False  # one operand has just been divided by its length


def of_products(
    jaxpr: Any,
    around: Place,
    default_precision: Any = None,
    numbers: Iterable[LostNumber] = (),
    gpu: Gpu = NEWEST,
) -> tuple[tuple[Hazard, ...], tuple[UnfusedAttention, ...], tuple[WrittenHead, ...]]:
    """Returns the risks in a jaxpr, its attentions and loss heads, in their order.

    Args:
        jaxpr: Of the program.
        around: What is around its operations.
        default_precision: That of products whose lines ask for none.
        numbers: Those in the code that 16 bits have lost.
        gpu: By which attention is judged.
    """
    search = _Search(default_precision, gpu)
    inputs = [Made(given=True) for _ in _jaxpr.in_vars(jaxpr)]
    search.walk.through(jaxpr, inputs, (), around)
    for x in numbers:
        if x.written is not None and not x.place.backward:
            search.note_number(x.written, x.left, x.dtype, x.place)
    hazards, attentions = search.found.values(), search.attentions.rows.values()
    return tuple(hazards), tuple(attentions), tuple(search.heads.rows.values())


class _Search:
    """Follows products through a jaxpr to what is made of them."""

    def __init__(self, default_precision: Any, gpu: Gpu):
        self._default_precision = default_precision
        self._followed: list[Product] = []
        self.found: dict[Any, Hazard] = {}
        self.attentions, self.heads = Attentions(gpu), Heads()
        self.walk = Forward(self._operation, _either, _known, enter=self._enter)

    def _enter(self, eqn: Equation, ins: list[Made], at: At) -> list[Made]:
        """Goes into an equation, a loop once: its start says what it carries."""
        carried = _jaxpr.call_layout(eqn).fixed_in
        ins = [_carried(x) if i in carried else x for i, x in enumerate(ins)]
        return self.walk.once(eqn, ins, at)

    def _operation(self, eqn: Equation, ins: list[Made], at: At) -> list[Made]:
        self.attentions.look(eqn, at.place)
        return [self._made(eqn, ins, at.place)] * len(eqn.outvars)

    def _made(self, eqn: Equation, ins: list[Made], place: Place) -> Made:
        """Returns what the results of an equation are made of."""
        if any(_jaxpr.sub_jaxprs(eqn)) or not eqn.outvars:
            return Made()
        if len(ins) == 1 and (table.is_view(eqn) or table.is_rounding(eqn)):
            if _jaxpr.is_cast(eqn):
                self._look_at_cast(eqn, ins[0], place)
                if is_narrow(eqn.outvars[0].aval):
                    new = {("raised", x) for x in ins[0].of("high")}
                    new |= {(x, n) for x in _SHIFTED for n in ins[0].of("added")}
                    return ins[0]._replace(marks=ins[0].marks | new)
            lost = set[Any]() if _keeps_rows(eqn) else ins[0].of("rows")
            return ins[0]._replace(marks=ins[0].marks - {("rows", x) for x in lost})
        if multiplies_matrices(eqn):
            return self._product(eqn, ins, place)
        self._look(eqn, ins)
        parts = [x.part for x in ins]
        self.heads.look(eqn, parts, place)
        part = made_of(eqn, parts)
        marks, given = frozenset(_marks(eqn, ins)), all(x.given for x in ins)
        if table.adds_terms(eqn) and not (given or place.backward or place.again):
            marks = self._moved_away(eqn, ins, marks, place)
        return Made(marks, given, part=part)

    def _product(self, eqn: Equation, ins: list[Made], place: Place) -> Made:
        if place.backward or place.again:
            return Made()
        part = self.attentions.multiplied(eqn, [x.part for x in ins], place)
        self._note("offset", ins, "taken")
        is_narrow_one = any(is_narrow(x.aval) for x in eqn.invars[:2])
        at_default = is_of_float32(eqn) and has_default_precision(
            eqn, self._default_precision
        )
        # What nobody has decided would be in 16 bits in mixed precision.
        would_be = has_default_precision(eqn) and is_matrix_product(eqn)
        would_be &= not _scopes.is_decided(place.scopes)
        would_be &= _jaxpr.is_float32(eqn.invars[0])
        if not (is_narrow_one or at_default or would_be):
            return Made(part=part)
        is_cast = is_narrow_one and _scopes.AUTOCAST not in place.scopes
        marks = {("sum", number := len(self._followed))}
        is_unit = any(x.of("unit") for x in ins)
        self._followed.append(Product(place, is_cast, at_default, is_unit))
        if any(x.of("squared") for x in ins[:2]):
            marks.add(("moment", number))
        if any(x.of("doubled") for x in ins):
            marks.add(("twice", number))
        made = Made(frozenset(marks), part=part)
        if is_convolution(eqn) and ins[1].of("balanced"):
            self._note("kernel", [made], "sum")
        return made

    def _moved_away(
        self, eqn: Equation, ins: list[Made], marks: Marks, place: Place
    ) -> Marks:
        """Follows a sum with a number, and notes it where something takes that away."""
        x, y = ins if ins[1].number is not None else reversed(ins)
        raised = x.of("raised")
        if y.number is None:
            other = y.of("raised")  # if one of two is rounded, a part of it may be
            both = x.of("high") & y.of("high") & (raised | other)
            taken = both or (y.given and raised) or (x.given and other)
            if not (taken and table.subtracts(eqn)):
                return marks
        else:
            scale = max(x.of("times"), default=1.0)
            if not abs(y.number) > _FAR * scale:
                return marks
            takes = (y.number < 0) != (table.subtracts(eqn) and y is ins[1])
            taken = {one for one in raised if one[1] != takes}
            if not taken:
                key = len(self._followed), takes
                is_cast = _scopes.AUTOCAST not in place.scopes
                self._followed.append(Product(place, is_cast, at_default=False))
                high = ["high"] + ["raised"] * is_narrow(eqn.outvars[0].aval)
                return marks | {(word, key) for word in high}
        self._note("units", [Made(frozenset(("sum", n) for n, _ in taken))], "sum")
        return frozenset(x for x in marks if x[0] not in ("high", "raised"))

    def _look(self, eqn: Equation, ins: list[Made]) -> None:
        """Notes what ``eqn`` makes of products, if that is a risk."""
        made = eqn.outvars[0].aval
        is_turn = table.is_exponential(eqn) and made.dtype.kind == "c"
        if table.is_phase(eqn) or is_turn:
            self._note("phase", ins[:1], "sum")
        elif table.inverts(eqn):
            of_entries = ["entry"] * table.inverts_symmetric(eqn)
            self._note("inverse", ins[:1], "sum", *of_entries)
        elif table.adds_terms(eqn) and math.prod(made.shape) > 1:
            if any(x.of("squares") and not x.of("twice") for x in ins):
                self._note("distance", [x for x in ins if not x.of("squares")], "twice")
            if table.subtracts(eqn) and any(x.of("totals") for x in ins):
                self._note("covariance", ins, "sum")
        if table.subtracts(eqn) and ins[0].of("moment") and ins[1].of("squared sum"):
            self._note("moments", [ins[0]], "moment")
            self._note("moments", [ins[1]], "squared sum")
        if table.totals(eqn):
            raised = (("sum", n) for n, _ in ins[0].of("raised"))
            self._note("units", [Made(frozenset(raised))], "sum")

    def _look_at_cast(self, eqn: Equation, x: Made, place: Place) -> None:
        """Notes the numbers of which a cast to 16 bits leaves 0 or Inf.

        `jnp.where(mask, x, -1e9)` casts its number.
        """
        dtype = eqn.outvars[0].aval.dtype
        in_autocast = _scopes.AUTOCAST in place.scopes  # which clips what it casts
        if in_autocast or place.backward or place.again or not is_narrow(dtype):
            return
        for number in sorted(x.of("number")):
            with np.errstate(over="ignore"):
                left = float(np.asarray(number).astype(dtype))
            if number and (left == 0 or np.isinf(left)):
                self.note_number(number, left, dtype, place)

    def note_number(
        self, written: float, left: float, dtype: Any, place: Place
    ) -> None:
        """Notes a number of which 16 bits leave another, once in each line."""
        limit = "finfo(x.dtype).min" if written < 0 else "finfo(x.dtype).max"
        row = Hazard(
            kind="number",
            why=f"{written:.4g} is {'0' if left == 0 else 'Inf'} in {dtype}",
            cure="x.astype(jnp.float32)" if left == 0 else f"jnp.{limit}",
            module=place.module,
            where=place.where,
        )
        self.found.setdefault((row.why, row.module, row.where), row)

    def _note(self, pattern: str, values: Sequence[Made], *words: str) -> None:
        """Notes the products of which one of some words is said."""
        for number in sorted(set[int]().union(*(x.of(*words) for x in values))):
            product = self._followed[number]
            if pattern == "distance" and product.is_unit:
                continue
            row = Hazard(
                kind=_KINDS.get(pattern, pattern),
                why=_WHY[pattern],
                cure=_FORMULAS.get(pattern) or _cure(product),
                module=product.place.module,
                where=product.place.where,
                at_default_precision=product.at_default,
            )
            self.found.setdefault((row.module, row.where), row)


def _marks(eqn: Equation, ins: Sequence[Made]) -> Iterator[tuple[str, Any]]:
    """Yields what is said of the result of an operation."""
    words = set[str]()
    if table.is_linear(eqn):
        words |= {"sum", "moment", "twice", "added", "shifted", "squares"}
        words |= {"times", "high", "raised"}
    if table.totals(eqn):
        words |= {"sum", "moment", "raised"}
        if len(eqn.invars[0].aval.shape) - 1 not in eqn.params["axes"]:
            words.add("rows")
    elif (table.is_linear(eqn) or table.holds(eqn)) and _keeps_rows(eqn):
        words.add("rows")
    if table.selects(eqn):
        words.add("number")
    if table.holds(eqn):
        words |= {"shifted", "taken", "times", "high", "raised"}
    is_normalised = table.multiplies(eqn) and any(x.of("length") for x in ins)
    if table.is_arithmetic(eqn):
        if not is_normalised:
            words.add("taken")
        yield from (("entry", n) for x in ins for n in x.of("sum", "entry"))
    yield from (mark for x in ins for mark in x.marks if mark[0] in words)

    # What was given is added to a sum in 16 bits, and taken away again, as it is by
    # another row of the sum.
    if any(x.given and x.number is None for x in ins):
        if table.adds_terms(eqn):
            words = _SHIFTED if is_narrow(eqn.outvars[0].aval) else ["added"]
            sums = [n for x in ins for n in x.of("sum", "entry")]
            yield from ((word, n) for word in words for n in sums)
        if table.subtracts(eqn):
            yield from (("taken", n) for x in ins for n in x.of("shifted"))
    if table.subtracts(eqn):
        yield from (("taken", n) for n in ins[0].of("rows") & ins[1].of("rows"))

    multiplies = table.multiplies_entries(eqn) or table.is_product_of_any_kind(eqn)
    if multiplies and all(x.of("total") for x in ins[:2]):
        yield "totals", None
    if table.is_square(eqn):
        yield "squared", None
        yield from (("squared sum", n) for n in ins[0].of("sum"))
        yield from (("raised", n) for n in ins[0].of("raised"))
        yield from [("squares", None)] * bool(ins[0].of("norm"))
    if table.is_product_of_any_kind(eqn) and eqn.invars[0] is eqn.invars[1]:
        yield "squares", None
    if table.totals(eqn):
        yield "total", None
        if ins[0].of("squared", "squares"):
            yield "squares", None
    if table.is_root(eqn) and ins[0].of("squares"):
        yield "norm", None
    yield from _lengths(eqn, ins)
    if table.multiplies(eqn) and not table.is_square(eqn):
        yield from _scaled(eqn, *ins)


def _carried(x: Made) -> Made:
    """Returns what is known of what a loop carries, if it starts from this."""
    return Made(frozenset(y for y in x.marks if y[0] in ("rows", "high", "raised")))


def _keeps_rows(eqn: Equation) -> bool:
    """Whether it keeps all entries along the last axis, of each operand."""
    of = filter(_jaxpr.is_inexact, eqn.invars)  # and no indices
    shapes = [x.aval.shape for x in (*of, *eqn.outvars)]
    return len({shape[-1] for shape in shapes if len(shape)}) == 1


def _lengths(eqn: Equation, ins: Sequence[Made]) -> Iterator[tuple[str, Any]]:
    """Yields what is said of lengths, and of what is divided by its own."""
    is_of_lengths = any(x.of("length") for x in ins)
    if table.takes_root(eqn) or table.is_extreme(eqn):
        is_of_lengths |= any(x.of("squares") for x in ins)
    elif table.multiplies(eqn):
        yield from [("unit", None)] * is_of_lengths
        is_of_lengths &= all(x.given or x.of("length") for x in ins)
    elif not (table.guards(eqn) or table.selects(eqn)):
        is_of_lengths = False
    yield from [("length", None)] * is_of_lengths
    is_unit = table.is_linear(eqn) and any(x.of("unit") for x in ins)
    if is_unit and all(x.given or x.of("unit") for x in ins):
        yield "unit", None


def _scaled(eqn: Equation, x: Made, factor: Made) -> Iterator[tuple[str, Any]]:
    """Yields what is said of a value times a number or an array that was given."""
    divides = table.divisor(eqn) is not None
    if not divides and (x.number is not None or not factor.given):
        x, factor = factor, x
    if not factor.given:
        return
    is_two = factor.number is not None and abs(factor.number) == 2
    kept = {"sum", "squared", "squares", "total", "balanced", "unit"}
    kept |= {"added", *_SHIFTED, "moment", "squared sum", "high", "raised"}
    if not x.given:
        size = abs(factor.number) if factor.number else 1.0
        scales = x.of("times") or {1.0}
        yield from (("times", s / size if divides else s * size) for s in scales)
    kept |= set() if is_two else {"twice"}
    yield from (mark for mark in x.marks if mark[0] in kept)
    if is_two:
        yield "doubled", None
        yield from (("twice", n) for n in x.of("sum"))


def _known(x: Any, at: At) -> Made:
    """Returns the facts of a number in the code, or of an array."""
    if not isinstance(x, _jaxpr.Literal):
        return _constant(x)
    number = _real(_jaxpr.number_of(x))
    if number is None or not np.isfinite(number):
        return Made(given=True, number=number)
    return Made(frozenset({("number", float(number))}), True, number)


def _constant(array: Any) -> Made:
    """Returns the facts of an array that a jaxpr carries."""
    number, marks = None, set[Any]()
    is_known = not isinstance(array, _jaxpr.Tracer) and 0 < np.size(array) <= _LARGEST
    if is_known and isinstance(array.dtype, np.dtype):  # and no key
        numbers = np.asarray(array)
        if (numbers == numbers.flat[0]).all():
            number = _real(numbers.flat[0].item())
        elif numbers.astype(complex).sum() == 0:
            marks.add(("balanced", None))
        if jnp.issubdtype(numbers.dtype, np.floating):  # as a mask has that NumPy made
            ends = float(numbers.min()), float(numbers.max())
            # Not those near 0, where small ones may be meant.
            marks |= {("number", x) for x in ends if 1 < abs(x) < np.inf}
    return Made(frozenset(marks), True, number)


def _real(number: Any) -> Any:
    return None if np.iscomplexobj(number) else number


def _either(values: Sequence[Made]) -> Made:
    """Returns the facts of a value that is one of these."""
    if all(x == values[0] for x in values):
        return values[0]
    marks = frozenset[Any]().union(*(x.marks for x in values))
    given, part = all(x.given for x in values), the_one([x.part for x in values])
    return Made(marks, given, part=part)


def _cure(product: Product) -> str:
    """Returns what to type."""
    if product.at_default:  # with which autocast, too, leaves it in float32
        return _HIGHEST
    if product.is_cast:
        return 'x.astype(jnp.float32), for both operands, and precision="highest"'
    module = product.place.module
    return f'float32_paths=("{module}",)' if "/" in module else _REGION
