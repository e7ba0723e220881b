"""The public names beyond the core: the first that somebody asks for imports them all.

Reading jaxprs takes ``jax.extend``, and with it Pallas: longer than all the rest of
jaxmp, so that whoever asks for a loss scale loads the core alone.
"""

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
