"""Mixed precision for a function as it stands, and regions that stay float32."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._base.around import (
    in_gradient,
    knowing,
    note_casting,
    warn_unscaled,
    watched,
)
from .._base.checks import check_function, clipped, explains, short, warn
from .._base.dtypes import casts_do_nothing
from .._base.gpus import warn_if_emulated
from .._base.objects import refuse_lost_updates
from .._base.policy import PolicyLike, dtype_of_gradients, get_policy
from .._jaxprs import scopes as _scopes
from .._jaxprs.flatten import traced_by_us
from .._jaxprs.jaxpr import Run
from .._jaxprs.state import haiku_state_kept, linen_state_kept
from .._ops.lists import DEFAULT_OPS, OpLists
from .._ops.precision import PRECISIONS, Precision
from .._residuals.eight_bits import Format, check_format
from .._residuals.replay import STORE_OF, with_narrow_residuals
from .derivative import differentiable
from .emit import RECORD, Emitter
from .plan import Planner

P = ParamSpec("P")
T = TypeVar("T")


_NO_CONTEXT = (
    "It is not a context manager, and names no device; as a decorator, type "
    '`@functools.partial(jaxmp.autocast, policy="mixed_float16")`.'
)


@explains('jaxmp.autocast(fun, "mixed_float16")(*args)', _NO_CONTEXT)
def autocast(
    fun: Callable[P, T],
    policy: PolicyLike | None = None,
    *,
    ops: OpLists = DEFAULT_OPS,
    float32_paths: Iterable[str] | Mapping[str, Precision] = (),
    bfloat16_paths: Iterable[str] = (),
    residuals: Format | None = None,
) -> Callable[P, T]:
    """Runs the matmuls and convolutions of ``fun`` in 16 bits.

    ``fun`` is any function that JAX can trace: a model's ``apply``, a loss, or a whole
    ``value_and_grad``. Put autocast around the gradient function if you can. In
    ``autocast(value_and_grad(loss))`` the backward pass sums in float32, and gradients
    are returned in float32 without rounding.

    A matmul or a convolution rounds its arguments to 16 bits and accumulates in
    float32. It returns 16 bits if its result feeds another one through elementwise
    operations, and float32 if not. Reductions, exponentials, norms, losses and unknown
    operations are float32. ``docs/rules.md`` has the five rules. Under
    ``"mixed_fp8"`` large matmuls round their operands further, to scaled float8.

    Args:
        fun: Function of any pytrees. Leaves that are not JAX arrays (Python numbers,
            strings, NumPy arrays) are passed on as they are.
        policy: A policy, its string, or a dtype. Its compute dtype and its dot dtype
            are used; None is bfloat16. Under a float32 policy nothing changes.
        ops: Which primitives run in 16 bits, in float32, or in the dtype of inputs.
        float32_paths: Named scopes to keep in float32 in both passes: ``"head"`` or
            ``"Net/head"`` is a module with all inside it. What it reads is float32
            too, back to the last matmul or reduction. Its matmuls have full float32
            precision; ``{"head": "default"}`` names less, see :func:`float32_region`.
        bfloat16_paths: Named scopes to keep out of eight bits.
        residuals: ``"int8"`` or ``"fp8"`` stores in eight bits what the forward pass
            keeps for the backward pass; None stores it in its own dtype.

    Returns:
        A function with the signature of ``fun``, and outputs of the same dtypes.

    Raises:
        ValueError: If the policy has overrides, or a path matches no named scope, or
            ``bfloat16_paths`` come with float16.
        TypeError: If a Flax module or a Haiku transform would lose its state.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> grad = jaxmp.autocast(jax.grad(loss), jnp.bfloat16)
        >>> grad(jnp.ones((4, 2)), jnp.ones((8, 4))).dtype
        dtype('float32')

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3,
        https://arxiv.org/abs/1710.03740.
    """
    check_function(
        "autocast",
        fun,
        "autocast(fun, policy)",
        "Pass its `apply`, `autocast(model.apply, policy)`, or a function that calls "
        "it, such as the loss.",
        hint=_NO_CONTEXT,
    )
    if not isinstance(ops, OpLists):
        raise TypeError(
            f"`ops` must be an `OpLists`, but is {short(ops)}. Pass for example "
            '`ops=jaxmp.DEFAULT_OPS.with_deny("tanh")`.'
        )
    check_format(residuals)
    dtype, backward_dtype, float8 = _dtypes(policy)
    if dtype == jnp.float32:
        return float32_region(fun, precision="default")
    paths = _as_paths("float32_paths", float32_paths)
    precisions = dict.fromkeys(paths, "highest")
    if isinstance(float32_paths, Mapping):
        precisions = float32_paths
    for path, precision in precisions.items():
        _check_precision(f"float32_paths[{short(path)}]", precision)
    bfloat16_paths = _as_paths("bfloat16_paths", bfloat16_paths)
    if bfloat16_paths and dtype == jnp.float16:
        raise ValueError(
            "`bfloat16_paths` keeps modules out of eight bits, but this policy "
            'computes in float16. Pass the policy "mixed_bfloat16" or "mixed_fp8", or '
            "leave `bfloat16_paths` out."
        )
    cure = "Use `jaxmp.nnx.autocast`, which takes the same arguments."
    checked = refuse_lost_updates("autocast", cure, fun)
    make_planner = functools.partial(
        Planner,
        dtype,
        ops,
        precisions,
        backward_dtype=backward_dtype,
        float8=float8,
        bfloat16_paths=bfloat16_paths,
    )

    scope = f"{_scopes.AUTOCAST}/{_scopes.FLOAT8}" if float8 else _scopes.AUTOCAST
    calls = itertools.count()
    own = ""  # what has a rule for gradients, and none for tangents
    if float8:
        own = "Products in float8"
    elif backward_dtype != dtype:
        own = "Functions whose backward pass has a dtype of its own"
    elif residuals is not None:
        own = "Functions that store residuals in eight bits"
    make_emitter = functools.partial(Emitter, brings_gradient=bool(own))
    emitter = make_emitter(make_planner())

    def changed(run: Run) -> Run:
        if residuals is not None:
            run = with_narrow_residuals(run, residuals, bfloat16_paths)
        return differentiable(run) if own else run

    @functools.wraps(fun, updated=())
    def autocast_fun(*args, **kwargs):
        if casts_do_nothing():
            return fun(*args, **kwargs)
        note_casting()
        warn_if_emulated(dtype, backward_dtype, float8=float8)
        record = RECORD.value
        used = make_emitter(make_planner(), record()) if record else emitter
        cast = used.wrap(traced_by_us(checked), changed=changed)
        with (
            jax.named_scope(scope),
            _explained(fun, own),
            knowing(autocast=backward_dtype),
        ):
            result = watched(backward_dtype, cast(*args, **kwargs))
        is_first = next(calls) == 0
        runs = not (record or STORE_OF.value)  # and is not looked at
        if is_first and runs and used.forgets_scale and not in_gradient():
            warn_unscaled()
        if is_first and used.planner.float8_is_unused:
            warn(
                "No matmul runs in float8. Autocast takes it for matmuls of two "
                "matrices whose sizes are multiples of 16 and at least "
                f"{ops.min_size}, and the dtype of the policy for all others: "
                "`print(jaxmp.audit(fun)(*args))` says why for each. Use the policy "
                '"mixed_bfloat16", or pass another limit, '
                "`ops=jaxmp.DEFAULT_OPS.with_fp8(min_size=...)`."
            )
        return result

    return autocast_fun


@explains("jaxmp.float32_region(fun)(*args)")
def float32_region(
    fun: Callable[P, T], *, precision: Precision = "highest"
) -> Callable[P, T]:
    """Keeps ``fun`` in the dtypes that it was written in, inside an autocast function.

    Its inputs are cast back to float32. For a few lines, write
    ``with jax.named_scope("jaxmp.float32"):`` instead.

    By JAX's default, a float32 matmul runs in TF32 on NVIDIA GPUs from A100 on, and in
    bfloat16 on a TPU. In the region and its gradients it has full precision.

    Args:
        fun: Function that JAX can trace.
        precision: ``"highest"``, or ``"default"``, JAX's own. A matmul with a precision
            of its own keeps it.

    Returns:
        The same function, in the named scope ``jaxmp.float32``.

    Raises:
        ValueError: If there is no such precision.

    Examples:
        >>> def f(x):
        ...     return jaxmp.float32_region(jnp.matmul)(x, x)
        >>> x = jnp.full((2, 2), 1 / 3)
        >>> bool((jaxmp.autocast(f)(x) == f(x)).all())
        True
    """

    check_function(
        "float32_region",
        fun,
        "float32_region(fun)",
        "Pass a function that calls `model.apply`.",
    )

    _check_precision("precision", precision)
    scope = _scopes.FLOAT32
    if precision != "highest":
        scope = f"{scope}/{_scopes.PRECISION}{precision}"

    @functools.wraps(fun, updated=())
    def in_float32(*args, **kwargs):
        with jax.named_scope(scope), knowing(autocast=np.dtype(np.float32)):
            return fun(*args, **kwargs)

    return in_float32


def _as_paths(name: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths of modules that an option names, one or several."""
    is_many = isinstance(paths, Iterable) and not isinstance(paths, str)
    several: Any = tuple(paths) if is_many else (paths,)
    if not all(isinstance(path, str) for path in several):
        raise TypeError(
            f"`{name}` must be the path of a module or several, but is {short(paths)}. "
            f'Pass for example `{name}=("head",)`.'
        )
    return several


