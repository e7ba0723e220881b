"""Which primitives run in 16 bits, which in float32, and which follow their inputs.

The scheme is that of NVIDIA's automatic mixed precision, which Apex, TensorFlow and
PyTorch share: an allow list that gains from 16 bits, a deny list that is harmed by
them, and an infer list that may do either. Sources, named at each group below:

* [guide] NVIDIA, Train With Mixed Precision, "Automatic Mixed Precision",
  https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/
* [grappler] the lists in TensorFlow's ``auto_mixed_precision_lists.h``,
  https://github.com/tensorflow/tensorflow/tree/master/tensorflow/core/grappler/optimizers
* [torch] PyTorch, "Autocast Op Reference", https://pytorch.org/docs/stable/amp.html
* [jax] how the primitive is defined, transposed or lowered in JAX
"""

import dataclasses
import difflib
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checks import as_count, clipped, short
from .._jaxprs.jaxpr import (
    CALL_KINDS,
    Equation,
    Literal,
    Primitive,
    call_kind,
    is_float32,
    live_primitives,
    number_of,
    open_jaxpr,
    sub_jaxprs,
)
from .products import ATTENTION, PRODUCTS, is_matrix_product

# Values move or are chosen between, and none is rounded: [grappler]'s clear list.
_MOVE = """
    reshape broadcast_in_dim broadcast_to transpose squeeze rev slice split
    dynamic_slice dynamic_update_slice gather tile unstack stack concatenate pad copy
    stop_gradient name optimization_barrier tie device_put layout_constraint relayout
    sharding_constraint reshard with_memory_space_constraint pbroadcast pvary pcast"""
_CHOOSE = """
    select_n clamp max min eq ne lt le gt ge is_finite reduce_max reduce_min argmax
    argmin sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min
    scatter scatter-min scatter-max abs neg sign floor ceil round"""
_COMMUNICATE = "pmax pmin all_gather all_gather_invariant ppermute all_to_all"

# Elementwise, bounded or nearly linear: [grappler]'s infer list. A cube is here for
# the GELU approximation; other integer powers are treated as squares are, below.
_ROUND = """
    add sub mul div rem add_any atan2 sqrt sin cos tanh logistic erf erfc integer_pow
    one_minus_square"""

# The gradient of pooling adds up the few cotangents of a window.
_POOL = "select_and_scatter_add"

# Steep functions: float16 ends at 65504, exp(12) is beyond. [guide], [torch]
_STEEP = """
    exp exp2 expm1 log log1p log2 pow square rsqrt cbrt tan sinh cosh asin acos atan
    asinh acosh atanh erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a
    zeta bessel_i0e bessel_i1e regularized_incomplete_beta polynomial mulhi"""

# Sums lose small terms and overflow: losses, means, norms, gradients. [guide], [torch]
_SUM = """
    reduce_sum reduce_prod reduce cumsum cumprod cumlogsumexp reduce_window
    reduce_window_sum select_and_scatter select_and_gather_add scatter-add
    scatter-sub scatter-mul psum psum_invariant unreduced_psum
    unreduced_pmax unreduced_pmin reduce_scatter unreduced_reduce_scatter preduced
    symmetric_product"""

# Solvers that exist, or converge, in float32 only. [torch], [jax]
_SOLVE = """
    fft cholesky cholesky_update lu lu_pivots_to_permutation qr geqrf geqp3
    householder_product ormqr svd eig eigh eigh_jacobi schur hessenberg tridiagonal
    tridiagonal_solve triangular_solve custom_linear_solve"""

# Results that depend on the number format itself. [jax]
_FORMAT = """
    nextafter reduce_precision bitcast_convert_type convert_element_type to_edtype
    from_edtype complex real imag conj iota empty empty2 zeros_like rng_uniform
    random_gamma"""

