"""What is said of a name, or of a library, that is not there."""

from __future__ import annotations

import sys

_GRADIENTS = "`jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)(params, x)`"
_SCALE = "the loss scale is in the state of the optimizer: type"
_POLICY = '`jaxmp.get_policy("mixed_float16")`'

_LOSS_SCALE = (
    f'{_SCALE} `tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")`, and '
    f"{_GRADIENTS} for the gradients; read it with `jaxmp.get_loss_scale(opt_state)`"
)
_NOT_GLOBAL = (
    "nothing is global: give each function its policy, as in "
    '`jaxmp.autocast(fun, "mixed_float16")(params, x)`'
)
_SKIPS = (
    'type `tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")`, which skips '
    "the steps that are not finite; the parameters stay in float32"
)
_IN_FLOAT32 = "type `jaxmp.float32_region(fun)(params, x)` inside of `jaxmp.autocast`"

# The names that people type: of torch.amp, Apex, Keras, jmp, Flax, Haiku, mpx, Equinox
# and optax.
ANSWERS = {
    "amp": 'type `jaxmp.autocast(fun, "mixed_float16")(params, x)` for 16 bits, and '
    '`tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")` for the scale',
    "GradScaler": _LOSS_SCALE,
    "LossScaleOptimizer": _LOSS_SCALE,
    "DynamicScale": _LOSS_SCALE,
    "DynamicLossScale": _LOSS_SCALE,
    "DynamicLossScaling": _LOSS_SCALE,
    "loss_scale": _LOSS_SCALE,
    "get_scale": _LOSS_SCALE,
    "StaticLossScale": f"{_SCALE} `tx = jaxmp.static_loss_scale(optax.adam(1e-3), "
    f"128)`, and {_GRADIENTS} for the gradients",
    "is_autocast_enabled": "nothing is global: type `print(jaxmp.explain(fun)(params, "
    "x))` for the dtype of each line of a function",
    "filter_grad": f"type {_GRADIENTS}, whose gradients are in true units",
    "filter_value_and_grad": f"type {_GRADIENTS}, whose gradients are in true units",
    "unscale_": f"type {_GRADIENTS}, whose gradients are in true units",
    "set_global_policy": _NOT_GLOBAL,
    "set_policy": _NOT_GLOBAL,
    "policy": f"type {_POLICY}, and see `help(jaxmp.get_policy)` for the names",
    "DTypePolicy": f"type {_POLICY}, and see `help(jaxmp.get_policy)` for the names",
    "cast": 'type `jaxmp.cast_tree(params, "float16")`',
    "cast_to_half": 'type `jaxmp.cast_tree(params, "float16")`',
    "cast_to_full": 'type `jaxmp.cast_tree(params, "float32")`',
    "cast_to_compute": f"type `{_POLICY[1:-1]}.cast_to_compute(params)`",
    "cast_to_param": f"type `{_POLICY[1:-1]}.cast_to_param(params)`",
    "cast_to_output": f"type `{_POLICY[1:-1]}.cast_to_output(params)`",
    "half_function": 'type `jaxmp.with_policy(fun, "mixed_float16")(params, x)`',
    "float_function": _IN_FLOAT32,
    "force_full_precision": _IN_FLOAT32,
    "apply_if_finite": _SKIPS,
    "skip_nonfinite": _SKIPS,
    "is_finite": "type `jaxmp.last_step_finite(opt_state)`, or "
    "`jaxmp.all_finite(params)`",
    "stochastic_round": "type `jaxmp.stochastic_rounding(optax.adam(1e-3))`",
}


def missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module, such as ``jaxmp.nnx``, lacks."""
    root = sys.modules["jaxmp"]
    if module == "jaxmp.nnx" and name == "grad":
        answer = (
            "type `jaxmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)(model, x)`, "
            "which returns the gradients second"
        )
    elif module != "jaxmp" and not name.startswith("_") and name in dir(root):
        answer = f"type `jaxmp.{name}`"
    elif name in ANSWERS:
        answer = ANSWERS[name]
    else:
        # With the module, Python says which name may be meant.
        return AttributeError(
            f"module {module!r} has no attribute {name!r}",
            name=name,
            obj=sys.modules[module],
        )
    return AttributeError(f"{module} has no `{name}`: {answer}.")


def not_installed(front_end: str, library: str, extra: str) -> ModuleNotFoundError:
    """Returns the error of a front end whose library is not there, or too old."""
    return ModuleNotFoundError(
        f"`{front_end}` needs {library}, which the rest of jaxmp does not. Install it: "
        f"pip install 'jaxmp[{extra}]'"
    )