def _check_precision(name: str, precision: Any) -> None:
    if precision not in PRECISIONS:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, PRECISIONS))}, but is "
            f'{short(precision)}. "highest" is full float32 precision.'
        )


def _dtypes(policy: PolicyLike | None) -> tuple[np.dtype, np.dtype, bool]:
    """Returns the dtypes of both passes of a policy, and whether products are float8.

    Refuses what autocast has no use for.
    """
    if policy is None:
        return np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16), False
    policy = get_policy(policy)
    if policy.overrides:
        raise ValueError(
            f"`autocast` uses the compute dtype of a policy only, but "
            f"{clipped(policy)} has overrides. Name the modules in `float32_paths` "
            "instead."
        )
    if policy.reduce_dtype is not None:
        warn(
            f"The `reduce_dtype` of {clipped(policy)} is not used by `autocast`, "
            "which sums nothing over devices. Pass it to `value_and_grad`, "
            "`policy=policy`, with `axis_name` or `mesh`, and `autocast` a policy "
            "without `r=`."
        )
    if policy.compute_dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(
            f"`autocast` computes in float16 or bfloat16, or changes nothing in "
            f"float32, but {clipped(policy)} computes in {policy.compute_dtype}. "
            'Pass for example "mixed_float16".'
        )
    is_float8 = policy.dot_dtype is not None
    return policy.compute_dtype, dtype_of_gradients(policy), is_float8


