"""What is known of each primitive of JAX: a table with a row for each.

Whoever asks what autocast does with ``cumsum`` reads its row, and what its class and
its traits mean above the table. Below it are tests of equations, which the rows answer.

The classes are those of NVIDIA's automatic mixed precision, which Apex, TensorFlow and
PyTorch share: what gains from 16 bits, what is harmed by them, and what may do either.
Sources, named at each class:

* [guide] NVIDIA, Train With Mixed Precision, "Automatic Mixed Precision",
  https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/
* [grappler] the lists in TensorFlow's ``auto_mixed_precision_lists.h``,
  https://github.com/tensorflow/tensorflow/tree/master/tensorflow/core/grappler/optimizers
* [torch] PyTorch, "Autocast Op Reference", https://pytorch.org/docs/stable/amp.html
* [jax] how the primitive is defined, transposed or lowered in JAX
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .._jaxprs.jaxpr import (
    Equation,
    Literal,
    call_kind,
    is_cast,
    is_float32,
    number_of,
    open_jaxpr,
    sub_jaxprs,
)
from .._jaxprs.sizes import size_of
from .products import is_matrix_product

# The list that each class is in by default, see :class:`~jaxmp.OpLists`, and what it
# does with its inputs. What is in no row is float32, and reads the last digits.
CLASSES = {
    # Takes 16 bits and adds up in float32. [guide], [torch]
    "matmul": "allow",
    # Moves, sends or chooses: these return numbers that they were given, and what their
    # consumers need of the result, they need of the inputs. [grappler]'s clear list
    "move": "infer",
    "send": "infer",
    "choice": "infer",
    # These round nothing, and return truth values, places, or whole numbers. They read
    # float32. [grappler]'s clear list
    "comparison": "infer",
    "sort": "infer",
    "to whole": "infer",
    # Elementwise, bounded or nearly linear: it follows its inputs, and hands on to them
    # what is needed of the result. [grappler]'s infer list
    "arithmetic": "infer",
    # Adds up the few cotangents of a window.
    "pooling": "infer",
    # Elementwise: float16 ends at 65504, exp(12) is beyond. What is lost before is lost
    # behind, too. [guide], [torch]
    "steep": "deny",
    # Loses small terms and overflows: losses, means, norms, gradients. [guide], [torch]
    "sum": "deny",
    # Exists, or converges, in float32 only. [torch], [jax]
    "solver": "deny",
    # Has a result that depends on the number format itself. [jax]
    "format": "deny",
    # Integers, keys and tokens: nothing to round. [jax]
    "discrete": "deny",
    # Kernels, callbacks, references, other compilers, half-finished collectives. They
    # see exactly the values that they were written for. [jax]
    "opaque": "deny",
    # Holds functions: autocast goes inside.
    "call": "none",
}

# Our own, in a program that is replayed with its roundings: what is stored in 8 bits.
ROUNDED = "rounded_value"

# Each row has one primitive or several that are alike, their class, their traits, and
# what an explanation calls them, if not by their names. The traits:
#
# digits: makes much of the last digits of what it reads, as log(1 - p) does of a p near
#     1. So does a product of many numbers: what is off in all of them alike adds up
# hands on: what is lost before is lost behind, too, as where it is elementwise
# adds, scales: adds up or takes away, multiplies or divides entry by entry
# squashes: what it takes is rounded in proportion to its size, and it hardly changes
#     where that is large: near 1, too, it is no further off than what it is made of
# whole: returns all magnitudes that it was given, in another shape, order or place
# cuts: returns parts of an array, each of which has consumers of its own
# copies: its transpose adds up what it has copied
# placed: says what `jax.checkpoint` does with a value
# inverts: solves or factorises, which amplifies the errors of a matrix
# multiplies: may multiply matrices, nobody knows how many
_TABLE = """
dot_general ragged_dot_general conv_general_dilated | matmul | | a matmul
dot_product_attention | matmul | | an attention
linear_cross_entropy | matmul | | a loss head

