"""Which products of a function run in which dtype, and what made them float32.

The function is traced, never run. One walk over its jaxpr follows every float32 value
back to its roots: float32 arguments, float32 constants, casts to float32. What a
matrix product or a convolution is charged to is what its float32 operands come from.
"""

import dataclasses
import functools
import inspect
import os
import re
import sys
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from . import _jaxpr, _scopes
from ._checks import check_function
from ._op_lists import CALLS, DEFAULT_OPS, VIEWS, is_square
from ._products import flops as flops_of
from ._products import has_default_precision

P = ParamSpec("P")

_WIDTH = 98  # of the table

# What the named scopes say of an operation that autocast kept.
_KEPT_BY = {
    _scopes.FLOAT32: "float32 region",
    _scopes.KEPT_BY_PATHS: "`float32_paths`",
    _scopes.KEPT_BY_OPS: "the lists in `ops`",
    _scopes.KEPT_BY_REFERENCE: "in a call that takes references",
}

# A line in one of these is nobody's mistake; the line that called it may be.
_JAX = os.path.dirname(jax.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\](flax|optax|haiku|equinox|chex|einops|jaxtyping)[/\\]"
    r"|^<frozen"
)


@dataclasses.dataclass(frozen=True)
class Leak:
    """One root cause of float32 products.

    Attributes:
        source: The argument's path, the constant, or the operation that casts.
        kind: ``"argument"``, ``"constant"``, ``"cast"`` or, where an operation that
            JAX alone knows made it float32, ``"unknown"``.
        dtype: The dtype that ``source`` brought in.
        meets_16bit: Whether it turned 16-bit work into float32; if not, nothing that
            it meets was 16-bit to begin with.
        module: Named scopes (Linen module path) where that happened.
        where: The line of the caller's code, ``file:line``. For a number in the code it
            is the line where the number stands, also if it is handed on from there to
            a jitted function. Where all the code is a library's, the line that called
            the audit.
        flops: FLOPs of the products that are float32 on its account. Two causes of
            one product both count it.
        share: ``flops`` as a share of all the FLOPs.

    Examples:
        >>> x, scale = jnp.ones((8, 8), jnp.bfloat16), jnp.ones(8)
        >>> report = jaxmp.audit(lambda x, scale: (x * scale) @ x)(x, scale)
        >>> (leak,) = report.leaks
        >>> leak.source, leak.kind, leak.meets_16bit, leak.share
        ('scale', 'argument', True, 1.0)
    """

    source: str
    kind: str
    dtype: str
    meets_16bit: bool
    module: str
    where: str
    flops: float
    share: float

    def __str__(self) -> str:
        """Says what happened, without place and size."""
        if self.kind == "unknown":
            return self.source
        if self.kind == "cast":
            return f"{self.source} from 16-bit to {self.dtype}"
        source = f"{self.source} ({self.dtype})"
        if self.kind == "constant":  # whose name says the dtype
            source = self.source
        met = "16-bit" if self.meets_16bit else self.dtype
        return f"{source} meets {met}"


@dataclasses.dataclass(frozen=True)
class Kept:
    """What :func:`jaxmp.autocast` left in float32, and why.

    Attributes:
        operation: Name of the JAX primitive.
        reason: Why it stayed.
        count: How many times it runs.
        flops: FLOPs, where it is a product.
        module: Named scopes of a product, else of the first such operation.
        where: ``file:line`` of a product, else of the first such operation.

    Examples:
        >>> kept_in_float32 = jaxmp.float32_region(jnp.matmul)
        >>> x = jnp.ones((8, 8))
        >>> report = jaxmp.audit(jaxmp.autocast(kept_in_float32))(x, x)
        >>> (row,) = report.kept
        >>> row.operation, row.count, row.flops
        ('dot_general', 1, 1024.0)
    """

    operation: str
    reason: str
    count: int
    flops: float
    module: str
    where: str


