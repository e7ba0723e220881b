"""Small random programs with one planted fault, and what is made of an advice.

Each program is a source text of a few blocks, so that the number of its faulty line is
known. An advice is followed by editing that text: what `jaxmp.find_overflow` says is
read, and nothing of what was planted.
"""

import dataclasses
import itertools
import random
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp

from ..counting.measure import AS_WRITTEN

NOTHING = "nothing"  # a sound program, of which no fault may be named
# What is planted: the ways to write the faulty line, and what follows it.
KINDS = {
    "overflow": [
        ("big = jnp.square({a} * h)", "jnp.log1p(big)"),
        ("big = jnp.exp({b} + h)", "jnp.log(big)"),
        ('big = ({a} * h) @ p["big"]', "jnp.log1p(big)"),
    ],
    "underflow": [
        ("tiny = jnp.square({c} * h)", "jnp.log(tiny)"),
        ("tiny = jnp.exp(h - {d})", "1 / tiny * {e}"),
        ('tiny = ({c} * h) @ p["small"]', "jnp.log(tiny)"),
    ],
    "Inf or NaN in the data": [
        ("norm = jnp.sqrt(jnp.sum(h * h, axis=-1, keepdims=True))", "h / norm"),
        ("bounded = jnp.tanh(h)", "bounded"),
        ("wave = jnp.fft.ifft(jnp.fft.fft(h.astype(jnp.float32))).real", "wave"),
        ("softened = jax.nn.softmax(h)", "softened * h"),
    ],
    "lost epsilon": [
        ("unit = h / (jnp.abs(h) + 1e-8)", "unit + h"),
        ("unit = h / jnp.sqrt(h * h + 1e-9)", "unit + h"),
        ("logs = jnp.log(h + 1e-8)", "logs + h"),
    ],
    "mask beyond the dtype": [
        ("scores = jnp.where(h < 2, -1e9, h)", "jax.nn.softmax(scores) * h"),
        ("scores = h - 1e9 * (h < 2)", "jax.nn.softmax(scores) * h"),
    ],
    "hidden Inf": [
        (
            "norm = jnp.sqrt(jnp.sum(jnp.square({a} * h), axis=-1, keepdims=True))",
            "{a} * h / norm",
        ),
        ("weight = jnp.exp({b} + h)", "h + 1e4 / (1 + weight)"),
    ],
    "overflow, backward": [('steep = {f} * (h @ p["one"])', "steep")],
    "underflow, backward": [('flat = h @ p["one"]', "flat")],
    NOTHING: [
        ("sound = jnp.tanh({g} * h)", "sound"),
        ("sound = jnp.square({g} * h)", "jnp.sqrt(sound)"),
        ("sound = jnp.where(h > 0, h, -1e4)", "jax.nn.softmax(sound) * h"),
        ("sound = h / (jnp.abs(h) + 1e-3)", "sound"),
        ('sound = h @ p["one"]', "jax.nn.gelu(sound)"),
        ("sound = jnp.maximum(h - 0.6, 0.0)", "sound"),
        ("sound = jnp.clip(jnp.exp(20 * h), 0, 1e3)", "jnp.log1p(sound)"),
    ],
}
PLACES = {
    "plain": "planted(p, h)",
    "jit": "jax.jit(planted)(p, h)",
    "remat": "jax.checkpoint(planted)(p, h)",
    "vmap": "jax.vmap(planted, (None, 0))(p, h)",
    "scan": "jax.lax.scan(lambda c, h: (c, planted(p, h)), 0, h.reshape(2, 4, 8))[1]",
    "cond": "jax.lax.cond(x[0, 0] < 9, planted, planted, p, h)",
}
CASTS = ("arguments", "with_policy", "autocast", "dtype=")
BLOCKS = ("h = h + 0.1 * h * h", "h = jax.nn.sigmoid(h)", 'h = 0.5 * h @ p["one"] + h')
_NUMBERS = itertools.count()


