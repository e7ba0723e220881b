"""Which values of a program may be 16 bits, by `sentences.md` alone.

Read it beside that page, whose words and order it keeps: nothing else is known here of
autocast. What a loop carries is made of itself, so each word is applied to all values
until nothing changes. At first everything may be 16 bits, and what the sentences do not
allow is taken away.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from jax import lax
from values import PASSES, Value, live


def named(text: str) -> set[str]:
    """Returns the primitives of a list."""
    return set(text.split())


DEFAULTS = None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2  # precisions
ACTIVATIONS = named("tanh logistic erf erfc")
ARITHMETIC = named(
    """add add_any sub mul div rem atan2 sqrt sin cos one_minus_square
    select_and_scatter_add tanh logistic erf erfc"""
)
CUTS = named("slice split dynamic_slice unstack")
MOVES = named(
    """slice split dynamic_slice unstack reshape broadcast_in_dim broadcast_to transpose
    squeeze rev dynamic_update_slice gather tile stack concatenate pad copy copy_p
    stop_gradient name optimization_barrier select_n clamp max min abs neg reduce_max
    reduce_min cummax cummin reduce_window_max reduce_window_min scatter scatter-min
    scatter-max all_gather ppermute all_to_all pmax pmin"""
)
MOVES |= PASSES.keys() - {"out of custom"}
WHOLE = named("floor ceil round")
SORTS = named("sort top_k approx_top_k argmax argmin floor ceil round sign is_finite")
ORDERS = named("lt le gt ge")
PRODUCTS = named("dot_general ragged_dot_general")
ROUNDED = PRODUCTS | named(
    """conv_general_dilated dot_product_attention convert_element_type reduce_precision
    integer_pow square reduce_sum reduce_window_sum cumsum cumlogsumexp scatter-add psum
    fft cbrt atan asinh nextafter bitcast_convert_type"""
)
ROUNDED |= SORTS | ORDERS | ARITHMETIC - {"sqrt", "rem"} | {"out of custom"}
ELEMENTWISE = ARITHMETIC | SORTS
ELEMENTWISE |= named("convert_element_type reduce_precision integer_pow square")
OF_GRADIENTS = {"mul", "div", "add", "sub", "add_any"}
# What loops, branches and rules of their own return.
RETURNED = {"carry", "last", "stack of scan", "branches", "out of custom"}


def allowed(
    values: Sequence[Value], kept: frozenset[Value] = frozenset()
) -> list[bool]:
    """Returns of each value whether the sentences allow that it is 16 bits.

    Args:
        values: Those of a program, each at the place that its ``number`` says.
        kept: Values that a safeguard keeps in float32.
    """
    bits = Sentences(values, kept).bits
    return [v in bits for v in values]


def until(holds: Callable, found: set[Value], values: Iterable[Value]) -> None:
    """Adds the values of which something holds, until there are no more."""
    rest, before = [*values], -1
    while before < len(found):
        before = len(found)
        rest = [v for v in rest if v not in found]
        found.update(v for v in rest if holds(v))


def size_of(x: Any) -> float | None:
    """Returns the size of a number that is written in the code."""
    while isinstance(x, Value) and x.op in ("broadcast_in_dim", "convert_element_type"):
        x = x.of[0]
    return None if isinstance(x, Value) else abs(x)


def is_product(v: Value) -> bool:
    """Says if an operation is a matmul, wherever it is."""
    if v.params.get("precision") not in DEFAULTS:
        return False
    if v.op not in PRODUCTS:
        return v.op in ("conv_general_dilated", "dot_product_attention")
    ragged = v.op == "ragged_dot_general"
    dims = v.params["ragged_dot_dimension_numbers" if ragged else "dimension_numbers"]
    dims = dims.dot_dimension_numbers if ragged else dims
    shapes = [getattr(x, "shape", ()) for x in v.of[:2]]
    free = [
        [n for i, n in enumerate(shape) if i not in (*contracted, *batched)]
        for shape, contracted, batched in zip(shapes, *dims, strict=True)
    ]
    summed = prod(shapes[0][i] for i in dims[0][0])
    if v.back:
        return summed >= 2 and prod(free[0 if ragged else 1]) >= 8
    return summed >= 8 and any(free)


class Sentences:
    """The words of the page as sets of values, and its sentences."""

    def __init__(self, values: Sequence[Value], kept: frozenset[Value]):
        self.values = values
        self.repeats: dict[Value, set[int]] = {}
        regions = {v for v in kept if v.op != "constant of loop"}
        self.regions = regions | {v for v in values if v.kept}
        self.matmuls = {v for v in values if is_product(v)} - self.regions
        self.numbers, self.made, self.masks = set[Value](), set[Value](), set[Value]()
        self.products, self.powers = set[Value](), set[Value]()
        self.alike, self.gradients = set[Value](), set[Value]()
        self.factors = set[Value]()
        until(self.is_number, self.numbers, values)
        until(self.is_no_input, self.made, values)
        until(self.is_mask, self.masks, values)
        until(self.is_made_of_products, self.products, values)
        until(self.is_made_by_powers, self.powers, values)
        read, self.consumers = live(values), dict[Value, list[tuple[Value, int]]]()
        for v in values:
            self.consumers[v] = [x for x in v.consumers if x[0] in read]
        self.back = {v for v in values if v.back}
        until(self.is_slope, self.back, reversed(values))
        for v in set(values) - read:
            if any(x in read and self.is_alone(x) for x in self.arguments(v)):
                for i, x in enumerate(v.of):
                    if isinstance(x, Value):
                        self.consumers[x].append((v, i))
        self.back = {v for v in values if v.back}
        until(self.is_slope, self.back, reversed(values))
        until(self.is_alike, self.alike, values)
        until(self.is_gradient, self.gradients, values)
        self.handed_on = self.all_handed_on()
        self.exact = {v for v in values if v.returned} | self.handed_on
        until(self.is_read_exactly, self.exact, reversed(values))
        until(self.is_factor, self.factors, reversed(values))
        self.exact |= self.factors
        self.readers = {v: self.read(v) for v in values}
        self.bits = self.sentence_1() - kept
        self.firm = set(self.bits)  # not stored by sentence 5
        while True:
            before = len(self.bits), len(self.firm)
            self.feeding: set[Value] = set()
            until(self.feeds_a_matmul, self.feeding, reversed(values))
            for v in sorted(self.bits, key=lambda v: v.number):
                plain = self.sentence_2(v)
                if not plain or self.is_for_backward(v) or self.is_stored(v):
                    self.firm.discard(v)
                if not (plain or self.sentence_5(v)):
                    self.bits.discard(v)
            if before == (len(self.bits), len(self.firm)):
                break

    # Operations

    def is_move(self, v: Value) -> bool:
        first = v.of[0] if v.op == "convert_element_type" else None
        cast = isinstance(first, Value) and first.dtype == v.dtype
        if v.op == "reduce_precision":
            cast = v.params["exponent_bits"] == 8 and v.params["mantissa_bits"] == 23
        return (v.op in MOVES or cast) and v not in self.regions

    def is_arithmetic(self, v: Value) -> bool:
        if v.op not in ARITHMETIC or v in self.regions:
            return False
        sizes = [size_of(x) for x in v.of if v.op in ("mul", "div")]
        squared = v.op == "mul" and v.of[0] is v.of[1]
        return not squared and all(not n or 1 / 256 <= n <= 256 for n in sizes)

    def reads(self, v: Value, place: int) -> str:
        """Returns how an operation that is no move reads an argument."""
        if v in self.regions:
            return "exactly"
        if v in self.matmuls and (place < 2 or v.op not in PRODUCTS):
            return "in 16 bits"
        found_again = v.op in ("eq", "ne") and v in self.back
        if found_again or (v.op in ORDERS and self.is_a_number(v.of[-1])):
            return ""
        divides = (v.op == "div" and place == 1) or v.params.get("y", 0) < 0
        counts = v.op in WHOLE
        counts |= v.op == "convert_element_type" and v.dtype.kind in "iu"
        if v not in self.back and (divides or counts or v.op not in ROUNDED):
            return "exactly"
        return "by arithmetic" if self.is_arithmetic(v) else "in float32"

    # Values

    def is_a_number(self, x: Any) -> bool:
        return not isinstance(x, Value) or x in self.numbers

    def is_number(self, v: Value) -> bool:
        if v.op == "constant":
            return v.shape == ()
        none = {"argument", "iota", "carry", "last", "test"}
        none |= {"slice of scan", "stack of scan"}
        return v.op not in none and all(map(self.is_a_number, v.of))

    def arguments(self, v: Value) -> list[Value]:
        """Returns the floating arguments that are no numbers."""
        of = [x for x in v.of if not self.is_a_number(x)]
        return [x for x in of if x.dtype.kind not in "biu"]

    def is_no_input(self, v: Value) -> bool:
        made = any(isinstance(x, Value) and x in self.made for x in v.of)
        return made or v.op == "out of custom" or v in self.matmuls

    def is_bias(self, x: Any, v: Value) -> bool:
        """Says if an argument of a sum is a bias of it, or no input."""
        if self.is_a_number(x) or x in self.made:
            return True
        own, repeated = x.shape or (1,) * len(v.shape), self.repeated(x)
        alike = [own[i] != n or i in repeated for i, n in enumerate(v.shape) if n != 1]
        return alike.count(False) == 1 and alike[0]

    def repeated(self, v: Value) -> set[int]:
        """Returns the axes along which an input repeats entries."""
        if v not in self.repeats:
            self.repeats[v] = self.repeated_by(v)
        return self.repeats[v]

    def repeated_by(self, v: Value) -> set[int]:
        of = [x for x in v.of if not self.is_a_number(x)]
        found = [self.repeated(x) for x in of] if v.op not in ("carry", "last") else []
        axes = {i for i, n in enumerate(v.shape) if n != 1}
        if not found:
            return set()
        if v.op == "broadcast_in_dim":
            old = enumerate(v.params["broadcast_dimensions"])
            same = {to for i, to in old if of[0].shape[i] == v.shape[to]}
            moved = enumerate(v.params["broadcast_dimensions"])
            return axes - (same - {to for i, to in moved if i in found[0]})
        if v.op == "transpose":
            return {i for i, x in enumerate(v.params["permutation"]) if x in found[0]}
        if v.op == "slice of scan":
            return {i - 1 for i in found[0] if i}
        entrywise = all(x.shape == v.shape for x in of)
        return set.intersection(*found) & axes if entrywise else set()

    def is_mask(self, v: Value) -> bool:
        first = v.of[0] if v.op == "convert_element_type" else None
        scaled = self.is_move(v) or v.op in ("mul", "div")
        bools = isinstance(first, Value) and first.dtype == bool
        return bools or (scaled and self.is_made_of(v, self.masks))

    def is_slope(self, v: Value) -> bool:
        passes = v.op in PASSES or v in self.matmuls or v.returned
        takes = any(r in self.matmuls for r, _ in self.read(v))
        return not (passes or takes) and self.is_alone(v)

    def is_alone(self, v: Value) -> bool:
        """Says if nobody reads a value but the backward pass."""
        readers = self.read(v)
        return bool(readers) and all(r in self.back for r, _ in readers)

    def read(self, v: Value, *, scaled: bool = False) -> list[tuple[Value, str]]:
        """Returns who reads a value, or what moves return of it, and how."""
        found, moved = [], [v]
        for x in moved:
            for r, place in self.consumers[x]:
                if self.is_move(r) or (scaled and self.scales(r, place)):
                    moved += [r] * (r not in moved)
                elif how := self.reads(r, place):
                    found.append((r, how))
        return found

    def scales(self, v: Value, place: int) -> bool:
        """Says if a mask or a number multiplies a value, and makes it no smaller."""
        if v.op not in ("mul", "div") or (v.op == "div" and place == 1):
            return False
        other = v.of[1 - place]
        size = size_of(other)
        if size is None:
            return other in self.masks
        return size >= 1 if v.op == "mul" else size <= 1

    # Read exactly

    def is_read_exactly(self, v: Value) -> bool:
        for r, place in self.consumers[v]:
            moved = self.is_move(r)
            if not moved and self.reads(r, place) == "exactly":
                return True
            made = moved or (r.op in ELEMENTWISE and r not in self.handed_on)
            if made and r in self.exact:
                return True
        return False

    # To sentence 1: as written

    def sentence_1(self) -> set[Value]:
        none = "argument", "constant", "into custom", "out of custom"
        float32 = {v for v in self.values if v.dtype == "float32" and v.op not in none}
        return float32 - self.numbers - self.regions

    # To sentence 2: between matmuls

    def feeds_a_matmul(self, v: Value) -> bool:
        readers = self.readers[v]
        wide = any(
            how == "in float32" or (how == "by arithmetic" and r not in self.bits)
            for r, how in readers
            if r not in self.back or r in self.handed_on
        )
        return v not in self.exact and any(
            how == "in 16 bits" or (r in self.feeding and not (wide and r in self.back))
            for r, how in readers
            if how != "in float32"
        )

    def sentence_2(self, v: Value) -> bool:
        if v in self.handed_on:  # by sentence 4
            return False
        if v not in self.exact and {x for _, x in self.readers[v]} == {"in 16 bits"}:
            return True
        if self.is_move(v) or v.op in SORTS:
            cut = v.op in CUTS and v in self.feeding and v.of[0] in self.products
            return cut or self.is_made_of(v, self.firm)
        if v not in self.feeding:
            return False
        if v.op == "add":
            others = [x for x in v.of if x not in self.bits]
            return len(others) < len(v.of) and all(self.is_bias(x, v) for x in others)
        if v.op in ACTIVATIONS and (v in self.powers or not self.is_read_later(v)):
            return True
        made = self.is_arithmetic(v) and self.is_made_of(v, self.firm)
        return v in self.matmuls or made

    def is_read_later(self, v: Value) -> bool:
        """Says if float32 reads it, or what arithmetic made that feeds a matmul."""
        forward = [(r, how) for r, how in self.readers[v] if r not in self.back]
        return any(
            how == "in float32"
            or (
                how == "by arithmetic"
                and (r not in self.feeding or self.is_read_later(r))
            )
            for r, how in forward
        )

    def is_made_of(self, v: Value, found: set[Value]) -> bool:
        of = v.of if v.op == "branches" else self.arguments(v)
        return bool(of) and all(x in found for x in of)

    def is_made_of_products(self, v: Value) -> bool:
        """Says if arithmetic and moves made a value of results of matmuls."""
        if v.op == "add":
            added = all(x in self.products or self.is_bias(x, v) for x in v.of)
            return added and any(x in self.products for x in v.of)
        passed = self.is_move(v) or self.is_arithmetic(v)
        return v in self.matmuls or (passed and self.is_made_of(v, self.products))

    def is_made_by_powers(self, v: Value) -> bool:
        """Says the same of arithmetic, moves and powers."""
        passed = self.is_move(v) or v.op in ARITHMETIC | {"integer_pow", "square"}
        return v in self.products or (passed and self.is_made_of(v, self.powers))

    # To sentence 4: loops

    def all_handed_on(self) -> set[Value]:
        """Returns what lies on a way from what a loop carries to itself."""
        before: dict[Value, list[Value]] = {}
        after: dict[Value, list[Value]] = {v: [] for v in self.values}
        for v in self.values:
            # A scan has an iteration, and what that returns is the last value.
            of = v.of[1:] if v.op == "last" and "length" in v.params else v.of
            of = [] if v in self.matmuls else of
            before[v] = [x for x in of if isinstance(x, Value)]
            for x in before[v]:
                after[x].append(v)

        def beyond(v: Value, step: dict[Value, list[Value]]) -> set[Value]:
            found, todo = set(), [v]
            while todo:
                new = {*step[todo.pop()]} - found
                found |= new
                todo += new
            return found

        carries = [v for v in self.values if v.op == "carry"]
        return set().union(*(beyond(v, before) & beyond(v, after) for v in carries))

    def is_factor(self, v: Value) -> bool:
        """Says if a value, or what is made of it, multiplies what is handed on."""
        for r, _ in self.consumers[v] if v not in self.handed_on else ():
            product = r.op in PRODUCTS and r not in self.matmuls
            if r in self.handed_on and (r.op in ("mul", "div") or product):
                return True
            smooth = self.is_arithmetic(r) and r.op not in ACTIVATIONS
            if r in self.factors and (smooth or self.is_move(r)):
                return True
        return False

    # To sentence 5: stored

    def sentence_5(self, v: Value) -> bool:
        if v in self.handed_on:
            return self.is_computed_again(v)
        stack = v.op == "stack of scan"
        if self.is_move(v) and (not stack or self.is_made_of(v, self.bits)):
            return self.is_made_of(v, self.bits)
        if self.is_exact_before(v) or v not in self.made:
            return False
        readers = self.read(v, scaled=True)
        back = self.back - self.handed_on
        alone = all(r in back or how == "in 16 bits" for r, how in readers)
        matmul = any(how == "in 16 bits" for _, how in readers)
        stacked = stack and v not in self.back
        return (alone and (matmul or stacked)) or self.is_summed_gradient(v)

    def is_exact_before(self, v: Value) -> bool:
        """Says if a value is read exactly, or what a loop or a branch returns as it."""
        if v in self.exact:
            return True
        of = v.of[1:] if v.op == "last" else v.of
        return v.op in RETURNED - {"carry"} and any(
            isinstance(x, Value) and self.is_exact_before(x) for x in of
        )

    def is_computed_again(self, v: Value) -> bool:
        """Says if a scan stacks what it carries, and a checkpoint reads the stack."""
        if v.op != "carry":
            return False
        stacks = [r for r, _ in self.consumers[v] if r.op == "stack of scan"]
        slices = [r for s in stacks for r, _ in self.consumers[s] if r.back]
        return any(
            r.op == "into checkpoint" for s in slices for r, _ in self.consumers[s]
        )

    def is_alike(self, v: Value) -> bool:
        """Says if a value of the backward pass repeats entries, or is made of such."""
        if v not in self.back or v.op in RETURNED:
            return False
        of = [x for x in v.of if not self.is_a_number(x)]
        longer = v.op == "broadcast_in_dim" and prod(of[0].shape if of else ()) != prod(
            v.shape
        )
        if longer or v.op in ("tile", "gather"):
            return True
        if v in self.matmuls:
            return len(of) < len(v.of) or any(x in self.alike for x in of)
        return bool(of) and all(x in self.alike for x in of)

    def is_gradient(self, v: Value) -> bool:
        if v not in self.back or v.op in RETURNED:
            return False
        moved = self.is_move(v) and any(x in self.gradients for x in self.arguments(v))
        return v in self.matmuls or moved or self.is_made_of_gradients(v)

    def is_made_of_gradients(self, v: Value) -> bool:
        of = self.arguments(v)
        own = any(x in self.gradients and x not in self.alike for x in of)
        return v.op in OF_GRADIENTS and own and all(x in self.made for x in of)

    def is_summed_gradient(self, v: Value) -> bool:
        of, readers = self.arguments(v), self.readers[v]
        others = [(r, how) for r, how in readers if how != "in 16 bits"]
        feeding = [how == "by arithmetic" and r in self.feeding for r, how in others]
        made = self.is_made_of_gradients(v) and not any(map(self.is_softmax, of))
        back = self.back - self.handed_on
        alone = v in self.back and all(r in back for r, _ in readers)
        return made and alone and any(feeding) and not all(feeding)

    def is_softmax(self, v: Value) -> bool:
        """Says if a value is, or is given by, a stored quotient of an exponential."""
        while v.op in PASSES and len(v.of) == 1:
            v = v.of[0]
        divided = v.op == "div" and isinstance(v.of[0], Value) and v.of[0].op == "exp"
        return divided and v in self.bits - self.firm

    def is_for_backward(self, v: Value) -> bool:
        stack = v.op == "stack of scan"
        return stack and any(r in self.back for r, _ in self.readers[v])

    def is_stored(self, v: Value) -> bool:
        """Says if an activation of a float32 value is stored."""
        made = self.is_made_of(v, self.firm)
        return v.op in ACTIVATIONS and not made and self.sentence_5(v)