@dataclasses.dataclass(frozen=True)
class DtypeReport:
    """What :func:`jaxmp.audit` found.

    Attributes:
        flops: FLOPs of matrix products and convolutions by the dtype of their inputs,
            the wider one where they differ.
        leaks: Root causes of float32 products, worst first, each once.
        kept: What autocast left in float32 on purpose, products first.
        residual_bytes: Bytes by dtype of what the forward pass computes and keeps for
            the backward pass, arguments left out. None if JAX cannot differentiate
            the function.
        notes: What could not be counted exactly.
    """

    flops: dict[str, float]
    leaks: tuple[Leak, ...]
    kept: tuple[Kept, ...]
    residual_bytes: dict[str, int] | None
    notes: tuple[str, ...]

    @property
    def fraction_16bit(self) -> float:
        """Share of the FLOPs in at most 16 bits, 1 if there are no products."""
        total = sum(self.flops.values())
        wide = sum(n for name, n in self.flops.items() if _is_wide(jnp.dtype(name)))
        return 1 - wide / total if total else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON.

        Examples:
            >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> jaxmp.audit(jnp.matmul)(w, w).as_dict()["flops"]
            {'float32': 1024.0}
        """
        fields = dataclasses.asdict(self)
        for name in ("leaks", "kept", "notes"):
            fields[name] = list(fields[name])
        return {"fraction_16bit": self.fraction_16bit, **fields}

    def __str__(self) -> str:
        """Renders a table of at most 98 columns."""
        return "\n".join(_lines(self))


def audit(fun: Callable[P, Any]) -> Callable[P, DtypeReport]:
    """Reports in which dtypes ``fun`` multiplies matrices, and why not in 16 bits.

    Nothing runs: ``fun`` is traced with the shapes and dtypes of its arguments. Give
    it a forward pass, a loss, a gradient function or a whole training step.

    * **FLOPs**: a scan counts its length, a shard_map its devices, all branches of a
      cond count, a while loop counts once (and is noted). A product of two vectors
      or over an axis of size 1 is no matrix product. Kernels (Pallas) are noted, not
      counted.
    * **Leaks**: each float32 product is charged to the float32 arguments and array
      constants that reach it through float32 values; if there are none, to the casts
      from 16 bits; if there are none either, to arrays made in float32; and at the
      very last to numbers. A number is charged before all others where it meets a
      16-bit array itself, here or in a jitted function that it is handed to; one that
      meets other float32 values changes nothing. Float32 work that never reaches a
      product (softmax, normalisation, loss) is no leak. A backward product has the
      causes of the forward products of its line and module. No float32 product is
      without a cause: below 1, ``report.fraction_16bit`` has its reasons in
      ``report.leaks`` or ``report.kept``.
    * **Residuals**: if ``fun`` computes gradients, what its forward passes hand to
      its backward passes; otherwise, what differentiating it with respect to all its
      floating arguments would keep.
    * **Autocast**: products and arithmetic inside :func:`jaxmp.autocast` that stayed
      float32 are no leaks; ``report.kept`` says why they stayed.

    Args:
        fun: Function that JAX can trace.

    Returns:
        A function of the arguments of ``fun`` that returns a :class:`DtypeReport`.
        Arrays may be given as ``jax.ShapeDtypeStruct``; leaves that are not arrays
        reach ``fun`` as they are. Paths of arguments start at each argument.

    Raises:
        TypeError: If ``fun`` is not callable.

    Examples:
        >>> def model(params, x):
        ...     h = x @ params["w1"] * params["scale"]
        ...     return h @ params["w2"]
        >>> w = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        >>> scale = jax.ShapeDtypeStruct((64,), jnp.float32)
        >>> report = jaxmp.audit(model)({"w1": w, "scale": scale, "w2": w}, w)
        >>> report.fraction_16bit
        0.5
        >>> print(*report.leaks)
        scale (float32) meets 16-bit
    """
    check_function("audit", fun, "audit(fun)", "Type `audit(model.apply)(params, x)`.")

    @functools.wraps(fun)
    def audited(*args: P.args, **kwargs: P.kwargs) -> DtypeReport:
        flat, leaves, names = _flattened(fun, args, kwargs)
        jaxpr = jax.make_jaxpr(flat)(*leaves)
        body = _jaxpr.open_jaxpr(jaxpr)
        walk = _Walk()
        inputs = [
            walk.argument(name, var.aval)
            for name, var in zip(names, body.invars, strict=True)
        ]
        walk.run(jaxpr, inputs, _Place(user=_caller()))
        residuals = _handed_over(jaxpr)
        if residuals is None:
            residuals = _would_keep(flat, leaves)
        return walk.report(residuals)

    return audited


def assert_16bit(fun: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Fails with the whole report unless ``fun`` multiplies matrices in 16 bits only.

    One line of a test keeps float32 from coming back. What :func:`jaxmp.autocast`
    left in float32 fails as well, since it is as slow as a leak. Where that is wanted
    (``float32_paths``, ``float32_region``), write
    ``report = jaxmp.audit(fun)(*args)`` and ``assert not report.leaks, report``.

    Args:
        fun: Function that JAX can trace. It does not run.
        *args: Its arguments, as :func:`jaxmp.audit` takes them.
        **kwargs: Its keyword arguments.

    Raises:
        AssertionError: If a product of ``fun`` is float32 or wider.
        TypeError: If ``fun`` is not callable.

    Examples:
        >>> def model(w, x):
        ...     return jnp.tanh(x @ w) @ w
        >>> w = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
        >>> jaxmp.assert_16bit(model, w, w)
    """
    if not callable(fun):
        raise TypeError(
            f"`assert_16bit` expects a function, but got {type(fun).__name__}. Type "
            "`assert_16bit(fun, *args)`."
        )
    report = audit(fun)(*args, **kwargs)
    if report.fraction_16bit < 1:
        name = getattr(fun, "__name__", type(fun).__name__)
        problem = (
            f"`assert_16bit` expects all matrix products and convolutions of `{name}` "
            f"in 16 bits, but {1 - report.fraction_16bit:.1%} of their FLOPs are not."
        )
        if report.leaks:
            problem += " Change the lines under `float32 because of`."
        if report.kept:
            problem += (
                " If autocast keeps products in float32 because you said so, type "
                "`assert not jaxmp.audit(fun)(*args).leaks` instead."
            )
        raise AssertionError(f"{textwrap.fill(problem, _WIDTH - 16)}\n\n{report}")