# Integers, keys and tokens: nothing to narrow. [jax]
_DISCRETE = """
    and or xor not reduce_and reduce_or reduce_xor shift_left shift_right_logical
    shift_right_arithmetic population_count clz eq_to le_to lt_to iota_2x32_shape
    axis_index platform_index dim_as_value dimension_size shape_assertion after_all
    create_token rng_bit_generator random_bits random_clone random_fold_in random_seed
    random_split random_unwrap random_wrap threefry2x32 threefry4x32 philox2x32
    philox4x32"""

# Opaque: kernels, callbacks, references, other compilers, half-finished
# collectives. They see exactly the values that they were written for. [jax]
_OPAQUE = """
    pallas_call ffi_call call_exported pure_callback io_callback debug_callback
    debug_print custom_vmap_call custom_partitioning custom_transpose_call
    composite linear_call call_hi_primitive call_hi_primitive_linearized run_state
    core_map stage xla_pmap vmap call custom_jvp_call_jaxpr custom_lin remat_opt
    unreachable dce_sink check inspect_sharding new_ref empty_ref free_ref freeze get
    swap addupdate accum_grad_in_ref pin unpin create_linear new_box box_get box_set
    new_log log_extend log_read scaled_dot scaled_matmul scaled_matmul_wrapper
    cudnn_fusion bias_fwd bias_bwd dot_product_attention_fwd
    dot_product_attention_bwd dot_product_attention_fwd_wrapper
    dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd
    dot_product_attention_fp8_bwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fp8_bwd_wrapper full_to_shard shard_to_full pgather psend
    precv ragged_all_to_all pbroadcast_dynamic all_gather_reduced ag_start ag_done
    all_gather_start all_gather_done all_gather_reduced_start all_to_all_start
    all_to_all_done pbroadcast_start pbroadcast_done ppermute_start ppermute_done
    psum_start psum_done psum_invariant_start reduce_scatter_start reduce_scatter_done
    unreduced_psum_start unreduced_reduce_scatter_start
    reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p"""

# Those of them that may multiply matrices, of which nobody knows how many.
MAY_MULTIPLY = frozenset(
    name
    for name in _OPAQUE.split()
    if name.startswith(("dot_product_attention", "ffi_call", "pallas_call"))
)

# Primitives that hold jaxprs: autocast goes inside.
CALLS = frozenset(CALL_KINDS)
# Readers that make much of the last digits, log(1 - p) of a p near 1 for one: steep
# functions, solvers, and opaque code, which sees exactly what it was written for. So
# does a product of many numbers: what is off in all of them alike adds up.
_READS_NO_DIGITS = """
    square polynomial cbrt atan asinh mulhi fft householder_product ormqr
    debug_callback debug_print check inspect_sharding"""
_POWERS = "sqrt reduce_prod cumprod"
STEEP = frozenset(" ".join([_STEEP, _SOLVE, _OPAQUE, _POWERS]).split()) - frozenset(
    _READS_NO_DIGITS.split()
)
# Denied, and what is lost before them is lost behind them too.
_HANDS_ON = """
    square scatter-mul convert_element_type complex real
    imag"""
HANDS_ON = frozenset(_HANDS_ON.split())
EXACT = frozenset(" ".join([_MOVE, _CHOOSE, _COMMUNICATE]).split())
VIEWS = frozenset(_MOVE.split())

# What is moved or chosen from is the same number whether it is rounded before or after.
_PICK = """
    select_n clamp max min abs neg reduce_max reduce_min cummax cummin
    reduce_window_max reduce_window_min scatter scatter-min scatter-max"""
PICKS = frozenset(" ".join([_MOVE, _COMMUNICATE, _PICK]).split())
COMPARES = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "is_finite", "sign"])
EQUALITIES = frozenset({"eq", "ne"})
# The same magnitudes in another shape, order or place, or with another sign.
_KEEPS_MAGNITUDES = """
    reshape broadcast_in_dim broadcast_to transpose squeeze rev tile copy stop_gradient
    name optimization_barrier tie device_put layout_constraint relayout
    sharding_constraint reshard with_memory_space_constraint pbroadcast pvary pcast
    neg abs"""