reshape broadcast_to transpose squeeze rev copy stop_gradient | move | whole |
broadcast_in_dim tile pbroadcast pvary pcast | move | whole, copies |
layout_constraint relayout sharding_constraint reshard | move | whole |
with_memory_space_constraint optimization_barrier | move | whole |
name tie device_put | move | whole, placed |
slice split dynamic_slice unstack | move | cuts |
gather | move | copies |
concatenate stack pad dynamic_update_slice | move | |
pmax pmin all_gather all_gather_invariant ppermute all_to_all | send | |
select_n clamp scatter scatter-min scatter-max | choice | |
max reduce_max | choice | | a maximum
min reduce_min | choice | | a minimum
cummax cummin reduce_window_max reduce_window_min | choice | |
abs neg | choice | whole |
eq ne lt le gt ge | comparison | | a comparison
is_finite sign | comparison | |
argmax argmin sort top_k approx_top_k | sort | |
floor ceil round | to whole | |

add add_any | arithmetic | hands on, adds | an addition
sub | arithmetic | hands on, adds | a difference
mul | arithmetic | hands on, scales | a multiplication
div | arithmetic | hands on, scales | a division
sqrt | arithmetic | hands on, digits | a root
tanh logistic erf erfc | arithmetic | hands on, squashes |
sin cos atan2 one_minus_square | arithmetic | hands on |
rem | arithmetic | hands on, digits | a remainder
select_and_scatter_add | pooling | |

exp exp2 expm1 | steep | hands on, digits | an exponential
log log1p log2 | steep | hands on, digits | a logarithm
rsqrt | steep | hands on, digits | a root
cbrt | steep | hands on | a root
pow | steep | hands on, digits | a power
integer_pow | steep | hands on | a power
square | steep | hands on | a square
tan sinh cosh asin acos acosh atanh erf_inv | steep | hands on, digits |
lgamma digamma polygamma igamma igammac igamma_grad_a | steep | hands on, digits |
zeta bessel_i0e bessel_i1e regularized_incomplete_beta | steep | hands on, digits |
atan asinh polynomial mulhi | steep | hands on |

reduce_sum | sum | | a sum
cumsum | sum | | a running sum
reduce_prod cumprod | sum | digits |
scatter-mul | sum | hands on |
scatter-add scatter-sub reduce cumlogsumexp reduce_window reduce_window_sum | sum | |
select_and_scatter select_and_gather_add symmetric_product | sum | |
psum psum_invariant unreduced_psum unreduced_pmax unreduced_pmin | sum | |
reduce_scatter unreduced_reduce_scatter preduced | sum | |

cholesky lu qr svd eig eigh schur | solver | digits, inverts | a solver
triangular_solve geqrf tridiagonal hessenberg | solver | digits, inverts | a solver
tridiagonal_solve custom_linear_solve eigh_jacobi geqp3 | solver | digits | a solver
cholesky_update lu_pivots_to_permutation | solver | digits | a solver
householder_product ormqr | solver | | a solver
fft | solver | |

convert_element_type | format | hands on | a cast
rounded_value | format | hands on | a cast
complex real imag | format | hands on |
reduce_precision nextafter bitcast_convert_type to_edtype from_edtype conj | format | |
iota empty empty2 zeros_like rng_uniform random_gamma | format | |

and or xor not reduce_and reduce_or reduce_xor population_count clz | discrete | |
shift_left shift_right_logical shift_right_arithmetic eq_to le_to lt_to | discrete | |
iota_2x32_shape axis_index platform_index dim_as_value | discrete | |
dimension_size shape_assertion after_all create_token | discrete | |
random_bits random_seed random_split random_fold_in random_clone | discrete | |
random_wrap random_unwrap rng_bit_generator | discrete | |
threefry2x32 threefry4x32 philox2x32 philox4x32 | discrete | |

