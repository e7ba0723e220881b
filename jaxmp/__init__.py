"""Mixed precision for JAX, Flax and optax, as a few pure functions.

A training step in 16 bits, with float32 parameters and unscaled gradients::

    policy = jaxmp.get_policy("mixed_float16")  # or "mixed_bfloat16"
    tx = jaxmp.loss_scaling(optax.adam(1e-3), policy)
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state, x, y):
        grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = jaxmp.autocast(grad_fn, policy)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

`help` of a name, such as `help(jaxmp.autocast)`, has its options and an example.

Policies    get_policy Policy unused_overrides with_policy cast_tree
16 bits     autocast float32_region OpLists DEFAULT_OPS
            dot_product_attention linear_cross_entropy
Gradients   value_and_grad grad gather init_shardings
Loss scale  loss_scaling dynamic_loss_scale static_loss_scale LossScaleState
            get_loss_scale get_loss_scale_state last_step_finite check_loss_scale
            keep_if_skipped scalars unscale all_finite select_tree
Dtypes      explain Explanation ExplainedLine
            audit assert_16bit DtypeReport Leak Kept Hazard UnfusedAttention
            CompiledReport CompiledProduct LostRounding WideArray
            WrittenHead
Faults      find_overflow OverflowReport Fault OperationRange
Errors      sensitivity SensitivityReport ModuleSensitivity
            parity ParityReport ModuleParity OutputParity named_values
Ranges      range_report RangeReport RangeStats suggest_loss_scale record_ranges
            RecordRangesState exponent_histogram activation_gradients
Memory      with_state_dtype cast_state StateDtypeState Int8Blocks
            stochastic_rounding StochasticRoundingState
            kahan_summation KahanSummationState masters set_masters
Front ends  jaxmp.linen jaxmp.nnx jaxmp.plots
"""

import importlib as _importlib
import importlib.util as _util
import sys as _sys
import types as _types
import typing as _typing

from ._base.policy import Policy as Policy
from ._base.policy import get_policy as get_policy
from ._base.policy import unused_overrides as unused_overrides
from ._base.tree import all_finite as all_finite
from ._base.tree import cast_tree as cast_tree
from ._base.tree import select_tree as select_tree
from ._gradients.grad import grad as grad
from ._gradients.grad import value_and_grad as value_and_grad
from ._gradients.grad import with_policy as with_policy
from ._training.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._training.loss_scale import loss_scaling as loss_scaling
from ._training.loss_scale import static_loss_scale as static_loss_scale
from ._training.loss_scale_state import LossScaleState as LossScaleState
from ._training.loss_scale_state import check_loss_scale as check_loss_scale
from ._training.loss_scale_state import get_loss_scale as get_loss_scale
from ._training.loss_scale_state import get_loss_scale_state as get_loss_scale_state
from ._training.loss_scale_state import keep_if_skipped as keep_if_skipped
from ._training.loss_scale_state import last_step_finite as last_step_finite
from ._training.loss_scale_state import unscale as unscale
from ._training.scalars import scalars as scalars
from ._version import __version__ as __version__

# These import Flax, or matplotlib.
_FRONT_ENDS = {"linen": "flax", "nnx": "flax", "plots": "matplotlib"}

if _typing.TYPE_CHECKING:
    from ._on_demand import *  # noqa: F403
else:  # for type checkers, a `__getattr__` would make every name a good one

    def _published(names: dict[str, _typing.Any]) -> dict[str, _typing.Any]:
        """Returns those that are public. A pickle names a class by its module."""
        found = {
            name: value
            for name, value in names.items()
            if name[0] != "_" and not isinstance(value, _types.ModuleType)
        }
        for value in found.values():
            if isinstance(value, type):
                value.__module__ = __name__
        return found

    def _later() -> list[str]:
        """Returns the public names beyond the core.

        The code of `_on_demand` holds all names that it would import. It is read and
        not run, because running it takes seconds.
        """
        spec = _util.find_spec("._on_demand", __name__)
        names = spec.loader.get_code(spec.name).co_names
        return [x for x in names if x.isidentifier() and x[0] != "_"]

    _ALL = sorted([*_published(globals()), *_later()])

    def __getattr__(name: str) -> _typing.Any:
        if name == "__all__":
            # `help(jaxmp)` would print every docstring of `__all__`, thousands of
            # lines. It is the page above, and finds an empty list.
            is_help = _sys._getframe(1).f_globals.get("__name__") == "pydoc"
            return [] if is_help else [*_ALL]
        if name in _FRONT_ENDS:
            return _importlib.import_module(f".{name}", __name__)
        if name in _ALL:
            others = _importlib.import_module("._on_demand", __name__)
            globals().update(_published(vars(others)))
            return globals()[name]
        from ._names import missing

        raise missing(__name__, name)

    def __dir__() -> list[str]:
        # A front end whose library is not installed could not be imported.
        installed = {x for x, of in _FRONT_ENDS.items() if _util.find_spec(of)}
        return sorted({*_ALL, *installed, "__version__"})