KEEPS_MAGNITUDES = frozenset(_KEEPS_MAGNITUDES.split())
# Elementwise arithmetic, each entry of the result from one entry of each operand.
ARITHMETIC = frozenset(" ".join([_ROUND, _STEEP]).split())
SUMS = frozenset(" ".join([_SUM, _POOL]).split())
# Operations that mean nothing but what they were written for.
AS_WRITTEN = frozenset(" ".join([_FORMAT, _DISCRETE, _OPAQUE]).split())

# Where a bias, a mask or an embedding joins 16-bit values, and is rounded for it. Not a
# difference: what is left of it may be the digits lost. Not a factor: it may be 1e6.
JOINS = frozenset({"add"})
FACTORS = frozenset({"mul"})
# Where derivatives add up what several readers of a value have sent back.
ADDS_UP = frozenset({"add_any"})
# What they take is rounded in proportion to its size, and they hardly change where that
# is large: near 1, too, they are no further off than what they are computed from.
SQUASHES = frozenset({"logistic", "tanh", "erf", "erfc"})
# Whatever they are given, they return no more than 1.
BOUNDED = frozenset({"logistic", "tanh", "erf", "sin", "cos"})
EXTREMES = frozenset({"min", "max"})
# (1 + x)(1 - x), each part of which 16 bits would round.
OF_SEVERAL = frozenset({"one_minus_square"})
# What returns parts of an array, each of which has readers of its own.
CUTS = frozenset({"slice", "split", "dynamic_slice", "unstack"})
# What puts axes into another order.
TRANSPOSES = frozenset({"transpose"})
# What brings the shards of an array to every device.
GATHERS = frozenset({"all_gather", "all_gather_invariant"})
# Adds numbers at places: the gradient of a lookup.
ADDS_AT = frozenset({"scatter-add"})
# Besides products, what makes it worth going inside of what holds jaxprs.
STARTS = frozenset({"gather", "custom_vjp_call"}) | GATHERS | ADDS_AT
# Operations that stretch dimensions of size 1.
STRETCHES = frozenset(["add", "sub", "mul", "div", "rem", "atan2", "max", "min"])
# Operations whose transpose adds up what they have copied.
COPIES = frozenset(
    ["broadcast_in_dim", "gather", "tile", "pbroadcast", "pvary", "pcast"]
)

# For what no list can know: what is made of a product. Operations in which it stays a
# sum of products, those that scale it, and those that are harmed by its rounding.
LINEAR = frozenset(["add", "sub", "add_any", "select_n", "neg"]) | VIEWS
SCALES = frozenset({"mul", "div"})
DIVIDES = frozenset({"div"})
SHIFTS = frozenset({"add", "sub"})
DIFFERENCES = SHIFTS - JOINS
# Where a small number in the code keeps from zero what is divided by, or a logarithm.
GUARDS = SHIFTS | {"max", "clamp"}
PHASES = frozenset({"sin", "cos", "tan"})
ORDERS = frozenset({"lt", "le", "gt", "ge"})
SELECTS = frozenset({"select_n"})
EXPONENTIALS = frozenset({"exp"})
EXPS = EXPONENTIALS | {"expm1"}  # less one, or not
NEGATES = frozenset({"neg"})
ROUNDS = frozenset({"floor", "ceil", "round"})
CHOOSES = frozenset({"argmin", "argmax", "top_k", "approx_top_k", "sort"})
INVERTS = frozenset(["cholesky", "lu", "qr", "geqrf", "svd", "eig", "eigh", "schur"])
INVERTS |= {"triangular_solve", "tridiagonal", "hessenberg"}
INVERTS_SYMMETRIC = frozenset({"cholesky", "eigh"})
ROOTS = frozenset({"sqrt"})
TOTALS = frozenset({"reduce_sum"})
MAXIMA = frozenset({"reduce_max"})
REMAINDERS = frozenset({"rem"})
JOINS_TERMS = frozenset({"add", "sub", "add_any"})

