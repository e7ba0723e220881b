"""Which values may be 16 bits, by the five sentences and nothing else.

Written from the text that users read, in its order and in its words, without knowledge
of the program that it describes. What is circular in a loop is what it may be at most:
everything is allowed at first, and what the sentences then do not allow is taken away
until nothing changes.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from values import Value


def _names(text: str) -> set[str]:
    return set(text.split())


PRODUCTS = {"dot_general", "ragged_dot_general"}
ACTIVATIONS = {"tanh", "logistic", "erf", "erfc"}
ARITHMETIC = ACTIVATIONS | _names(
    """add add_any sub mul div rem atan2 sqrt sin cos one_minus_square
    select_and_scatter_add"""
)
MOVES = _names(
    """reshape broadcast_in_dim broadcast_to transpose squeeze rev slice split
    dynamic_slice dynamic_update_slice gather tile unstack stack concatenate pad copy
    copy_p stop_gradient name optimization_barrier select_n clamp max min abs neg
    reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min scatter
    scatter-min scatter-max all_gather ppermute all_to_all pmax pmin"""
)
LOOP = {"carry", "last", "test"}  # what is made of a first value and a returned one
PASSES = LOOP | {"slice of scan", "stack of scan", "constant of loop"}
PASSES |= {"into checkpoint", "branches"}
CUTS = {"slice", "split", "dynamic_slice", "unstack"}
SORTS = _names("sort top_k approx_top_k argmax argmin floor ceil round sign is_finite")
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
EXACT_ELEMENTWISE = _names(
    """exp exp2 expm1 log log1p log2 pow sqrt rsqrt tan sinh cosh asin acos acosh atanh
    erf_inv lgamma digamma polygamma igamma igammac zeta bessel_i0e bessel_i1e
    regularized_incomplete_beta"""
)
ELEMENTWISE = EXACT_ELEMENTWISE | _names("integer_pow square cbrt atan asinh nextafter")
EXACT = EXACT_ELEMENTWISE | _names(
    """reduce_prod cumprod cholesky lu qr svd eig eigh schur triangular_solve
    tridiagonal_solve custom_linear_solve eq ne pallas_call"""
)
CASTS = {"convert_element_type", "reduce_precision"}
SUMS = {"mul", "div", "add", "sub", "add_any"}  # of gradients, in sentence 5


def allowed(values: list[Value], kept: frozenset[Value] = frozenset()) -> list[bool]:
    """Says which values the sentences allow to be 16 bits.

    Args:
        values: Those of a program, each at the place that its ``number`` says.
        kept: Values that a safeguard keeps in float32.

    Returns:
        A bool for each value. False for numbers, arguments and constants.
    """
    program = _Program(values, kept)
    return [v in program.half for v in values]


def floating(x: Any) -> bool:
    """Tells floating values and numbers from integers and booleans."""
    return not isinstance(x, Value) or jnp.issubdtype(x.dtype, jnp.floating)


class _Program:
    """The values of a program, and the words of the text as sets and tests of them."""

    def __init__(self, values: list[Value], kept: frozenset[Value]):
        self.values, self.kept = values, kept
        self.numbers = self._numbers()
        self.back = self._back()
        self.inputs = self._inputs()
        self.way = _cycles(values, self.is_matmul)
        self.exact = self._read_exactly()
        self.cut = self._made_of_matmuls()
        self.gradients = self._gradients()
        self.loops: dict[Any, list[Value]] = {}
        for v in values:
            if v.op in LOOP:
                self.loops.setdefault(_loop(v), []).append(v)
        self.feeding = set(values)
        # `half` may be 16 bits; those of `stored` by sentence 5 alone.
        self.half = {v for v in values if self.sentence_1(v)}
        self.stored: set[Value] = set()
        while True:
            self.leaves = functools.cache(lambda v: list(self.reads(v)))
            self.scaled_leaves = functools.cache(lambda v: list(self.reads(v, True)))
            self.feeding = self._feeding()
            before = len(self.half), len(self.stored)
            for v in values:
                if v in self.half:
                    plain = self.sentence_2(v)
                    if plain and not self.is_for_backward(v) and v not in self.stored:
                        continue
                    if plain or self.sentence_5(v) or self.is_half_move(v):
                        self.stored.add(v)
                    else:
                        self.half.discard(v)
                        self.stored.discard(v)
            if before == (len(self.half), len(self.stored)):
                break

    # The five sentences.

    def sentence_1(self, v: Value) -> bool:
        """What is not float32, or is kept in float32, stays so; 3: as all else does."""
        written = v.op in {"argument", "constant"} or v in self.numbers
        custom = v.op in {"into custom", "out of custom"}
        is_float32 = v.dtype == np.float32
        return is_float32 and not (written or custom or v.kept or v in self.kept)

    def sentence_2(self, v: Value) -> bool:
        """Allows what is between matmuls."""
        arguments = [x for x in self.arguments(v) if floating(x)]
        if self.only_matmuls_read(v):
            return True
        if v.op in LOOP:
            return self.sentence_4(v) and not any(x in self.stored for x in arguments)
        if self.is_matmul(v):
            return v in self.feeding
        if v.op in CUTS and v in self.feeding and self.arguments(v)[0] in self.cut:
            return True
        plain = all(x in self.half and x not in self.stored for x in arguments)
        if self.is_arithmetic(v) and v in self.feeding:
            some = v.op == "add" and any(x in self.half for x in arguments)
            return plain or some or (v.op in ACTIVATIONS and v not in self.inputs)
        if v.op in SORTS:
            return all(x in self.half for x in arguments)
        moved = self.moved(v)
        return bool(moved) and all(
            x in self.half and x not in self.stored for x in moved
        )

    def sentence_4(self, v: Value) -> bool:
        """Allows what a loop carries, and returns of it."""
        together = self.loops[_loop(v)]
        carry = next(w for w in together if w.op == "carry")
        if v.op != "carry":
            # What is handed on may be stored by sentence 5; the sum goes on in float32.
            return carry in self.half and carry not in self.exact
        made = all(x in self.half for x in self.arguments(v))
        feeds = any(w in self.feeding for w in together)
        exact = bool(set(together) & self.exact)
        return made and feeds and not exact and self.last_feeds(v)

    def last_feeds(self, v: Value) -> bool:
        """Whether the last value of what a loop carries feeds a matmul, if read."""
        last = [w for w in self.loops[_loop(v)] if w.op == "last" and w.consumers]
        return all(w in self.feeding for w in last)

    def sentence_5(self, v: Value) -> bool:
        """Allows what is stored."""
        if v.op == "stack of scan" and v not in self.back:
            no_input = not any(x in self.inputs | self.exact for x in v.of)
            consumers = [r for r, _ in self.leaves(v)]
            none = all(r in self.back and not self.is_matmul(r) for r in consumers)
            if no_input and none and not v.returned:
                return True
        if v.op == "carry":
            return self.is_recomputed_from(v)
        if (v.op != "stack of scan" and self.is_move(v)) or v in self.inputs:
            return False
        consumers = self.scaled_leaves(v)
        matmuls = [r for r, i in consumers if self.reads_as_matmul(r, i)]
        alone = all(r in self.back or self.reads_as_matmul(r, i) for r, i in consumers)
        if v not in self.exact and matmuls and alone:
            return True
        gradient = v.op in SUMS and v in self.back and v not in self.exact
        return gradient and self.is_summed_gradient(v)

    # Operations.

    def is_matmul(self, v: Value, back: bool | None = None) -> bool:
        """Whether an operation is a matmul."""
        if v.kept or v.dtype != np.float32 or v.params.get("precision") is not None:
            return False
        if v.op not in PRODUCTS:
            return v.op in {"conv_general_dilated", "dot_product_attention"}
        numbers = v.params.get("dimension_numbers")
        if v.op == "ragged_dot_general":
            numbers = v.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        contract, batch = numbers
        shapes = [np.shape(x) if not isinstance(x, Value) else x.shape for x in v.of]
        added = math.prod(shapes[0][i] for i in contract[0])
        free = [
            [n for i, n in enumerate(s) if i not in (*c, *b)]
            for s, c, b in zip(shapes, contract, batch, strict=False)
        ]
        if v in self.back if back is None else back:
            second = free[0 if v.op == "ragged_dot_general" else 1]
            return added >= 2 and math.prod(second) >= 8
        return added >= 8 and bool(free[0] or free[1])

    def reads_as_matmul(self, v: Value, i: int) -> bool:
        """Whether an operation is a matmul, and its argument ``i`` an operand."""
        return self.is_matmul(v) and (i < 2 or v.op == "dot_product_attention")

    def is_arithmetic(self, v: Value) -> bool:
        """Whether an operation is arithmetic."""
        if v.op not in ARITHMETIC or v.kept:
            return False
        if v.op == "mul" and v.of[0] is v.of[1]:
            return False
        sizes = [self.size(x) for x in v.of if v.op in {"mul", "div"}]
        return all(n is None or 1 / 256 <= n <= 256 for n in sizes)

    def is_move(self, v: Value) -> bool:
        """Whether an operation moves its arguments."""
        cast = v.op == "convert_element_type" and v.dtype == np.float32
        cast = cast and isinstance(v.of[0], Value) and v.of[0].dtype == np.float32
        if v.op == "reduce_precision":
            bits = v.params["exponent_bits"], v.params["mantissa_bits"]
            cast = bits[0] >= 8 and bits[1] >= 23
        return (v.op in MOVES or v.op in PASSES or cast) and not v.kept

    def reads_nothing(self, v: Value) -> bool:
        """Whether an operation is a comparison that reads nothing."""
        if v.op in {"eq", "ne"}:
            return v in self.back
        return v.op in COMPARISONS and self.is_number(v.of[-1])

    # Values.

    def _numbers(self) -> set[Value]:
        """Finds scalars in the code, and what is made of such alone."""
        numbers: set[Value] = set()
        loop = LOOP | {"argument", "slice of scan", "stack of scan", "iota"}
        for v in self.values:
            scalar = v.shape == () if v.op == "constant" else v.op not in loop
            if scalar and all(not isinstance(x, Value) or x in numbers for x in v.of):
                numbers.add(v)
        return numbers

    def is_number(self, x: Any) -> bool:
        """Whether an argument is a number."""
        return not isinstance(x, Value) or x in self.numbers

    def arguments(self, v: Value) -> list[Value]:
        """Gives the arguments that are no numbers."""
        return [x for x in v.of if not self.is_number(x)]

    def size(self, x: Any) -> float | None:
        """Gives how large a number is that is in the code, or moved, and None else."""
        if not isinstance(x, Value):
            return float(abs(x))
        moved = x in self.numbers and (x.op in CASTS or self.is_move(x))
        return self.size(x.of[0]) if moved and len(x.of) == 1 else None

    def _inputs(self) -> set[Value]:
        """Finds arguments, constants, and what is made of them without a matmul."""
        inputs = {v for v in self.values if v.op != "out of custom"} - self.numbers
        inputs = {v for v in inputs if not self.is_matmul(v)}
        while True:
            gone = {
                v for v in inputs if any(x not in inputs for x in self.arguments(v))
            }
            if not gone:
                return inputs
            inputs -= gone

    def _back(self) -> set[Value]:
        """Finds what JAX writes to transpose, and slopes."""
        passes = PASSES | {"argument", "constant", "into custom", "out of custom"}
        self.back = set(self.values)  # and what passes to none but the backward pass

        def belongs(v: Value) -> bool:
            consumers = [r for r, _ in v.consumers]
            none = all(r in self.back and not self.is_matmul(r) for r in consumers)
            alone = none and not v.returned and v.op not in {"argument", "constant"}
            if v.back or not alone or self.is_matmul(v, back=False):
                return v.back
            return bool(consumers) or self.is_move(v)

        while gone := {v for v in self.back if not belongs(v)}:
            self.back -= gone
        return {v for v in self.back if v.back or v.op not in passes}

    def reads(self, v: Value, scaled: bool = False) -> Iterator[tuple[Value, int]]:
        """Yields who reads a value, or what moves return of it, and as which argument.

        Args:
            v: A value.
            scaled: Whether to be multiplied by a number or a mask is a move.
        """
        seen, todo = {v}, [v]
        while todo:
            for r, i in todo.pop().consumers:
                passes = self.is_move(r) or (r.op == "into custom" and not r.kept)
                if passes or (scaled and self.scales(r)):
                    if r not in seen:
                        seen.add(r)
                        todo.append(r)
                elif not self.reads_nothing(r):
                    yield r, i

    # Read exactly.

    def reads_exactly(self, v: Value, i: int) -> bool:
        """Whether an operation reads its argument ``i`` exactly."""
        if v.kept:
            return True
        if v in self.back:
            return False
        if v.op == "integer_pow":
            return v.params["y"] < 0
        unknown = v.op in EXACT or "callback" in v.op or v.op == "ffi_call"
        return unknown or (v.op == "div" and i == 1)

    def _read_exactly(self) -> set[Value]:
        """Finds what is read exactly, by sentence 4 and otherwise."""
        keeps = {v for v in self.kept if v.op != "constant of loop"}
        exact = {v for v in self.values if v.returned} | keeps
        for v in self.values:
            exact |= {x for i, x in enumerate(v.of) if self.reads_exactly(v, i)}
        factors: set[Value] = set()
        for v in self.way:
            others = [x for x in self.arguments(v) if x not in self.way]
            if self.is_move(v):
                exact |= set(others)
            elif v.op in {"mul", "div"} | PRODUCTS:
                factors |= set(others)

        makes = ARITHMETIC | ELEMENTWISE | CASTS | SORTS | {"into custom"}
        exact = self._back_from(
            exact, lambda v: self.is_move(v) or (v.op in makes and v not in self.way)
        )
        factors = self._back_from(
            factors,
            lambda v: (
                self.is_move(v) or (self.is_arithmetic(v) and v.op not in ACTIVATIONS)
            ),
        )
        self.factors = factors
        return exact | factors | self.way

    def _back_from(self, found: set[Any], made: Any) -> set[Value]:
        """Adds what values are made of, as far as ``made`` says."""
        found = {x for x in found if isinstance(x, Value)}
        todo = list(found)
        while todo:
            v = todo.pop()
            if made(v):
                of = v.of[:1] if v.op == "carry" else v.of
                new = {x for x in of if isinstance(x, Value)} - found
                found |= new
                todo += new
        return found

    # To sentence 2.

    def reads_float32(self, v: Value, i: int) -> bool:
        """Whether what is no move reads its argument ``i`` in float32."""
        if v in self.way or (v in self.factors and v.op in ACTIVATIONS):
            return True
        return not (self.is_arithmetic(v) or self.reads_as_matmul(v, i))

    def _feeding(self) -> set[Value]:
        """Finds what feeds a matmul."""
        feeding: set[Value] = set()

        def feeds(v: Value) -> bool:
            consumers = self.leaves(v)
            if any(self.reads_as_matmul(r, i) for r, i in consumers):
                return True
            forward = [(r, i) for r, i in consumers if r not in self.back]
            if any(
                self.reads_float32(r, i)
                or (self.is_arithmetic(r) and r not in self.half)
                for r, i in forward
            ):
                consumers = forward
            return any(self.is_arithmetic(r) and r in feeding for r, _ in consumers)

        while True:
            before = len(feeding)
            for v in reversed(self.values):
                if v not in feeding and v not in self.exact and feeds(v):
                    feeding.add(v)
            if len(feeding) == before:
                return feeding

    def only_matmuls_read(self, v: Value) -> bool:
        """Whether only matmuls read a value."""
        consumers = self.leaves(v)
        if v.op == "carry":
            consumers = [r for w in self.loops[_loop(v)] for r in self.leaves(w)]
        matmuls = all(self.reads_as_matmul(r, i) for r, i in consumers)
        return matmuls and bool(consumers) and v not in self.exact

    def _made_of_matmuls(self) -> set[Value]:
        """Finds what arithmetic and moves make of nothing but results of matmuls."""

        def made(v: Value) -> bool:
            if self.is_matmul(v):
                return True
            of = [x for x in self.arguments(v) if floating(x)]
            if v.op == "add" and any(x in found for x in of):
                of = [x for x in of if x not in self.inputs]
            moved = self.is_arithmetic(v) or self.is_move(v)
            return moved and bool(of) and all(x in found for x in of)

        found = set(self.values)
        while gone := {v for v in found if not made(v)}:
            found -= gone
        return found

    # To sentence 5.

    def moved(self, v: Value) -> list[Value]:
        """Gives the floating values that an operation moves, none if it is no move."""
        of = [x for x in self.arguments(v) if floating(x)]
        if v.op == "branches" and len(of) < sum(floating(x) for x in v.of):
            return []  # a number is no 16-bit value
        if self.scales(v):
            return [x for x in of if not self.is_mask(x)]
        return of if self.is_move(v) else []

    def is_half_move(self, v: Value) -> bool:
        """Whether an operation moves nothing but 16-bit values."""
        if v.op in LOOP:
            return self.sentence_4(v)
        moved = self.moved(v)
        return bool(moved) and all(x in self.half for x in moved)

    def is_for_backward(self, v: Value) -> bool:
        """Whether a scan stacks a value for the backward pass alone."""
        stacks = v.op == "stack of scan" and v not in self.back
        return stacks and all(r in self.back for r, _ in self.leaves(v))

    def is_mask(self, x: Any) -> bool:
        """Whether a value was boolean, and is moved and scaled by numbers at most."""
        if not isinstance(x, Value) or x in self.numbers:
            return False
        first = x.of[0] if x.op == "convert_element_type" else None
        if isinstance(first, Value) and first.dtype == np.bool_:
            return True
        of = [y for y in self.arguments(x) if floating(y)]
        scaled = (self.is_move(x) and x.op not in LOOP) or x.op in {"mul", "div"}
        return scaled and len(of) == 1 and self.is_mask(of[0])

    def scales(self, v: Value) -> bool:
        """Whether a value is multiplied by a mask, or by a number of 1 or more."""
        if v.op not in {"mul", "div"} or v.kept:
            return False
        if any(self.is_mask(x) for x in (v.of if v.op == "mul" else v.of[1:])):
            return True
        for i, x in enumerate(v.of):
            if self.is_number(x) and (v.op == "mul" or i == 1):
                n = self.size(x)
                return n is not None and (n >= 1 if v.op == "mul" else n <= 1)
        return False

    def is_recomputed_from(self, v: Value) -> bool:
        """Whether a scan stacks it, and a checkpoint in the backward pass reads it."""
        stacks = [r for r, _ in v.consumers if r.op == "stack of scan"]
        slices = [r for s in stacks for r, _ in s.consumers if r.op == "slice of scan"]
        return any(
            r.op == "into checkpoint" for s in slices if s.back for r, _ in s.consumers
        )

    def _gradients(self) -> set[Value]:
        """Finds gradients of matmuls and loops, and what is made of these."""
        found: set[Value] = set()
        for v in self.values:
            first = self.is_matmul(v) or v.op == "carry"
            summed = self.is_move(v) or v.op in SUMS
            made = first or (summed and any(x in found for x in v.of))
            if v in self.back and made:
                found.add(v)
        return found

    def is_softmax(self, x: Any) -> bool:
        """Whether a value is exponentials that are divided by their own sum, stored."""
        if x not in self.half:
            return False
        while isinstance(x, Value) and self.is_move(x) and len(x.of) == 1:
            x = x.of[0]
        if not isinstance(x, Value) or x.op != "div":
            return False
        top, below = x.of
        while isinstance(below, Value) and self.is_move(below) and len(below.of) == 1:
            below = below.of[0]
        sums = isinstance(below, Value) and below.op == "reduce_sum"
        return sums and below.of[0] is top and top.op == "exp"

    def is_summed_gradient(self, v: Value) -> bool:
        """Whether a gradient is read by arithmetic that feeds a matmul, and summed."""
        consumers = self.leaves(v)
        others = [r for r, i in consumers if not self.reads_as_matmul(r, i)]
        feeds = [self.is_arithmetic(r) and r in self.feeding for r in others]
        alone = all(r in self.back for r, _ in consumers) and not v.returned
        of = self.arguments(v)
        bad = any(x in self.inputs or self.is_softmax(x) for x in of)
        gradient = any(x in self.gradients for x in of)
        return any(feeds) and not all(feeds) and alone and gradient and not bad


def _loop(v: Value) -> tuple[Any, ...]:
    """Tells which of what loops carry a value belongs to."""
    return (v.place, *(id(x) if isinstance(x, Value) else x for x in v.of))


def _cycles(values: list[Value], stops: Any) -> set[Value]:
    """Finds what lies on a way from a value to itself, in a loop, without a matmul."""
    index: dict[Value, int] = {}
    low: dict[Value, int] = {}
    stack: list[Value] = []
    found: set[Value] = set()
    done: set[Value] = set()
    for start in values:
        if start in index or stops(start):
            continue
        todo = [(start, None)]
        while todo:
            v, of = todo.pop()
            if of is None:
                if v in index:
                    continue
                index[v] = low[v] = len(index)
                stack.append(v)
                # A scan has an iteration, and what that returns is the last value.
                of = v.of[1:] if v.op == "last" and "length" in v.params else v.of
                of = [x for x in of if isinstance(x, Value) and not stops(x)]
                todo.append((v, of))
                todo += [(x, None) for x in of if x not in index]
                continue
            for x in of:
                if x not in done:
                    low[v] = min(low[v], low[x])
            if low[v] == index[v]:
                group = [stack.pop()]
                while group[-1] is not v:
                    group.append(stack.pop())
                done |= set(group)
                if len(group) > 1 or v in of:
                    found |= set(group)
    return found
