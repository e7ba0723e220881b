"""Writes the page of the documentation with the dtype of each function and layer.

``docs/names.md`` is what the engine of autocast does to a small program for each name,
so that no dtype in it is typed by hand.
"""

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from jaxmp._autocast.emit import Emitter
from jaxmp._autocast.plan import Planner, Step
from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._ops import table
from jaxmp._ops.products import is_convolution

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "names.md"

INTRODUCTION = """\
# The dtype of each name

Find the function or layer that you use. Each cell has the dtype of its argument and of
its result in a training step under autocast: `32 → 16` takes float32 and returns 16
bits. The argument is the result of a matmul. In the first column the result feeds
another matmul, in the second a loss. `32, rounded` is float32 that holds 16-bit
numbers: cuDNN has no convolution that takes 16 bits and returns float32.
[`jaxmp.explain`](explain.md) gives the [rule](rules.md) for each line of your code.

Parameters stay float32, and a layer rounds its own copy of them. The tables hold for
bfloat16 and for float16, unless a cell names float16.

`python -m benchmarks names` writes this page from what autocast does.
"""


class Case(NamedTuple):
    """What a name is shown by."""

    fun: Callable  # of one array
    shape: tuple[int, ...] = (8, 16)
    given: bool = False  # whether it takes an argument, and not what a matmul computed
    is_loss: bool = False  # whether no matmul reads what it returns


class Shown(NamedTuple):
    """What a name takes and returns in one program."""

    takes: str
    returns: str

    def __str__(self) -> str:
        """Spells a cell of the table."""
        return f"{self.takes}\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}{self.returns}"


def _layer(module: nn.Module, *args: Any, shape: tuple[int, ...] = (8, 16)) -> Case:
    """Returns a Flax layer with its parameters and statistics."""
    state = module.init(jax.random.key(0), jnp.ones(shape), *args)
    mutable = [x for x in state if x != "params"] or False

    def fun(x):
        rngs = {"dropout": jax.random.key(1)}
        out = module.apply(state, x, *args, rngs=rngs, mutable=mutable)
        return out[0] if mutable else out

    return Case(fun, shape)


W, V = jnp.ones((16, 16)), jnp.ones(16)
LABELS, PLACES = jnp.arange(8) % 16, jnp.arange(8) % 3
IMAGE = (2, 8, 8, 8)
HEADS = (2, 8, 2, 8)


@jax.custom_vjp
def _own_rule(x):
    return jnp.tanh(x)


_own_rule.defvjp(
    lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),)
)


def _matrix(fun: Callable) -> Case:
    """Returns what takes a square matrix."""
    return Case(fun, (16, 16))


