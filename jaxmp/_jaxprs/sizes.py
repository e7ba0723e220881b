"""Sizes as numbers to compare, also those that ``jax.export`` leaves open.

JAX compares symbolic sizes only where the answer is the same for all of them: a batch
of ``b`` may have one row. Autocast decides by sizes what is worth rounding, which is
right for any size and good for large ones. So an open size counts as a large one: a
product sums over it, what is added to each row of a batch is smaller than the batch,
and to store something for each row takes much memory.

Where it matters that sizes are the same for certain, JAX's ``==`` tells: it is false
unless they are.
"""

import functools
import math
import numbers
import operator
import re
from typing import Any

# What an open size counts as: larger than those that are known, also as a quotient,
# and a prime, so that no remainder of it is zero.
_OPEN = 10**12 + 39
# The names in a symbolic size that JAX writes down, and its functions.
_NAMES = re.compile(r"[^\W\d]\w*\b(?!\()")
_FUNCTIONS = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


def size_of(array: Any) -> int:
    """Returns how many entries an array, or the type of one, has: a number."""
    size = math.prod(array.shape)
    return size if type(size) is int else as_number(size)


def as_number(size: Any, open_size: int = _OPEN) -> int:
    """Returns a size as a number; what is open in it counts as ``open_size``."""
    if isinstance(size, numbers.Integral):  # one of NumPy's, for one
        return int(size)
    return _evaluated(str(size), open_size)


@functools.lru_cache(maxsize=4096)
def _evaluated(text: str, open_size: int) -> int:
    # The text is what `jax.export.symbolic_shape` reads: sums of products, in which
    # Python writes a power otherwise.
    terms = _NAMES.sub(str(open_size), text).replace("^", "**")
    return eval(terms, {"__builtins__": {}}, _FUNCTIONS)