def _flattened(
    fun: Callable, args: tuple, kwargs: dict
) -> tuple[Callable, list[Any], list[str]]:
    """Returns ``fun`` on its array leaves, these leaves and their names."""
    try:
        parameters = inspect.signature(fun).parameters.values()
        positional = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        parameters = [p.name for p in parameters if p.kind in positional]
    except (TypeError, ValueError):
        parameters = []
    parameters += [f"argument {i}" for i in range(len(parameters), len(args))]

    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for _, x in paths]
    leaves, names = [], []
    for ((part, first, *rest), leaf), traced in zip(paths, is_array, strict=True):
        if traced:
            path = jax.tree_util.keystr(tuple(rest), simple=True, separator="/")
            name = first.key if part.idx else parameters[first.idx]
            if not path or isinstance(rest[0], jax.tree_util.SequenceKey):
                path = f"{name}/{path}".rstrip("/")  # a number alone says nothing
            leaves.append(leaf)
            names.append(path)

    def flat(*arrays):
        arrays = iter(arrays)
        args, kwargs = tree.unflatten(
            next(arrays) if traced else leaf
            for (_, leaf), traced in zip(paths, is_array, strict=True)
        )
        out = jax.tree.leaves(fun(*args, **kwargs))
        return [x for x in out if isinstance(x, (jax.Array, np.ndarray, np.generic))]

    return flat, leaves, names


# The walk


class _Value(NamedTuple):
    """What the walk knows of a value.

    ``roots`` is a set of indices of causes, as the bits of an integer. It is empty
    for values of at most 16 bits: whatever made them wide has been undone.
    """

    roots: int = 0
    touched: bool = False  # computed from something 16-bit
    cast_at: Any = None  # where this was widened, if nothing else has happened since

    def __or__(self, other: "_Value") -> "_Value":
        return _Value(self.roots | other.roots, self.touched or other.touched)


@dataclasses.dataclass
class _Cause:
    """A root: where float32 came from, and where it first mattered."""

    source: str
    kind: str
    dtype: str
    place: Any = None  # (module, where) of the first meeting
    stays: bool = False  # in that place, wherever it meets something
    meets_16bit: bool = False
    flops: float = 0.0


class _Place(NamedTuple):
    """Where an equation is: its surroundings, or its own place in them."""

    scopes: tuple[str, ...] = ()
    user: Any = None  # innermost frame outside of all libraries
    author: Any = None  # the same outside of JAX only
    shared: bool = False  # inside a function with the lines of another caller
    backward: bool = False
    trips: int = 1
    opaque: str = ""  # the primitive around it that nothing is known of

    @property
    def instruction(self) -> tuple:
        return self.scopes, self.user

    @property
    def module(self) -> str:
        return _scopes.module_of(self.scopes)

    @property
    def where(self) -> str:
        return f"{self.user[0]}:{self.user[1]}" if self.user else ""

    def of(self, eqn: _jaxpr.JaxprEqn, before: "_Place") -> "_Place":
        """Returns the place of ``eqn`` in these surroundings.

        Some of JAX's own rules for ``grad`` write equations without a line. They
        belong to the equation before.
        """
        scopes = self.scopes + _jaxpr.scope_names(eqn)
        user, author = self.user, self.author
        if not self.shared:
            own = _lines_of(eqn)
            user, author = own if own[0] else (user, own[1] or author)
            if own == (None, None):
                user, author = before.user, before.author
                scopes = before.scopes if scopes == self.scopes else scopes
        return self._replace(
            scopes=scopes,
            user=user,
            author=author,
            backward=self.backward or _jaxpr.is_transposed(eqn),
        )

    def inside(self, eqn: _jaxpr.JaxprEqn, jaxpr: Any) -> "_Place":
        """Returns the surroundings of what is inside ``eqn``, which is here."""
        # JAX traces its own jitted functions once, with the lines of the first caller.
        is_jit = eqn.primitive.name in ("jit", "pjit", "custom_jvp_call")
        trips = _jaxpr.trip_count(eqn)
        return self._replace(
            shared=self.shared
            or "branches_platforms" in eqn.params
            or (is_jit and _jaxpr.defined_in(jaxpr).startswith(_JAX)),
            trips=self.trips * (1 if trips is None else trips),
            opaque=self.opaque
            or ("" if eqn.primitive.name in CALLS else eqn.primitive.name),
        )