pallas_call ffi_call call_exported | opaque | digits, multiplies |
dot_product_attention_fwd dot_product_attention_bwd | opaque | digits, multiplies |
dot_product_attention_fwd_wrapper | opaque | digits, multiplies |
dot_product_attention_bwd_wrapper | opaque | digits, multiplies |
dot_product_attention_fp8_fwd | opaque | digits, multiplies |
dot_product_attention_fp8_bwd | opaque | digits, multiplies |
dot_product_attention_fp8_fwd_wrapper | opaque | digits, multiplies |
dot_product_attention_fp8_bwd_wrapper | opaque | digits, multiplies |
scaled_dot scaled_matmul scaled_matmul_wrapper cudnn_fusion | opaque | digits |
pure_callback io_callback | opaque | digits |
debug_callback debug_print check inspect_sharding | opaque | |
custom_vmap_call custom_partitioning custom_transpose_call | opaque | digits |
composite linear_call call_hi_primitive call_hi_primitive_linearized | opaque | digits |
run_state core_map stage xla_pmap call custom_jvp_call_jaxpr | opaque | digits |
custom_lin remat_opt unreachable dce_sink create_linear | opaque | digits |
new_ref empty_ref free_ref freeze get swap addupdate | opaque | digits |
accum_grad_in_ref pin unpin new_box box_get box_set | opaque | digits |
new_log log_extend log_read full_to_shard shard_to_full | opaque | digits |
psend precv ragged_all_to_all pbroadcast_dynamic | opaque | digits |
all_gather_reduced ag_start ag_done all_gather_start all_gather_done | opaque | digits |
all_gather_reduced_start all_to_all_start all_to_all_done | opaque | digits |
pbroadcast_start pbroadcast_done ppermute_start ppermute_done | opaque | digits |
psum_start psum_done psum_invariant_start unreduced_psum_start | opaque | digits |
reduce_scatter_start reduce_scatter_done | opaque | digits |
unreduced_reduce_scatter_start reduced_vary_cast | opaque | digits |
reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p | opaque | digits |

