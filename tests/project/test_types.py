"""A type checker finds the mistakes in a user's program, and nothing else."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ParamSpec, get_args, get_type_hints

import pytest

import jaxmp
import jaxmp.linen
import jaxmp.nnx
import jaxmp.plots

# Lines that end in `# error` must be found. The comment of a `reveal_type` is what
# pyright must say, with SIGNATURE for that of `loss_fn`.
PROGRAM = """
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jaxmp
import jaxmp.linen
import jaxmp.nnx

# Policies
policy = jaxmp.get_policy("mixed_float16")
jaxmp.Policy("float32", jnp.float16, jnp.dtype("float32"), [("head/", "f32")])
jaxmp.Policy("float32", "bfloat16", "float32", reduce_dtype="bf16")
jaxmp.Policy("float32", "bfloat16")  # error
jaxmp.Policy("float32", "bfloat16", "float32", reduce="bf16")  # error
policy.with_output_dtype("float16").with_overrides(("head/", "float32"))
policy.cast_to_output({"w": 1.0})["w"].real
reveal_type(policy.compute_dtype)  # dtype[Any]

# The optimizer
params = {"w": jnp.ones(3)}
tx = jaxmp.loss_scaling(optax.chain(optax.clip(1.0), optax.adam(1e-3)), policy)
opt_state = tx.init(params)
reveal_type(opt_state)  # LossScaleState
opt_state = opt_state._replace(
    loss_scale=jnp.float32(2.0**15), good_steps=jnp.int32(0)
)
reveal_type(opt_state.loss_scale)  # Array
updates, new_state = tx.update(params, opt_state, params)
reveal_type(new_state)  # LossScaleState
reveal_type(jaxmp.dynamic_loss_scale(optax.sgd(1.0)).init(params))  # LossScaleState
reveal_type(jaxmp.static_loss_scale(optax.sgd(1.0)).init(params))  # LossScaleState
optax.chain(optax.clip(1.0), tx).init(params)
TrainState.create(apply_fn=len, params=params, tx=tx)
opt_state.loss_scal  # error
jaxmp.loss_scaling("mixed_float16", optax.adam(1e-3))  # error
jaxmp.loss_scaling(optax.adam, "mixed_float16")  # error


# Functions keep their signatures
def loss_fn(
    params: dict[str, jax.Array], x: jax.Array, *, weight: float = 1.0
) -> jax.Array:
    return weight * (x @ params["w"]).mean()


def with_aux(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x), 1


x = jnp.ones((4, 3))
fast = jaxmp.autocast(loss_fn, policy)
fast(params, x, weight=2.0).mean()
fast(params)  # error
fast(params, x, wait=2.0)  # error
cast = jaxmp.with_policy(loss_fn, policy)
cast(params, x, weight=2.0).mean()
cast(params, "x")  # error
kept = jaxmp.float32_region(loss_fn)
kept(params, x, x)  # error
grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)
loss, grads = grad_fn(params, x)
grad_fn(x)  # error
(loss, aux), grads = jaxmp.value_and_grad(with_aux, has_aux=True)(params, x)
report = jaxmp.audit(loss_fn)(params, x)
leaks: tuple[jaxmp.Leak, ...] = report.leaks
rows: tuple[jaxmp.Kept, ...] = report.kept
jaxmp.audit(loss_fn)(params)  # error
report.fraction_16bits  # error
reveal_type(jaxmp.autocast(loss_fn))  # SIGNATURE -> Array
reveal_type(jaxmp.with_policy(loss_fn, policy))  # SIGNATURE -> Array
reveal_type(jaxmp.float32_region(loss_fn))  # SIGNATURE -> Array
reveal_type(jaxmp.audit(loss_fn))  # SIGNATURE -> DtypeReport
reveal_type(jaxmp.explain(loss_fn))  # SIGNATURE -> Explanation
reveal_type(jaxmp.grad(loss_fn))  # SIGNATURE -> Any
reveal_type(jaxmp.autocast(grad_fn, policy))  # SIGNATURE -> tuple[Any, Any]
reveal_type(jaxmp.activation_gradients(loss_fn))  # SIGNATURE -> dict[str, Array]
reveal_type(jaxmp.nnx.autocast(loss_fn))  # SIGNATURE -> Array
reveal_type(jaxmp.nnx.value_and_grad(loss_fn))  # SIGNATURE -> tuple[Any, Any]


@jaxmp.autocast
def decorated(x: jax.Array) -> jax.Array:
    return x


decorated(x).sum()
decorated("x")  # error


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, x):
    grad_fn = jaxmp.value_and_grad(loss_fn, policy=policy, loss_scale=opt_state)
    loss, grads = jaxmp.autocast(grad_fn, policy)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params, opt_state, loss = train_step(params, opt_state, x)