@functools.cache
def _is_everybodys(file: str) -> bool:
    in_stdlib = file.startswith(_STDLIB) and "-packages" not in file
    return in_stdlib or file.startswith(_JAX) or file == __file__


@functools.cache
def _is_users(file: str) -> bool:
    is_library = file.startswith(_OWN) or _LIBRARIES.search(file)
    return not (_is_everybodys(file) or is_library)


def _caller() -> Any:
    """Returns the innermost running frame outside all libraries, as JAX's frames."""
    frame = sys._getframe()
    while frame and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)


def _lines_of(eqn: _jaxpr.JaxprEqn) -> tuple[Any, Any]:
    """Returns the innermost frames of ``eqn`` outside all libraries and outside JAX."""
    author = None
    for frame in _jaxpr.frames(eqn):
        if not _is_everybodys(frame[0]):
            author = author or frame
            if _is_users(frame[0]):
                return frame, author
    return None, author


class _Walk:
    """Follows float32 values through a jaxpr and adds up its products."""

    def __init__(self):
        self.flops: dict[str, float] = {}
        self.causes: list[_Cause] = []
        self.index: dict[Any, int] = {}  # of a cause, by what tells it from others
        # Causes are charged in this order: arguments, array constants and whatever
        # was seen to promote; casts; arrays made in float32; float32 numbers; numbers
        # without a dtype of their own.
        self.ranks = [0, 0, 0, 0, 0]
        self.placed = 0  # causes of which it is known where they matter
        self.met = 0  # those that have met something 16-bit
        self.forward: dict[Any, int] = {}  # causes of forward products, by place
        self.kept: dict[Any, Kept] = {}
        self.notes: dict[str, None] = {}  # an ordered set
        self.recording = True

    def cause(self, rank: int, key: Any, source: str, kind: str, dtype: Any) -> int:
        """Returns the bit of a cause, new or known."""
        if key not in self.index:
            self.index[key] = len(self.causes)
            self.causes.append(_Cause(source, kind, str(dtype)))
            self.ranks[rank] |= 1 << self.index[key]
        return 1 << self.index[key]

    def settle(self, causes: int, place: _Place, *, meets_16bit: bool) -> None:
        """Remembers where causes first met something else, at best 16-bit."""
        for bit in _bits(causes & ~(self.met if meets_16bit else self.placed)):
            cause = self.causes[bit]
            if not cause.stays:
                cause.place = (place.module, place.where)
            cause.meets_16bit = meets_16bit
        self.placed |= causes
        self.met |= causes if meets_16bit else 0

    def note(self, text: str, place: _Place) -> None:
        self.notes[f"{os.path.basename(place.where) or 'somewhere'}: {text}"] = None

    def argument(self, name: str, aval: Any) -> _Value:
        if not _is_wide_var(aval):
            return _Value(touched=_is_narrow_var(aval))
        key = ("argument", len(self.causes))
        return _Value(self.cause(0, key, name, "argument", aval.dtype))

    def constant(self, value: Any) -> _Value:
        aval = jax.typeof(value)
        if not _is_wide_var(aval):
            return _Value(touched=_is_narrow_var(aval))
        rank, name = 0, f"constant {aval.dtype}{[*aval.shape]}"
        if aval.size == 1 and not isinstance(value, _jaxpr.Tracer):
            rank, name = 3, _number(value)
        key = ("constant", id(value))
        return _Value(self.cause(rank, key, name, "constant", aval.dtype))

    def number(self, literal: _jaxpr.Literal, place: _Place) -> _Value:
        """Returns what is known of a number that stands in the code."""
        aval = _aval(literal)
        if not _is_wide_var(aval):
            return _Value()  # and no 16-bit work: a bare number is none
        text = _number(literal.val)
        # What JAX's own functions compute with is nobody's mistake either.
        weak = place.shared or getattr(aval, "weak_type", False)
        key = ("number", text, weak, place.module, place.where)
        root = self.cause(4 if weak else 3, key, text, "constant", aval.dtype)
        cause = self.causes[root.bit_length() - 1]
        cause.place, cause.stays = (place.module, place.where), True
        return _Value(root)

    def unknown(self, place: _Place, name: str, aval: Any) -> int:
        """Returns the bit of a float32 value of which nothing is known."""
        at = os.path.basename(place.where) or name
        source = f"{aval.dtype} of unknown origin at {at}"
        key = ("unknown", source, place.module, place.where)
        root = self.cause(2, key, source, "unknown", aval.dtype)
        self.settle(root, place, meets_16bit=False)
        return root

    def run(self, jaxpr: Any, inputs: Sequence[_Value], around: _Place) -> list[_Value]:
        """Walks a jaxpr and returns what is known of its outputs."""
        body = _jaxpr.open_jaxpr(jaxpr)
        consts = [self.constant(x) for x in _jaxpr.closed_consts(jaxpr)]
        env = dict(
            zip([*body.constvars, *body.invars], [*consts, *inputs], strict=True)
        )

        def read(atom, place):
            if isinstance(atom, _jaxpr.Literal):
                return self.number(atom, place)
            return env[atom]

        place = around
        for eqn in body.eqns:
            place = around.of(eqn, before=place)
            ins = [read(atom, place) for atom in eqn.invars]
            if eqn.primitive.name in CALLS:
                outs = self.call(eqn, ins, place)
            elif eqn.primitive.name != "pallas_call" and any(_jaxpr.sub_jaxprs(eqn)):
                outs = self.unknown_call(eqn, ins, place)
            else:
                outs = self.operation(eqn, ins, place)
            for var, out in zip(eqn.outvars, outs, strict=True):
                if not _is_wide_var(var.aval):
                    out = _Value(touched=_is_narrow_var(var.aval))
                elif not out.roots:
                    roots = self.unknown(place, eqn.primitive.name, var.aval)
                    out = out._replace(roots=roots)
                env[var] = out
        return [read(atom, around) for atom in body.outvars]

    def call(
        self, eqn: _jaxpr.JaxprEqn, ins: list[_Value], place: _Place
    ) -> list[_Value]:
        """Walks the bodies of an equation; a loop until its carry has settled."""
        layout = _jaxpr.call_layout(eqn)
        if _jaxpr.trip_count(eqn) is None:
            self.note("a while loop, counted as one trip", place)

        def bodies() -> list[list[_Value]]:
            return [
                self.run(
                    body.jaxpr,
                    [ins[i] for i in body.operands],
                    place.inside(eqn, body.jaxpr),
                )
                for body in _jaxpr.on_accelerator(eqn, layout.bodies)
            ]

        carries = [*zip(layout.fixed_in, layout.fixed_out, strict=True)]
        recording, self.recording = self.recording, False
        while carries:
            outs = bodies()[-1]
            fed_back = {i: ins[i] | outs[j] for i, j in carries}
            if all(fed_back[i] == ins[i] for i in fed_back):
                break
            ins = [fed_back.get(i, value) for i, value in enumerate(ins)]
        self.recording = recording

        *others, outs = bodies()
        if eqn.primitive.name == "cond":
            for other in others:
                outs = [a | b for a, b in zip(outs, other, strict=True)]
        elif eqn.primitive.name == "while":  # which may not run at all
            outs = [outs[j] | ins[i] for i, j in carries]
        return outs

    def unknown_call(
        self, eqn: _jaxpr.JaxprEqn, ins: list[_Value], place: _Place
    ) -> list[_Value]:
        """Walks the jaxprs of an equation of which nothing else is known."""
        mixed = functools.reduce(_Value.__or__, ins, _Value())
        for jaxpr in _jaxpr.sub_jaxprs(eqn):
            inputs = [mixed] * len(_jaxpr.open_jaxpr(jaxpr).invars)
            for out in self.run(jaxpr, inputs, place.inside(eqn, jaxpr)):
                mixed |= out
        return [mixed] * len(eqn.outvars)

    def operation(
        self, eqn: _jaxpr.JaxprEqn, ins: list[_Value], place: _Place
    ) -> list[_Value]:
        """Follows one equation without jaxprs."""
        name = eqn.primitive.name
        if name == "pallas_call":
            self.note("a Pallas kernel, its products not counted", place)
        floats = [
            (atom, value)
            for atom, value in zip(eqn.invars, ins, strict=True)
            if _is_wide_var(atom.aval) or _is_narrow_var(atom.aval)
        ]
        wide = [(a, v) for a, v in floats if _is_wide_var(a.aval)]
        wide_out = any(_is_wide_var(var.aval) for var in eqn.outvars)
        roots = self.roots(eqn, floats, wide, place) if wide or wide_out else 0
        touched = any(value.touched for _, value in floats)
        if self.recording and place.trips:
            flops = flops_of(eqn) * place.trips
            if flops:
                self.product(eqn, wide, roots, flops, place)
            elif wide_out and _scopes.AUTOCAST in place.scopes:
                self.keep(eqn, 0.0, place)

        cast_at, here = None, (place.instruction, place.author)
        arrays = [v for a, v in wide if not isinstance(a, _jaxpr.Literal)]
        if name == "convert_element_type" and floats and not wide:
            cast_at = here
        elif name in VIEWS and len(floats) == 1:
            cast_at = floats[0][1].cast_at
        elif arrays and all(value.cast_at == here for value in arrays):
            # Still inside the call that widened them, if no other cause was found.
            cast_at = here if roots == self.strongest(wide) else None
        return [_Value(roots, touched, cast_at)] * len(eqn.outvars)

    def roots(
        self, eqn: _jaxpr.JaxprEqn, floats: list, wide: list, place: _Place
    ) -> int:
        """Returns the causes of what ``eqn`` computes from or to float32.

        Where a value was widened only because of what it meets here, that is the
        cause, and not the value.
        """
        self.note_meetings(floats, place)
        widened, others = [], []
        for atom, value in wide:
            here = value.cast_at and value.cast_at[0] == place.instruction
            (widened if here else others).append((atom, value))
        roots = self.strongest(others or wide)
        own_dtype = roots & ~self.ranks[4]
        weak = not roots & (self.ranks[0] | self.ranks[1])
        if widened and others and weak and _is_wide_var(eqn.outvars[0].aval):
            if not own_dtype:
                roots = _union(widened)
            elif all(value.cast_at[1] == place.author for _, value in widened):
                self.promote(own_dtype, place)
            else:  # widened a step earlier, on purpose
                roots = self.strongest(wide)
        name, out = eqn.primitive.name, _aval(eqn.outvars[0])
        is_number = out.size == 1 and name in (*VIEWS, "convert_element_type")
        if any(is_number or not isinstance(a, _jaxpr.Literal) for a, _ in wide):
            return roots
        is_cast = bool(floats) and not wide
        if is_cast:
            source = "cast" if name == "convert_element_type" else name
            key = ("cast", source, place.module, place.where)
            root = self.cause(1, key, source, "cast", out.dtype)
        else:
            made_at = os.path.basename(place.where) or name
            source = f"{out.dtype}{[*out.shape]} made at {made_at}"
            if wide:
                source += f" of {', '.join(_number(atom.val) for atom, _ in wide)}"
            key = ("made", source, place.module, place.where)
            rank = 2 if out.size > 1 else 3
            root = self.cause(rank, key, source, "constant", out.dtype)
        self.settle(root, place, meets_16bit=is_cast)
        return root

    def strongest(self, operands: list) -> int:
        """Returns the causes of operands, of numbers only where there is nothing else.

        A number that meets an array, or one without a dtype that meets one with, leaves
        its dtype as it was. So does one in the line of an operation on other values.
        """
        arrays = [(a, v) for a, v in operands if not isinstance(a, _jaxpr.Literal)]
        roots = _union(arrays or operands)
        for numbers in reversed(self.ranks[3:]):
            roots = roots & ~numbers or roots
        return roots

    def promote(self, roots: int, place: _Place) -> None:
        """Charges numbers and arrays made in float32 with what they widened here."""
        self.ranks = [rank & ~roots for rank in self.ranks]
        self.ranks[0] |= roots
        self.settle(roots, place, meets_16bit=True)

    def note_meetings(self, floats: list, place: _Place) -> None:
        """Settles the causes that come with some operands and not with others."""
        if len(floats) < 2:
            return
        for i, (_, value) in enumerate(floats):
            others = floats[:i] + floats[i + 1 :]
            touched = any(other.touched for _, other in others)
            self.settle(value.roots & ~_union(others), place, meets_16bit=touched)

    def product(
        self,
        eqn: _jaxpr.JaxprEqn,
        wide: list,
        roots: int,
        flops: float,
        place: _Place,
    ) -> None:
        """Adds a matrix product or convolution to the totals and to its causes."""
        dtypes = [_aval(atom).dtype for atom in eqn.invars[:2]]
        dtype = str(max(dtypes, key=lambda d: d.itemsize))
        self.flops[dtype] = self.flops.get(dtype, 0.0) + flops
        key = (_without_repeats(place.scopes), place.user, eqn.primitive.name)
        if not wide:
            if _is_wide_var(eqn.outvars[0].aval) and not place.backward:
                self.forward.setdefault(key, roots)
            return
        if _scopes.AUTOCAST in place.scopes:
            return self.keep(eqn, flops, place)
        if place.backward:
            roots = self.forward.get(key) or roots
        else:
            self.forward[key] = self.forward.get(key, 0) | roots
        charged = next((roots & rank for rank in self.ranks if roots & rank), 0)
        self.settle(charged, place, meets_16bit=False)
        for bit in _bits(charged):
            self.causes[bit].flops += flops

    def keep(self, eqn: _jaxpr.JaxprEqn, flops: float, place: _Place) -> None:
        """Remembers why autocast left an operation in float32."""
        name = eqn.primitive.name
        if name in VIEWS or name in ("convert_element_type", "iota"):
            return
        written = next(filter(None, map(_KEPT_BY.get, place.scopes)), None)
        if written is not None:
            reason = written
        elif flops:
            reason = _why_kept(eqn, place)
        elif is_square(eqn):
            reason = "a square or a power"
        elif name in DEFAULT_OPS.deny:
            reason = "denied by list"
        elif name in DEFAULT_OPS.infer:
            reason = "float32 work around it"
        elif name in DEFAULT_OPS.allow:
            reason = "no matrix product"
        else:
            reason = "in no list"
        key = (
            name,
            reason,
            place.module if flops else "",
            place.where if flops else "",
        )
        row = self.kept.get(key, Kept(name, reason, 0, 0.0, place.module, place.where))
        self.kept[key] = dataclasses.replace(
            row, count=row.count + place.trips, flops=row.flops + flops
        )

    def report(self, residual_bytes: dict[str, int] | None) -> DtypeReport:
        total = sum(self.flops.values())
        leaks = [
            Leak(
                source=cause.source,
                kind=cause.kind,
                dtype=cause.dtype,
                meets_16bit=cause.meets_16bit,
                module=cause.place[0],
                where=cause.place[1],
                flops=cause.flops,
                share=cause.flops / total,
            )
            for cause in self.causes
            if cause.flops
        ]
        return DtypeReport(
            flops=dict(sorted(self.flops.items(), key=lambda item: -item[1])),
            leaks=tuple(sorted(leaks, key=lambda leak: -leak.flops)),
            kept=tuple(sorted(self.kept.values(), key=lambda k: (-k.flops, -k.count))),
            residual_bytes=residual_bytes,
            notes=tuple(self.notes),
        )