# Of what is kept for the backward pass: moves that leave each number where it can be
# found, and choices that hardly change when what they choose from does.
_PARTS = frozenset(["slice", "split", "concatenate", "pad"])
_BARRIERS = frozenset({"optimization_barrier"})
_PLACED = frozenset({"name", "tie", "device_put"})
_MOVED = (KEEPS_MAGNITUDES | _PARTS) - _PLACED - _BARRIERS
_CHOSEN = EXTREMES | SELECTS | {"clamp"}
CASTS = frozenset({"convert_element_type", "reduce_precision"})
# Elementwise, and computed again at the price of a fusion. Not pads: a scan in parallel
# joins its halves by them on each level, and XLA would fuse each level into the next
# two, which takes gigabytes and minutes.
_COMPUTED_AGAIN = (ARITHMETIC - STEEP - REMAINDERS) | _MOVED | _CHOSEN | CASTS
_COMPUTED_AGAIN -= {"pad"}
# The same numbers each time, from what is given.
_LOGIC = frozenset({"and", "or", "not", "xor", "iota"})
_WHOLE_MOVES = VIEWS - _PLACED - {"gather"}
_REPEATABLE = ARITHMETIC | _WHOLE_MOVES | _CHOSEN | CASTS | COMPARES | _LOGIC
_REDUCES = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})
_TELLS = COMPARES | CHOOSES | ROUNDS
# Attention is an exponential of what it is given.
_READS_DIGITS = (STEEP | _TELLS | AS_WRITTEN | {ATTENTION}) - CASTS

# What an explanation calls operations; of all others it has the name of the primitive.
_WORDS: dict[str, frozenset[str]] = {
    "a matmul": PRODUCTS - {ATTENTION},
    "an attention": frozenset({ATTENTION}),
    "an exponential": EXPS,
    "a logarithm": frozenset({"log", "log1p", "log2"}),
    "a root": frozenset({"sqrt", "rsqrt", "cbrt"}),
    "a sum": TOTALS,
    "a running sum": frozenset({"cumsum"}),
    "a maximum": frozenset({"reduce_max", "max"}),
    "a minimum": frozenset({"reduce_min", "min"}),
    "a division": frozenset({"div"}),
    "a difference": frozenset({"sub"}),
    "a square": frozenset({"square"}),
    "a power": frozenset({"pow", "integer_pow"}),
    "a comparison": EQUALITIES | ORDERS,
    "a solver": frozenset(_SOLVE.split()) - {"fft"},
    "a cast": frozenset({"convert_element_type"}),
    "an addition": frozenset({"add", "add_any"}),
    "a multiplication": FACTORS,
}
_IN_WORDS = {name: words for words, names in _WORDS.items() for name in names}

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


def one_of(names: Iterable[str]) -> Callable[[Equation], bool]:
    """Returns a test whether an equation is one of some operations."""
    names = frozenset(names)
    return lambda eqn: eqn.primitive.name in names


is_power = one_of({"integer_pow"})
is_iota = one_of({"iota"})  # makes an array that counts, from nothing
rounds_to_integers = one_of({"round"})  # as floats
is_barrier = one_of(_BARRIERS)  # only says when what it takes is computed
is_placed = one_of(_PLACED)  # says what `jax.checkpoint` does with a value
is_repeatable = one_of(_REPEATABLE)  # elementwise or a move
is_elementwise = one_of(_REPEATABLE - COMPARES)  # what is lost before is lost behind
reduces = one_of(_REDUCES)  # makes a statistic of many numbers
# Makes one truth value of many.
reduces_tests = one_of(
    {"reduce_and", "reduce_or", "reduce_min", "reduce_max", "reduce"}
)


