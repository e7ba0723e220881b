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

# Imported when first asked for, so that who asks for a loss scale loads the core alone.
# Reading jaxprs takes `jax.extend`, and with it Pallas: longer than all the rest of
# jaxmp. The front ends take Flax's own, or matplotlib.
_HOMES = {
    "_attention.function": ("dot_product_attention",),
    "_autocast.autocast": ("autocast", "float32_region"),
    "_devices.gather": ("gather",),
    "_devices.mesh": ("init_shardings",),
    "_diagnosis.activations": ("activation_gradients",),
    "_diagnosis.audit.audit": ("assert_16bit", "audit"),
    "_diagnosis.audit.compiled_report": (
        "CompiledProduct",
        "CompiledReport",
        "LostRounding",
        "WideArray",
    ),
    "_diagnosis.audit.report": (
        "DtypeReport",
        "Hazard",
        "Kept",
        "Leak",
        "UnfusedAttention",
        "WrittenHead",
    ),
    "_diagnosis.explain.explain": ("explain",),
    "_diagnosis.explain.report": ("ExplainedLine", "Explanation"),
    "_diagnosis.exponents": (
        "RecordRangesState",
        "exponent_histogram",
        "record_ranges",
    ),
    "_diagnosis.overflow.overflow": ("find_overflow",),
    "_diagnosis.overflow.report": ("Fault", "OperationRange", "OverflowReport"),
    "_diagnosis.parity.parity": ("named_values", "parity"),
    "_diagnosis.parity.report": ("ModuleParity", "OutputParity", "ParityReport"),
    "_diagnosis.ranges": (
        "RangeReport",
        "RangeStats",
        "range_report",
        "suggest_loss_scale",
    ),
    "_diagnosis.sensitivity.report": ("ModuleSensitivity", "SensitivityReport"),
    "_diagnosis.sensitivity.sensitivity": ("sensitivity",),
    "_head.function": ("linear_cross_entropy",),
    "_ops.lists": ("DEFAULT_OPS", "OpLists"),
    "_optimizers.blocks": ("Int8Blocks",),
    "_optimizers.narrow_params": (
        "KahanSummationState",
        "StochasticRoundingState",
        "kahan_summation",
        "masters",
        "set_masters",
        "stochastic_rounding",
    ),
    "_optimizers.state_dtype": ("StateDtypeState", "cast_state", "with_state_dtype"),
}
_FRONT_ENDS = {"linen": "flax", "nnx": "flax", "plots": "matplotlib"}

