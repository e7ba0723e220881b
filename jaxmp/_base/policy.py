"""Policies: in which dtypes parameters are stored, used and returned."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jmp
import numpy as np
from jax.typing import DTypeLike

from .checks import as_html, clipped, short
from .dtypes import DTYPES, as_dot_dtype, as_dtype, parse_dtype, spelled, suggest
from .gpus import mixed
from .other_scales import refuse_other_scale
from .tree import cast_tree, is_array, is_floating, path_name, wide_dtype

T = TypeVar("T")

# What is taken wherever a policy is: one of jaxmp's or jmp's, its string, or a dtype
# for everything.
PolicyLike: TypeAlias = str | jmp.Policy | DTypeLike

_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    "r": "reduce_dtype",
    "reduce": "reduce_dtype",
    "d": "dot_dtype",
    "dot": "dot_dtype",
    "b": "backward_dtype",
    "backward": "backward_dtype",
}

# What Flax, Haiku, Equinox and Keras call the parameters of a normalisation: anything
# named scale, gamma or beta, and the bias, offset or weight of LayerNorm_0, batch_norm,
# norm2, layer_normalization, ln_1, bn... It looks at each part of a path once.
_NORMALIZATION = (
    r"(?i)(^|/)(scale|gamma|beta"
    r"|(?=[^/]*(norm(?!al(?![a-z]))|(?<![^/_])(ln|bn|gn)[_\d/]))"
    r"[^/]*/(bias|offset|shift|weight))(/value)?$"
)
# The key in a policy's string that stands for that regular expression.
_NORMALIZATION_KEY = "norm"

_MIXED = "mixed"  # which of the next is a question of the device
_SHORTHANDS = {
    "mixed_float16": "p=f32,c=f16,o=f32",
    "mixed_bfloat16": "p=f32,c=bf16,o=f32",
    "mixed_float16_bfloat16": "p=f32,c=f16,o=f32,b=bf16",
    "mixed_fp8": "p=f32,c=bf16,o=f32,d=fp8",
    "O0": "p=f32,c=f32,o=f32",
    "O1": "p=f32,c=f16,o=f32",
    "O2": "p=f32,c=f16,o=f32,norm=f32",
    "O3": "p=f16,c=f16,o=f16",
}

# One `key=dtype` of a policy's string and the comma behind it. The key of an override
# is a regular expression in double quotes, with a double quote in it doubled.
_PART = re.compile(r'\s*(?:"((?:[^"]|"")*)"\s*=)?([^,]*)(,?)', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Policy(jmp.Policy):
    """The dtypes of a mixed-precision computation.

    A policy is frozen, hashable, and a ``jmp.Policy``. A dtype may be spelled in any
    way (``jnp.float16``, ``np.dtype("float16")``, ``"f16"``): equal policies compare
    and hash equal.

    ``overrides`` keep chosen parameters in another dtype than ``compute_dtype``, in
    :meth:`cast_to_compute` only. Each is a pair of a regular expression, searched in
    the leaf's path (``params/LayerNorm_0/scale``, beginning at the tree that is
    cast, and without the ``value`` of Flax's boxes), and a dtype; the last match wins.
    Leaves of a ``batch_stats`` collection
    stay at least float32 in every cast, because running means lose small updates in
    16 bits; only an override changes that.

    Args:
        param_dtype: Dtype in which parameters are stored and updated.
        compute_dtype: Dtype of the arithmetic.
        output_dtype: Dtype in which results are returned.
        overrides: Pairs of ``(regex, dtype)``.
        reduce_dtype: Dtype in which :func:`jaxmp.value_and_grad` sums gradients over
            devices. None means float32. It has no effect under plain ``jit``, where JAX
            sums in the dtype of the backward pass.
        dot_dtype: Dtype of the operands of large matmuls under :func:`jaxmp.autocast`:
            ``"fp8"``, which is ``jnp.float8_e4m3fn``, or None for ``compute_dtype``.
            With float8, ``compute_dtype`` is bfloat16, and casting to it raises an
            error: each operand needs a scale of its own, which a cast does not have.
        backward_dtype: Dtype of the backward pass under :func:`jaxmp.autocast`:
            bfloat16 beside a ``compute_dtype`` of float16, so that gradients stay in
            range without a loss scale; or None for ``compute_dtype``. Casting with
            bfloat16 here raises an error: what is cast differentiates itself in the
            dtype that it is cast to.

    Raises:
        ValueError: If a dtype is not one of float16, bfloat16, float32 and float64,
            or an override is not a pair of a valid regular expression and a dtype; or
            if ``dot_dtype`` or ``backward_dtype`` is another one, or ``compute_dtype``
            beside it.

    Examples:
        >>> policy = jaxmp.Policy(jnp.float32, jnp.float16, jnp.float32)
        >>> str(policy)
        'p=full,c=f16,o=full'
        >>> policy == jaxmp.get_policy("mixed_float16")
        True
        >>> kept = policy.with_overrides(("head/", "float32"))
        >>> tree = {"body": {"w": jnp.ones(1)}, "head": {"w": jnp.ones(1)}}
        >>> jax.tree.map(lambda x: x.dtype.name, kept.cast_to_compute(tree))
        {'body': {'w': 'float16'}, 'head': {'w': 'float32'}}

    References:
        https://github.com/google-deepmind/jmp for the three dtypes and their strings.
    """

    overrides: tuple[tuple[str, np.dtype], ...] = ()
    reduce_dtype: np.dtype | None = dataclasses.field(default=None, kw_only=True)
    dot_dtype: np.dtype | None = dataclasses.field(default=None, kw_only=True)
    backward_dtype: np.dtype | None = dataclasses.field(default=None, kw_only=True)

    if TYPE_CHECKING:  # the fields are dtypes, and what they are made of may be more

        def __init__(
            self,
            param_dtype: DTypeLike,
            compute_dtype: DTypeLike,
            output_dtype: DTypeLike,
            overrides: Iterable[tuple[str, DTypeLike]] = (),
            *,
            reduce_dtype: DTypeLike | None = None,
            dot_dtype: DTypeLike | None = None,
            backward_dtype: DTypeLike | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Normalises the dtypes, so that equal policies are equal."""
        # `object.__setattr__` is how a frozen dataclass sets its own fields.
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = as_dtype(getattr(self, field), f"`{field}`")
            object.__setattr__(self, field, dtype)
        if self.reduce_dtype is not None:
            dtype = as_dtype(self.reduce_dtype, "`reduce_dtype`")
            object.__setattr__(self, "reduce_dtype", dtype)
        if self.dot_dtype is not None:
            dtype = as_dot_dtype(self.dot_dtype, "`dot_dtype`")
            object.__setattr__(self, "dot_dtype", dtype)
            if self.compute_dtype != DTYPES["bf16"]:
                raise ValueError(
                    "`dot_dtype` needs the compute dtype bfloat16, in which all else "
                    f"is computed, but that is {self.compute_dtype}. Type `c=bf16` "
                    'beside `d=fp8`, or the policy "mixed_fp8".'
                )
        if self.backward_dtype is not None:
            dtype = as_dtype(self.backward_dtype, "`backward_dtype`")
            both = self.compute_dtype, dtype
            if dtype != self.compute_dtype and both != (DTYPES["f16"], DTYPES["bf16"]):
                raise ValueError(
                    "`backward_dtype` is bfloat16 beside the compute dtype float16, or "
                    f"the compute dtype itself, but it is {dtype} beside "
                    f"{self.compute_dtype}. Type `c=f16,b=bf16`, or leave `b=` out."
                )
            same = dtype == self.compute_dtype
            object.__setattr__(self, "backward_dtype", None if same else dtype)
        overrides = tuple(_as_override(pair) for pair in self.overrides)
        object.__setattr__(self, "overrides", overrides)

    def __eq__(self, other: object) -> bool:
        """Compares with a policy of jmp too, whose dtypes may be spelled in any way."""
        if not isinstance(other, jmp.Policy):
            return NotImplemented
        return all(
            getattr(self, x.name) == getattr(other, x.name, x.default)
            for x in dataclasses.fields(self)
        )

    def __hash__(self) -> int:
        """Hashes like a policy of jmp that has the three dtypes and equals this one."""
        more = (self.overrides, self.reduce_dtype, self.dot_dtype, self.backward_dtype)
        three = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return hash((*(x.type for x in three), *(more if any(more) else ())))

    def cast_to_param(self, x: T) -> T:
        """Casts the floating arrays of a pytree to ``param_dtype``."""
        return _cast_by_path(x, lambda path: _default_dtype(path, self.param_dtype))

    def cast_to_compute(self, x: T, *, shardings: Any = None) -> T:
        """Casts the floating arrays of a pytree to ``compute_dtype`` or an override.

        Args:
            x: Any pytree.
            shardings: Where to pin the copy: the shardings of ``x``, as a pytree of
                ``jax.sharding.Sharding`` or a prefix of one, under ``jit``. Sharded
                float32 parameters are then gathered as the 16-bit copy, never in
                float32.

        Raises:
            ValueError: If the shardings do not fit the tree, or there is a
                ``dot_dtype`` or a ``backward_dtype``.
        """
        casting_policy(self, "Policy.cast_to_compute")
        cast = _cast_by_path(x, self._compute_dtype_at)
        if shardings is None:
            return cast
        try:
            return jax.lax.with_sharding_constraint(cast, shardings)
        except (TypeError, ValueError) as error:
            said = f"JAX says: {clipped(error, 400)}"
            if any(map(is_array, jax.tree.leaves(shardings))):  # JAX prints them all
                said = "But there are arrays in them."
            raise ValueError(
                "`shardings` must be the shardings of the tree that is cast, or a "
                "prefix of them. Take them outside `jax.jit`: "
                f"`shardings = jax.tree.map(lambda x: x.sharding, params)`. {said}"
            ) from error

    def cast_to_output(self, x: T) -> T:
        """Casts the floating arrays of a pytree to ``output_dtype``."""
        return _cast_by_path(x, lambda path: _default_dtype(path, self.output_dtype))

    def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
        """Returns this policy with another ``output_dtype``."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def with_overrides(self, *pairs: tuple[str, DTypeLike]) -> Policy:
        """Returns this policy with ``(regex, dtype)`` pairs added to its overrides."""
        return dataclasses.replace(self, overrides=(*self.overrides, *pairs))

    def _compute_dtype_at(self, path: str) -> np.dtype:
        for pattern, dtype in reversed(self.overrides):
            if re.search(pattern, path):
                return dtype
        return _default_dtype(path, self.compute_dtype)

    def __str__(self) -> str:
        """Spells the policy so that :func:`get_policy` reads it back."""
        if self == get_policy("O2"):
            return "O2"
        parts: list[tuple[str, np.dtype | None]] = []
        for pattern, dtype in self.overrides:
            key = '"' + pattern.replace('"', '""') + '"'
            if pattern == _NORMALIZATION:
                key = _NORMALIZATION_KEY
            parts.append((key, dtype))
        parts = [
            ("p", self.param_dtype),
            ("c", self.compute_dtype),
            ("o", self.output_dtype),
            *parts,
            ("r", self.reduce_dtype),
            ("d", self.dot_dtype),
            ("b", self.backward_dtype),
        ]
        return ",".join(f"{key}={spelled(x)}" for key, x in parts if x is not None)

    def __repr__(self) -> str:
        """Spells the call that makes the policy."""
        return f"get_policy({str(self)!r})"

    def _repr_html_(self) -> str:
        return as_html(repr(self))


def get_policy(policy: PolicyLike, *, device: Any = None) -> Policy:
    """Returns the policy that a string or a dtype names.

    Five spellings are understood, here and wherever a function takes a policy:

    - jmp's, ``p=f32,c=f16,o=f32``, or ``params=``, ``compute=``, ``output=``. Params
      default to float32, compute to params, and output to compute. A regular
      expression in double quotes is the key of an override, ``"head/"=f32``;
      ``norm=f32`` is that of the normalisation parameters; ``r=`` or ``reduce=`` is
      the dtype of sums over devices; and, under :func:`jaxmp.autocast`, ``d=fp8`` or
      ``dot=fp8`` is that of matrix products, and ``b=bf16`` or ``backward=bf16`` that
      of the backward pass.
    - a dtype for everything: ``bfloat16``, ``f16``, ``full``, or jmp's ``half``,
      which is float16, on a TPU bfloat16.
    - the dtype itself, ``jnp.bfloat16`` or ``np.dtype("float32")``.
    - ``mixed``, the 16-bit format that the device multiplies: ``mixed_float16`` on
      an NVIDIA GPU below compute capability 8.0 (T4), else ``mixed_bfloat16``. With a
      loss scale, one program serves both, and each continues the other's checkpoints.
    - a name: Keras's ``mixed_float16`` and ``mixed_bfloat16`` (float32 parameters
      and outputs); ``mixed_float16_bfloat16``, the former with ``b=bf16``;
      ``mixed_fp8``, the latter with ``d=fp8``; and Apex's ``O0`` (float32), ``O1``
      (``mixed_float16``), ``O2`` (the same with ``norm=f32``; use it with
      :func:`jaxmp.linen.with_policy`) and ``O3`` (float16 throughout).

    None means no policy: :func:`jaxmp.value_and_grad` then casts nothing,
    :func:`jaxmp.autocast` computes in bfloat16, and everything else refuses it.

    Args:
        policy: The string or dtype, or a policy of jaxmp's (returned as it is) or
            jmp's.
        device: The one of ``mixed``, also one of a topology. None is JAX's default
            device, which JAX looks for then: call
            ``jax.distributed.initialize`` before.

    Returns:
        A :class:`Policy`.

    Raises:
        ValueError: If the string has an unknown name, an unknown or repeated key, or
            a dtype that is not in the list.
        TypeError: If ``policy`` is neither a string, nor a dtype, nor a policy.

    Examples:
        >>> jaxmp.get_policy("c=bf16")
        get_policy('p=full,c=bf16,o=bf16')
        >>> jaxmp.get_policy("mixed_float16").compute_dtype
        dtype('float16')
        >>> jaxmp.get_policy("mixed", device=jax.devices("cpu")[0])
        get_policy('p=full,c=bf16,o=full')
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, (type, np.dtype)):
        dtype = as_dtype(policy, "A dtype that is given as the policy")
        return Policy(dtype, dtype, dtype)
    if not isinstance(policy, (str, jmp.Policy)):
        refuse_other_scale(policy)
        raise TypeError(
            f"`get_policy` needs a string or a policy, but got {short(policy)}. Pass "
            'for example "mixed_float16" or "p=f32,c=bf16,o=f32", or a dtype such as '
            "`jnp.bfloat16`. The arguments of a function go to what its wrapper "
            "returns: `autocast(fun, policy)(*args)`."
        )
    if isinstance(policy, jmp.Policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    name = policy.strip()
    text = _SHORTHANDS.get(mixed(device) if name == _MIXED else name, policy)
    if "=" not in text:
        names = ("half", *DTYPES, _MIXED, *_SHORTHANDS)
        dtype = parse_dtype(text, f"the policy {short(policy)}", names)
        return Policy(dtype, dtype, dtype)
    return _parse_parts(text)


def casting_policy(policy: PolicyLike, function: str) -> Policy:
    """Returns a policy by which ``function`` casts, refusing what no cast can do."""
    policy = get_policy(policy)
    if policy.dot_dtype is not None:
        raise ValueError(
            f"`{function}` cannot cast to {clipped(policy)}: operands in float8 "
            "need a scale each, and a cast has none. Type "
            "`jaxmp.autocast(jax.value_and_grad(loss), policy)`, and pass no policy to "
            "the other functions."
        )
    if policy.backward_dtype is not None:
        raise ValueError(
            f"`{function}` cannot compute gradients as {clipped(policy)} says: what is "
            f"cast to {policy.compute_dtype} has its backward pass in "
            f"{policy.compute_dtype} too. Use autocast, "
            "`jaxmp.autocast(loss_fn, policy)`, and pass no policy to the other "
            'functions; or "mixed_float16" with a loss scale.'
        )
    return policy


def dtype_of_gradients(policy: Policy) -> np.dtype:
    own = policy.backward_dtype
    return policy.compute_dtype if own is None else own


def unused_overrides(policy: PolicyLike, tree: Any) -> tuple[str, ...]:
    """Returns the override patterns of a policy that match no floating leaf.

    A pattern with a typo changes nothing and raises no error. To find it, test that
    this is empty for the variables of the model.

    Args:
        policy: A policy, its string, or a dtype.
        tree: The pytree that :meth:`Policy.cast_to_compute` is given.

    Returns:
        The patterns in their order.

    Examples:
        >>> jaxmp.unused_overrides('c=f16,"haed/"=f32', {"head": {"w": jnp.ones(1)}})
        ('haed/',)
    """
    paths = [path for path, x in _named_leaves(tree) if is_floating(x)]
    return tuple(
        pattern
        for pattern, _ in get_policy(policy).overrides
        if not any(re.search(pattern, path) for path in paths)
    )


def _cast_by_path(tree: T, dtype_at: Callable[[str], np.dtype]) -> T:
    return jax.tree.structure(tree).unflatten(
        cast_tree(x, dtype_at(path)) if is_floating(x) else x
        for path, x in _named_leaves(tree)
    )


def _named_leaves(tree: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the leaves with their paths, in which boxes do not appear.

    Flax's boxes (``nn.Partitioned``, an NNX variable) add a last part to the path of
    the parameter that they hold, mostly ``value``. Overrides name the parameter.
    """

    def is_box_inside(x):
        return x is not tree and _is_box(x)

    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_box_inside):
        path = (*prefix, *(path[1:] if _is_box(tree) else path))
        if is_box_inside(x):
            yield from _named_leaves(x, path)
        else:
            yield path_name(path), x


def _is_box(x: Any) -> bool:
    """Returns whether ``x`` is what Flax puts around a parameter to annotate it."""
    # Who has a box has imported its module; jaxmp need not.
    boxes = (("flax.core.meta", "AxisMetadata"), ("flax.nnx", "Variable"))
    kinds = (getattr(sys.modules.get(module), name, ()) for module, name in boxes)
    return isinstance(x, tuple(kinds))


def _default_dtype(path: str, dtype: np.dtype) -> np.dtype:
    """Keeps the running statistics of Linen at least float32."""
    if "batch_stats" in path.split("/"):
        return wide_dtype(dtype)
    return dtype


def _parse_parts(text: str) -> Policy:
    where = f"the policy {short(text)}"
    dtypes: dict[str, np.dtype] = {}
    overrides = []
    position, comma = 0, ","
    while comma:
        part = _PART.match(text, position)
        assert part is not None, "every group of the pattern may be empty"
        pattern, rest, comma = part.groups()
        position = part.end()
        key, equals, value = rest.partition("=")
        if pattern is None and equals and key.strip() == _NORMALIZATION_KEY:
            pattern, rest = _NORMALIZATION, value
        if pattern is not None:
            overrides.append((pattern.replace('""', '"'), parse_dtype(rest, where)))
            continue
        field = _KEYS.get(key.strip())
        if not equals or field is None:
            raise ValueError(
                f"`{clipped(rest.strip())}` in {where} is not understood. Expected "
                f"parts like `c=f16`, whose key is one of {', '.join(_KEYS)}, "
                f"{_NORMALIZATION_KEY}, or a regex in double quotes."
                f"{suggest(key.strip(), _KEYS)}"
            )
        if field in dtypes:
            raise ValueError(
                f"`{clipped(rest.strip())}` in {where} repeats a key: `{field}` is "
                f"{dtypes[field].name} already. Keep one of the two."
            )
        parse = as_dot_dtype if field == "dot_dtype" else parse_dtype
        dtypes[field] = parse(value, where)
    param = dtypes.pop("param_dtype", np.dtype(np.float32))
    compute = dtypes.pop("compute_dtype", param)
    output = dtypes.pop("output_dtype", compute)
    return Policy(param, compute, output, overrides, **dtypes)


def _as_override(pair: Any) -> tuple[str, np.dtype]:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise ValueError(
            f"An override must be a pair of a regex and a dtype, but is {short(pair)}. "
            'Pass for example `("LayerNorm", "float32")`.'
        )
    pattern, dtype = pair
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`{short(pattern)}` is not a regular expression that an override could "
            f"search in a leaf's path: {clipped(error)}. Pass a string such as "
            "`LayerNorm_0/scale`."
        ) from error
    return str(pattern), as_dtype(dtype, f"the override {short(pattern)}")
