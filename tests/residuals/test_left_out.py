"""Which modules to leave out of residuals in eight bits, measured."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp._diagnosis.sensitivity.rounded import marking
from jaxmp._diagnosis.sensitivity.search import relative_errors as _errors
from jaxmp._diagnosis.sensitivity.switches import Program
from jaxmp._diagnosis.wide_replay import compiled
from jaxmp._jaxprs.flatten import flatten
from jaxmp._jaxprs.places import Place

ROWS, WIDTH = 64, 64
NAMES = ("table", "consumer", "plain", "head")
# One column of a table is 10,000 times as large as the others, which int8 makes zero.
LARGE = jnp.where(jnp.arange(WIDTH) == 0, 1e4, 1.0)


def loss_fn(params, x):
    with jax.named_scope("table"):
        y = x @ (params["table"] * LARGE)
    with jax.named_scope("consumer"):
        y = y @ (params["consumer"] / LARGE[:, None])
    with jax.named_scope("plain"):
        y = y + jnp.tanh(y @ params["plain"])
    with jax.named_scope("head"):
        return jnp.mean((y @ params["head"]) ** 2)


def args():
    *keys, last = jax.random.split(jax.random.key(0), len(NAMES) + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys]
    return dict(zip(NAMES, weights, strict=True)), jax.random.normal(
        last, (ROWS, WIDTH)
    )


def measure(fun, *args, **options):
    return jaxmp.sensitivity(fun, progress=False, **options)(*args)


@functools.cache
def report():
    return measure(loss_fn, *args(), residuals="int8", tolerance=0.02)


def error_of(fun, exact):
    flat = flatten(fun, args(), {})
    found = compiled(flat.fun, *flat.leaves)(*flat.leaves)
    return float(_errors(found, exact)[1])


def cast(**options: Any):
    grad = jax.value_and_grad(loss_fn)
    return jaxmp.autocast(grad, "mixed_bfloat16", **options)


def test_the_module_that_stores_what_int8_loses_is_left_out():
    found = report()
    assert found.residuals == "int8"
    assert found.gradients > 0.3
    assert {row.path for row in found.modules[:2]} == {"table", "consumer"}
    rows = {row.path: row for row in found.modules}
    for name in NAMES:
        helps = name in ("table", "consumer")
        assert (rows[name].gradients_without < 0.01) == helps, name
    # The table alone is less to store in 16 bits than all that its consumer reads.
    assert rows["table"].stored < rows["consumer"].stored
    assert found.line == 'bfloat16_paths=("table",)'
    assert found.meets_tolerance


def test_what_is_pasted_brings_the_error_down():
    flat = flatten(jax.value_and_grad(loss_fn), args(), {})
    exact = compiled(flat.fun, *flat.leaves)(*flat.leaves)
    found = report()
    pasted = eval(f"dict({found.line})")
    assert error_of(cast(residuals="int8"), exact) == pytest.approx(
        found.gradients, rel=0.01
    )
    error = error_of(cast(residuals="int8", **pasted), exact)
    assert error < 0.01
    assert error == pytest.approx(found.gradients_with_paths, rel=0.01)


def test_the_report_speaks_of_eight_bits():
    text = " ".join(str(report()).split())
    assert "everything in bfloat16 and int8" in text
    assert "only this in 8 bits all but this in 8 bits" in text
    assert "Out of 8 bits, these modules bring both errors to at most 0.02" in text
    table = next(x for x in report().modules if x.path == "table")
    assert f"{table.stored:.1%}" in text


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_switches_stand_for_residuals_in_eight_bits(kind):
    flat = flatten(jax.value_and_grad(loss_fn), args(), {})
    options: Any = {"residuals": kind}
    whole = jaxmp.autocast(flat.fun, "mixed_bfloat16", **options)
    with marking():
        jaxpr = jax.make_jaxpr(whole)(*flat.leaves)
    program = Program(jaxpr, Place(), flat.leaves)
    run = compiled(program.run, np.zeros(program.count, bool), *flat.leaves)
    for paths in [(), ("table",), program.eight_bit_parts]:
        options["bfloat16_paths"] = paths
        kept = jaxmp.autocast(flat.fun, "mixed_bfloat16", **options)
        real = compiled(kept, *flat.leaves)(*flat.leaves)
        second = [part not in paths for part in program.eight_bit_parts]
        switches = np.array([True] * len(program.parts) + second)
        assert max(map(float, _errors(run(switches, *flat.leaves), real))) < 1e-6


def test_layers_that_are_scanned_have_one_switch():
    def scanned(params, x):
        def layer(x, w):
            with jax.named_scope("layer"):
                return x + jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    params, x = args()
    params = jnp.stack([params["plain"], params["head"]])
    found = measure(scanned, params, x, residuals="fp8", tolerance=1e-9)
    rows = {row.path: row for row in found.modules}
    assert rows["layer"].stored == 1
    assert found.gradients > 2 * rows["layer"].gradients_without > 0


def test_a_function_under_autocast_says_by_itself_what_it_stores():
    found = measure(cast(residuals="int8"), *args(), tolerance=0.02)
    assert found.line == report().line
    assert found.modules == report().modules


WRONG = {
    "the policy computes in float32": {"policy": "float32", "float32_matmuls": "tf32"},
    'Pass "mixed_bfloat16"': {"policy": "float16"},
    "must be one of 'int8', 'fp8' or None": {"residuals": "int4"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_leaves_nothing_to_say_is_refused(message):
    with pytest.raises(ValueError, match=message):
        measure(loss_fn, *args(), **{"residuals": "int8", **WRONG[message]})


def test_small_arrays_and_functions_that_cast_are_refused():
    params, x = args()
    with pytest.raises(ValueError, match="has 4096 numbers"):
        measure(loss_fn, params, x[:8], residuals="int8")
    with pytest.raises(ValueError, match="casts by itself"):
        measure(cast(), params, x, residuals="int8")