def _psum(x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    summed = functools.partial(lax.psum, axis_name="i")
    return jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(x)


def _cases() -> dict[str, dict[str, Case]]:
    """Returns the names, by the headings of the page."""
    return {
        "Matmuls and convolutions": {
            "`x @ w`, `jnp.matmul`, `jnp.dot`": Case(lambda x: x @ W),
            "`jnp.einsum`": Case(lambda x: jnp.einsum("ij,jk->ik", x, W)),
            "`jnp.tensordot`": Case(lambda x: jnp.tensordot(x, W, 1)),
            "`jnp.linalg.multi_dot`": Case(lambda x: jnp.linalg.multi_dot([x, W, W])),
            "`lax.dot_general`": Case(
                lambda x: lax.dot_general(x, W, (((1,), (0,)), ((), ())))
            ),
            "`x @ w` of fewer than 8 rows": Case(lambda x: x[:, :4] @ W[:4]),
            "`lax.conv_general_dilated`": Case(
                lambda x: lax.conv_general_dilated(
                    x, jnp.ones((3, 3, 8, 8)), (1, 1), "SAME",
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                ), IMAGE,
            ),
            "`jnp.convolve`": Case(lambda x: jnp.convolve(x[0], V[:3])),
            "`jnp.outer`": Case(lambda x: jnp.outer(x[0], x[1])),
            "`jnp.vdot` of two vectors": Case(
                lambda x: jnp.vdot(x[0], x[1]), is_loss=True
            ),
            '`jnp.matmul(..., precision="highest")`': Case(
                lambda x: jnp.matmul(x, W, precision="highest")
            ),
        },
        "Layers": {
            "`nn.Dense`": _layer(nn.Dense(16)),
            "`nn.Conv`": _layer(nn.Conv(8, (3, 3)), shape=IMAGE),
            "`nn.Embed`, of token ids": Case(lambda x: x[LABELS], (16, 16), True),
            "`nn.LayerNorm`": _layer(nn.LayerNorm()),
            "`nn.RMSNorm`": _layer(nn.RMSNorm()),
            "`nn.GroupNorm`": _layer(nn.GroupNorm(2), shape=IMAGE),
            "`nn.BatchNorm`": _layer(nn.BatchNorm(False), shape=IMAGE),
            "`nn.Dropout`": _layer(nn.Dropout(0.5, deterministic=False)),
            "`nn.max_pool`": Case(lambda x: nn.max_pool(x, (2, 2), (2, 2)), IMAGE),
            "`nn.avg_pool`": Case(lambda x: nn.avg_pool(x, (2, 2), (2, 2)), IMAGE),
            "`jax.nn.dot_product_attention`": Case(
                lambda x: jax.nn.dot_product_attention(x, x, x), HEADS
            ),
            "`nn.MultiHeadDotProductAttention`": _layer(
                nn.MultiHeadDotProductAttention(2), shape=(2, 8, 16)
            ),
            "`nn.RNN(nn.LSTMCell)`": _layer(nn.RNN(nn.LSTMCell(16)), shape=(2, 8, 16)),
            "`nn.RNN(nn.GRUCell)`": _layer(nn.RNN(nn.GRUCell(16)), shape=(2, 8, 16)),
        },
        "Elementwise": {
            "`x + b`, a bias": Case(lambda x: x + V),
            "`x + layer(x)`, a residual": Case(lambda x: x + jnp.tanh(x) @ W),
            "`x + norm(x)`": Case(lambda x: x + jax.nn.standardize(x)),
            "`x - y` of two layers": Case(lambda x: x - x @ W),
            "`x * 0.5`, `x + 1`": Case(lambda x: x * 0.5),
            "`x * 1000`": Case(lambda x: x * 1000),
            "`x * y` of two layers": Case(lambda x: x * (x @ W)),
            "`x / y` of two layers": Case(lambda x: x / (x @ W)),
            "`x**2`, `jnp.square`": Case(lambda x: x**2),
            "`jnp.power`": Case(lambda x: jnp.power(x, 1.5)),
            "`jnp.sqrt`, `lax.rsqrt`": Case(jnp.sqrt),
            "`jnp.exp`": Case(jnp.exp),
            "`jnp.log`": Case(jnp.log),
            "`jnp.tanh`": Case(jnp.tanh),
            "`jnp.sin`, `jnp.cos`": Case(jnp.sin),
            "`jnp.arctan`": Case(jnp.arctan),
            "`jax.nn.relu`": Case(jax.nn.relu),
            "`jax.nn.gelu`": Case(jax.nn.gelu),
            "`jax.nn.gelu(..., approximate=False)`": Case(
                lambda x: jax.nn.gelu(x, approximate=False)
            ),
            "`jax.nn.silu`": Case(jax.nn.silu),
            "`jax.nn.sigmoid`": Case(jax.nn.sigmoid),
            "`jax.nn.softplus`": Case(jax.nn.softplus),
            "`jax.nn.elu`": Case(jax.nn.elu),
            "`jnp.interp`": Case(lambda x: jnp.interp(x, V, V)),
        },
        "Reductions and losses": {
            "`jax.nn.softmax`": Case(jax.nn.softmax),
            "`jax.nn.log_softmax`": Case(jax.nn.log_softmax),
            "`jax.nn.logsumexp`": Case(lambda x: jax.nn.logsumexp(x, -1)),
            "`jnp.sum`, `jnp.mean`": Case(lambda x: x.mean(0)),
            "`jnp.var`, `jnp.std`": Case(lambda x: x.var(0)),
            "`jnp.cumsum`": Case(lambda x: jnp.cumsum(x, 1)),
            "`jnp.cumprod`, `jnp.prod`": Case(lambda x: jnp.cumprod(x, 1), (2, 64)),
            "`jnp.max`, `jnp.min`": Case(lambda x: x.max(0)),
            "`jnp.argmax`": Case(lambda x: x.argmax(-1)),
            "`jnp.sort`": Case(jnp.sort),
            "`lax.top_k`": Case(lambda x: lax.top_k(x, 4)[0]),
            "`jax.ops.segment_sum`": Case(lambda x: jax.ops.segment_sum(x, PLACES, 3)),
            "`lax.reduce_window`, a sum": Case(
                lambda x: lax.reduce_window(
                    x, 0.0, lax.add, (2, 2), (2, 2), "VALID"
                )
            ),
            "`jnp.linalg.norm`": Case(lambda x: jnp.linalg.norm(x, axis=-1)),
            "`optax.softmax_cross_entropy`": Case(
                lambda x: optax.softmax_cross_entropy(x, jax.nn.one_hot(LABELS, 16)),
                is_loss=True,
            ),
            "`optax.softmax_cross_entropy_with_integer_labels`": Case(
                lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS),
                is_loss=True,
            ),
        },
        "Data movement and choices": {
            "`jnp.reshape`, `x.T`, `x[:4]`": Case(lambda x: x.T),
            "`jnp.concatenate`, `jnp.stack`": Case(lambda x: jnp.concatenate([x, x])),
            "`jnp.where`": Case(lambda x: jnp.where(x > 0, x, 0.0)),
            "`jnp.maximum`, `jnp.clip`": Case(lambda x: jnp.clip(x, -1.0, 1.0)),
            "`jnp.take`, `x[ids]`": Case(lambda x: jnp.take(x, LABELS[:4], 0)),
            "`jnp.take_along_axis`": Case(
                lambda x: jnp.take_along_axis(x, jnp.stack([LABELS] * 8, 1), 1)
            ),
            "`x.at[ids].set`": Case(lambda x: x.at[PLACES].set(0.0)),
            "`x.at[ids].add`": Case(lambda x: x.at[PLACES].add(x)),
            "`jnp.pad`": Case(lambda x: jnp.pad(x, 1)),
            "`x.astype(jnp.float32)`": Case(lambda x: x.astype(jnp.float32)),
            "`x.astype(jnp.bfloat16)`": Case(lambda x: x.astype(jnp.bfloat16)),
        },
        "Linear algebra, transforms and images": {
            "`jnp.linalg.solve`": _matrix(lambda a: jnp.linalg.solve(a, V)),
            "`jnp.linalg.inv`": _matrix(jnp.linalg.inv),
            "`jnp.linalg.cholesky`": _matrix(jnp.linalg.cholesky),
            "`jnp.linalg.eigh`": _matrix(lambda a: jnp.linalg.eigh(a)[1]),
            "`jnp.linalg.svd`": Case(
                lambda x: jnp.linalg.svd(x, full_matrices=False)[0]
            ),
            "`jnp.linalg.qr`": Case(lambda x: jnp.linalg.qr(x.T)[0]),
            "`jnp.fft.fft`": Case(lambda x: jnp.fft.fft(x).real),
            "`jax.image.resize`": Case(
                lambda x: jax.image.resize(x, (2, 4, 4, 8), "linear"), IMAGE
            ),
        },
        "Loops and transformations": {
            "`jax.jit`, `jax.checkpoint`, of a `tanh`": Case(jax.checkpoint(jnp.tanh)),
            "`jax.vmap`, of a `tanh`": Case(jax.vmap(jnp.tanh)),
            "`lax.cond`, of a `tanh`": Case(
                lambda x: lax.cond(x[0, 0] > 0, jnp.tanh, lambda x: x, x)
            ),
            "`jax.custom_vjp`, of a `tanh`": Case(_own_rule),
            "`lax.scan`, a matmul in each step": Case(
                lambda x: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, W[None])[0]
            ),
            "`lax.scan`, a residual in each step": Case(
                lambda x: lax.scan(
                    lambda c, w: (c + jnp.tanh(c @ w), None), x, W[None]
                )[0]
            ),
            "`lax.scan`, a running sum": Case(
                lambda x: lax.scan(lambda c, row: (c + row, None), V * 0, x)[0]
            ),
            "`lax.fori_loop`, a matmul in each step": Case(
                lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ W), x)
            ),
            "`lax.associative_scan`, a sum": Case(
                lambda x: lax.associative_scan(jnp.add, x)
            ),
            "`lax.psum`, in `jax.shard_map`": Case(_psum),
        },
    }  # fmt: skip


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