def is_steep_power(eqn: Equation) -> bool:
    """Whether ``eqn`` is a square or another power, but a cube.

    Squares leave the range of float16 beyond 256.

    A cube does so sooner. Where it occurs, in GELU's approximation, it joins the value
    that it was made of, and is squashed at once.
    """
    ins = eqn.invars
    if is_power(eqn):
        return eqn.params["y"] != 3
    is_product = eqn.primitive.name == "mul"
    return is_product and not isinstance(ins[0], Literal) and ins[0] is ins[1]


def is_square(eqn: Equation) -> bool:
    """Whether ``eqn`` squares its input, in any spelling."""
    if is_power(eqn):
        return eqn.params["y"] == 2
    if eqn.primitive.name == "pow":
        return getattr(eqn.invars[1], "val", None) == 2
    return eqn.primitive.name == "square" or is_steep_power(eqn)


def divisor(eqn: Equation) -> int | None:
    """Returns which input of ``eqn`` is a divisor, if one is."""
    name = eqn.primitive.name
    if name == "div":
        return 1
    return 0 if name == "integer_pow" and eqn.params["y"] < 0 else None


def is_computed_again(eqn: Equation) -> bool:
    """Whether ``eqn`` is elementwise or a move, and forgives rounded inputs."""
    if call_kind(eqn) in ("jit", "custom_jvp"):
        bodies = map(open_jaxpr, sub_jaxprs(eqn))
        return all(is_computed_again(inner) for body in bodies for inner in body.eqns)
    return eqn.primitive.name in _COMPUTED_AGAIN or holds_back(eqn)


def is_moved(eqn: Equation) -> bool:
    """Whether ``eqn`` returns what it is given in another place, shape or dtype."""
    return eqn.primitive.name in _MOVED | CASTS or holds_back(eqn)


def reads_digits(eqn: Equation, place: int) -> bool:
    """Whether ``eqn`` makes much of the last digits of an input, or is unknown."""
    name = eqn.primitive.name
    if name == _POOL:  # which compares what was pooled, and adds up its gradient
        return place == 1
    return name in _READS_DIGITS or name not in _KNOWN or divisor(eqn) == place


def holds_back(eqn: Equation) -> bool:
    """Whether ``eqn`` does nothing but to keep one value from being fused."""
    return is_barrier(eqn) and len(eqn.invars) == 1


def in_words(eqn: Equation) -> str:
    """Returns what an explanation calls an operation."""
    name: str = eqn.primitive.name
    if name in PRODUCTS and not is_matrix_product(eqn):
        return "a product"
    return _IN_WORDS.get(name) or name


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
    if eqn.primitive.name not in ("mul", "div"):
        return False
    numbers = [x.val for x in eqn.invars if isinstance(x, Literal) and is_float32(x)]
    return any(map(is_far, numbers))


def scales_down(eqn: Equation) -> bool:
    """Whether ``eqn`` multiplies by a number below one, as a mean does with a sum."""
    if eqn.primitive.name not in ("mul", "div"):
        return False
    numbers = [number_of(x) for x in eqn.invars]
    sizes = [abs(x) for x in numbers if x is not None]
    is_ratio = eqn.primitive.name == "div"
    return any(x > 1 if is_ratio else 0 < x < 1 for x in sizes)


def is_far(number: Any) -> bool:
    """Whether to multiply by ``number`` brings a value into range, or out of it."""
    if number is None or getattr(number, "ndim", 0):
        return False
    return not 2**-8 <= abs(number or 1) <= 2**8


def _name(primitive: str | Primitive) -> str:
    name = primitive.name if isinstance(primitive, Primitive) else primitive
    if not isinstance(name, str):
        raise TypeError(
            f"`OpLists` holds names of JAX primitives, but got {short(primitive)}. "
            'Pass for example `jaxmp.DEFAULT_OPS.with_deny("tanh")`. To keep a '
            "function of yours in float32, type `jaxmp.float32_region(fun)`."
        )
    return name