def _why_kept(eqn: _jaxpr.JaxprEqn, place: _Place) -> str:
    """Returns why autocast did not take a product in 16 bits."""
    dtypes = {str(_aval(atom).dtype) for atom in (*eqn.invars[:2], *eqn.outvars)}
    if not has_default_precision(eqn):
        return "its `precision`"
    if place.opaque:
        return f"inside of `{place.opaque}`"
    if len(dtypes) > 1 or dtypes != {"float32"}:
        return f"written in {' and '.join(sorted(dtypes))}"
    if _jaxpr.is_differentiated(eqn):
        return "derivative of what stayed float32"
    return "where autocast does not see it"


def _without_repeats(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``a/b/c`` for ``a/b/a/b/c``.

    The backward pass of a remat or a cond has the scopes around it once more in each
    line, or once less, than the forward pass.
    """
    once: list[str] = []
    for scope in scopes:
        once.append(scope)
        for n in range(1, len(once) // 2 + 1):
            if once[-n:] == once[-2 * n : -n]:
                del once[-n:]
                break
    return tuple(once)


def _aval(atom: Any) -> Any:  # whose shape and dtype an `AbstractValue` may lack
    return atom.aval


def _number(value: Any) -> str:
    return f"{jax.typeof(value).dtype}({np.asarray(value).item():g})"


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 2


def _is_wide_var(aval: Any) -> bool:
    return _is_wide(getattr(aval, "dtype", jnp.dtype("bool")))


def _is_narrow_var(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", jnp.dtype("bool"))
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize <= 2


def _union(operands: list) -> int:
    """Returns the causes of any of the operands."""
    return functools.reduce(int.__or__, (value.roots for _, value in operands), 0)


def _bits(number: int) -> Iterator[int]:
    """Yields the positions of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


# Residuals


def _handed_over(jaxpr: Any) -> dict[str, int] | None:
    """Returns the bytes that forward passes in ``jaxpr`` hand to backward passes.

    None if there is no backward pass in it.
    """
    body, found, sizes = _jaxpr.open_jaxpr(jaxpr), False, Counter()
    computed, narrowed = _computed(body), _only_narrowed(body)
    handed = {}
    for eqn in body.eqns:
        if _jaxpr.is_transposed(eqn):
            found = True
            for atom in eqn.invars:
                if not isinstance(atom, _jaxpr.Literal) and atom in computed:
                    var = computed[atom]
                    handed[var] = narrowed.get(var, var.aval.dtype)
            continue
        for sub in _jaxpr.on_accelerator(eqn, [*_jaxpr.sub_jaxprs(eqn)]):
            inner = _handed_over(sub)
            found = found or inner is not None
            sizes.update(inner or {})
    sizes.update(_sizes(handed))
    return dict(sizes.most_common()) if found else None


def _computed(body: Any) -> dict[Any, Any]:
    """Maps what a forward pass computes to what a compiler would keep of it.

    A float32 copy of a 16-bit value costs nothing to make again.
    """
    computed = {}
    for eqn in body.eqns:
        if not _jaxpr.is_transposed(eqn):
            computed.update((var, var) for var in eqn.outvars)
            if eqn.primitive.name == "convert_element_type":
                old, new = eqn.invars[0], eqn.outvars[0]
                if _is_narrow_var(old.aval) and _is_wide_var(new.aval):
                    if old in computed:
                        computed[new] = computed[old]
                    else:  # an argument
                        del computed[new]
    return computed


def _only_narrowed(body: Any) -> dict[Any, Any]:
    """Maps float32 values that the backward pass reads in 16 bits only to that dtype.

    The compiler sees that the forward pass has narrowed them already.
    """
    readers: dict[Any, set] = {}
    for eqn in body.eqns:
        if _jaxpr.is_transposed(eqn):
            is_cast = eqn.primitive.name == "convert_element_type"
            dtype = _aval(eqn.outvars[0]).dtype if is_cast and eqn.outvars else None
            for atom in eqn.invars:
                if not isinstance(atom, _jaxpr.Literal):
                    readers.setdefault(atom, set()).add(dtype)
    return {
        var: dtype
        for var, dtypes in readers.items()
        for dtype in dtypes
        if len(dtypes) == 1 and dtype is not None and _is_wide_var(var.aval)
        if dtype.itemsize <= 2
    }


def _would_keep(flat: Callable, leaves: list[Any]) -> dict[str, int] | None:
    """Returns the bytes that differentiating a function would keep."""
    try:
        # The function that `vjp` returns is a pytree of what it keeps.
        jaxpr, shapes = jax.make_jaxpr(
            lambda *arrays: jax.vjp(flat, *arrays), return_shape=True
        )(*leaves)
    except (TypeError, ValueError, NotImplementedError):
        return None
    body = _jaxpr.open_jaxpr(jaxpr)
    outs = body.outvars[len(jax.tree.leaves(shapes[0])) :]
    computed = _computed(body)
    kept = [
        computed[var]
        for var in outs
        if not isinstance(var, _jaxpr.Literal) and var in computed
    ]
    return dict(_sizes({var: var.aval.dtype for var in kept}).most_common())


def _sizes(dtypes: dict[Any, Any]) -> Counter[str]:
    """Adds up the bytes of variables, each in the dtype that is given for it."""
    sizes: Counter[str] = Counter()
    for var, dtype in dtypes.items():
        # `int`, as shapes may hold NumPy's.
        sizes[str(dtype)] += int(var.aval.size) * getattr(dtype, "itemsize", 0)
    return sizes


# The table


def _lines(report: DtypeReport, rows: int = 12) -> Iterator[str]:
    total = sum(report.flops.values())
    products = "matrix product and convolution FLOPs"
    yield f"{report.fraction_16bit:.1%} of {products} in 16 bits"
    for dtype, flops in report.flops.items():
        yield f"  {dtype:<10}{flops / total:>7.1%}  {_unit(flops, 1000)}FLOP"
    if report.leaks:
        yield ""
        yield "float32 because of"
        yield from _table(
            [
                (f"{leak.share:.1%}", str(leak), leak.module, _base(leak))
                for leak in report.leaks[:rows]
            ]
        )
        if len(report.leaks) > rows:
            yield f"  and {len(report.leaks) - rows} more in `report.leaks`"
        if not any(leak.meets_16bit for leak in report.leaks):
            yield "  Nothing was 16-bit: cast with `with_policy` or use `autocast`."
    if report.kept:
        yield ""
        yield "kept in float32 by autocast"
        products = [k for k in report.kept if k.flops]
        yield from _table(
            [
                (
                    f"{k.flops / total:.1%}",
                    f"{k.operation}, {k.reason}",
                    k.module,
                    _base(k),
                )
                for k in products[:rows]
            ]
        )
        if len(products) > rows:
            yield f"  and {len(products) - rows} more in `report.kept`"
        for reason in dict.fromkeys(k.reason for k in report.kept if not k.flops):
            names = [
                f"{k.operation} ({k.count})"
                for k in report.kept
                if k.reason == reason and not k.flops
            ]
            yield from textwrap.wrap(
                f"{reason}: {', '.join(names)}",
                width=_WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
            )
    if report.residual_bytes:
        yield ""
        yield "kept for the backward pass"
        for dtype, size in report.residual_bytes.items():
            yield f"  {dtype:<10}{_unit(size, 1024):>10}B"
    if report.notes:
        yield ""
        yield from (f"note: {note}" for note in report.notes)


def _base(row: Leak | Kept) -> str:
    return os.path.basename(row.where)


def _table(cells: list[tuple[str, ...]]) -> Iterator[str]:
    """Aligns columns. Text that finds no room loses its beginning, modules first."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    excess = sum(widths) + 2 * len(widths) - _WIDTH
    for column, least in ((2, 16), (1, 16), (3, 8)):
        cut = min(max(excess, 0), max(widths[column] - least, 0)) if widths else 0
        if cut:
            widths[column] -= cut
            excess -= cut
    for row in cells:
        clipped = [
            text if len(text) <= width else "…" + text[len(text) - width + 1 :]
            for text, width in zip(row, widths, strict=True)
        ]
        first, *rest = map(str.ljust, clipped, widths)
        columns = [first.strip().rjust(widths[0]), *filter(None, rest)]
        yield f"  {'  '.join(columns)}".rstrip()


def _unit(number: float, base: int) -> str:
    prefixes = (
        ["", "Ki", "Mi", "Gi", "Ti"] if base == 1024 else ["", "k", "M", "G", "T"]
    )
    power = 0
    while number >= base and power < len(prefixes) - 1:
        number, power = number / base, power + 1
    return f"{number:.4g} {prefixes[power]}"
