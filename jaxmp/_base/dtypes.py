"""How the name of a dtype is read, what a wrong one may have meant; wide and narrow."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from .checks import clipped, short

# The names of each dtype; the first is the one that str(policy) uses.
NAMES = {
    np.dtype(jnp.float16): ("f16", "float16"),
    np.dtype(jnp.bfloat16): ("bf16", "bfloat16"),
    np.dtype(jnp.float32): ("full", "f32", "float32"),
    np.dtype(jnp.float64): ("f64", "float64"),
}
DTYPES = {name: dtype for dtype, names in NAMES.items() for name in names}

# Of the operands of matrix products: four bits of precision, numbers up to 448, no Inf.
FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_FLOAT8_NAMES = ("fp8", "f8", "float8", "float8_e4m3fn")

_NOT_DTYPES = (float, np.floating, np.inexact, np.number, np.generic)


def as_dtype(dtype: Any, where: str, *, narrower: bool = False) -> np.dtype:
    """Normalises a dtype, refusing what is not one of the four.

    With ``narrower`` the floating dtypes of fewer than 16 bits are taken as well.
    """
    if isinstance(dtype, str):
        return parse_dtype(dtype, where)
    # NumPy reads None, Python's float and the abstract kinds as float64, which nobody
    # means here, and an array as its dtype.
    is_dtype = isinstance(dtype, (type, np.dtype))
    is_dtype = is_dtype and not any(dtype is kind for kind in _NOT_DTYPES)
    normal = np.dtype(dtype if is_dtype else object)
    is_narrower = normal.itemsize < 2 and jnp.issubdtype(normal, jnp.floating)
    if not (normal in NAMES or (narrower and is_narrower)):
        raise ValueError(
            f"{where} must be float16, bfloat16, float32 or float64, but is "
            f"{short(dtype)}. Pass for example `jnp.bfloat16`."
        )
    return normal


def parse_dtype(
    name: str, where: str, accepted: Iterable[str] = ("half", *DTYPES)
) -> np.dtype:
    """Returns the dtype of a name, refusing what is not in the list."""
    name = name.strip()
    if name == "half":
        return np.dtype(jmp.half_dtype())
    if name in DTYPES:
        return DTYPES[name]
    raise ValueError(
        f"`{clipped(name)}` in {where} is not a name that jaxmp knows. "
        f"Expected one of {', '.join(accepted)}.{suggest(name, accepted)}"
    )


def is_called(x: Any, dtype: np.dtype, names: Iterable[str]) -> bool:
    """Whether ``x`` is a dtype, or one of the names of it."""
    if isinstance(x, str):
        return x.strip() in names
    return isinstance(x, (type, np.dtype)) and x == dtype


def as_dot_dtype(dtype: Any, where: str) -> np.dtype:
    """Normalises the dtype of the operands of products, refusing all but one."""
    if is_called(dtype, FLOAT8, _FLOAT8_NAMES):
        return FLOAT8
    raise ValueError(
        f"{where} has {short(dtype)} for the operands of matmuls. Type `d=fp8` for "
        "float8_e4m3fn, or leave `d=` out for the compute dtype."
    )


def spelled(dtype: np.dtype) -> str:
    """Returns the name of a dtype that the string of a policy uses."""
    return _FLOAT8_NAMES[0] if dtype == FLOAT8 else NAMES[dtype][0]


def suggest(name: str, accepted: Iterable[str]) -> str:
    """Says which accepted name was meant, if that can be told."""
    accepted = list(accepted)
    spelled = {known.lower(): known for known in accepted}
    nearest = spelled.get(name.lower()) or _of_other_libraries(name, accepted)
    if nearest is None:
        near = difflib.get_close_matches(name, accepted, n=1, cutoff=0.5)
        nearest = near[0] if near else None
    if nearest is None:
        return ""
    if nearest not in accepted:
        return f' `{nearest}` is a whole policy: `get_policy("{nearest}")`.'
    of_all = nearest.removeprefix("mixed_")
    if of_all != nearest and of_all in accepted and not _is_mixed(name):
        return (
            f" Did you mean `{nearest}`, with float32 parameters? `{of_all}` has "
            "everything in 16 bits, the parameters too."
        )
    return f" Did you mean `{nearest}`?"


def _of_other_libraries(name: str, accepted: list[str]) -> str | None:
    """Returns what a name such as ``bf16-mixed``, ``amp`` or ``fp32`` means here.

    The nearest spelling would not do: that of ``float16_mixed`` is ``float16``, which
    has 16-bit parameters.
    """
    name = name.lower()
    if re.search("f(p|loat)?8|e4m3|e5m2", name):
        return "mixed_fp8"
    if name.count("16") == 2:
        return "mixed_float16_bfloat16"
    if name in ("float", "single"):  # the nearest spelling of `float` is `float64`
        return "float32"
    bits = next((bits for bits in ("16", "32", "64") if bits in name), None)
    if bits is None and "half" in name:
        bits = "16"
    kind = "bfloat" if "b" in name.replace("bit", "") else "float"
    if bits in ("32", "64"):
        return f"float{bits}"
    if _is_mixed(name) or (bits and "mixed_float16" in accepted and "true" not in name):
        return f"mixed_{kind}16"
    return f"{kind}16" if bits else None


def _is_mixed(name: str) -> bool:
    return any(word in name.lower() for word in ("mix", "amp", "auto"))


def is_wide(x: Any) -> bool:
    """Whether a dtype, or what has one, is floating or complex and over 16 bits."""
    return _inexact_bytes(getattr(x, "dtype", x)) > 2


def is_narrow(x: Any) -> bool:
    """Whether a dtype, or what has one, is floating and of at most 16 bits."""
    return 0 < _inexact_bytes(getattr(x, "dtype", x)) <= 2


@functools.cache
def _inexact_bytes(dtype: Any) -> int:
    """Returns the size of a floating or complex dtype, 0 for all else."""
    is_inexact = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact)
    return dtype.itemsize if is_inexact else 0


# JAX keeps what it has traced by its contexts, so that the two share nothing.
_CASTS_DO_NOTHING = jax.make_user_context(False)


def without_casts() -> contextlib.AbstractContextManager:
    """Traces what is in here as if it had been written in float32."""
    return _CASTS_DO_NOTHING(True)


def casts_do_nothing() -> bool:
    """Whether the casts of jaxmp are to leave float32 as it is."""
    return bool(_CASTS_DO_NOTHING.value)