jit closed_call eval_jaxpr remat2 scan while cond shard_map | call | |
custom_jvp_call custom_vjp_call | call | |
"""


class Entry(NamedTuple):
    """What is known of a primitive."""

    kind: str
    traits: tuple[str, ...]
    words: str


def _rows() -> dict[str, Entry]:
    rows: dict[str, Entry] = {}
    for line in filter(None, _TABLE.splitlines()):
        names, kind, traits, words = map(str.strip, line.split("|"))
        row = Entry(kind, tuple(traits.split(", ")), words)
        rows.update(dict.fromkeys(names.split(), row))
    return rows


TABLE = _rows()
_NAMES = {name for row in TABLE.values() for name in (row.kind, *row.traits)}


def named(*kinds_or_traits: str) -> frozenset[str]:
    """Returns the primitives of one of some classes, or with one of some traits."""
    wanted = set(kinds_or_traits)
    assert wanted <= _NAMES, wanted - _NAMES
    return frozenset(
        name
        for name, row in TABLE.items()
        if row.kind in wanted or not wanted.isdisjoint(row.traits)
    )


def one_of(names: str | Iterable[str]) -> Callable[[Equation], bool]:
    """Returns a test whether an equation is one of some operations."""
    names = frozenset(names.split() if isinstance(names, str) else names)
    assert names <= TABLE.keys(), names - TABLE.keys()
    return lambda eqn: eqn.primitive.name in names


def _has(*kinds_or_traits: str) -> Callable[[Equation], bool]:
    return one_of(named(*kinds_or_traits))


# Classes, alone and together.
is_known = one_of(TABLE)
is_product_of_any_kind = _has("matmul")  # in whatever dtype, with or without sums
is_view = _has("move")  # returns what it was given in another shape or place
picks = _has("move", "send", "choice")  # returns numbers that it was given
is_exact = _has("move", "send", "choice", "comparison", "sort", "to whole")
compares = _has("comparison")
pools = _has("pooling")
sorts = _has("sort")  # returns some of the numbers it was given, or their places
# What is taken away from what these return is taken away from what they are given.
holds = _has("move", "send", "choice", "to whole")
is_arithmetic = _has("arithmetic", "steep")  # each entry of one of each operand
is_sum = _has("sum", "pooling")
# Computes what its dtype has to round.
rounds = _has("matmul", "arithmetic", "steep", "sum", "pooling", "solver", "opaque")

# Traits.
_copies = _has("copies")
hands_on = _has("hands on")
adds_terms = _has("adds")
multiplies = _has("scales")
squashes = _has("squashes")
keeps_magnitudes = _has("whole")
cuts = _has("cuts")
is_placed = _has("placed")
inverts = _has("inverts")
may_multiply = _has("multiplies")

# Single ones, by what they do.
joins = one_of("add")  # a bias, a mask or an embedding, rounded to join 16-bit values
sums_entries = one_of("add add_any")  # the same, in either pass
subtracts = one_of("sub")
multiplies_entries = one_of("mul")
divides = one_of("div")
is_extreme = one_of("max min")
is_greatest = one_of("max")
is_sigmoid = one_of("logistic")
is_bounded = one_of("tanh logistic erf sin cos")  # returns no more than 1
# May be given an operand of size one along an axis.
stretches = one_of("add sub mul div rem atan2 max min")
guards = one_of("add sub max clamp")  # where a small number keeps a divisor from zero
selects = one_of("select_n")
tests_equal = one_of("eq ne")
tests = one_of("eq ne lt le gt ge")  # tells how two numbers compare
is_greater = one_of("gt")
_orders = one_of("lt le gt ge")
is_exponential = one_of("exp exp2 expm1")
is_logarithm = one_of("log log1p log2")
_makes_whole = _has("to whole")
is_phase = one_of("sin cos tan rem")  # of which the fraction of a turn matters
is_root = one_of("sqrt")
takes_root = one_of("sqrt rsqrt pow")
is_power = one_of("integer_pow")
is_of_several = one_of("one_minus_square")  # of which 16 bits would round each part
totals = one_of("reduce_sum")
is_magnitude = one_of("abs")
is_maximum = one_of("reduce_max")
transposes = one_of("transpose")
broadcasts = one_of("broadcast_in_dim")
gathers = one_of("all_gather all_gather_invariant")  # the shards, to every device
adds_at = one_of("scatter-add")  # the gradient of a lookup
inverts_symmetric = one_of("cholesky eigh")
reduces = one_of("reduce_sum reduce_max reduce_min reduce_prod")  # to a statistic
# Makes one truth value of many.
reduces_tests = one_of("reduce_and reduce_or reduce_min reduce_max reduce")

# Adds up, chooses, moves or casts: what is made of a product stays a sum of products.
is_linear = one_of(named("move", "adds") | {"select_n", "neg", "convert_element_type"})
_STEEP = named("digits")
_FORGIVING = TABLE.keys() - _STEEP - named("call")
_RETYPED = TABLE.keys() - named("format", "discrete", "opaque", "call")

# Of what is kept for the backward pass: moves that leave each number where it can be
# found, and choices that hardly change when what they choose from does.
_CASTS = frozenset({"convert_element_type", "reduce_precision", ROUNDED})
is_rounding = one_of(_CASTS)
_MOVED = (
    (named("whole") | {"slice", "split", "concatenate", "pad"})
    - named("placed")
    - {"optimization_barrier"}
)
_CHOSEN = frozenset({"min", "max", "select_n", "clamp"})
# Elementwise, and computed again at the price of a fusion. Not pads: a scan in parallel
# joins its halves by them on each level, and XLA would fuse each level into the next
# two, which takes gigabytes and minutes.
_COMPUTED_AGAIN = (
    (named("arithmetic", "steep") - _STEEP - {"rem"})
    | (_MOVED - {"pad"})
    | _CHOSEN
    | _CASTS
)
# The same numbers each time, from what is given: elementwise or a move.
_ELEMENTWISE = (
    named("arithmetic", "steep", "move")
    | _CHOSEN
    | _CASTS
    | {"and", "or", "not", "xor", "iota"}
) - (named("placed") | {"gather"})
is_elementwise = one_of(_ELEMENTWISE)  # what is lost before is lost behind
is_repeatable = one_of(_ELEMENTWISE | named("comparison"))
# Attention is an exponential of what it is given, and so is a loss head.
_READS_DIGITS = (
    _STEEP
    | named("comparison", "sort", "to whole", "format", "discrete", "opaque")
    | {"dot_product_attention", "linear_cross_entropy"}
) - _CASTS

# What is known of numbers while tracing. With NumPy, because evaluating with JAX while
# tracing fails inside `shard_map`.
FOLDS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


# Returns the equation that computes a variable, None for what is given.
Definition = Callable[[Any], Equation | None]


def copies(eqn: Equation) -> bool:
    """Whether the transpose of ``eqn`` adds up what it has copied.

    To add axes of size one copies nothing.
    """
    sizes = (size_of(x.aval) for x in (*eqn.invars[:1], *eqn.outvars[:1]))
    return _copies(eqn) and not (broadcasts(eqn) and len({*sizes}) == 1)


def is_steep(eqn: Equation) -> bool:
    """Whether an equation makes much of the last digits, or is not known."""
    return eqn.primitive.name not in _FORGIVING


def is_as_written(eqn: Equation) -> bool:
    """Whether ``eqn`` means nothing but what it was written for, or is not known."""
    return eqn.primitive.name not in _RETYPED


def multiplies_itself(eqn: Equation) -> bool:
    """Whether ``eqn`` squares: beyond 256, a square is out of the range of float16."""
    if not multiplies_entries(eqn):
        return False
    x, y = eqn.invars
    return x is y and not isinstance(x, Literal)


def is_square(eqn: Equation) -> bool:
    """Whether ``eqn`` squares its input, in any spelling."""
    if is_power(eqn):
        return eqn.params["y"] == 2
    if eqn.primitive.name == "pow":
        return getattr(eqn.invars[1], "val", None) == 2
    return eqn.primitive.name == "square" or multiplies_itself(eqn)


def tests_sign(eqn: Equation) -> bool:
    """Whether ``eqn`` compares float32 numbers with zero."""
    orders = _orders(eqn) and is_float32(eqn.invars[0])
    return orders and number_of(eqn.invars[1]) == 0


def divisor(eqn: Equation) -> int | None:
    """Returns which input of ``eqn`` is a divisor, if one is."""
    if divides(eqn):
        return 1
    return 0 if is_power(eqn) and eqn.params["y"] < 0 else None


def is_computed_again(eqn: Equation) -> bool:
    """Whether ``eqn`` is elementwise or a move, and forgives rounded inputs."""
    if call_kind(eqn) in ("jit", "custom_jvp"):
        bodies = map(open_jaxpr, sub_jaxprs(eqn))
        return all(is_computed_again(inner) for body in bodies for inner in body.eqns)
    return eqn.primitive.name in _COMPUTED_AGAIN or holds_back(eqn)


def is_moved(eqn: Equation) -> bool:
    """Whether ``eqn`` returns what it is given in another place, shape or dtype."""
    return eqn.primitive.name in _MOVED | _CASTS or holds_back(eqn)


def reads_digits(eqn: Equation, place: int) -> bool:
    """Whether ``eqn`` makes much of the last digits of an input, or is unknown."""
    if pools(eqn):  # which compares what was pooled, and adds up its gradient
        return place == 1
    unknown = not is_known(eqn)
    return unknown or eqn.primitive.name in _READS_DIGITS or divisor(eqn) == place


def holds_back(eqn: Equation) -> bool:
    """Whether ``eqn`` does nothing but to keep one value from being fused."""
    return eqn.primitive.name == "optimization_barrier" and len(eqn.invars) == 1


def in_words(eqn: Equation) -> str:
    """Returns what an explanation calls an operation."""
    if is_product_of_any_kind(eqn) and not is_matrix_product(eqn):
        return "a product"
    row = TABLE.get(eqn.primitive.name)
    return (row and row.words) or eqn.primitive.name


def given_name(eqn: Equation) -> str | None:
    """Returns the name that ``checkpoint_name`` gives to a value, None for all else."""
    return eqn.params["name"] if eqn.primitive.name == "name" else None


def tests_finite(eqn: Equation) -> bool:
    """Whether ``eqn`` tells where an array is finite, or is not NaN."""
    name, ins = eqn.primitive.name, eqn.invars
    # `jnp.isnan` compares an array with itself.
    is_self = len(ins) == 2 and ins[0] is ins[1]
    return name == "is_finite" or (name in ("ne", "eq") and is_self)


def axes_of_softmax(eqn: Equation, definition: Definition) -> tuple[int, ...]:
    """Returns the axes over which the result of ``eqn`` sums to one, if any is known.

    It is a softmax then: exponentials, divided by their own sums.
    """

    def defined(atom, *names):
        found = definition(atom)
        return found if found and found.primitive.name in names else None

    if eqn.primitive.name != "div" or not defined(eqn.invars[0], "exp"):
        return ()
    spread = defined(eqn.invars[1], "broadcast_in_dim", "reshape")
    total = spread and defined(spread.invars[0], "reduce_sum")
    if not spread or not total or total.invars[0] is not eqn.invars[0]:
        return ()
    axes, shape = total.params["axes"], list(eqn.outvars[0].aval.shape)
    for i in axes:
        shape[i] = 1
    return tuple(axes) if list(spread.outvars[0].aval.shape) == shape else ()


def scales_far(eqn: Equation) -> bool:
    """Whether ``eqn`` brings a value back into range, or takes it out of it."""
    if not multiplies(eqn):
        return False
    numbers = [x.val for x in eqn.invars if isinstance(x, Literal) and is_float32(x)]
    return any(map(is_far, numbers))


def scales_down(eqn: Equation) -> bool:
    """Whether ``eqn`` multiplies by a number below one, as a mean does with a sum."""
    if not multiplies(eqn):
        return False
    numbers = [number_of(x) for x in eqn.invars]
    sizes = [abs(x) for x in numbers if x is not None]
    is_ratio = divides(eqn)
    return any(x > 1 if is_ratio else 0 < x < 1 for x in sizes)


def is_far(number: Any) -> bool:
    """Whether to multiply by ``number`` brings a value into range, or out of it."""
    if number is None or getattr(number, "ndim", 0):
        return False
    return not 2**-8 <= abs(number or 1) <= 2**8


def negates(eqn: Equation) -> bool:
    """Whether an equation changes the sign of what it is given."""
    if multiplies(eqn):
        numbers = (number_of(x) for x in eqn.invars)
        return any(x is not None and np.real(x) < 0 for x in numbers)
    return eqn.primitive.name == "neg"


def folded(eqn: Equation, numbers: list[Any]) -> Any:
    """Returns what ``eqn`` makes of arrays of one number each, or None."""
    name = eqn.primitive.name
    if name in FOLDS:
        with np.errstate(all="ignore"):
            return FOLDS[name](*numbers)
    if is_cast(eqn) and is_float32(eqn.outvars[0]):
        return np.float32(numbers[0])
    return numbers[0] if is_view(eqn) and len(numbers) == 1 else None


def is_saved(eqn: Equation) -> bool:
    """Whether an equation returns the float32 that it is given without rounding.

    A ``jax.checkpoint`` whose policy saves a value puts that behind it, so that XLA
    keeps no more digits of it in the forward pass.
    """
    if eqn.primitive.name != "reduce_precision":
        return False
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    return bits == (8, 23) and all(map(is_float32, eqn.invars))


def puts(eqn: Equation) -> bool:
    """Whether an equation puts arrays elsewhere, as into the memory of the host."""
    return eqn.primitive.name == "device_put"


def counts(eqn: Equation) -> bool:
    """Whether ``eqn`` makes whole numbers of float32, such as places in an array.

    What has been rounded before may be next to another one.
    """
    is_index = is_cast(eqn) and np.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
    return _makes_whole(eqn) or (is_index and is_float32(eqn.invars[0]))


def retypes(eqn: Equation) -> bool:
    """Whether an equation casts float32 to float32, of another weak type."""
    return is_cast(eqn) and all(map(is_float32, (*eqn.invars, *eqn.outvars)))
