"""Mixed precision for JAX, Flax and optax, as a few pure functions."""

from ._version import __version__ as __version__
