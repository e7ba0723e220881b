"""Random programs of which any part may be called: no value may change its dtype.

A program is a list of operations on a pool of matrices. Written twice, once as it is
and once with random parts of it in functions that are called in some way, it has the
same values in the forward pass. Each has a name, by which one finds it in what autocast
makes of the two.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from benchmarks.counting.measure import traced

SIZE = 8  # of a matrix


def _normed(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


ONE: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "maximum": lambda x: jnp.maximum(x, 0),
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "softmax": jax.nn.softmax,
    "norm": _normed,
    "exponential": lambda x: jnp.exp(-x),
    "logarithm": lambda x: jnp.log1p(jnp.abs(x)),
    "square": jnp.square,
    "sine": jnp.sin,
    "half": lambda x: 0.5 * x,
    "a share": lambda x: x / 0.9,
    "one less": lambda x: 1 - x,
    "negative": lambda x: -x,
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(-1, 2, SIZE).reshape(x.shape),
    "reverse": lambda x: x[::-1],
    "halves": lambda x: jnp.concatenate([x[:, SIZE // 2 :], x[:, : SIZE // 2]], -1),
    "left": lambda x: jnp.tile(x[:, : SIZE // 2], 2),
    "right": lambda x: jnp.tile(jnp.split(x, 2, -1)[1], 2),
    "mask": lambda x: jnp.where(jnp.tri(SIZE, dtype=bool), x, 0),
    "clip": lambda x: jnp.clip(x, -3, 3),
    "mean": lambda x: x - x.mean(0),
    "sum": lambda x: jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape),
    "running sum": lambda x: jnp.cumsum(x, 0) / SIZE,
}
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda x, y: x @ y,
    "transposed matmul": lambda x, y: x @ y.T,
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "gate": lambda x, y: jax.nn.sigmoid(x) * y,
    "ratio": lambda x, y: x / (1 + jnp.abs(y)),
    "larger": jnp.maximum,
    "choice": lambda x, y: jnp.where(x > 0, x, y),
}


def _with_rule(fun: Callable) -> Callable:
    """Calls a function with a derivative rule, which is that of JAX."""
    called = jax.custom_jvp(fun)
    called.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return called


CALLS: dict[str, Callable[[Callable], Callable]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "named_call": lambda fun: jax.named_call(fun, name="part"),
    "custom_jvp": _with_rule,
    "jit in jit": lambda fun: jax.jit(jax.jit(fun)),
    "checkpointed jit": lambda fun: jax.checkpoint(jax.jit(fun)),
    "jitted rule": lambda fun: jax.jit(_with_rule(fun)),
}
# These compute values again, and what reads them in the backward pass reads the second.
_AGAIN = {"checkpoint": "jit", "checkpointed jit": "jit in jit"}


class Line(NamedTuple):
    """An operation, and which values it takes."""

    operation: str
    takes: tuple[int, ...]


class Part(NamedTuple):
    """Lines of a program, and how they are called."""

    start: int
    stop: int
    call: str


class Program(NamedTuple):
    """A program on inputs, which are the first values."""

    inputs: int
    lines: tuple[Line, ...]
    parts: tuple[Part, ...]


def drawn(seed: int) -> Program:
    """Returns the program of a seed, with the parts of it that are called."""
    rng = np.random.default_rng(seed)
    inputs, lines = 4, list[Line]()
    for i in range(inputs, inputs + int(rng.integers(3, 12))):
        recent = [int(i - 1 - min(i - 1, rng.geometric(0.4) - 1)) for _ in range(2)]
        if rng.random() < 0.35:
            recent[1] = int(rng.integers(inputs))  # such as a weight
        if rng.random() < 0.5:
            lines.append(Line(f"1 {rng.choice([*ONE])}", (recent[0],)))
        else:
            names = [*TWO, *["matmul"] * 5, *["sum"] * 2]
            lines.append(Line(f"2 {rng.choice(names)}", tuple(recent)))
    lines = _read(inputs, lines)
    parts, start = list[Part](), 0
    while start < len(lines):
        stop = min(len(lines), start + int(rng.integers(1, 5)))
        if rng.random() < 0.6:
            parts.append(Part(start, stop, str(rng.choice([*CALLS]))))
        start = stop
    return Program(inputs, tuple(lines), tuple(parts))


def _read(inputs: int, lines: Sequence[Line]) -> list[Line]:
    """Leaves out what nobody reads, which a checkpoint leaves out too."""
    read = {inputs + len(lines) - 1}
    for i, line in reversed([*enumerate(lines, inputs)]):
        read.update(line.takes if i in read else ())
    kept = [
        *range(inputs),
        *(i for i in range(inputs, inputs + len(lines)) if i in read),
    ]
    places = {old: new for new, old in enumerate(kept)}
    taken = (lines[i - inputs] for i in kept[inputs:])
    return [Line(x.operation, tuple(places[k] for k in x.takes)) for x in taken]


def forward(program: Program, *, called: bool) -> Callable[..., Any]:
    """Returns a program, whose parts are called or not; it returns its last value."""

    def run(start: int, stop: int, values: Sequence[Any]) -> list[Any]:
        values = list(values)
        for i in range(start, stop):
            name, takes = program.lines[i]
            table: dict[str, Callable] = ONE if name.startswith("1") else TWO
            value = table[name[2:]](*(values[k] for k in takes))
            values.append(checkpoint_name(value, f"value {program.inputs + i}"))
        return values

    def call(part: Part, values: list[Any]) -> list[Any]:
        """Calls a part with what it takes, for what is taken of it."""
        first = len(values)
        inside = {k for x in program.lines[part.start : part.stop] for k in x.takes}
        behind = {k for x in program.lines[part.stop :] for k in x.takes}
        last = program.inputs + part.stop - 1
        taken = sorted(k for k in inside if k < first)
        returned = [k for k in range(first, last + 1) if k in behind or k == last]

        def fun(*args):
            known = [None] * first
            for k, x in zip(taken, args, strict=True):
                known[k] = x
            done = run(part.start, part.stop, known)
            return [done[k] for k in returned]

        outs = CALLS[part.call](fun)(*(values[k] for k in taken))
        found = dict(zip(returned, outs, strict=True))
        return [*values, *(found.get(k) for k in range(first, last + 1))]

    def fun(*inputs):
        values, at = list(inputs), 0
        for part in (*program.parts, None):
            end = len(program.lines) if part is None else part.start
            values = run(at, end, values)
            if part is not None:
                values = (
                    call(part, values) if called else run(part.start, part.stop, values)
                )
                at = part.stop
        return values[-1]

    return fun


def dtypes(
    program: Program, dtype: str, *, called: bool, backward: bool
) -> dict[str, str]:
    """Returns the dtypes that the values of a program have in the forward pass.

    Args:
        program: The program.
        dtype: That of autocast.
        called: Whether its parts are called.
        backward: Whether it is a loss with its gradients.
    """
    if backward:
        parts = (x._replace(call=_AGAIN.get(x.call, x.call)) for x in program.parts)
        program = program._replace(parts=tuple(parts))
    fun = forward(program, called=called)
    if backward:
        fun = jax.value_and_grad(functools.partial(_loss, fun), tuple(range(4)))
    args = [jnp.ones((SIZE, SIZE))] * program.inputs
    found: dict[str, str] = {}
    for eqn in traced(jaxmp.autocast(fun, dtype), *args):
        if eqn.primitive.name == "name":
            aval: Any = eqn.outvars[0].aval
            found[eqn.params["name"]] = str(aval.dtype)
    return found


def _loss(fun: Callable, *args: Any) -> Any:
    return jnp.mean(fun(*args) ** 2)


def changed(program: Program, dtype: str, *, backward: bool) -> dict[str, tuple]:
    """Returns the values whose dtype a call changes: without it, and with it."""
    plain, called = (
        dtypes(program, dtype, called=x, backward=backward) for x in (False, True)
    )
    return {
        k: (plain[k], called[k]) for k in plain if k in called and plain[k] != called[k]
    }
