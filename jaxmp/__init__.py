"""Mixed precision for JAX, Flax and optax, as a few pure functions."""

from ._audit import DtypeReport as DtypeReport
from ._audit import audit as audit
from ._autocast import autocast as autocast
from ._autocast import float32_region as float32_region
from ._op_lists import DEFAULT_OPS as DEFAULT_OPS
from ._op_lists import OpLists as OpLists
from ._version import __version__ as __version__
