"""The lists by which autocast chooses dtypes, as the table of primitives has them."""

import dataclasses
import difflib
import textwrap
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .._base.checks import as_count, clipped, short
from .._jaxprs.jaxpr import Primitive, live_primitives
from .table import CLASSES, TABLE, named


def _name(primitive: str | Primitive) -> str:
    name = primitive.name if isinstance(primitive, Primitive) else primitive
    if not isinstance(name, str):
        raise TypeError(
            f"`OpLists` holds names of JAX primitives, but got {short(primitive)}. "
            'Pass for example `jaxmp.DEFAULT_OPS.with_deny("tanh")`. To keep a '
            "function of yours in float32, type `jaxmp.float32_region(fun)`."
        )
    return name


def _meant_by(name: str, known: Iterable[str]) -> str:
    """Says what a name that no primitive has may mean."""
    close = difflib.get_close_matches(name, known)
    text = f"Near it: {', '.join(f'`{c}`' for c in close) or 'none'}."
    for module in (jax.nn, jnp):
        if callable(getattr(module, name, None)):  # of several primitives
            fun = f"{module.__name__}.{name}"
            return f"{text} Type `jaxmp.float32_region({fun})` for the function."
    return text


_LISTS = ("allow", "deny", "infer")


@dataclasses.dataclass(frozen=True)
class OpLists:
    """The lists of primitives by which autocast chooses dtypes.

    A primitive in no list is denied. Primitives that contain a function, such as
    ``scan`` and ``cond``, are in no list: autocast goes inside them, unless they are
    denied.

    Attributes:
        allow: Run in 16 bits if they are matmuls with sums in them.
        deny: Run in the dtypes that the function was written in.
        infer: Run in 16 bits if their inputs are 16-bit and the rules of autocast allow
            it.
        rounds_matmuls: Whether every matmul returns 16 bits, see
            :meth:`with_rounded_matmuls`.
        min_size: The smallest size of a matmul that runs in float8, see
            :meth:`with_fp8`.

    Examples:
        >>> ops = jaxmp.DEFAULT_OPS.with_deny("tanh", "logistic")
        >>> "tanh" in ops.deny, "tanh" in ops.infer
        (True, False)
    """

    allow: frozenset[str]
    deny: frozenset[str]
    infer: frozenset[str]
    rounds_matmuls: bool = dataclasses.field(default=False, kw_only=True)
    min_size: int = dataclasses.field(default=2048, kw_only=True)

    def __post_init__(self) -> None:
        """Normalises names and refuses unknown ones and contradictions."""
        object.__setattr__(self, "min_size", as_count("min_size", self.min_size))
        for field in _LISTS:
            names = getattr(self, field)
            names = names if isinstance(names, Iterable) else [names]
            names = [names] if isinstance(names, str) else names
            object.__setattr__(self, field, frozenset(map(_name, names)))
        for name in sorted((self.allow | self.deny | self.infer) - TABLE.keys()):
            live = live_primitives()
            if name not in live:
                raise ValueError(
                    f"`{clipped(name)}` is not the name of a JAX primitive. "
                    f"{_meant_by(name, TABLE.keys() | live.keys())} "
                    "`print(jaxmp.DEFAULT_OPS)` lists them; a `Primitive` works too."
                )
        for name in sorted((self.allow | self.infer) & named("call")):
            raise ValueError(
                f"`{name}` holds a function, and autocast goes inside. It can only be "
                f'denied: `ops.with_deny("{name}")` keeps all of it as it was written.'
            )
        twice = (self.allow & self.deny) | (self.infer & (self.allow | self.deny))
        if twice:
            raise ValueError(
                f"`{min(twice)}` is in two lists of `OpLists`. `with_allow`, "
                "`with_deny` and `with_infer` move a name from one to another."
            )

    def with_allow(self, *primitives: str | Primitive) -> "OpLists":
        """Returns lists in which ``primitives`` run in 16 bits."""
        return self._moved("allow", primitives)

    def with_deny(self, *primitives: str | Primitive) -> "OpLists":
        """Returns lists in which ``primitives`` keep their original dtypes."""
        return self._moved("deny", primitives)

    def with_infer(self, *primitives: str | Primitive) -> "OpLists":
        """Returns lists in which ``primitives`` follow their inputs."""
        return self._moved("infer", primitives)

    def with_rounded_matmuls(self) -> "OpLists":
        """Returns lists with which every matmul returns 16 bits, as in torch.amp.

        By default a matmul returns its float32 sums if a consumer is float32:
        attention scores and logits for a softmax, weight gradients for the user.
        Rounded, they take half of the memory traffic, and have the accuracy of a model
        that is cast as a whole. Float32 regions and ``float32_paths`` still get the
        float32 sums. A result beyond the range of float16 becomes its largest number in
        the forward pass. In the backward pass it becomes infinite, so that the step is
        skipped.

        Examples:
            >>> ops = jaxmp.DEFAULT_OPS.with_rounded_matmuls()
            >>> def scores(q, k):
            ...     return jax.nn.softmax(q @ k.T)
            >>> q = jnp.ones((2, 4))
            >>> jaxmp.autocast(scores, ops=ops)(q, q).dtype
            dtype('float32')

        References:
            PyTorch, "Autocast Op Reference", https://pytorch.org/docs/stable/amp.html
        """
        return dataclasses.replace(self, rounds_matmuls=True)

    def with_fp8(self, *, min_size: int) -> "OpLists":
        """Returns lists with another limit for matmuls in float8.

        Under a policy with ``d=fp8``, such as ``"mixed_fp8"``, a matmul of a matrix
        ``[m, k]`` and a matrix ``[k, n]`` runs in float8 if ``m``, ``k`` and ``n`` are
        multiples of 16 and none is below ``min_size``. The default is 2048: of 1024, on
        an H100, finding the scales and rounding took longer than float8 gained.

        Args:
            min_size: At least 1. Use 16 in a test, where speed does not matter.

        Raises:
            ValueError: If ``min_size`` is below 1.
            TypeError: If it is not an integer.

        Examples:
            >>> ops = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
            >>> def layer(x, w):
            ...     return x @ w
            >>> x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
            >>> jaxmp.audit(jaxmp.autocast(layer, "mixed_fp8", ops=ops))(x, x).flops
            {'float8_e4m3fn': 8192.0}
        """
        return dataclasses.replace(self, min_size=min_size)

    def _moved(self, to: str, primitives: tuple[str | Primitive, ...]) -> "OpLists":
        names = frozenset(map(_name, primitives))
        lists: dict[str, Any] = {
            field: getattr(self, field) - names for field in _LISTS
        }
        return dataclasses.replace(self, **{**lists, to: lists[to] | names})

    def __repr__(self) -> str:
        """Spells how the lists differ from the default ones, which are long."""
        names = {field: getattr(self, field) for field in _LISTS}
        default = {name: getattr(DEFAULT_OPS, name) for name in names}
        if frozenset().union(*default.values()) - frozenset().union(*names.values()):
            lists = [f"{name}={sorted(ops)}" for name, ops in names.items()]
            lists += ["rounds_matmuls=True"] * self.rounds_matmuls
            if self.min_size != DEFAULT_OPS.min_size:
                lists.append(f"min_size={self.min_size}")
            return f"OpLists({', '.join(lists)})"
        text = "DEFAULT_OPS"
        for name, ops in names.items():
            if moved := sorted(ops - default[name]):
                text += f".with_{name}({', '.join(map(repr, moved))})"
        text += ".with_rounded_matmuls()" * self.rounds_matmuls
        if self.min_size != DEFAULT_OPS.min_size:
            text += f".with_fp8(min_size={self.min_size})"
        return text

    def __str__(self) -> str:
        """Lists the names, one paragraph a list."""
        paragraphs = [
            textwrap.fill(
                f"{field}: {' '.join(sorted(getattr(self, field)))}",
                width=88,
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            for field in _LISTS
        ]
        paragraphs += ["Every matmul returns 16 bits."] * self.rounds_matmuls
        if self.min_size != DEFAULT_OPS.min_size:
            paragraphs.append(f"In float8: matmuls of sizes from {self.min_size} on.")
        return "\n".join(paragraphs)


def _listed(field: str) -> frozenset[str]:
    return named(*(kind for kind, found in CLASSES.items() if found == field))


DEFAULT_OPS = OpLists(_listed("allow"), _listed("deny"), _listed("infer"))
