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
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast.autocast import autocast
from ..._base.checks import (
    as_scale,
    check_function,
    check_positive,
    clipped,
    explains,
    uncalled,
)
from ..._base.policy import PolicyLike, get_policy
from ..._base.tree import all_finite, path_name, widen
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.flatten import Flat, check_values, flatten, traced_in_float32
from ..._jaxprs.places import Place, caller
from ..._jaxprs.scopes import is_under
from ..._ops.lists import DEFAULT_OPS, OpLists
from ..._ops.precision import FLOAT32_PRODUCTS, Float32Products
from ..._residuals.eight_bits import FEW, Format, check_format
from ..._training.loss_scale_state import scale_in
from ..numbers import Numbers
from ..wide_replay import compiled
from .report import ModuleSensitivity, SensitivityReport
from .switches import Program

P = ParamSpec("P")

_TRIED = 4  # modules in each step of the search
_AIM = 0.9  # of the tolerance, as autocast itself differs a little from the switches


@explains('jaxmp.sensitivity(loss_fn, "mixed_float16")(*args)')
def sensitivity(
    fun: Callable[P, Any],
    policy: PolicyLike | None = None,
    *,
    tolerance: float = 0.05,
    has_aux: bool = False,
    loss_scale: Any = None,
    ops: OpLists = DEFAULT_OPS,
    depth: int | None = None,
    progress: bool | None = None,
    float32_products: Float32Products | None = None,
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
    can be switched off in it. At the end autocast itself runs with the paths found.

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
        loss_scale: What the loss is multiplied by for its gradients: a number, or an
            optimizer state that holds one. None is 1, and for gradients in float16 the
            largest power of two up to 2^15 with which they are finite.
        ops: As :func:`jaxmp.autocast` takes it.
        depth: The number of names of a path that are used, for fewer rows. 2 gives the
            layers of a Linen model, 3 those in a list of NNX. None uses all names.
        progress: Whether to show a progress bar. None shows one if there is a terminal
            and rich is installed.
        float32_products: The dtype to which a device rounds the operands of float32
            matmuls without a precision: ``"tf32"`` for NVIDIA GPUs from A100 on,
            ``"bfloat16"`` for a TPU. The errors then include this rounding on any
            machine. None leaves it to the device that this runs on; a CPU has all
            digits. Use it with the policy ``"float32"`` to measure a float32 program.
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
    check_function(
        "sensitivity",
        fun,
        "sensitivity(fun, policy)",
        "Pass the loss, a function that calls `model.apply(params, x)`.",
    )
    _check_options(tolerance, depth, float32_products)
    check_format(residuals)
    policy = None if policy is None else get_policy(policy)

    @functools.wraps(fun, updated=())
    def measured(*args: P.args, **kwargs: P.kwargs) -> SensitivityReport:
        flat = flatten(fun, args, kwargs)
        check_values("sensitivity", flat, "the parameters and a batch")
        around = Place(user=caller())
        own = Program(jax.make_jaxpr(flat.fun)(*flat.leaves), around, flat.leaves)
        is_loss = _returns_scalar(own.jaxpr) or has_aux
        if not is_loss and not own.has_backward:
            raise TypeError(
                "`sensitivity` expects a loss, but `fun` returns more than a scalar, "
                "and computes no gradients. Type `sensitivity(fun, has_aux=True)`, "
                "which differentiates the first result."
            )
        if not is_loss and loss_scale is not None:
            raise ValueError(
                "`loss_scale` is for a `fun` that returns a loss alone, but this one "
                "returns more: its own gradients. Give the scale to what computes "
                "them, `jaxmp.value_and_grad(loss, loss_scale=...)`, and none to "
                "`sensitivity`."
            )
        step = flat.fun
        count = len(flatten(lambda *args: None, args[:1], {}).leaves)
        if is_loss:
            step = _gradient(flat, count)
        paths_keep = functools.partial(
            autocast, step, policy, ops=ops, residuals=residuals
        )
        in_16bit = step if own.multiplies else paths_keep()
        is_float32 = policy is not None and policy.compute_dtype == jnp.float32
        in_float32 = is_float32 and not own.multiplies and float32_products is not None
        arrays = [jnp.float32(1), *flat.leaves] if is_loss else flat.leaves
        jaxpr = jax.make_jaxpr(in_16bit)(*arrays)
        twin = functools.partial(traced_in_float32, in_16bit, arrays)
        numbers = Numbers(jaxpr, twin, around)
        program = Program(jaxpr, around, flat.leaves, depth, numbers, float32_products)
        if not program.parts:
            raise ValueError(_nothing_found(float32_products))
        _check_residuals(program, residuals, own.multiplies)
        scales = _scales(loss_scale, program) if is_loss else ()
        with _Bar(progress) as bar:
            search = _Search(program, flat.leaves, scales, bar)
            rows = search.rows()
            paths, milder, errors = search.found(rows, tolerance)
            again: tuple[float, float] | None = None
            if not (own.multiplies or in_float32):
                bar.expect("running autocast itself", 1)
                kept = paths_keep(float32_paths=paths, bfloat16_paths=milder)
                if float32_products is not None:
                    kept = _on_device(kept, around, search.arrays, float32_products)
                loss, gradients = _errors_of(kept, step, search.arrays)
                again = loss, gradients
                bar.advance()
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
            float32_products=float32_products,
            in_float32=in_float32,
            residuals=program.residuals,
        )
        notes = _unmatched(report, [*args, *kwargs.values()])
        if in_float32 and report.dtype:
            notes += (
                f"the program casts to {report.dtype} by itself: its errors are among "
                "those above, and no precision takes them away",
            )
        return dataclasses.replace(report, notes=report.notes + notes)

    return uncalled("sensitivity", fun, measured)


