"""Checks of arguments that several functions share, with their messages."""

from __future__ import annotations

import functools
import html
import inspect
import numbers
import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import ArrayLike

from .other_scales import refuse_other_scale

F = TypeVar("F", bound=Callable)

# A class of JAX, and so a function to Python.
_DTYPES = jnp.float16, jnp.bfloat16, jnp.float32
_POSITIVE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_POWER_OF_TWO = "Pass a power of two such as 2.0**15."
_CALL_IT = "The arguments of the function go to what is returned."


def as_scale(loss_scale: ArrayLike) -> jax.Array | np.float32:
    """Returns a loss scale as a float32 scalar, refusing what cannot be one."""
    known = known_number("loss_scale", loss_scale)
    if known is None:
        return jnp.asarray(loss_scale, jnp.float32)
    check_positive("loss_scale", known)
    if isinstance(loss_scale, jax.Array):
        return jnp.asarray(loss_scale, jnp.float32)
    # Not a JAX array: that would start the backend, before a program that builds
    # its functions on import can call `jax.distributed.initialize`.
    return np.float32(known)


def known_number(name: str, value: Any) -> Any:
    """Returns a number or scalar array as a Python number, or None if it is traced.

    A value that is not on a device of this process is not known either.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, (np.generic, bool)):
        return value
    array = plain_array(value) if hasattr(value, "dtype") else None
    if (
        array is None
        or isinstance(array, jax.ShapeDtypeStruct)
        or not any(jnp.issubdtype(array.dtype, x) for x in (jnp.floating, jnp.integer))
    ):
        refuse_other_scale(value)
        of = "" if array is None else f" of dtype {array.dtype}"
        raise TypeError(
            f"`{name}` must be a number, but is {short(value)}{of}. Pass a Python "
            "float."
        )
    if jnp.shape(array) != ():
        raise ValueError(
            f"`{name}` must be a scalar, but has the shape {list(jnp.shape(array))}. "
            "Pass `jaxmp.get_loss_scale(opt_state)`, or a Python float."
        )
    if isinstance(array, jax.core.Tracer):
        return None
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    return jax.device_get(array).item()


def plain_array(x: Any) -> Any:
    """Takes an array, or its abstract shape, out of the variable of NNX around it."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return x
    (value,) = jax.tree.leaves(x)
    return value if isinstance(value, jax.ShapeDtypeStruct) else x[...]


def check_positive(name: str, value: Any, cure: str = _POWER_OF_TWO) -> None:
    """Raises unless a number is a positive normal float32, as far as it is known."""
    check_limits(name, value, _POSITIVE, "be finite and positive", cure)


def check_limits(
    name: str, value: Any, limits: tuple[float, float], must: str, cure: str
) -> None:
    """Raises where a number is known and does not lie within limits."""
    value = known_number(name, value)
    if value is not None and not limits[0] <= value <= limits[1]:
        raise ValueError(
            f"`{name}` must {must} in float32, but is {short(value)}. {cure}"
        )


def as_count(name: str, value: int) -> int:
    """Returns a number of steps as an int, refusing what is not at least 1."""
    try:
        count = _as_index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be an integer, but is {short(value)}. Pass a number "
            "of steps."
        ) from None
    if not 1 <= count <= np.iinfo(np.int32).max:
        raise ValueError(
            f"`{name}` must be at least 1 and fit into int32, but is {short(value)}."
        )
    return count


def as_positions(name: str, numbers: Any) -> int | tuple[int, ...]:
    """Returns positions of arguments as ints, one or several as they were given."""
    several = isinstance(numbers, (tuple, list, range)) or np.ndim(numbers) == 1
    try:
        return tuple(map(_as_index, numbers)) if several else _as_index(numbers)
    except TypeError:
        raise TypeError(
            f"`{name}` must be the position of an argument or several, but is "
            f"{short(numbers)}. Pass integers that count from 0, such as "
            f"`{name}=1` or `{name}=(1, 2)`."
        ) from None


def _as_index(x: Any) -> int:
    if isinstance(x, (bool, np.bool_)):  # an index in Python, and a slip
        raise TypeError
    return operator.index(x)


