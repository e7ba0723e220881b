"""Reading, replaying and retracing jaxprs: all that JAX does not promise to keep.

Everything that leans on ``jax.extend.core``, on an attribute outside JAX's public
interface or on a JAX version lives in this file, so that a new release is met here, and
in :mod:`jaxmp._devices.varying`, which a program without autocast needs and which is
apart because importing ``jax.extend`` takes long.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax._src.lax import linalg as _linalg
from jax._src.util import cache as _cache
from jax.core import ShapedArray
from jax.core import Tracer as Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.core import unmapped_aval as unmapped_aval
from jax.interpreters import ad, batching, mlir
from jax.interpreters.ad import Zero as Zero
from jax.interpreters.ad import is_undefined_primal as is_undefined_primal
from jax.interpreters.partial_eval import DynamicJaxprTracer

from .._base.gpus import Gpu, weakest

Equation = Any  # a JaxprEqn, whose annotations know no shapes
Run = Callable[[Any, Sequence[Any]], list[Any]]  # runs a jaxpr on arrays, in some way

FLOAT32 = np.dtype(np.float32)  # compares faster than `jnp.float32`


# Remembers what a function returns that traces: for each of its arguments, and for each
# context in which JAX would trace them otherwise, as in a mesh or where it checks over
# which devices values vary. `jax.clear_caches` empties it.
remembered = _cache(max_size=4096)
trace_context = _config.trace_context


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Returns the equations of a jaxpr that may carry its constants."""
    # From 0.12 on `Jaxpr` and `ClosedJaxpr` are one class.
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def closed_consts(jaxpr: Any) -> Sequence[Any]:
    """Returns the constants that a jaxpr carries, none when it is open."""
    return jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()


def in_vars(jaxpr: Any) -> list[Any]:
    return open_jaxpr(jaxpr).invars


def in_avals(jaxpr: Any) -> list[Any]:
    return [var.aval for var in in_vars(jaxpr)]


def out_avals(jaxpr: Any) -> list[Any]:
    return [atom.aval for atom in open_jaxpr(jaxpr).outvars]


def interpret(
    jaxpr: Any,
    inputs: Sequence[Any],
    apply: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    eqns: Sequence[Any] | None = None,
    const: Callable[[Any], Any] = lambda const: const,
    literal: Callable[[Any], Any] = lambda literal: literal.val,
) -> list[Any]:
    """Goes through the equations of a jaxpr, of arrays or of anything else.

    Args:
        jaxpr: Open or closed jaxpr.
        inputs: What stands for its inputs.
        apply: Takes an equation and a list of what stands for its inputs, and returns
            what stands for each of its outputs.
        eqns: Its equations, if others than those that it holds.
        const: Makes such a thing of a constant that the jaxpr carries.
        literal: Makes such a thing of a ``Literal``.

    Returns:
        What stands for the outputs of the jaxpr.
    """
    body = open_jaxpr(jaxpr)
    consts = [const(x) for x in closed_consts(jaxpr)]
    given = zip([*body.constvars, *body.invars], [*consts, *inputs], strict=True)
    env: dict[Any, Any] = dict(given)

    def read(atoms):
        return [literal(x) if isinstance(x, Literal) else env[x] for x in atoms]

    for eqn in body.eqns if eqns is None else eqns:
        env.update(zip(eqn.outvars, apply(eqn, read(eqn.invars)), strict=True))
    return read(body.outvars)


def is_float32(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) == FLOAT32


def is_inexact(atom: Any) -> bool:
    """Whether a variable or literal of a jaxpr is floating or complex."""
    return _issubdtype(atom.aval.dtype, jnp.inexact)


_issubdtype = functools.cache(jnp.issubdtype)


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """Yields every jaxpr, open or closed, in the parameters of an equation."""
    for param in eqn.params.values():
        if is_jaxpr(param):
            yield param
        elif isinstance(param, (tuple, list)):
            yield from filter(is_jaxpr, param)