# What is measured


def _check_options(tolerance: float, depth: int | None, products: Any) -> None:
    is_name = isinstance(products, str)
    if products is not None and not (is_name and products in FLOAT32_PRODUCTS):
        got = repr(clipped(products)) if is_name else f"a {type(products).__name__}"
        raise ValueError(
            f"`float32_products` must be None or one of {FLOAT32_PRODUCTS}, but is "
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
            '`sensitivity(fun, "float32", float32_products="tf32")`.'
        )
    return (
        "`sensitivity` found nothing to round: the policy computes in float32, and "
        "`fun` has no matmul without a precision. No device rounds it."
    )


def _unmatched(report: SensitivityReport, args: Sequence[Any]) -> tuple[str, ...]:
    """Returns what to say of overrides that match no argument."""
    if not report.is_cast:
        return ()
    leaves = [leaf for arg in args for leaf in jax.tree.leaves_with_path(arg)]
    names = [path_name(path) for path, _ in leaves]
    pairs = zip(report.float32_paths, report.overrides, strict=True)
    return tuple(
        f"no argument has a path that the override for `{path}` matches: put "
        "`jaxmp.float32_region` around that module instead"
        for path, (pattern, _) in pairs
        if not any(re.search(pattern, name) for name in names)
    )


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


def _scales(loss_scale: Any, program: Program) -> list[float]:
    """Returns the loss scales to try, one after the other."""
    if loss_scale is not None:
        scale = scale_in(loss_scale)
        check_positive("loss_scale", scale)
        return [float(as_scale(scale))]
    return [2.0**i for i in range(15, -1, -1)] if program.scales else [1.0]


# How it is measured


class _Errors(NamedTuple):
    """Relative errors against float32."""

    loss: float
    gradients: float

    @property
    def worst(self) -> float:
        return max(self)