def as_tuple(positions: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns one checked position or several as a tuple; none where there is None."""
    return (positions,) if isinstance(positions, int) else positions or ()


def as_axes(axis_name: Any) -> tuple[Any, ...]:
    """Returns one axis name or several as a tuple; none where there is None."""
    if axis_name is None:
        return ()
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    try:
        hash(axes)
        are_names = not any(isinstance(axis, numbers.Number) for axis in axes)
    except Exception:  # Flax has an error of its own
        are_names = False
    if not are_names:
        raise TypeError(
            f"`axis_name` must be the name of a mesh axis or several, but is "
            f'{short(axis_name)}. Pass for example `axis_name="data"`.'
        )
    return axes


def check_axes_are_bound(axes: tuple[Any, ...]) -> None:
    """Raises where an axis is not one of the ``shard_map`` or ``pmap`` around."""
    for axis in axes:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            bound = jax.sharding.get_abstract_mesh().manual_axes
            known = f", which has {bound}," if bound else ""
            raise ValueError(
                "`axis_name` must name axes of the `shard_map` or `pmap` around"
                f"{known} but {short(axis)} is not one. Pass the name of a mesh axis "
                "inside `jax.shard_map`, and no `axis_name` under plain `jax.jit`."
            ) from None


# Ours, and what may call us for a user.
_BETWEEN = (
    "jaxmp",
    "jax",
    "flax",
    "optax",
    "equinox",
    "haiku",
    "contextlib",
    "functools",
)


def warn(message: str) -> None:
    """Warns at the user's line that called jaxmp, however deep inside of it this is.

    JAX may be between: it traces the functions that it is given.
    """
    frame, level = sys._getframe(1), 2
    # Code that was given to `exec` may have no name.
    while frame.f_back and (
        frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_optimizer(inner: Any, call: str) -> None:
    if callable(getattr(inner, "init", None)) and callable(
        getattr(inner, "update", None)
    ):
        return
    refuse_other_scale(inner)
    cure = "Pass for example `optax.adam(1e-3)`."
    if isinstance(inner, (str, jmp.Policy)):
        cure = f"It comes first: `{call}`."
    elif callable(inner):
        name = getattr(inner, "__name__", "adam")
        cure = f"Call it, with its options: `{name}(1e-3)`."
    raise TypeError(
        f"The optimizer to wrap must be an optax transformation, but is {short(inner)}."
        f" {cure}"
    )


def check_state(state: Any, state_type: type, more: str = "") -> None:
    if isinstance(state, state_type):
        return
    text = (
        "`tx.update(grads, opt_state, params)` needs the state that `tx.init(params)` "
        f"made, a `{state_type.__name__}`, but got {short(state)}. Begin with "
        "`opt_state = tx.init(params)`."
    )
    raise TypeError(f"{text} {more}".rstrip())


def check_function(
    name: str, fun: Any, call: str, for_model: str, hint: str = ""
) -> None:
    """Raises where a model, a policy or a result stands in the place of a function.

    ``call`` is how our function ``name`` is called, ``for_model`` what to type for a
    model, and ``hint`` what else those want who begin with the policy.
    """
    linen = sys.modules.get("flax.linen")  # who has a module has imported it
    got = type(fun).__name__
    is_model = linen is not None and isinstance(fun, linen.Module)
    if is_model and fun.scope is None and fun.parent is None:  # and no part of another
        got, cure = f"the Linen module `{got}`", for_model
    elif linen and isinstance(fun, type) and issubclass(fun, linen.Module):
        got, cure = f"the class `{fun.__name__}`", f"Make a model of it. {for_model}"
    elif isinstance(fun, (str, jmp.Policy)) or any(fun is x for x in _DTYPES):
        got = f"the dtype `{jnp.dtype(fun)}`" if isinstance(fun, type) else got
        cure = f"The function comes first: `{call}`. {hint}".rstrip()
    elif callable(fun):
        return
    elif hasattr(fun, "apply"):  # of `hk.transform`
        cure = for_model
    else:
        got = got if isinstance(fun, (dict, list)) else describe(fun)
        cure = f"Pass the function itself, and call the result: `{call}(*args)`."
    raise TypeError(f"`{name}` needs a function, but got {got}. {cure}")


def describe(x: Any) -> str:
    """Says what something is in the words of its user."""
    kind = type(x).__name__
    if hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, type):
        return f"an array {x.dtype}{list(x.shape)}"
    if isinstance(x, (tuple, list, dict)) and type(x) in (tuple, list, dict):
        return f"a {kind} of {len(x)}"
    if isinstance(x, str) and len(x) > 60:
        return f"a string of {len(x)} characters"
    if callable(x) and hasattr(x, "__name__"):
        return f"the {kind} `{clipped(x.__name__)}`"
    text = _spelled(x)
    return f"{text} of type {kind}" if text else f"an object of type {kind}"


def short(x: Any) -> str:
    """Returns how something is spelled, or what it is where that is long."""
    return describe(x) if callable(x) else _spelled(x) or describe(x)


def clipped(text: Any, length: int = 60) -> str:
    text = str(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _spelled(x: Any) -> str:
    """Returns the `repr` of something, empty where it is long or has arrays in it."""
    if any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(x)):
        return ""
    try:
        text = repr(x)
    except Exception:  # whatever it is: of a donated array, or a number of 9999 digits
        return ""
    return "" if len(text) > 60 or "\n" in text else text


def explains(call: str, hint: str = _CALL_IT) -> Callable[[F], F]:
    """Has a function answer arguments that it does not take with what to type.

    The hint is for those who call it in another way.
    """

    def decorate(fun: F) -> F:
        signature = inspect.signature(fun)
        parameters, name = signature.parameters, fun.__name__
        options = [p.name for p in parameters.values() if p.default is not p.empty]

        @functools.wraps(fun)
        def explained(*args, **kwargs):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                problem = f"This call does not fit: {error}."
                if unknown := [key for key in kwargs if key not in parameters]:
                    problem = f"`{name}` has no option `{clipped(unknown[0])}`."
                    if options:
                        problem += f" Expected one of {', '.join(options)}."
                parts = filter(None, (f"Type `{call}`.", hint, problem))
                raise TypeError(" ".join(parts)) from None
            return fun(*args, **kwargs)

        return explained  # pyright: ignore[reportReturnType]

    return decorate


def as_html(report: Any) -> str:
    """Returns the text of a report as Jupyter shows it at the end of a cell."""
    return f"<pre>{html.escape(str(report))}</pre>"
