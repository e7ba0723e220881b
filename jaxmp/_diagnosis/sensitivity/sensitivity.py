"""Which part of a model needs float32, measured.

The loss and its gradients are computed once for each choice of the modules that round
to 16 bits, by one compiled program (:mod:`~.switches`), and compared with those of
float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from ..._autocast.autocast import autocast
from ..._base.checks import (
    check_function,
    clipped,
    describe,
    explains,
)
from ..._base.policy import PolicyLike, get_policy
from ..._base.tree import path_name, widen
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.flatten import Flat, check_values, flatten, traced_in_float32
from ..._jaxprs.places import Place, caller
from ..._ops.lists import DEFAULT_OPS, OpLists
from ..._ops.precision import FLOAT32_PRODUCTS, Float32Products
from ..._residuals.eight_bits import FEW, Format, check_format
from ..numbers import Numbers
from ..text import PASS_THE_LOSS, uncalled
from .report import SensitivityReport
from .rounded import marking
from .search import Search, progress_bar
from .switches import Program

P = ParamSpec("P")


@explains('jaxmp.sensitivity(loss_fn, "mixed_float16")(*args)')
def sensitivity(
    fun: Callable[P, Any],
    policy: PolicyLike | None = None,
    *,
    tolerance: float = 0.05,
    has_aux: bool = False,
    ops: OpLists = DEFAULT_OPS,
    depth: int | None = None,
    progress: bool | None = None,
    float32_matmuls: Float32Products | None = None,
    residuals: Format | None = None,
) -> Callable[P, SensitivityReport]:
    """Measures which modules of a model need float32, and names the fewest.

    ``fun`` is a loss. For each module in it (of Linen, NNX, Equinox and Haiku;
    ``jax.named_scope`` names anything else), the report has the errors of the loss and
    of the gradients relative to float32: with that module alone in 16 bits, and with
    everything but that module in 16 bits. It also has the FLOPs of the module, and the
    ``float32_paths`` that meet a tolerance, as a line to paste. Under ``"mixed_fp8"``
    these are the modules for which bfloat16 is not enough, and ``bfloat16_paths`` those
    to keep out of float8.

    With ``residuals="int8"`` it measures what each module adds to the error because it
    stores eight bits for the backward pass. ``bfloat16_paths`` are then the modules
    that must not.

    One compiled program measures all of these choices, because each rounding to 16 bits
    can be switched off in it. Of more than 40 modules, the worst ten are measured in
    full, and the errors without another one are estimated. At the end autocast itself
    runs with the paths found. Gradients in float16 are those of the loss times the
    largest power of two up to 2^15 with which they are finite.

    Args:
        fun: Function that returns a scalar, differentiated with respect to the floating
            arrays of its first argument; or one that returns a scalar and gradients of
            its own, as ``jax.value_and_grad(loss)`` does, all compared. If it
            multiplies matrices in 16 bits already (:func:`jaxmp.with_policy`,
            :func:`jaxmp.autocast`), it is taken as it stands.
        policy: As :func:`jaxmp.autocast` takes it; None is bfloat16.
        tolerance: The largest relative error that is accepted, for the loss and the
            gradients.
        has_aux: Whether ``fun`` returns a pair of the loss and something else, which is
            ignored.
        ops: As :func:`jaxmp.autocast` takes it.
        depth: The number of names of a path that are used, for fewer rows. 2 gives the
            layers of a Linen model, 3 those in a list of NNX. None uses all names.
        progress: Whether to show a progress bar. None shows one if there is a terminal
            and rich is installed.
        float32_matmuls: The dtype to which a device rounds the operands of float32
            matmuls without a precision: ``"tf32"`` for NVIDIA GPUs from A100 on,
            ``"bfloat16"`` for a TPU. The errors then include this rounding on any
            machine. None leaves it to the device that this runs on; a CPU does not
            round. Use it with the policy ``"float32"`` to measure a float32 program.
        residuals: As :func:`jaxmp.autocast` takes it.

    Returns:
        A function of the arguments of ``fun`` that returns a
        :class:`SensitivityReport`.

    Raises:
        TypeError: If ``fun`` is not callable, returns no scalar, or more without
            gradients and ``has_aux``, or if an argument has no values.
        ValueError: If an option is out of range, nothing in ``fun`` is in 16 bits, or
            in eight with ``residuals``, or an argument was donated to a step that has
            run.
        FloatingPointError: If the loss or its gradients are not finite in float32.

    Examples:
        >>> def loss(w, x):
        ...     with jax.named_scope("features"):
        ...         h = jnp.sin(x @ w["b"])
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((h @ w["w"]) ** 2)
        >>> w = {"b": jnp.full((8, 8), 33.3), "w": jnp.ones((8, 1))}
        >>> report = jaxmp.sensitivity(loss)(w, jnp.full((8, 8), 3.33))
        >>> report.float32_paths
        ('features',)
    """
    check_function("sensitivity", fun, "sensitivity(fun, policy)", PASS_THE_LOSS)
    is_name = isinstance(float32_matmuls, str)
    if float32_matmuls is not None and not (
        is_name and float32_matmuls in FLOAT32_PRODUCTS
    ):
        got = repr(clipped(float32_matmuls)) if is_name else describe(float32_matmuls)
        raise ValueError(
            f"`float32_matmuls` must be None or one of {FLOAT32_PRODUCTS}, but is "
            f'{got}. Pass `"tf32"` for NVIDIA GPUs from A100 on, and `"bfloat16"` for '
            "a TPU."
        )
    if not 0 < tolerance < math.inf:
        raise ValueError(
            f"`tolerance` must be a positive relative error, but is {tolerance}. Pass "
            "for example `tolerance=0.05`."
        )
    if depth is not None and depth < 1:
        raise ValueError(
            f"`depth` must be at least 1, but is {depth}. Pass 2 for the layers of a "
            "Linen model, and None for all modules."
        )
    check_format(residuals)
    policy = None if policy is None else get_policy(policy)
    is_float32 = policy is not None and policy.compute_dtype == jnp.float32

    @functools.wraps(fun, updated=())
    def measured(*args: P.args, **kwargs: P.kwargs) -> SensitivityReport:
        flat = flatten(fun, args, kwargs)
        check_values("sensitivity", flat, "the parameters and a batch")
        around = Place(user=caller())
        with marking(depth):
            own = Program(jax.make_jaxpr(flat.fun)(*flat.leaves), around, flat.leaves)
        is_loss = _returns_scalar(own.jaxpr) or has_aux
        if not is_loss and not own.has_backward:
            raise TypeError(
                "`sensitivity` expects a loss, but `fun` returns more than a scalar, "
                "and computes no gradients. Type `sensitivity(fun, has_aux=True)`, "
                "which differentiates the first result."
            )
        step, arrays = flat.fun, flat.leaves
        if is_loss:
            count = len(flatten(lambda *args: None, args[:1], {}).leaves)
            step, arrays = _gradient(flat, count), [jnp.float32(1), *flat.leaves]
        cast = functools.partial(autocast, step, policy, ops=ops, residuals=residuals)
        in_16bit = step if own.multiplies else cast()

        def program_of(fun: Callable) -> Program:
            with marking(depth):
                jaxpr = jax.make_jaxpr(fun)(*arrays)
            twin = functools.partial(traced_in_float32, fun, arrays)
            numbers = Numbers(jaxpr, twin, around)
            options = depth, numbers, float32_matmuls
            return Program(jaxpr, around, flat.leaves, *options)

        program = program_of(in_16bit)
        if not program.parts:
            raise ValueError(_nothing_found(float32_matmuls))
        _check_residuals(program, residuals, own.multiplies)
        in_float32 = is_float32 and not own.multiplies and float32_matmuls is not None
        scales = [2.0**i for i in range(15 if program.scales else 0, -1, -1)]
        with progress_bar(progress) as tell:
            search = Search(program, flat.leaves, scales if is_loss else (), tell)
            rows = search.rows()
            paths, milder, errors = search.found(rows, tolerance)
            again: tuple[float, float] | None = None
            if not (own.multiplies or in_float32):
                tell("running autocast itself", 1)
                kept = cast(float32_paths=paths, bfloat16_paths=milder)
                if float32_matmuls is not None:
                    kept = program_of(kept).all_on
                loss, gradients = search.errors_of(kept)
                again = loss, gradients
                tell()
        report = SensitivityReport(
            modules=tuple(rows),
            dtype=" and ".join(sorted(program.dtypes)),
            loss=search.all.loss,
            gradients=search.all.gradients,
            tolerance=float(tolerance),
            float32_paths=paths,
            bfloat16_paths=milder,
            loss_with_paths=errors.loss,
            gradients_with_paths=errors.gradients,
            measured=again,
            is_cast=own.multiplies and not own.has_autocast,
            loss_scale=search.scale,
            notes=tuple(program.notes),
            float32_matmuls=float32_matmuls,
            in_float32=in_float32,
            residuals=program.residuals,
        )
        return _with_notes(report, [*args, *kwargs.values()])

    return uncalled("sensitivity", fun, measured)


# What is measured


def _check_residuals(program: Program, residuals: Any, is_cast: bool) -> None:
    """Refuses what leaves nothing to say of residuals in eight bits."""
    if residuals is not None and is_cast:
        raise ValueError(
            "`residuals` is for the autocast that `sensitivity` puts around `fun`, but "
            "this one casts by itself. Pass `residuals` to its own `autocast`, around "
            "the gradient, and none to `sensitivity`."
        )
    if residuals is not None and program.residuals is None:
        raise ValueError(
            f'`sensitivity(..., residuals="{residuals}")` found nothing that is stored '
            "in eight bits: the policy computes in float32, or no array that the "
            f"backward pass reads has {FEW} numbers. Pass a policy such as "
            '"mixed_bfloat16", and a larger batch.'
        )
    if program.residuals is not None and "float16" in program.dtypes:
        raise ValueError(
            "`sensitivity` finds the `bfloat16_paths` that store no eight bits, but a "
            'float16 policy takes none. Pass "mixed_bfloat16", or no `residuals`. In '
            "float16, `float32_paths` leave a module out."
        )


def _nothing_found(products: str | None) -> str:
    """Returns what to say of a program in which nothing is rounded."""
    if products is None:
        return (
            "`sensitivity` found nothing in 16 bits: the policy computes in float32, "
            "or `fun` has no matmul, or float64 arguments. Pass for example "
            '`policy="mixed_bfloat16"`, or for a float32 program on a GPU '
            '`sensitivity(fun, "float32", float32_matmuls="tf32")`.'
        )
    return (
        "`sensitivity` found nothing to round: the policy computes in float32, and "
        "`fun` has no matmul without a precision. No device rounds it."
    )


def _with_notes(report: SensitivityReport, args: Sequence[Any]) -> SensitivityReport:
    """Returns a report that says what its line does not reach, too."""
    found = [*report.notes]
    if report.is_cast:
        leaves = [leaf for arg in args for leaf in jax.tree.leaves_with_path(arg)]
        names = [path_name(path) for path, _ in leaves]
        pairs = zip(report.float32_paths, report.overrides, strict=True)
        found += [
            f"no argument has a path that the override for `{path}` matches: put "
            "`jaxmp.float32_region` around that module instead"
            for path, (pattern, _) in pairs
            if not any(re.search(pattern, name) for name in names)
        ]
    if any(row.is_estimated for row in report.modules):
        found.append(
            "the worst modules are measured in full: all but another one is estimated, "
            "as errors add as squares"
        )
    if report.in_float32 and report.dtype:
        found.append(
            f"the program casts to {report.dtype} by itself: its errors are among "
            "those above, and no precision removes them"
        )
    return dataclasses.replace(report, notes=tuple(found))


def _returns_scalar(jaxpr: Any) -> bool:
    """Whether a function returns a scalar alone; false if a scalar and more."""
    avals = _jaxpr.out_avals(jaxpr)
    if not avals or avals[0].shape or not jnp.issubdtype(avals[0].dtype, jnp.floating):
        first = f"{avals[0].dtype}{[*avals[0].shape]}" if avals else "nothing"
        raise TypeError(
            "`sensitivity` expects a function that returns a floating scalar, or one "
            f"first and then more, but the first result is {first}. Pass the loss, or "
            "`jax.value_and_grad(loss)`."
        )
    return len(avals) == 1


def _gradient(flat: Flat, count: int) -> Callable[..., list[jax.Array]]:
    """Returns a function of the loss scale and the leaves: the loss and its gradients.

    They are with respect to the first ``count`` leaves.
    """
    first = enumerate(flat.leaves[:count])
    moving = [i for i, x in first if jnp.issubdtype(x.dtype, jnp.floating)]
    if not moving:
        raise TypeError(
            "`sensitivity` differentiates with respect to the first argument of `fun`, "
            "but there is no floating array in it. Pass the parameters first."
        )

    def step(scale, *leaves):
        def loss(moved):
            replaced = dict(zip(moving, moved, strict=True))
            out, *_ = flat.fun(*(replaced.get(i, x) for i, x in enumerate(leaves)))
            return widen(out) * scale

        loss, grads = jax.value_and_grad(loss)([leaves[i] for i in moving])
        return [loss / scale, *(widen(grad) / scale for grad in grads)]

    return step