if _typing.TYPE_CHECKING:  # or every name would be a good one
    from ._attention.function import dot_product_attention as dot_product_attention
    from ._autocast.autocast import autocast as autocast
    from ._autocast.autocast import float32_region as float32_region
    from ._devices.gather import gather as gather
    from ._devices.mesh import init_shardings as init_shardings
    from ._diagnosis.activations import activation_gradients as activation_gradients
    from ._diagnosis.audit.audit import assert_16bit as assert_16bit
    from ._diagnosis.audit.audit import audit as audit
    from ._diagnosis.audit.compiled_report import CompiledProduct as CompiledProduct
    from ._diagnosis.audit.compiled_report import CompiledReport as CompiledReport
    from ._diagnosis.audit.compiled_report import LostRounding as LostRounding
    from ._diagnosis.audit.compiled_report import WideArray as WideArray
    from ._diagnosis.audit.report import DtypeReport as DtypeReport
    from ._diagnosis.audit.report import Hazard as Hazard
    from ._diagnosis.audit.report import Kept as Kept
    from ._diagnosis.audit.report import Leak as Leak
    from ._diagnosis.audit.report import UnfusedAttention as UnfusedAttention
    from ._diagnosis.audit.report import WrittenHead as WrittenHead
    from ._diagnosis.explain.explain import explain as explain
    from ._diagnosis.explain.report import ExplainedLine as ExplainedLine
    from ._diagnosis.explain.report import Explanation as Explanation
    from ._diagnosis.exponents import RecordRangesState as RecordRangesState
    from ._diagnosis.exponents import exponent_histogram as exponent_histogram
    from ._diagnosis.exponents import record_ranges as record_ranges
    from ._diagnosis.overflow.overflow import find_overflow as find_overflow
    from ._diagnosis.overflow.report import Fault as Fault
    from ._diagnosis.overflow.report import OperationRange as OperationRange
    from ._diagnosis.overflow.report import OverflowReport as OverflowReport
    from ._diagnosis.parity.parity import named_values as named_values
    from ._diagnosis.parity.parity import parity as parity
    from ._diagnosis.parity.report import ModuleParity as ModuleParity
    from ._diagnosis.parity.report import OutputParity as OutputParity
    from ._diagnosis.parity.report import ParityReport as ParityReport
    from ._diagnosis.ranges import RangeReport as RangeReport
    from ._diagnosis.ranges import RangeStats as RangeStats
    from ._diagnosis.ranges import range_report as range_report
    from ._diagnosis.ranges import suggest_loss_scale as suggest_loss_scale
    from ._diagnosis.sensitivity.report import ModuleSensitivity as ModuleSensitivity
    from ._diagnosis.sensitivity.report import SensitivityReport as SensitivityReport
    from ._diagnosis.sensitivity.sensitivity import sensitivity as sensitivity
    from ._head.function import linear_cross_entropy as linear_cross_entropy
    from ._ops.lists import DEFAULT_OPS as DEFAULT_OPS
    from ._ops.lists import OpLists as OpLists
    from ._optimizers.blocks import Int8Blocks as Int8Blocks
    from ._optimizers.narrow_params import KahanSummationState as KahanSummationState
    from ._optimizers.narrow_params import (
        StochasticRoundingState as StochasticRoundingState,
    )
    from ._optimizers.narrow_params import kahan_summation as kahan_summation
    from ._optimizers.narrow_params import masters as masters
    from ._optimizers.narrow_params import set_masters as set_masters
    from ._optimizers.narrow_params import stochastic_rounding as stochastic_rounding
    from ._optimizers.state_dtype import StateDtypeState as StateDtypeState
    from ._optimizers.state_dtype import cast_state as cast_state
    from ._optimizers.state_dtype import with_state_dtype as with_state_dtype
else:
    _LATER = {name: home for home, names in _HOMES.items() for name in names}
    _PUBLIC = sorted({name for name in globals() if name[0] != "_"} | _LATER.keys())

    def _publish() -> None:
        """Makes public classes members of this module: pickles name a class by it."""
        for name, home in _LATER.items():
            module = _sys.modules.get(f"{__name__}.{home}")
            if module and name in vars(module):  # else it is being imported
                globals()[name] = vars(module)[name]
        for name in {*_PUBLIC} & globals().keys():
            if isinstance(globals()[name], type):
                globals()[name].__module__ = __name__

    _publish()

    def __getattr__(name: str) -> _typing.Any:
        if name == "__all__":
            # `help(jaxmp)` would print every docstring of `__all__`, thousands of
            # lines. It is the page above, and finds an empty list.
            is_help = _sys._getframe(1).f_globals.get("__name__") == "pydoc"
            return [] if is_help else _PUBLIC
        if name in _FRONT_ENDS:
            return _importlib.import_module(f".{name}", __name__)
        if name in _LATER:
            _importlib.import_module(f".{_LATER[name]}", __name__)
            _publish()
            return globals()[name]
        from ._base.names import missing

        raise missing(__name__, name)

    def __dir__() -> list[str]:
        # A front end whose library is not installed could not be imported.
        installed = {x for x, of in _FRONT_ENDS.items() if _util.find_spec(of)}
        return sorted({*_PUBLIC, *installed, "__version__"})