def _meant_by(name: str, known: Iterable[str]) -> str:
    """Says what a name that no primitive has may mean."""
    close = difflib.get_close_matches(name, known)
    text = f"Near it: {', '.join(f'`{c}`' for c in close) or 'none'}."
    for module in (jax.nn, jnp):
        if callable(getattr(module, name, None)):  # of several primitives
            fun = f"{module.__name__}.{name}"
            return f"{text} Type `jaxmp.float32_region({fun})` for the function."
    return text


_LISTS = ("allow", "deny", "infer")


@dataclasses.dataclass(frozen=True)
class OpLists:
    """The lists of primitives by which autocast chooses dtypes.

    A primitive in no list is denied. Primitives that contain a function, such as
    ``scan`` and ``cond``, are in no list: autocast goes inside them, unless they are
    denied.

    Attributes:
        allow: Run in 16 bits if they are matmuls with sums in them.
        deny: Run in the dtypes that the function was written in.
        infer: Run in 16 bits if their inputs are 16-bit and the rules of autocast allow
            it.
        rounds_products: Whether every matmul returns 16 bits, see
            :meth:`with_rounded_products`.
        min_size: The smallest size of a matmul that runs in float8, see
            :meth:`with_fp8`.

    Examples:
        >>> ops = jaxmp.DEFAULT_OPS.with_deny("tanh", "logistic")
        >>> "tanh" in ops.deny, "tanh" in ops.infer
        (True, False)
    """

    allow: frozenset[str]
    deny: frozenset[str]
    infer: frozenset[str]
    rounds_products: bool = dataclasses.field(default=False, kw_only=True)
    min_size: int = dataclasses.field(default=1024, kw_only=True)

    def __post_init__(self):
        """Normalises names and refuses unknown ones and contradictions."""
        object.__setattr__(self, "min_size", as_count("min_size", self.min_size))
        for field in _LISTS:
            names = getattr(self, field)
            names = names if isinstance(names, Iterable) else [names]
            names = [names] if isinstance(names, str) else names
            object.__setattr__(self, field, frozenset(map(_name, names)))
        for name in sorted((self.allow | self.deny | self.infer) - _KNOWN):
            live = live_primitives()
            if name not in live:
                raise ValueError(
                    f"`{clipped(name)}` is not the name of a JAX primitive. "
                    f"{_meant_by(name, _KNOWN | live.keys())} "
                    "`print(jaxmp.DEFAULT_OPS)` lists them; a `Primitive` works too."
                )
        for name in sorted((self.allow | self.infer) & CALLS):
            raise ValueError(
                f"`{name}` holds a function, and autocast goes inside. It can only be "
                f'denied: `ops.with_deny("{name}")` keeps all of it as it was written.'
            )
        twice = (
            (self.allow & self.deny)
            | (self.allow & self.infer)
            | (self.deny & self.infer)
        )
        if twice:
            raise ValueError(
                f"`{min(twice)}` is in two lists of `OpLists`. `with_allow`, "
                "`with_deny` and `with_infer` move a name from one to another."
            )

    def with_allow(self, *primitives: str | Primitive) -> "OpLists":
        """Returns lists in which ``primitives`` run in 16 bits."""
        return self._moved("allow", primitives)

    def with_deny(self, *primitives: str | Primitive) -> "OpLists":
        """Returns lists in which ``primitives`` keep their original dtypes."""
        return self._moved("deny", primitives)

    def with_infer(self, *primitives: str | Primitive) -> "OpLists":
        """Returns lists in which ``primitives`` follow their inputs."""
        return self._moved("infer", primitives)

    def with_rounded_products(self) -> "OpLists":
        """Returns lists with which every matmul returns 16 bits, as in torch.amp.

        By default a matmul returns its float32 sums if the reader computes in float32:
        attention scores and logits for a softmax, weight gradients for the user.
        Rounded, they take half of the memory traffic, and have the accuracy of a model
        that is cast as a whole. Float32 regions and ``float32_paths`` still get the
        float32 sums. A result beyond the range of float16 becomes its largest number in
        the forward pass. In the backward pass it becomes infinite, so that the step is
        skipped.

        Examples:
            >>> ops = jaxmp.DEFAULT_OPS.with_rounded_products()
            >>> def scores(q, k):
            ...     return jax.nn.softmax(q @ k.T)
            >>> q = jnp.ones((2, 4))
            >>> jaxmp.autocast(scores, ops=ops)(q, q).dtype
            dtype('float32')

        References:
            PyTorch, "Autocast Op Reference", https://pytorch.org/docs/stable/amp.html
        """
        return dataclasses.replace(self, rounds_products=True)

    def with_fp8(self, *, min_size: int) -> "OpLists":
        """Returns lists with another limit for matmuls in float8.

        Under a policy with ``d=fp8``, such as ``"mixed_fp8"``, a matmul of a matrix
        ``[m, k]`` and a matrix ``[k, n]`` runs in float8 if ``m``, ``k`` and ``n`` are
        multiples of 16 and none is below ``min_size``. The default is 1024: for smaller
        matmuls, finding the scales and rounding takes longer than float8 gains.

        Args:
            min_size: At least 1. Use 16 in a test, where speed does not matter.

        Raises:
            ValueError: If ``min_size`` is below 1.
            TypeError: If it is not an integer.

        Examples:
            >>> ops = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
            >>> def layer(x, w):
            ...     return x @ w
            >>> x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
            >>> jaxmp.audit(jaxmp.autocast(layer, "mixed_fp8", ops=ops))(x, x).flops
            {'float8_e4m3fn': 8192.0}
        """
        return dataclasses.replace(self, min_size=min_size)

    def _moved(self, to: str, primitives: tuple[str | Primitive, ...]) -> "OpLists":
        names = frozenset(map(_name, primitives))
        lists: dict[str, Any] = {
            field: getattr(self, field) - names for field in _LISTS
        }
        return dataclasses.replace(self, **{**lists, to: lists[to] | names})

    def __repr__(self) -> str:
        """Spells how the lists differ from the default ones, which are long."""
        names = {field: getattr(self, field) for field in _LISTS}
        default = {name: getattr(DEFAULT_OPS, name) for name in names}
        if frozenset().union(*default.values()) - frozenset().union(*names.values()):
            lists = [f"{name}={sorted(ops)}" for name, ops in names.items()]
            lists += ["rounds_products=True"] * self.rounds_products
            if self.min_size != DEFAULT_OPS.min_size:
                lists.append(f"min_size={self.min_size}")
            return f"OpLists({', '.join(lists)})"
        text = "DEFAULT_OPS"
        for name, ops in names.items():
            if moved := sorted(ops - default[name]):
                text += f".with_{name}({', '.join(map(repr, moved))})"
        text += ".with_rounded_products()" * self.rounds_products
        if self.min_size != DEFAULT_OPS.min_size:
            text += f".with_fp8(min_size={self.min_size})"
        return text

    def __str__(self) -> str:
        """Lists the names, one paragraph a list."""
        paragraphs = [
            textwrap.fill(
                f"{field}: {' '.join(sorted(getattr(self, field)))}",
                width=88,
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            for field in _LISTS
        ]
        paragraphs += ["Every matmul returns 16 bits."] * self.rounds_products
        if self.min_size != DEFAULT_OPS.min_size:
            paragraphs.append(f"In float8: matmuls of sizes from {self.min_size} on.")
        return "\n".join(paragraphs)


_INFER = " ".join([_MOVE, _CHOOSE, _COMMUNICATE, _ROUND, _POOL])
_DENY = " ".join([_STEEP, _SUM, _SOLVE, _FORMAT, _DISCRETE, _OPAQUE])
_KNOWN = frozenset(" ".join([_INFER, _DENY]).split()) | PRODUCTS | CALLS

DEFAULT_OPS = OpLists(
    allow=PRODUCTS,
    deny=frozenset(_DENY.split()),
    infer=frozenset(_INFER.split()),
)