class _Search:
    """One compiled program, and what it gives for some choices of its switches."""

    def __init__(
        self,
        program: Program,
        leaves: Sequence[Any],
        scales: Sequence[float],
        bar: _Bar,
    ):
        """Compiles the program, and runs it with all switches off and all on."""
        self.program, self.bar = program, bar
        self.is_first = np.arange(program.count) < len(program.parts)
        self.masks = {part: self.mask(part) for part in program.parts}
        off = np.zeros(program.count, bool)
        self.scale, self.arrays = 1.0, leaves
        bar.expect("compiling", 1)
        first = [jnp.float32(1)] * bool(scales)
        self.run = compiled(program.run, off, *first, *leaves)
        bar.advance()
        bar.expect("everything in 16 bits", 1)
        if scales:
            self.settle(leaves, scales, off)
        else:
            self.reference = self.run(off, *leaves)
        _check_finite(self.reference, program)
        self.all = self.errors(~off)

    def settle(
        self, leaves: Sequence[Any], scales: Sequence[float], off: np.ndarray
    ) -> None:
        """Takes the first loss scale with which the gradients are finite."""
        on: np.ndarray | None = None
        for self.scale in scales:
            self.arrays = [jnp.float32(self.scale), *leaves]
            self.reference = self.run(off, *self.arrays)
            if on is None:
                # A forward pass that overflows needs a cure before it needs a scale.
                cures = (~mask for mask in (off, *self.masks.values()))
                on = next((x for x in cures if self.errors(x).loss < math.inf), off)
            if self.errors(on).gradients < math.inf:
                return

    def errors(self, switches: np.ndarray) -> _Errors:
        """Returns the errors with some parts in 16 bits."""
        outs = self.run(switches, *self.arrays)
        found = _Errors(*map(float, _errors(outs, self.reference)))
        self.bar.advance()
        return found

    def rows(self) -> list[ModuleSensitivity]:
        """Measures each module alone, and everything without it; the worst first."""
        parts = self.program.parts
        self.bar.expect("modules", 2 * len(parts))
        rows = [self.row(part) for part in parts]
        if self.program.residuals:  # one module alone stores little: it shares the rest
            return sorted(rows, key=lambda row: row.without)
        return sorted(rows, key=lambda row: -row.alone)

    def row(self, part: str) -> ModuleSensitivity:
        """Measures one module: its residuals, or what it rounds to 16 bits."""
        mask, others = self.masks[part], ~self.is_first
        if self.program.residuals:
            mask, others = self.mask_of_eight(part), self.is_first
        alone, without = self.errors(mask | others), self.errors(~mask)
        inside, by_part = self.inside(part), self.program.flops
        flops, total = sum(by_part[x] for x in inside), sum(by_part.values())
        stored = self.program.stored
        own = sum(stored[parts] for parts in stored if not parts.isdisjoint(inside))
        return ModuleSensitivity(
            path=part,
            loss_alone=alone.loss,
            gradients_alone=alone.gradients,
            loss_without=without.loss,
            gradients_without=without.gradients,
            flops=flops,
            share=flops / total if total else 0.0,
            has_path=self.has_path(part),
            stored=own / sum(stored.values()) if stored else 0.0,
        )

    def below(self, part: str) -> list[str]:
        """Returns the parts that ``float32_paths`` means by the name of one."""
        path, named = tuple(part.split("/")), filter(None, self.program.parts)
        return [x for x in named if part and is_under(path, tuple(x.split("/")))]

    def has_path(self, part: str) -> bool:
        """Whether ``float32_paths`` can name a part and not all parts with it."""
        named = [*filter(None, self.program.parts)]
        return bool(part) and (len(self.below(part)) < len(named) or len(named) == 1)

    def inside(self, part: str) -> list[str]:
        """Returns the parts that are in the row of one."""
        return self.below(part) if self.has_path(part) else [part]

    def mask(self, part: str) -> np.ndarray:
        """Returns which switches to 16 bits are in the row of one."""
        inside = self.inside(part)
        first = [x in inside for x in self.program.parts]
        return np.array(first + [False] * len(self.program.eight_bit_parts))

    def mask_of_eight(self, part: str) -> np.ndarray:
        """Returns which switches to eight bits are in the row of one."""
        inside, first = self.inside(part), [False] * len(self.program.parts)
        return np.array(first + [x in inside for x in self.program.eight_bit_parts])

    def found(
        self, rows: Sequence[ModuleSensitivity], tolerance: float
    ) -> tuple[tuple[str, ...], tuple[str, ...], _Errors]:
        """Searches for the fewest modules to keep in float32, and out of eight bits.

        What bfloat16 is not enough for needs float32. With that, some of the rest may
        have to stay in bfloat16.

        Returns:
            The paths of both, and the errors with them.
        """
        rows = [row for row in rows if row.has_path]
        aim, on = _AIM * tolerance, np.ones(self.program.count, bool)
        if self.all.worst <= aim or not rows:
            return (), (), self.all
        no_eight = self.is_first
        known: dict[str, _Errors] | None = None
        if no_eight.all():  # the rows have the first step
            known = {x.path: _Errors(x.loss_without, x.gradients_without) for x in rows}
        paths, errors = self.fewest(rows, self.masks, no_eight, known, aim, _flops)
        if no_eight.all():
            return paths, (), errors
        for path in paths:
            on &= ~self.masks[path]
        masks = {row.path: self.mask_of_eight(row.path) for row in rows}
        rows = [row for row in rows if masks[row.path].any()]
        cost = _stored if self.program.residuals else _flops
        milder, errors = self.fewest(rows, masks, on, None, aim, cost)
        return paths, milder, errors

    def fewest(
        self,
        rows: Sequence[ModuleSensitivity],
        masks: dict[str, np.ndarray],
        start: np.ndarray,
        known: dict[str, _Errors] | None,
        aim: float,
        cost: Callable[[ModuleSensitivity], float],
    ) -> tuple[tuple[str, ...], _Errors]:
        """Searches for the fewest modules whose switches, off, bring the error down.

        One after the other: the cheapest that is enough, else the one that takes away
        most of the squared error for its cost; at last those that were not needed are
        left out again. Where nothing is enough, as near as all of them come.

        Args:
            rows: The modules.
            masks: The switches of each.
            start: All switches, as they are before.
            known: The errors with each module off, if somebody has them.
            aim: The largest error that is accepted.
            cost: What it costs to switch a module off, as a share of all.

        Returns:
            Their paths, and the errors with these off.
        """

        def errors(off: Sequence[ModuleSensitivity]) -> _Errors:
            kept = [~masks[row.path] for row in off]
            return self.errors(np.all([start, *kept], axis=0))

        self.bar.expect("searching", 2)
        before = now = errors([])
        if now.worst <= aim or not rows:
            return (), now
        target = max(aim, 1.1 * errors(rows).worst)
        if known is None:
            self.bar.expect("searching", len(rows))
        found = known or {x.path: errors([x]) for x in rows}

        def use(x):
            return _use(x, cost(x), before, found[x.path])

        order = sorted(rows, key=use, reverse=True)
        chosen: list[ModuleSensitivity] = []
        on = start
        while now.worst > target:
            if chosen:
                left = [x for x in order if (on & masks[x.path]).any()][:_TRIED]
                if not left:
                    break
                self.bar.expect("searching", len(left))
                found = {x.path: errors([*chosen, x]) for x in left}
            candidates = [row for row in order if row.path in found]
            enough = [x for x in candidates if found[x.path].worst <= target]
            if enough:
                best = min(enough, key=cost)
            else:
                before = now
                best = max(candidates, key=use)
            chosen.append(best)
            on, now = on & ~masks[best.path], found[best.path]
        if len(chosen) > 1:
            self.bar.expect("searching", len(chosen))
            for row in sorted(chosen, key=cost, reverse=True):  # the dearest first
                rest = [x for x in chosen if x is not row]
                if (without := errors(rest)).worst <= target:
                    chosen, now = rest, without
        paths = {row.path for row in chosen}
        return tuple(x for x in self.program.parts if x in paths), now


