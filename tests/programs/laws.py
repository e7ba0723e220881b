"""What holds for a program under autocast, whoever wrote it.

A program is a function without arguments that builds a loss and what it is given. The
parameters are its first argument. Nothing else is asked of it.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from benchmarks.counting.measure import IN_A_HURRY, relative_error, run
from conftest import normal as normal

DTYPES = {
    "mixed_float16": jnp.float16,
    "mixed_bfloat16": jnp.bfloat16,
    "mixed_float16_bfloat16": jnp.bfloat16,  # of the gradients
}
POLICIES = ("float32", *DTYPES)
KEY = jax.random.key(0, impl="unsafe_rbg")  # which compiles sooner than others


def outside(loss, policy, **options):
    """Puts autocast around the gradient, where it is best."""
    return jaxmp.autocast(jax.value_and_grad(loss, **options), policy)


def inside(loss, policy, **options):
    """Differentiates what autocast has made."""
    return jax.value_and_grad(jaxmp.autocast(loss, policy), **options)


ORDERS = (outside, inside)
USUAL = ("mixed_float16",)
BUILDERS: list[Callable] = []  # of all programs, in the files that are imported


class Program(NamedTuple):
    """A loss, and what it is called with."""

    loss: Callable
    args: tuple  # it is differentiated with respect to the first
    has_aux: bool = False
    # Relative errors that are allowed, in epsilons of the 16-bit dtype. A layer rounds
    # two operands by half an epsilon each, forward and backward, and there are a few;
    # 8 where norms of few numbers, or steps in time, make more of it, and 16 where the
    # gates of a relu stand where a rounding turns them.
    tolerance: float = 4.0
    wide: bool = False  # whether there are products that autocast leaves in float32


def programs(*builders: Callable[[], Program]) -> Callable:
    """Gives a test each of the programs, under each policy, in both orders.

    Of each library the first program goes through float16, with autocast around the
    gradient; the rest is evidence. tests/test_autocast.py has float32.
    """
    BUILDERS.extend(builders)
    cases = []
    for build, policy, order in itertools.product(builders, POLICIES, ORDERS):
        first = build is builders[0] and order is outside
        name = f"{order.__name__}-{policy}-{build.__name__}"
        marks = () if first and policy in USUAL else pytest.mark.evidence
        cases.append(pytest.param(build, policy, order, id=name, marks=marks))
    return pytest.mark.parametrize(("program", "policy", "order"), cases)


# The 16-bit dtypes go one way.
in_16_bits = pytest.mark.parametrize(
    "policy",
    ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.evidence)],
)


def drawn(tree: Any) -> Any:
    """Draws parameters of the shapes in ``tree``, without a compiler.

    Matrices are normal, such that products keep the size of their inputs. Vectors are
    positive, because they may be scales and variances as well as biases.
    """
    rng = np.random.default_rng(0)

    def draw(x):
        if x.ndim < 2:
            return jnp.asarray(rng.uniform(0.5, 1, x.shape), x.dtype)
        numbers = rng.standard_normal(x.shape) / math.sqrt(x.size / max(x.shape))
        return jnp.asarray(numbers, x.dtype)

    def is_drawn(x):
        return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)

    return jax.tree.map(lambda x: draw(x) if is_drawn(x) else x, tree)


@functools.cache
def built(build: Callable[[], Program]) -> Program:
    """Builds a program once."""
    return build()


@functools.cache
def plainly_lowered(build: Callable[[], Program]) -> jax.stages.Lowered:
    """Returns what JAX gives the compiler for a program as it was written."""
    program = built(build)
    plain = jax.value_and_grad(program.loss, has_aux=program.has_aux)
    return jax.jit(plain).lower(*program.args)


@functools.cache
def in_float32(build: Callable[[], Program]) -> Any:
    """Returns what comes of a program as it was written."""
    compiled = plainly_lowered(build).compile(compiler_options=IN_A_HURRY)
    return compiled(*built(build).args)


def hold(build: Callable[[], Program], policy: str, order: Callable) -> None:
    """Runs a program under a policy, and compares loss, gradients and what it returns.

    Under float32 nothing changes, in any bit. In 16 bits all is near, has the dtypes
    that it had, and is finite where it was; the products take 16-bit operands.
    """
    program = built(build)
    grad_fn = order(program.loss, policy, has_aux=program.has_aux)
    if policy == "float32":
        lowered = jax.jit(grad_fn).lower(*program.args)
        if lowered.as_text() == plainly_lowered(build).as_text():
            return  # the same program gives the same bits
        got = run(grad_fn, *program.args)[0]
        chex.assert_trees_all_equal_shapes_and_dtypes(got, in_float32(build))
        chex.assert_trees_all_equal(got, in_float32(build))
        return
    got = run(grad_fn, *program.args)[0]
    near(got, in_float32(build), DTYPES[policy], program.tolerance)
    if policy == "mixed_float16":  # the other has the same products
        multiplies_in_16_bits(jaxmp.audit(grad_fn)(*program.args), program.wide)


def near(got: Any, expected: Any, dtype: Any, tolerance: float) -> None:
    """Compares each output, a pytree, with that of float32."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_equal(finite(got), finite(expected))
    for one, other in zip(got, expected, strict=True):
        error = relative_error(floats(one), floats(other))
        limit = tolerance * float(jnp.finfo(dtype).eps)
        assert error <= limit, f"{error:.2e} > {limit:.2e}, tolerance {tolerance}"


def finite(tree: Any) -> Any:
    """Returns where the numbers of a pytree are finite."""
    return [jnp.isfinite(x) for x in floats(tree)]


def floats(tree: Any) -> list:
    """Returns the floating leaves of a pytree."""
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


def multiplies_in_16_bits(report: jaxmp.DtypeReport, wide: bool = False) -> None:
    """Asks that every product is 16-bit, or if ``wide`` is named with a true reason."""
    assert not report.leaks, str(report)
    if not wide:
        assert report.fraction_16bit == 1, str(report)
        return
    float32 = report.flops.get("float32", 0.0)
    assert math.isclose(sum(k.flops for k in report.kept), float32), str(report)
    # None of these programs has float32 paths or lists of its own.
    reasons = {k.reason for k in report.kept}
    assert not any("float32_paths" in reason for reason in reasons), str(report)