def part(
    jaxpr: ClosedJaxpr, eqns: Sequence[JaxprEqn], inputs: Sequence[Any], outs: Any
) -> ClosedJaxpr:
    """Returns those of some equations of a jaxpr on which outputs depend.

    Inputs are variables that are given, outputs variables or literals.
    """
    body = jaxpr.jaxpr.replace(
        eqns=list(eqns),
        invars=list(inputs),
        outvars=list(outs),
        debug_info=jaxpr.jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr.replace(jaxpr=body.replace(eqns=live(body)))


def without_constants(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr that takes its constants as its first inputs."""
    body = jaxpr.jaxpr
    body = body.replace(
        constvars=[],
        invars=[*body.constvars, *body.invars],
        debug_info=body.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(body, [])


def with_fields(jaxpr: Any, **fields: Any) -> Any:
    """Returns a jaxpr, open or closed, with other equations for one."""
    body = open_jaxpr(jaxpr).replace(**fields)
    return jaxpr.replace(jaxpr=body) if isinstance(jaxpr, ClosedJaxpr) else body


def with_jaxprs(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """Returns ``eqn`` with each jaxpr in its parameters changed."""

    def changed(param):
        if is_jaxpr(param):
            return change(param)
        if isinstance(param, (tuple, list)) and any(map(is_jaxpr, param)):
            # Of a linear solve it is a tuple with names, and some may be None.
            return jax.tree.map(lambda x: change(x) if is_jaxpr(x) else x, param)
        return param

    params = {name: changed(param) for name, param in eqn.params.items()}
    return eqn.replace(params=params)


def trace(fun: Callable, avals: Sequence[Any]) -> ClosedJaxpr:
    """Traces a function of arrays that returns a list of arrays to a closed jaxpr.

    Of arrays, tracers or abstract values, whose shapes, dtypes, weak types, shardings
    and varying mesh axes are kept.
    """
    closed = jax.make_jaxpr(fun)(*avals)
    return closed if jax.__version_info__ >= (0, 10) else _with_shared(closed)


def _with_shared(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Reads each NumPy array from one variable, where JAX 0.9 has made several."""
    firsts: dict[int, Any] = {}
    pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    same = {x: firsts.setdefault(id(getattr(c, "val", c)), x) for x, c in pairs}
    if len(firsts) == len(same):
        return closed

    def shared(atom):
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    eqns = closed.jaxpr.eqns
    eqns = [x.replace(invars=[*map(shared, x.invars)]) for x in eqns]
    return with_fields(closed, eqns=eqns)


def stage() -> Any:
    """Returns the innermost trace around that JAX keeps, as of ``jit`` or ``scan``.

    None where there is none: under ``vmap`` and ``grad`` alone, operations run at once.
    """
    trace = _core.trace_ctx.trace
    while trace is not None and type(trace).__name__ != "DynamicJaxprTrace":
        trace = getattr(trace, "parent_trace", None)
    return trace


def located_at(
    eqn: JaxprEqn, joined: dict[tuple[int, int], Any]
) -> contextlib.AbstractContextManager:
    """Emits with the named scopes and the source line of ``eqn``.

    Args:
        eqn: The equation.
        joined: What this function keeps for the equations of one jaxpr, empty at first.
            Most of them share their scopes, and one object for each equation is what
            the garbage collector would go through.
    """
    return source_info_util.user_context(
        eqn.source_info.traceback, name_stack=_names_at(eqn, joined)
    )


def _names_at(eqn: JaxprEqn, joined: dict[tuple[int, int], Any]) -> Any:
    around, scopes = source_info_util.current_name_stack(), eqn.source_info.name_stack
    # By identity, because a scope and a transformation of the same name are equal; and
    # kept, because a new object may have the identity of one that is gone.
    key = id(around), id(scopes)
    if key not in joined:
        joined[key] = around + scopes, around, scopes
    return joined[key][0]


def context_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager:
    """Emits under the mesh and the compute type under which the user's line ran."""
    return eqn.ctx.manager  # pyright: ignore[reportAttributeAccessIssue]


def bind(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Applies the primitive of ``eqn`` to ``args``, with some parameters changed."""
    if not changed and (outs := repeated(eqn, args)) is not None:
        return outs
    primitive, params = eqn.primitive, {**eqn.params, **changed}
    bound = primitive.get_bind_params(params)  # pyright: ignore
    # Up to 0.9 the functions of a call primitive came apart from its parameters.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    out = primitive.bind(*subfuns, *args, **params)
    outs = list(out) if primitive.multiple_results else [out]
    # A primitive may be evaluated at once to a number of Python's.
    return [
        x if hasattr(x, "dtype") else np.asarray(x, var.aval.dtype)  # pyright: ignore
        for x, var in zip(outs, eqn.outvars, strict=True)
    ]


def repeated(
    eqn: Equation, args: Sequence[Any], joined: dict[tuple[int, int], Any] | None = None
) -> list[Any] | None:
    """Writes ``eqn`` again, as JAX writes the equations of a function that it inlines.

    Where ``args`` are such as it had, so that it returns now what it returned when it
    was traced. To ask the primitive for that once more takes twice as long. None where
    that is not so. With ``joined`` it is located as by :func:`located_at`.
    """
    trace = _core.trace_ctx.trace
    # A cast does more than to write an equation only where it is given a sharding.
    casts = is_cast(eqn) and eqn.params["sharding"] is None
    if eqn.effects or not (casts or _is_simple(eqn.primitive)):
        return None
    if not hasattr(trace, "emit_eqn"):
        return None
    ins, source, ctx = list(args), eqn.source_info, eqn.ctx
    if joined is None:
        source, ctx = source_info_util.current(), None
    else:
        source = source.replace(name_stack=_names_at(eqn, joined))
    for i, (x, atom) in enumerate(zip(args, eqn.invars, strict=True)):
        if isinstance(atom, Literal):
            same = x is atom.val
            ins[i] = DynamicJaxprTracer(trace, atom.aval, atom, source)
        else:  # of another trace in an inner function, or where it is transformed
            same = type(x) is DynamicJaxprTracer and x._trace is trace
            same = same and x.aval is atom.aval
        if not same:
            return None
    outs = [var.aval for var in eqn.outvars]
    return trace.emit_eqn(
        ins, outs, eqn.primitive, eqn.params, eqn.effects, source, ctx
    )


@functools.cache
def _is_simple(primitive: Primitive) -> bool:
    """Whether to apply a primitive while tracing is to write an equation."""
    if CALL_KINDS.get(primitive.name) == "custom_jvp":
        return True  # with a rule that is traced later, and shared by all copies
    if type(primitive) is not Primitive or primitive.name in CALL_KINDS:
        return False
    return vars(primitive).keys().isdisjoint({"bind", "bind_with_trace", "is_high"})


def written_as(call: JaxprEqn, eqn: Equation) -> JaxprEqn:
    """Returns ``call``, traced elsewhere, as the line that wrote ``eqn`` writes it."""
    return _written_at(call, eqn.source_info.traceback, eqn.ctx)


@functools.lru_cache(maxsize=4096)  # Layers are from one line, and share it.
def _written_at(call: JaxprEqn, traceback: Any, ctx: Any) -> JaxprEqn:
    ((param, closed, _),) = call_layout(call).bodies
    body = open_jaxpr(closed)
    eqns = [
        eqn.replace(ctx=ctx, source_info=eqn.source_info.replace(traceback=traceback))
        for eqn in body.eqns
    ]
    closed = with_fields(closed, eqns=eqns)
    return call.replace(params={**call.params, param: closed})


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many constants and carries a ``scan`` equation has."""
    if "ft_in" in eqn.params:  # from 0.12 on
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_with(
    eqn: JaxprEqn,
    body: Jaxpr,
    carries: int,
    invars: list[Any],
    outvars: list[Any],
    *,
    consts: int | None = None,
) -> JaxprEqn:
    """Returns a ``scan`` equation with another body, which carries as many values.

    It has as many constants as before, if no number of them is given.
    """
    consts = scan_counts(eqn)[0] if consts is None else consts

    def scan(xs):  # of numbers, because each version counts in its own way
        def step(carry, slices):
            total = sum([*xs[:consts], *slices])
            ys = [total + i for i in range(len(outvars) - carries)]
            return [x + total for x in carry], ys

        return lax.scan(step, xs[consts:][:carries], xs[consts + carries :], length=1)

    shapes = [(1,) * (i >= consts + carries) for i in range(len(invars))]
    like = [np.zeros(shape, np.float32) for shape in shapes]
    (counted,) = jax.make_jaxpr(scan)(like).eqns
    closed = eqn.params["jaxpr"].replace(jaxpr=body)
    params = {**eqn.params, **counted.params, "jaxpr": closed}
    params |= {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return eqn.replace(invars=invars, outvars=outvars, params=params)


def after_loop(
    eqn: JaxprEqn, loop: JaxprEqn, invars: list[Any], outvars: list[Any], **changed: Any
) -> JaxprEqn:
    """Returns an equation of the body of a loop as one that comes after the loop."""
    names = loop.source_info.name_stack + eqn.source_info.name_stack
    source = eqn.source_info.replace(name_stack=names)
    params = {**eqn.params, **changed}
    return eqn.replace(
        invars=invars, outvars=outvars, params=params, source_info=source
    )


def scope_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the named scopes around ``eqn``, outermost first.

    What differentiation and batching add to the stack is left out, so that the
    forward and the backward pass of a module have the same scopes.
    """
    return names_of(eqn).scopes


def in_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    stack = eqn.source_info.name_stack.extend(name)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` was written by differentiation, forward or backward."""
    return names_of(eqn).differentiated


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` belongs to a backward pass."""
    return bool(names_of(eqn).transposed)


def has_backward(jaxpr: Any) -> bool:
    """Whether there is a backward pass in a jaxpr, or in what it calls."""
    return any(
        is_transposed(eqn) or holds_backward(eqn) for eqn in open_jaxpr(jaxpr).eqns
    )


def holds_backward(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` calls a backward pass. The transposes in a solver are none."""
    return bool(call_kind(eqn)) and any(map(has_backward, sub_jaxprs(eqn)))


# What `jax.checkpoint` names what its backward pass computes a second time.
_COMPUTED_AGAIN = "rematted_computation"


def computes_again(eqn: JaxprEqn) -> bool:
    """Whether an equation holds one of a forward pass that is computed again."""
    return any(
        bool(names_of(inner).computed_again) or computes_again(inner)
        for jaxpr in sub_jaxprs(eqn)
        for inner in open_jaxpr(jaxpr).eqns
    )


class Names(NamedTuple):
    """What the names around an equation say."""

    scopes: tuple[str, ...]  # see `scope_names`
    differentiated: bool  # by differentiation, forward or backward
    transposed: int  # in so many backward passes, one differentiating another
    computed_again: int  # so many times, by rematerialised functions, for such a pass


def names_of(eqn: JaxprEqn) -> Names:
    stack = eqn.source_info.name_stack.stack
    # A scope and a transformation of the same name are equal.
    return _read_names(stack, tuple(map(type, stack)))


@functools.lru_cache(maxsize=4096)
def _read_names(stack: tuple, kinds: tuple[type, ...]) -> Names:
    names = [
        (kind.__name__, name)
        for entry, kind in zip(stack, kinds, strict=True)
        for name in entry.name.split("/")
        # Equinox says the class of a layer; which one it is, `modules` says.
        if not name.startswith("eqx.nn.")
    ]
    transforms = {name for kind, name in names if kind == "Transform"}
    scopes = [name for kind, name in names if kind == "Scope"]
    return Names(
        tuple(x for x in scopes if x != _COMPUTED_AGAIN),
        differentiated=not transforms.isdisjoint(("jvp", "transpose")),
        transposed=names.count(("Transform", "transpose")),
        computed_again=scopes.count(_COMPUTED_AGAIN),
    )


def live_primitives() -> dict[str, Primitive]:
    """Returns every primitive that exists in this process, by name."""
    # There is no registry: a primitive is known by having been created, or, where
    # `gc.freeze` has hidden it, by its derivative.
    rules = ad.primitive_jvps, ad.primitive_transposes
    created = (x for x in gc.get_objects() if isinstance(x, Primitive))
    return {p.name: p for p in itertools.chain(*rules, created)}


# What the primitives that hold jaxprs do, by name. JAX has renamed some.
CALL_KINDS = {
    "jit": "jit",
    "closed_call": "call",
    "eval_jaxpr": "call",
    "remat2": "remat",
    "scan": "scan",
    "while": "while",
    "cond": "cond",
    "shard_map": "shard_map",
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
}


def call_kind(eqn: JaxprEqn) -> str:
    """Returns what an equation does with the jaxprs that it holds, empty if unknown."""
    return CALL_KINDS.get(eqn.primitive.name, "")


def is_cast(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` changes the dtype of an array, or its weak type."""
    return eqn.primitive.name == "convert_element_type"


def is_inlined(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a ``jit`` that says nothing of where its values live."""
    if call_kind(eqn) != "jit":
        return False
    placed = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(type(x).__name__ == "UnspecifiedValue" for x in placed)


def number_of(atom: Any) -> Any:
    """Returns the number that a literal is, None where ``atom`` is none.

    A literal may be an array, too, and the tangent of integers, whose dtype float0 has
    no numbers at all.
    """
    if not isinstance(atom, Literal):
        return None
    aval: Any = atom.aval
    return None if aval.shape or not _issubdtype(aval.dtype, np.number) else atom.val


def variables(atoms: Iterable[Any]) -> Iterator[Any]:
    """Yields those of some atoms that are no numbers in the code."""
    return (x for x in atoms if not isinstance(x, Literal))


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` does something even if nobody reads what it returns.

    To be of a mesh, or to read a reference, is called an effect, too.
    """
    others = "NamedAxisEffect", "ReadEffect"
    return any(type(x).__name__ not in others for x in eqn.effects)


def live(jaxpr: Any) -> list[JaxprEqn]:
    """Returns the equations that the outputs of a jaxpr, or effects, depend on."""
    body = open_jaxpr(jaxpr)
    needed = set(variables(body.outvars))
    eqns = []
    for eqn in reversed(body.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(variables(eqn.invars))
    return eqns[::-1]


class Body(NamedTuple):
    """A jaxpr inside an equation, and which inputs of the equation it reads."""

    param: str
    jaxpr: Any
    operands: Sequence[int]


class CallLayout(NamedTuple):
    """How values pass between an equation and the jaxprs that it holds.

    A loop feeds its carry back, so that inputs and outputs of ``fixed_in`` and
    ``fixed_out`` must keep their types; all others are free.
    """

    bodies: Sequence[Body]
    fixed_in: range = range(0)
    fixed_out: range = range(0)


def call_layout(eqn: JaxprEqn) -> CallLayout:
    """Describes an equation that calls, repeats or chooses between jaxprs."""
    params, inputs = eqn.params, range(len(eqn.invars))
    match call_kind(eqn):
        case "scan":
            consts, carries = scan_counts(eqn)
            body = Body("jaxpr", params["jaxpr"], inputs)
            return CallLayout([body], inputs[consts:][:carries], range(carries))
        case "while":
            tested, repeated = params["cond_nconsts"], params["body_nconsts"]
            carry = inputs[tested + repeated :]
            test = Body("cond_jaxpr", params["cond_jaxpr"], [*inputs[:tested], *carry])
            body = Body("body_jaxpr", params["body_jaxpr"], inputs[tested:])
            return CallLayout([test, body], carry, range(len(carry)))
        case "cond":
            branches = params["branches"]
            return CallLayout([Body("branches", b, inputs[1:]) for b in branches])
        case _:
            param = "jaxpr" if "jaxpr" in params else "call_jaxpr"
            return CallLayout([Body(param, params[param], inputs)])


def is_call(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` calls, repeats or chooses between jaxprs, and takes values."""
    return call_kind(eqn) != "" and all(
        isinstance(var.aval, ShapedArray) for var in eqn.invars
    )


def chooses_platform(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a ``lax.platform_dependent``: a branch for each platform."""
    return "branches_platforms" in eqn.params


def on_platform(
    eqn: JaxprEqn, bodies: Sequence[Any], platform: str = "gpu"
) -> Sequence[Any]:
    """Returns those of the bodies of ``eqn`` that run on a platform.

    All, or the branch of a ``lax.platform_dependent`` that is for it, the last if none
    is. Our own way to multiply by a vector counts as the product that others run.
    """
    if not chooses_platform(eqn):
        return bodies
    branches = enumerate(eqn.params["branches_platforms"])
    platforms = ("cuda", "rocm") if platform == "gpu" else (platform,)
    number_of = {x: i for i, names in branches for x in names or ()}
    i = next((number_of[x] for x in platforms if x in number_of), -1)
    inside = open_jaxpr(eqn.params["branches"][i]).eqns
    ours = [inner.primitive.name for inner in inside] == ["custom_vmap_call"]
    return [bodies[-1 if ours else i]]


def bind_bodies(
    eqn: JaxprEqn, args: Sequence[Any], bodies: Sequence[ClosedJaxpr]
) -> list[Any]:
    """Applies ``eqn`` with other bodies, in the order of :func:`call_layout`."""
    changed: dict[str, Any] = {}
    for old, new in zip(call_layout(eqn).bodies, bodies, strict=True):
        if isinstance(eqn.params[old.param], tuple):
            changed[old.param] = (*changed.get(old.param, ()), new)
        elif isinstance(old.jaxpr, ClosedJaxpr):
            changed[old.param] = new
        else:
            assert not new.consts, "an open jaxpr has no place for constants"
            changed[old.param] = new.jaxpr
    return bind(eqn, args, **changed)


def bind_shard_map(eqn: JaxprEqn, args: Sequence[Any], body: Callable) -> list[Any]:
    """Applies a ``shard_map`` equation with another function as its body."""
    return map_shards(eqn, args, (), lambda shards, _: (body(*shards), ()))[0]


def map_shards(
    eqn: JaxprEqn, args: Sequence[Any], scalars: Any, body: Callable
) -> tuple[list[Any], Any]:
    """Applies a ``shard_map`` equation with a body that knows more than the shards.

    The body takes the list of shards and ``scalars``, a pytree that is the same on all
    devices. It returns the list of shards that the equation returns, and such a pytree.
    """
    # The public function is called, since only it puts the mesh axes in scope while
    # `body` is traced.
    params: dict[str, Any] = eqn.params
    same = jax.sharding.PartitionSpec()
    return jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), same),
        out_specs=(list(params["out_specs"]), same),
        axis_names=manual_axes(eqn),
        check_vma=params["check_vma"],
    )(list(args), scalars)


def is_remat(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` computes again, in a backward pass, what was not kept."""
    return call_kind(eqn) == "remat" and eqn.params["differentiated"]


def bind_remat(eqn: JaxprEqn, args: Sequence[Any], body: ClosedJaxpr) -> list[Any]:
    """Applies such an equation with another body, and other inputs and outputs."""
    # An open jaxpr has no place for constants.
    params = {**eqn.params, "jaxpr": without_constants(body).jaxpr}
    if isinstance(params["prevent_cse"], tuple):  # a flag for each input
        params["prevent_cse"] = True
    return list(eqn.primitive.bind(*body.consts, *args, **params))


def manual_axes(eqn: JaxprEqn) -> Any:
    """Returns the mesh axes that a ``shard_map`` equation maps over."""
    # The parameter was `manual_axes` up to 0.9.
    new = "newly_manual_axes"
    return eqn.params[new if new in eqn.params else "manual_axes"]


def frames(
    eqn: JaxprEqn, is_wanted: Callable[[str], bool] = lambda file: True
) -> Iterator[tuple[str, int, int, tuple[int, int], str]]:
    """Yields the calls behind ``eqn``.

    Of each the file, the line, the position in the bytecode, the columns of the
    expression in the line (in bytes, from and to), and the function.

    Innermost first, and only those in files that are wanted, as it takes long to find a
    line. JAX may have cut the outer end, never the inner one.
    """
    traceback = eqn.source_info.traceback
    if traceback is not None:
        for code, instruction in zip(*traceback.raw_frames(), strict=True):
            if is_wanted(code.co_filename):
                line, columns = position(code, instruction)
                yield code.co_filename, line, instruction, columns, code.co_qualname


_END = 10**6  # of a line


@functools.cache
def position(code: types.CodeType, instruction: int) -> tuple[int, tuple[int, int]]:
    """Returns the line of an instruction and the columns of its expression there.

    Of an expression over several lines, the columns are those of its first line.
    """
    # One code unit has two bytes.
    place = next(itertools.islice(code.co_positions(), instruction // 2, None))
    line, last, start, end = (x or 0 for x in place)
    return line, (start, end if line == last else _END)


def make_qr_precise(where: Callable[[], bool]) -> None:
    """Runs the matmuls in the derivative of a QR decomposition in full precision.

    As those of all other decompositions do, and only where ``where`` says so.
    """
    usual = ad.primitive_jvps[_linalg.qr_p]

    def rule(primals, tangents, **params):
        asked = jax.default_matmul_precision("highest")
        with asked if where() else contextlib.nullcontext():
            return usual(primals, tangents, **params)

    ad.primitive_jvps[_linalg.qr_p] = rule


def function_of(jaxpr: Any) -> tuple[str, str]:
    """Returns name and place of the function behind a jaxpr, empty if unknown."""
    name, _, place = open_jaxpr(jaxpr).debug_info.func_src_info.partition(" at ")
    return name, place


def written_in(jaxpr: Any, like: Any) -> Any:
    """Returns a jaxpr that says of itself to be the function behind another."""
    behind = open_jaxpr(like).debug_info.func_src_info
    info = open_jaxpr(jaxpr).debug_info._replace(func_src_info=behind)
    return with_fields(jaxpr, debug_info=info)


def zero_cotangent(zero: Any) -> Any:
    """Returns what the functions of ``jax.vjp`` take for a ``SymbolicZero``."""
    # Up to 0.10.0 they take numbers.
    is_taken = jax.__version_info__ >= (0, 10, 1)
    return Zero(zero.aval) if is_taken else zeros(zero.aval)


def as_array(x: Any) -> jax.Array:
    """Returns a number as an array, and arrays as they are, of whichever mesh."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def zeros(aval: Any) -> Any:
    return ad.instantiate_zeros(Zero(aval))


def zero_tangent(aval: Any) -> SymbolicZero:
    """Returns what a rule may return in the place of a tangent of zeros.

    And of what has no tangent, an integer for one.
    """
    return SymbolicZero(aval.to_tangent_aval())


def with_type_of(array: Any, aval: Any) -> jax.Array:
    """Gives ``array``, which may be a literal, the dtype and weak type of ``aval``."""
    if not isinstance(array, jax.Array):
        array = jnp.asarray(array, aval.dtype)
    weak = getattr(aval, "weak_type", False)
    if array.dtype == aval.dtype and getattr(array, "weak_type", False) == weak:
        return array
    # `lax.convert_element_type` makes its result strongly typed.
    return lax.convert_element_type_p.bind(
        array, new_dtype=aval.dtype, weak_type=weak, sharding=None
    )


at_once = dispatch.apply_primitive  # an operation of arrays, which is compiled


def operation(
    name: str,
    *,
    types: Callable,  # of the results, from those of the operands
    lowered: Callable,  # to operations of JAX, on every device
    batched: Callable,  # a rule of `vmap`
    derived: Callable,  # a rule of `jvp`
    # Of arrays, at once, where JAX is not to compile it as its own operations.
    run: Callable | None = None,
    # To those of an NVIDIA GPU, which comes first, None if unknown.
    on_cuda: Callable | None = None,
    transposed: Callable | None = None,  # a rule of what is linear
) -> Primitive:
    """Returns an operation that JAX shows as one equation, with several results."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(run or functools.partial(at_once, made))
    made.def_abstract_eval(types)
    # In a function of its own, which equal layers share.
    mlir.register_lowering(made, mlir.lower_fun(lowered), inline=False)

    if on_cuda is not None:

        def cuda(ctx, *args, **params):
            fun = functools.partial(on_cuda, _target(ctx.module_context))
            return mlir.lower_fun(fun)(ctx, *args, **params)

        mlir.register_lowering(made, cuda, platform="cuda", inline=False)
    batching.primitive_batchers[made] = batched
    ad.primitive_jvps[made] = derived
    if transposed is not None:
        ad.primitive_transposes[made] = transposed
    # JAX asks the kernel how it is sharded while it lowers it, and for that it has to
    # know the devices.
    dispatch.prim_requires_devices_during_lowering.add(made)
    return made


def _target(context: Any) -> Gpu | None:
    """Returns the NVIDIA GPU that a program is lowered for, None if that is unknown.

    Of several the weakest, because one program runs on all of them.
    """
    # What is exported runs somewhere else. The backend is not for the platform where
    # `lower(lowering_platforms=("cuda",))` was called without a GPU.
    if context.lowering_parameters.for_export or context.backend is None:
        return None
    assigned = getattr(context.axis_context, "device_assignment", None)
    return weakest(assigned or context.backend.devices())


def cudnn_version() -> tuple[int, int] | None:
    """Returns the version of cuDNN that is installed here, None if there is none."""
    try:
        version = _cudnn.check_cudnn_version()
    except RuntimeError:
        return None
    return version // 10000, version // 100 % 100


def mark(name: str) -> Primitive:
    """Returns an operation that gives back its operand, for who replays a program."""
    made = Primitive(name)
    made.def_impl(lambda x, **_: x)
    made.def_abstract_eval(lambda x, **_: x)
    batching.defvectorized(made)
    return made


def no_tangent(like: Any) -> Any:
    """Returns what the rule of an operation returns for a tangent of zeros."""
    return Zero(jax.typeof(like).to_tangent_aval())


class Cudnn(NamedTuple):
    """What cuDNN's attention is given beside query, key and value."""

    scale: float
    is_causal: bool
    window: int | None  # how many keys a query sees, its own and those before it
    bias: Any  # added to the scores, None for none
    lengths: Any  # those of the queries and of the keys, None for all


def cudnn_attention(
    given: Cudnn, arrays: Sequence[Any], *, residual: bool
) -> list[Any]:
    """Binds cuDNN's attention as JAX does, and does not ask for cuDNN's version.

    JAX's function asks while it is traced, for the GPU of the tracing machine too.

    Args:
        given: What the kernel is given beside the arrays.
        arrays: Query, key and value, ``[batch, length, heads, size]`` in 16 bits.
        residual: Whether the logarithm of the sum of each row is returned too.
    """
    operands, params = _cudnn_call(given, arrays, has_gradient=False)
    forward = _cudnn._dot_product_attention_fwd_p_wrapper
    return list(forward.bind(*operands, **params, is_training=residual))


def cudnn_attention_gradient(
    given: Cudnn, arrays: Sequence[Any], residuals: Sequence[Any], *, of_bias: bool
) -> list[Any]:
    """Binds the backward pass of cuDNN's attention, see :func:`cudnn_attention`.

    The residuals are what the forward pass returned, and the cotangent of the first.
    With ``of_bias`` the gradient of the bias is returned too.
    """
    out, sums, cotangent = residuals
    operands, params = _cudnn_call(given, arrays, has_gradient=of_bias)
    backward = _cudnn._dot_product_attention_bwd_p_wrapper
    return list(backward.bind(*operands, sums, out, cotangent, **params))


def _cudnn_call(
    given: Cudnn, arrays: Sequence[Any], *, has_gradient: bool
) -> tuple[list[Any], dict[str, Any]]:
    nothing, kinds = jnp.zeros(0, arrays[0].dtype), _cudnn.MaskType
    bias = nothing if given.bias is None else given.bias
    if given.lengths is None:
        lengths = nothing, nothing
        kind = kinds.CAUSAL if given.is_causal else kinds.NO_MASK
    else:
        lengths = given.lengths
        kind = kinds.PADDING_CAUSAL if given.is_causal else kinds.PADDING
    params = {
        "scale": given.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (given.bias is not None, has_gradient),
        "mask_type": kind,
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": given.window,
    }
    known = inspect.signature(_cudnn._dot_product_attention_fwd_impl).parameters
    params |= {"score_mod": None} if "score_mod" in known else {}
    # Then where packed sequences begin, and pages of keys.
    return [*arrays, bias, *lengths, *[nothing] * 4], params
