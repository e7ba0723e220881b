"""Which products of a function run in which dtype, and what made them float32.

The function is traced, never run. What :mod:`~.leaks` follows through its jaxpr are the
causes of float32, :mod:`~.hazards` what is made of products, an attention for one;
:mod:`~jaxmp._diagnosis.flow` has what is saved for backward passes.
"""

import functools
import textwrap
from collections.abc import Callable
from typing import Any, ParamSpec, overload

import jax

from ..._autocast.emit import recording
from ..._base.checks import check_function, explains
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.flatten import flatten, traced_in_float32
from ..._jaxprs.places import Place, caller
from ..._jaxprs.sizes import as_number
from ..._ops.precision import own_precisions
from ..._ops.products import default_precision
from ..flow import Flow
from ..numbers import Numbers
from ..text import WIDTH, uncalled
from .attention import judge
from .compiled import audit_compiled
from .compiled_report import CompiledReport
from .hazards import of_products
from .leaks import Leaks
from .report import DtypeReport, wide_name

P = ParamSpec("P")

# What a size that `jax.export` leaves open counts as: products have FLOPs in numbers.
_OPEN = 1024
_LONGEST = 1100  # characters of a report in an error


@overload
def audit(fun: jax.stages.Compiled | jax.stages.Lowered) -> CompiledReport: ...


@overload
def audit(fun: Callable[P, Any]) -> Callable[P, DtypeReport]: ...


@explains("jaxmp.audit(fun)(*args)")
def audit(  # pyright: ignore[reportInconsistentOverload]
    fun: Callable[P, Any],
) -> Callable[P, DtypeReport]:
    """Reports the dtypes of the matmuls of ``fun``, and why they are not 16-bit.

    Nothing runs: ``fun`` is traced with the shapes and dtypes of its arguments. Pass a
    forward pass, a loss, a gradient function or a whole training step.

    * **FLOPs**: a scan counts as often as it iterates, a shard_map once per device, a
      cond with all its branches, and a while loop once, with a note. Of a
      ``lax.platform_dependent``, the branch for an NVIDIA GPU counts. A product of two
      vectors, or over an axis of size 1, is not a matmul. Kernels (of Pallas or cuDNN,
      or a ``jax.ffi`` call) and exported functions have a note, and are not counted.
    * **Float32 fallbacks**: the causes of a float32 matmul are the float32 arguments
      and array constants that reach it through float32 values. Else the causes are
      casts from 16 bits, then arrays made in float32, and last of all numbers. A number
      that itself meets a 16-bit array comes first. Float32 values that never reach a
      matmul (softmax, normalisation, loss) are none. A matmul of the backward pass
      has the causes of the forward matmuls of its line and module. Every float32 matmul
      has a cause, in ``report.leaks`` or ``report.kept``. A float64 matmul has the
      float64 values that reach it, inside :func:`jaxmp.autocast` too.
    * **Residuals**: what a forward pass in ``fun`` stores for its backward pass.
    * **Autocast**: matmuls inside :func:`jaxmp.autocast` that stayed float32 are
      none: ``report.kept`` says why they stayed, and :func:`jaxmp.explain` why other
      operations did. Under a policy with float8, ``report.kept_16bit`` says why matmuls
      stayed in 16 bits.
    * **Numerical risks**: ``report.hazards`` has products whose use 16 bits make wrong,
      or float32 at default precision; and numbers that are 0 or Inf.
    * **Not fused**: what ``report.attention`` and ``report.loss_heads`` have, and why.
    * **Compiled code**: ``audit(jax.jit(fun).lower(*args))`` reads what a GPU runs, and
      what it lacks; a :class:`CompiledReport`. A ``Compiled`` hides what XLA left out.

    Args:
        fun: Function that JAX can trace; or a ``Lowered`` or ``Compiled`` for a GPU.

    Returns:
        A function of the arguments of ``fun`` that returns a :class:`DtypeReport`. You
        may pass ``jax.ShapeDtypeStruct`` instead of arrays. Leaves that are not arrays
        are passed on as they are. Paths of arguments start at each argument.

    Raises:
        TypeError: If ``fun`` is not callable.
        ValueError: If it is compiled for something else than a GPU.

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
    if isinstance(fun, (jax.stages.Compiled, jax.stages.Lowered)):
        report: Any = audit_compiled(fun)
        return report
    check_function("audit", fun, "audit(fun)", "Type `audit(model.apply)(params, x)`.")

    @functools.wraps(fun)
    def audited(*args: P.args, **kwargs: P.kwargs) -> DtypeReport:
        default = default_precision()
        # What JAX is told of all products is no request.
        with own_precisions(), recording() as steps:
            flat = flatten(fun, args, kwargs)
            leaves = [*map(_with_sizes, flat.leaves)]
            jaxpr = jax.make_jaxpr(flat.fun)(*leaves)
            leaks = Leaks(default)
            if any(x is not y for x, y in zip(leaves, flat.leaves, strict=True)):
                leaks.notes[f"symbolic sizes count as {_OPEN}"] = None
            inputs = map(leaks.argument, flat.names, _jaxpr.in_avals(jaxpr))
            around = Place(user=caller(), steps=steps)
            leaks.walk.through(jaxpr, [*inputs], (), around)
            twin = functools.partial(traced_in_float32, flat.fun, leaves)
            numbers = Numbers(jaxpr, twin, around)
            gpu = judge((args, kwargs))
            hazards, attention, heads = of_products(
                jaxpr, around, default, numbers, gpu
            )
            return DtypeReport(
                residual_bytes=Flow(jaxpr, around).residual_bytes(),
                hazards=hazards,
                attention=attention,
                loss_heads=heads,
                **leaks.found(),
            )

    return uncalled("audit", fun, audited)


def _with_sizes(x: Any) -> Any:
    """Returns an argument with a number for each size that is left open."""
    shape = tuple(as_number(n, _OPEN) for n in x.shape)
    return x if shape == tuple(x.shape) else jax.ShapeDtypeStruct(shape, x.dtype)


def assert_16bit(fun: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Raises the report as an error unless all matmuls of ``fun`` run in 16 bits.

    Put this line into a test to keep float32 from coming back. A matmul that
    :func:`jaxmp.autocast` left in float32 fails as well, because it is as slow.
    If you want that (``float32_paths``, ``float32_region``), write ``report =
    jaxmp.audit(fun)(*args)`` and ``assert not report.leaks, report``.

    Args:
        fun: Function that JAX can trace. It does not run.
        *args: Its arguments, as :func:`jaxmp.audit` takes them.
        **kwargs: Its keyword arguments.

    Raises:
        AssertionError: If a matmul of ``fun`` is float32 or wider.
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
            f"`assert_16bit` expects all matmuls and convolutions of `{name}` in 16 "
            f"bits, but {1 - report.fraction_16bit:.1%} of their FLOPs are not."
        )
        if report.leaks and not report.is_uncast:
            problem += f" Change the lines under `{wide_name(report)} because of`."
        if report.kept:
            problem += (
                " If some of them are in float32 on purpose, type "
                "`assert not jaxmp.audit(fun)(*args).leaks` instead."
            )
        # The traceback begins with "AssertionError: ".
        text = f"{textwrap.fill(problem, WIDTH - 16)}\n\n{report}"
        if len(text) > _LONGEST:
            head = text[: text.rindex("\n", 0, _LONGEST)]
            text = f"{head}\n… `print(jaxmp.audit(fun)(*args))` has the rest."
        raise AssertionError(text)
