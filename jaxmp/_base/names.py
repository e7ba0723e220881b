"""What the names of other libraries are called here, for those who type them first."""

from __future__ import annotations

import sys

_GRADIENTS = "`jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)(params, x)`"
_SCALE = "the loss scale is in the state of the optimizer: type"
_POLICY = '`jaxmp.get_policy("mixed_float16")`'

# Of torch.amp, Apex, Keras, jmp, Flax, Haiku, mpx, Equinox and optax.
_ANSWERS = (
    (
        "amp autocast_mode mixed_precision initialize custom_fwd",
        'type `jaxmp.autocast(fun, "mixed_float16")(params, x)` for 16 bits, and '
        '`tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")` for the scale',
    ),
    (
        "GradScaler LossScaler LossScale LossScaleOptimizer DynamicScale scaler "
        "DynamicLossScale DynamicLossScaling dynamic_scale scale_loss",
        f'{_SCALE} `tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")`, and '
        f"{_GRADIENTS} for the gradients",
    ),
    (
        "loss_scale get_scale scale current_scale",
        f'{_SCALE} `tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")`, and '
        f"{_GRADIENTS} for the gradients; read it with "
        "`jaxmp.get_loss_scale(opt_state)`",
    ),
    (
        "is_autocast_enabled get_autocast_dtype get_autocast_gpu_dtype "
        "is_autocast_available autocast_enabled",
        "nothing is global: type `print(jaxmp.explain(fun)(params, x))` for the dtype "
        "of each line of a function",
    ),
    (
        "StaticLossScale NoOpLossScale ConstantLossScale",
        f"{_SCALE} `tx = jaxmp.static_loss_scale(optax.adam(1e-3), 128)`, and "
        f"{_GRADIENTS} for the gradients",
    ),
    (
        "filter_grad filter_value_and_grad calculate_scaled_grads unscale_ "
        "scaled_value_and_grad unscale_grads",
        f"type {_GRADIENTS}, whose gradients are in true units",
    ),
    (
        "set_global_policy global_policy set_policy set_dtype_policy set_half_dtype "
        "half_dtype set_float16 set_bfloat16 set_autocast_dtype",
        "nothing is global: give each function its policy, as in "
        '`jaxmp.autocast(fun, "mixed_float16")(params, x)`',
    ),
    ("policy parse_policy DTypePolicy PrecisionPolicy", f"type {_POLICY}"),
    ("policies", f"type {_POLICY}, and see `help(jaxmp.get_policy)` for the names"),
    (
        "cast cast_to_half cast_to_half_precision cast_to_float16",
        'type `jaxmp.cast_tree(params, "float16")`',
    ),
    ("cast_to_bfloat16", 'type `jaxmp.cast_tree(params, "bfloat16")`'),
    (
        "cast_to_full cast_to_full_precision cast_to_float32",
        'type `jaxmp.cast_tree(params, "float32")`',
    ),
    ("cast_to_compute", f"type `{_POLICY[1:-1]}.cast_to_compute(params)`"),
    ("cast_to_param", f"type `{_POLICY[1:-1]}.cast_to_param(params)`"),
    ("cast_to_output", f"type `{_POLICY[1:-1]}.cast_to_output(params)`"),
    (
        "cast_function half_function",
        'type `jaxmp.with_policy(fun, "mixed_float16")(params, x)`',
    ),
    (
        "force_full_precision float_function disable_casts keep_float32",
        "type `jaxmp.float32_region(fun)(params, x)` inside of `jaxmp.autocast`",
    ),
    (
        "optimizer_update apply_if_finite skip_nonfinite adjust master_params",
        'type `tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")`, which '
        "skips the steps that are not finite; the parameters stay in float32",
    ),
    (
        "is_finite step_skipped found_inf",
        "type `jaxmp.last_step_finite(opt_state)`, or `jaxmp.all_finite(params)`",
    ),
    ("stochastic_round", "type `jaxmp.stochastic_rounding(optax.adam(1e-3))`"),
    ("select", "type `jaxmp.select_tree(True, params, params)`"),
)
ANSWERS = {name: text for names, text in _ANSWERS for name in names.split()}


def missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module of jaxmp lacks.

    Args:
        module: Such as ``"jaxmp.nnx"``.
        name: What was typed.
    """
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