@contextlib.contextmanager
def _explained(fun: Callable, own: str) -> Iterator[None]:
    """Adds what autocast knows to errors of JAX and Flax.

    Args:
        fun: The function.
        own: What in it has gradients and no derivatives in forward mode, if anything.
    """
    try:
        with linen_state_kept(fun), haiku_state_kept():
            yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        error.add_note(
            f"`autocast` traces `{_name(fun)}` as `jax.jit` does, so its arrays have "
            "no values in Python. Wrap the part that JAX can trace."
        )
        raise
    except Exception as error:
        is_forward = isinstance(error, TypeError) and "forward-mode" in str(error)
        if own and is_forward:
            error.add_note(
                f"{own} have gradients (`jax.grad`, `jax.vjp`) and no "
                "derivatives in forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`). "
                "Put `autocast` around the differentiated function, "
                "`autocast(jax.hessian(loss), policy)`, or use `mixed_bfloat16` "
                "without `residuals`."
            )
        if type(error).__name__ == "TraceContextError":  # of flax.nnx
            error.add_note(
                f"`{_name(fun)}` changes an NNX object that did not come to it as an "
                "argument of `jaxmp.nnx.autocast`. Pass it as one; and where "
                f"`{_name(fun)}` itself transforms a function that changes it, use "
                "`nnx.scan`, `nnx.grad` and their like, not those of JAX."
            )
        raise


def _name(fun: Callable) -> str:
    return getattr(fun, "__qualname__", type(fun).__name__)