def _flops(row: ModuleSensitivity) -> float:
    return row.share


def _stored(row: ModuleSensitivity) -> float:
    return row.stored


def _use(
    row: ModuleSensitivity, cost: float, before: _Errors, after: _Errors
) -> tuple[float, float]:
    """Returns how much error a module takes away for its cost, to compare."""
    gain = before.worst**2 - after.worst**2 if after.worst < math.inf else 0.0
    return gain / (cost + 0.01), row.alone


def _on_device(
    fun: Callable, around: Place, arrays: Sequence[Any], products: Float32Products
) -> Callable[..., list[Any]]:
    """Returns a function whose float32 products are those of a device."""
    jaxpr = jax.make_jaxpr(fun)(*arrays)
    program = Program(jaxpr, around, arrays, float32_products=products)
    return functools.partial(program.run, np.ones(program.count, bool))


def _errors_of(fun: Callable, exact: Callable, arrays: Sequence[Any]) -> _Errors:
    """Compiles and compares two functions."""
    outs = [compiled(f, *arrays)(*arrays) for f in (fun, exact)]
    return _Errors(*map(float, _errors(*outs)))


@jax.jit
def _errors(outs: Sequence[Any], reference: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the relative errors of the first result and of the others together."""
    return (
        _relative_error(outs[:1], reference[:1]),
        _relative_error(outs[1:], reference[1:]),
    )


def _relative_error(xs: Sequence[Any], ys: Sequence[Any]) -> jax.Array:
    pairs = [
        (widen(x), widen(y))
        for x, y in zip(xs, ys, strict=True)
        if jnp.issubdtype(y.dtype, jnp.inexact) and y.size
    ]
    if not pairs:
        return jnp.float32(0)
    # Squares of small gradients would be zero.
    top = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(y)) for _, y in pairs])
    unit = jnp.where(top > 0, top, 1)
    away = sum(jnp.sum(jnp.abs((x - y) / unit) ** 2) for x, y in pairs)
    size = sum(jnp.sum(jnp.abs(y / unit) ** 2) for _, y in pairs)
    error = jnp.sqrt(away) / jnp.where(top > 0, jnp.sqrt(size), 0)
    error = jnp.where(away == 0, 0, error)
    return jnp.where(jnp.isnan(error), jnp.inf, error)


def _check_finite(reference: Sequence[Any], program: Program) -> None:
    if bool(all_finite(list(reference))):
        return
    unknown = [x for x in program.numbers if x.written is None]
    if unknown:
        left = "0, as 1e-8 is" if unknown[0].left == 0 else "Inf, as 1e9 is"
        raise FloatingPointError(
            "`sensitivity` compares with float32, but the loss or its gradients are "
            "not finite as far as it can compute them in float32. The function casts "
            f"to {unknown[0].dtype} itself, and a number in its code at "
            f"{unknown[0].place.line or 'some line'} is {left}. Compute that line in "
            "float32, `x.astype(jnp.float32)`."
        )
    what = "the loss is not finite there"
    if bool(all_finite(reference[0])):
        what = "there the gradients are not finite, although the loss is"
    raise FloatingPointError(
        f"`sensitivity` compares with float32, but {what}. Type "
        "`jaxmp.find_overflow(fun)(*args)`, of the loss or of "
        "`jax.value_and_grad(loss)`, to see the line that breaks."
    )


class _Bar:
    """A progress bar, where there is rich and somebody to look at it."""

    def __init__(self, show: bool | None):
        self.bar: Any = None
        if show is False:
            return
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ModuleNotFoundError as error:
            if show:
                raise ModuleNotFoundError(
                    "`progress=True` needs rich. Install it with pip install rich"
                ) from error
            return
        console = Console(stderr=True)
        if show or console.is_terminal:
            self.bar = Progress(console=console, transient=True)
            self.task = self.bar.add_task("tracing", total=0)

    def __enter__(self) -> _Bar:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def expect(self, text: str, steps: int) -> None:
        """Says what comes next, and how many steps it takes."""
        if self.bar:
            total = self.bar.tasks[0].total + steps
            self.bar.update(self.task, description=text, total=total)

    def advance(self) -> None:
        """Makes one step."""
        if self.bar:
            self.bar.advance(self.task)