# Options and names
jaxmp.value_and_grad(loss_fn, policy="mixed_float16", accum_steps=2, batch_argnums=(1,))
jaxmp.value_and_grad(loss_fn, "mixed_float16")  # error
jaxmp.value_and_grad(loss_fn, acum_steps=2)  # error
jaxmp.value_and_grad(loss_fn, mesh="data")  # error
jaxmp.value_and_grad(loss_fn, reduction="sum")
jaxmp.value_and_grad(loss_fn, reduction="average")  # error
jaxmp.nnx.value_and_grad(loss_fn, reduction="average")  # error
jaxmp.loss_scaling(optax.sgd(1.0), policy, growth_interval=500, axis_name="data")
jaxmp.loss_scaling(optax.sgd(1.0), policy, growth_intervall=500)  # error
jaxmp.audit(loss_fn, params, x)  # error
jaxmp.autocast("cuda", dtype=jnp.float16)  # error
jaxmp.autocast(policy, loss_fn)  # error
jaxmp.autocast(loss_fn, ops="tanh")  # error
jaxmp.autocast(loss_fn, ops=jaxmp.DEFAULT_OPS.with_deny("tanh"))
jaxmp.autocats(loss_fn)  # error

# Front ends
model = nn.Dense(2)
jaxmp.linen.with_policy(model, "O2")(params, x).sum()
net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)


def net_loss(net: nnx.Linear, x: jax.Array) -> jax.Array:
    return jaxmp.with_policy(net, policy)(x).mean()


jaxmp.nnx.value_and_grad(net_loss, policy=policy, loss_scale=optimizer)(net, x)
jaxmp.nnx.value_and_grad(net_loss, policy=policy)(x, net)  # error

from jaxmp import *  # pyright: ignore[reportWildcardImportFromLibrary]

reveal_type(autocast(loss_fn))  # SIGNATURE -> Array
""".lstrip()

SIGNATURE = "(params: dict[str, Array], x: Array, *, weight: float = 1)"


def pyright(path):
    """Returns what pyright says of each line of a program."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", path.parent]
    run = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
    try:
        found = json.loads(run.stdout)["generalDiagnostics"]
    except ValueError:  # it fetches itself when first used
        pytest.skip(
            f"pyright does not run here: {run.stdout[-200:]}{run.stderr[-200:]}"
        )
    said: dict[tuple[int, str], str] = {}
    for row in found:
        key = row["range"]["start"]["line"], row["severity"]
        said[key] = said.get(key, "") + row["message"]
    return said


WRAPPERS = (
    jaxmp.activation_gradients,
    jaxmp.audit,
    jaxmp.autocast,
    jaxmp.explain,
    jaxmp.find_overflow,
    jaxmp.float32_region,
    jaxmp.grad,
    jaxmp.sensitivity,
    jaxmp.value_and_grad,
    jaxmp.with_policy,
    jaxmp.nnx.autocast,
    jaxmp.nnx.value_and_grad,
)


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_what_wraps_a_function_keeps_its_parameters(wrap):
    hints = get_type_hints(wrap)
    taken, returned = (
        get_args(hints[name])[0] for name in (next(iter(hints)), "return")
    )
    assert isinstance(taken, ParamSpec)
    assert taken is returned


def test_every_public_function_says_what_it_takes_and_returns():
    for module in (jaxmp, jaxmp.linen, jaxmp.nnx, jaxmp.plots):
        for name, fun in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and fun.__module__.startswith("jaxmp"):
                signature = inspect.signature(fun)
                arguments = [x.annotation for x in signature.parameters.values()]
                assert signature.empty not in (*arguments, signature.return_annotation)


def test_the_options_of_a_loss_scale_are_those_of_the_dynamic_one():
    def options(fun):
        parameters = inspect.signature(fun).parameters.values()
        return [(p.name, p.default) for p in parameters if p.default is not p.empty]

    assert options(jaxmp.loss_scaling) == options(jaxmp.dynamic_loss_scale)


# `.ci/run` has pyright check the library, the examples and the benchmarks.
@pytest.mark.evidence
def test_a_type_checker_finds_the_mistakes_of_a_user_and_nothing_else(tmp_path):
    config = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(Path(jaxmp.__file__).parent.parent)],
        "include": ["program.py"],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = pyright(program)

    lines = PROGRAM.splitlines()
    found = {
        lines[line]: text for (line, kind), text in said.items() if kind == "error"
    }
    wrong = {line for line in lines if line.endswith("# error")}
    assert {x: text for x, text in found.items() if x not in wrong} == {}
    assert wrong - set(found) == set()
    assert len(wrong) >= 15

    revealed = 0
    for number, line in enumerate(lines):
        if match := re.match(r"reveal_type\(.*\)  # (.*)", line):
            expected = match[1].replace("SIGNATURE", SIGNATURE)
            assert said[number, "information"].endswith(f'is "{expected}"'), line
            revealed += 1
    assert revealed >= 15