def page() -> str:
    """Returns the page as Markdown."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    for heading, cases in _cases().items():
        rows = [_row(name, case) for name, case in cases.items()]
        head = "| | feeds a matmul | feeds a loss |\n|---|---|---|"
        yield "\n".join([f"## {heading}\n", head, *rows, ""])


def rows(every: int = 1) -> Iterator[str]:
    """Yields rows of the tables, one of ``every`` so many."""
    cases = [x for section in _cases().values() for x in section.items()]
    return (_row(name, case) for name, case in cases[::every])


def _row(name: str, case: Case) -> str:
    return f"| {name} | {' | '.join(_cells(case))} |"


def _cells(case: Case) -> Iterator[str]:
    if case.is_loss:
        yield ""
    for to_matmul in (False,) if case.is_loss else (True, False):
        bfloat16, float16 = (
            shown(case, to_matmul, x) for x in (jnp.bfloat16, jnp.float16)
        )
        differ = bfloat16 != float16
        yield str(bfloat16) + f"; float16: {float16}" * differ


def shown(case: Case, to_matmul: bool, dtype: Any) -> Shown:
    """Returns what the engine makes of a name.

    Args:
        case: What the name is shown by.
        to_matmul: Whether a matmul reads what it returns, or a loss.
        dtype: The 16-bit dtype.
    """
    steps: list[Step] = []
    emitter = Emitter(Planner(np.dtype(dtype), jaxmp.DEFAULT_OPS), record=steps)
    program, x = _program(case, to_matmul)
    jaxpr = jax.make_jaxpr(emitter.wrap(jax.value_and_grad(program)))(W, x)
    decided = {x: step for step in steps for x in step.eqn.outvars}
    named = [x.eqn for x in steps if x.eqn.primitive.name == "name" and not x.back]
    bits, spelled = _bits(jaxpr), {}
    for eqn in reversed(named):
        name = eqn.params["name"]
        spelled[name] = bits[name]
        if bits[name] == "32" and _is_convolved(eqn.invars[0], decided):
            spelled[name] += ", rounded"
    takes = bits["takes"] if case.given else spelled["takes"]
    return Shown(takes, spelled.get("returns", "int"))


def _is_convolved(var: Any, decided: dict[Any, Step]) -> bool:
    """Whether a convolution in 16 bits returns a value, which is moved at most."""
    if var not in decided:
        return False
    eqn, decision = decided[var].eqn, decided[var]
    if is_convolution(eqn):
        return decision.kind == "product"
    if bodies := [*_jaxpr.sub_jaxprs(eqn)]:
        inner = _jaxpr.open_jaxpr(bodies[-1]).outvars[eqn.outvars.index(var)]
        return _is_convolved(inner, decided)
    return table.is_view(eqn) and _is_convolved(eqn.invars[0], decided)


def _program(case: Case, to_matmul: bool) -> tuple[Callable, jax.Array]:
    """Returns a loss of weights and an array, and the array."""

    def loss(w, x):
        x = x if case.given else x.reshape(-1, 16) @ w
        x = checkpoint_name(x.reshape(case.shape), "takes")
        y = case.fun(x)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return x.sum()
        y = checkpoint_name(y, "returns")
        if to_matmul:
            y = y.reshape(-1, y.shape[-1]) if y.ndim else jnp.broadcast_to(y, (2, 2))
            y = jnp.tanh(y @ jnp.ones((y.shape[-1], 8)))
        return jnp.mean(y**2)

    return loss, jax.random.normal(jax.random.key(2), case.shape)


def _bits(jaxpr: Any) -> dict[str, str]:
    """Returns the bits of what a program gives a name to, where it does first."""
    found: dict[str, str] = {}
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "name":
            aval: Any = eqn.outvars[0].aval
            bits = str(8 * aval.dtype.itemsize)
            found.setdefault(eqn.params["name"], bits)
        for inner in _jaxpr.sub_jaxprs(eqn):
            found = _bits(inner) | found
    return found