class Result(NamedTuple):
    """What a program gives: the loss and the gradients, unscaled."""

    loss: float
    grads: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Whether all of it is finite."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.grads).all())

    def agrees(self, other: "Result") -> bool:
        """Whether a result in 16 bits and one in float32 are the same but for them."""
        if not (self.is_finite and other.is_finite):
            return False
        pairs = [(self.loss, other.loss), (self.grads, other.grads)]
        return all(
            np.linalg.norm(x - y) <= 0.1 * np.linalg.norm(y) + 1e-30 for x, y in pairs
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, its arguments, and what has been changed in it."""

    kind: str
    place: str
    cast: str
    lines: tuple[str, ...]
    faulty: int  # the number of the faulty line
    params: Any
    x: Any
    scale: float = 1.0
    paths: tuple[str, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    asks_gradient: bool = True

    def functions(self, cast: str | None = None) -> dict[str, Any]:
        """Compiles the text, and returns what is in it.

        Args:
            cast: How it comes to 16 bits; "float32" if it does not.
        """
        cast = cast or self.cast
        name = f"planted_{next(_NUMBERS)}.py"
        policy = jaxmp.get_policy("mixed_float16").with_overrides(*self.overrides)
        globs = {
            "DTYPE": "float16" if cast == "dtype=" else None,
            "POLICY": policy if cast == "with_policy" else None,
        }
        exec(compile("\n".join(self.lines), name, "exec"), globs)
        return globs

    def step(self, cast: str | None = None, *, gradient: bool = True) -> Any:
        """Returns the loss, or what computes it and its gradients."""
        cast, found = cast or self.cast, self.functions(cast)
        fun = found["loss"]
        if gradient:
            fun = jaxmp.value_and_grad(fun, loss_scale=self.scale)
        if cast == "autocast":
            fun = jaxmp.autocast(fun, "float16", float32_paths=self.paths)
        return fun

    def args(self, cast: str | None = None) -> Any:
        """Returns the arguments in their dtypes."""
        is_16bit = (cast or self.cast) == "arguments"
        args = self.params, self.x
        return jaxmp.cast_tree(args, "float16") if is_16bit else args

    def run(self, cast: str | None = None) -> Result:
        """Runs the program, with every rounding in it."""
        args = self.args(cast)
        fun = jax.jit(self.step(cast), compiler_options=AS_WRITTEN)
        loss, grads = jax.device_get(fun(*args))
        flat = [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(grads)]
        return Result(float(loss), np.concatenate(flat))

    def search(self) -> Any:
        """Returns the report on it."""
        fun = self.step(gradient=self.asks_gradient)
        return jaxmp.find_overflow(fun)(*self.args())


def program(kind: str, seed: int) -> Program:
    """Returns a random program with a fault of a kind.

    It may be sound nevertheless: whether 16 bits make its results wrong depends on how
    it comes to them.
    """
    pick = random.Random(f"{kind} {seed}")
    numbers = {
        "a": pick.choice([600, 1000, 3000]),
        "b": pick.choice([11, 15, 20]),
        "c": pick.choice([1e-4, 3e-5]),
        "d": pick.choice([18, 25, 30]),
        "e": pick.choice([1e-8, 1e-10]),
        "f": pick.choice([2000, 5000, 9000]),
        "g": pick.choice([0.5, 2, 5]),
    }
    line, result = (x.format(**numbers) for x in pick.choice(KINDS[kind]))
    place, cast = pick.choice([*PLACES]), pick.choice(CASTS)
    blocks = pick.choices(BLOCKS, k=pick.randrange(3))
    opens = pick.choice(["h", "jax.nn.relu(h - 0.5)"] if kind == NOTHING else ["h"])
    if kind == "lost epsilon":
        opens = "jax.nn.relu(h - 1e3)"  # zeros, as dead units and padding are
    total = 1e9 if kind == "underflow, backward" else 32
    lines = [
        "import jax",
        "import jax.numpy as jnp",
        "import jaxmp",
        "",
        "def planted(p, h):",
        f"    h = {opens}",
        f"    {line}",
        f"    return {result}",
        "",
        "def model(p, x):",
        "    p, x = jax.tree.map(lambda x: x.astype(DTYPE or x.dtype), (p, x))",
        '    h = jax.nn.sigmoid(x @ p["w"])',
        *(f"    {block}" for block in blocks),
        '    with jax.named_scope("net/layer"):',
        f"        return {PLACES[place]}",
        "",
        "def loss(p, x):",
        "    cast = jaxmp.with_policy(model, POLICY) if POLICY else model",
        f"    return jnp.sum(cast(p, x).astype(jnp.float32)) / {total}",
    ]
    random_x = np.random.default_rng(seed)
    x = random_x.standard_normal((8, 8)).astype(np.float32)
    if kind == "Inf or NaN in the data":
        x[pick.randrange(8), pick.randrange(8)] = pick.choice([np.inf, -np.inf, np.nan])
    params = {
        "w": random_x.standard_normal((8, 8)).astype(np.float32) / 3,
        "one": np.eye(8, dtype=np.float32),
        "big": np.full((8, 8), 200, np.float32),
        "small": np.full((8, 8), 1e-5, np.float32),
    }
    backward = kind.endswith("backward")
    # Autocast rounds the cotangent for the product that takes it, and a cast of the
    # model rounds it where the model ends.
    at_end = kind == "underflow, backward" and cast != "autocast"
    return Program(
        kind,
        place,
        cast,
        tuple(lines),
        faulty=len(lines) if at_end else 7,
        params=jax.tree.map(jnp.asarray, params),
        x=jnp.asarray(x),
        scale=2.0**15 if kind == "overflow, backward" else 1.0,
        asks_gradient=backward or pick.random() < 0.5,
    )


def is_faulty(planted: Program) -> bool:
    """Whether the program gives something else than it does in float32."""
    got, wanted = planted.run(), planted.run("float32")
    if not planted.asks_gradient:
        got, wanted = (x._replace(grads=np.zeros(1)) for x in (got, wanted))
    return not got.agrees(wanted)


# The verdict


LINE = re.compile(r"planted_\d+\.py:(\d+)")
# The kind that the verdict should have.
EXPECTED = dict.fromkeys(KINDS, "Inf") | {NOTHING: NOTHING}
EXPECTED |= dict.fromkeys(["underflow", "underflow, backward", "lost epsilon"], "zeros")
EXPECTED["Inf or NaN in the data"] = "data"


def verdict(report: Any) -> tuple[str, int | None]:
    """Returns the kind and the line that a report names."""
    if "no precision helps" in report.advice:
        return "data", None
    if report.first is not None:
        found = LINE.search(report.first.where)
        return report.first.kind, int(found[1]) if found else None
    found = LINE.search(report.advice)
    if "gave Inf where float32 would not" in report.advice and found:
        return "Inf", int(found[1])
    if found and "zero or subnormal" in report.advice:
        return "zeros", int(found[1])
    return "nothing", None


def names_it(planted: Program, report: Any) -> bool:
    """Whether a report names the planted fault, its kind and its line."""
    kind, line = verdict(report)
    if kind != EXPECTED[planted.kind]:
        return False
    if kind == "data":
        return set(report.given) == {"x"} and "`x`" in report.advice
    return kind == "nothing" or line == planted.faulty


# The advice


def followed(planted: Program, report: Any) -> Program | None:
    """Returns the program as the advice of a report has it, None if there is none."""
    text, change = report.advice, dataclasses.replace
    line = LINE.search(text)
    if "no precision helps" in text:
        given = {"x": planted.x, **planted.params}
        fixed = {
            name: jnp.where(jnp.isfinite(x), x, 1) if name in report.given else x
            for name, x in given.items()
        }
        return change(planted, x=fixed.pop("x"), params=fixed)
    if "loss scale is too large" in text:
        return _finite_scale(change(planted, scale=planted.scale / 8))
    if "loss scale is too small" in text:
        return _finite_scale(change(planted, scale=2.0**24))
    if "`jnp.finfo(x.dtype).min`" in text and line:
        number = int(line[1])
        old = planted.lines[number - 1]
        new = re.sub(r"-1e9", "jnp.finfo(h.dtype).min", old)
        new = re.sub(
            r"h - 1e9 \* \((.*)\)", r"jnp.where(\1, jnp.finfo(h.dtype).min, h)", new
        )
        return change(planted, lines=_replaced(planted.lines, number, new))
    if found := re.search(r'`float32_paths=\("([^"]*)",\)`', text):
        return change(planted, paths=(found[1],))
    if "`jaxmp.float32_region` around the function" in text and line:
        name = _function_of(planted.lines, int(line[1]))
        region = f"{name} = jaxmp.float32_region({name})"
        return change(planted, lines=(*planted.lines, region))
    if found := re.search(r"Compute planted_\d+\.py:(\d+) in float32", text):
        number = int(found[1])
        left, equals, right = planted.lines[number - 1].partition(" = ")
        right = re.sub(
            r"\b(h|x)\b(?!\.astype)", r"\1.astype(jnp.float32)", right or left
        )
        new = f"{left}{equals}{right}" if equals else right
        return change(planted, lines=_replaced(planted.lines, number, new))
    if found := re.search(r'with_overrides\(\("([^"]*)", "float32"\)\)', text):
        return change(planted, overrides=((found[1], "float32"),))
    if "cast_tree((params, grads)" in text and planted.cast == "arguments":
        return change(planted, cast="float32")
    return None


def is_cured(planted: Program, report: Any) -> bool:
    """Whether the program agrees with float32 once the advice has been followed."""
    cured = followed(planted, report)
    return cured is not None and not is_faulty(cured)


def _finite_scale(planted: Program) -> Program:
    """Takes the scale down as `jaxmp.loss_scaling` does, by larger steps."""
    while planted.scale > 1 and not planted.run().is_finite:
        planted = dataclasses.replace(planted, scale=planted.scale / 8)
    return planted


def _replaced(lines: tuple[str, ...], number: int, new: str) -> tuple[str, ...]:
    return (*lines[: number - 1], new, *lines[number:])


def _function_of(lines: tuple[str, ...], number: int) -> str:
    above = [re.match(r"def (\w+)", line) for line in lines[:number]]
    return [x[1] for x in above if x][-1]
