"""Writes the page with all results.

``benchmarks/tables.md`` is made from the files in ``benchmarks/results`` and nothing
else, so that no number in it is typed by hand.
"""

import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import price
from .counting import pages, results
from .gpu import INT8, NAMES, gains
from .residuals import CHECKPOINTED

PAGE = pathlib.Path(__file__).with_name("tables.md")

Row = Mapping[str, Any]

# What the page calls the networks of `machinery`, and the order in which it shows them.
STEPS = {
    "mlp": "MLP, 27M",
    "gpt-12m": "GPT, 12M",
    "gpt-160m": "GPT, 163M",
    "resnet-18": "ResNet-18",
    "resnet-50": "ResNet-50",
}
FLOOR = "by hand"
AUTOCAST = "jaxmp autocast"
FORMS = {
    AUTOCAST: "autocast",
    "jaxmp autocast, rounded": "rounded",
    "jaxmp autocast, inside": "inside",
}
ERRORS = {
    "dtype=": "Flax's `dtype=`",
    "autocast": "autocast",
    "rounded": "rounded",
    "inside": "inside",
}

INTRODUCTION = """\
# All tables

`python -m benchmarks evidence` writes this page from the files in `benchmarks/results`.
[Performance](../docs/performance.md) says what follows from it.

*By hand* is a training step that casts the whole model with `astype`, has no loss scale
and skips no step. *N* is the number of parameters. All but the first section was
counted in code that was compiled for an H200 and not run, or measured on a CPU.
"""

TIMES = """\
## Times on a GPU

Training steps with Adam, each in float32 as JAX does by default (TF32), in true float32
(*highest*), and in 16 bits. Medians of five rounds in turns. The temporary memory is
that of the compiled step. *Trace* includes lowering; the compile time of the first step
of each dtype includes the choice of kernels, which the others reuse.
"""

CEILINGS = """\
The highest rates that this GPU reached:
"""

PYTORCH = """\
The same GPT in PyTorch, `torch.amp` under `torch.compile` in bfloat16. The peak is what
was allocated:
"""

PREDICTED = """\
### How well counting predicts times

What had been counted in code compiled for an H200, before any time was measured, and
then the measured time. The first two columns are bytes, the third is an estimated time.
"""

STEP = """\
## The memory traffic of a training step

The memory traffic of one step, relative to the step by hand.
"""

ATTENTION = """\
## What attention by cuDNN saves

Training steps under autocast with attention written out, and with
`jaxmp.dot_product_attention`, which is cuDNN's kernel in the compiled code.
"""

PRICE = """\
## What autocast costs

The memory traffic and the temporary memory of a training step, relative to the same
model cast by hand. *Less 6N* leaves out the bytes of float32 weight gradients, which
autocast returns on purpose. *Rounded* is autocast with
`DEFAULT_OPS.with_rounded_products()`. *Inside* is
`value_and_grad(autocast(loss, policy))`.
"""

ERROR = """\
## How far gradients are from float32

The norm of the error over the norm of the gradient, as the mean over seeds. It was
computed on a CPU, for small networks of the same families. A star marks a network for
which Flax's own 16 bits are nearer to float32 than autocast.
"""

PASSES = """\
### A dtype for each pass

The same of `mixed_float16`, `mixed_bfloat16` and `mixed_float16_bfloat16`, whose
backward pass alone is in bfloat16; of the loss, too.
"""

RESIDUALS = """\
## What storing residuals in 8 bits saves

The temporary memory and the memory traffic of a training step with `residuals="int8"`,
and, on small networks of the same families, the error of the gradients, which is that
of bfloat16 times this. Beside it `nn.remat` around each layer, and both, relative to
bfloat16.
"""

TRAINED = """\
The loss of small models with three seeds, over the last 50 updates:
"""

HOST = """\
## Outside compiled code

The ratios are medians over pairs of runs, of the CPU time of the thread. The quartiles
are in brackets.
"""


def main(arguments: list[str]) -> None:
    """Writes the page."""
    pages.write(arguments, "evidence", PAGE, page)


def page() -> str:
    """Returns the page as Markdown."""
    sections = [INTRODUCTION, *_times(), *_steps(), *_attention(), *_prices()]
    sections += [*_errors(), *_residuals(), *_host()]
    return "\n".join(sections)


def _times() -> Iterator[str]:
    found = _read("gpu")
    counted = found.pop("counted before")
    yield TIMES
    for title, result in found.items():
        rows = result["rows"]
        yield f"### {title}\n"
        if gained := gains(rows["steps"]):
            yield _table(list(gained[0]), [[*x.values()] for x in gained])
        header = ["", "step", "dtype", "ms", "relative to by hand"]
        header += ["times as fast as TF32"]
        header += ["temporary MiB", "trace s", "compile s"]
        yield _table(header, map(_timed, rows["steps"]))
        if "ceilings" in rows:
            yield CEILINGS
            table = [
                [x["ceiling"], f"{x['rate']:.0f} {x['unit']}"] for x in rows["ceilings"]
            ]
            yield _table(["", ""], table)
        if "torch" in rows:
            yield PYTORCH
            yield _table(
                ["attention", "ms", "peak MiB"],
                [
                    [
                        "fused" if x["fused"] else "written out",
                        f"{x['ms']['median']:.1f}",
                        f"{x['peak MiB']:.0f}",
                    ]
                    for x in rows["torch"]
                ],
            )
        yield _source([result])
    yield PREDICTED
    first, *_ = found.values()  # after which autocast has changed
    steps = {(x["network"], x["form"], x["dtype"]): x for x in first["rows"]["steps"]}
    header = ["", "autocast over by hand", "TF32 over autocast"]
    header.append('`residuals="int8"` over autocast')
    yield _table(header, [_predicted(x, steps) for x in counted["rows"]])
    yield _source([counted])


def _timed(row: Row) -> list[str]:
    ratios = (row["of by hand"], row["TF32 over it"])
    traced = row["trace and lower s"]
    return [
        NAMES[row["network"]],
        row["form"],
        {"float32": "TF32", "highest": "float32"}.get(row["form"]) or row["dtype"],
        f"{row['ms']['median']:.2f}",
        *("" if x is None else f"{x:.2f}" for x in ratios),
        f"{row['temporary MiB']:.0f}",
        "" if traced is None else f"{traced:.1f}",
        f"{row['compile s']:.0f}",
    ]


def _predicted(counted: Row, steps: Mapping[Any, Row]) -> list[str]:
    name, dtype = counted["network"], counted["dtype"]
    ours, small = steps[name, AUTOCAST, dtype], steps.get((name, INT8, dtype))
    estimate = counted.get("seconds of int8, of autocast")
    both = [
        (counted["bytes of autocast, of by hand"], ours["of by hand"]),
        (counted["bytes of TF32, of autocast"], ours["TF32 over it"]),
    ]
    if estimate and small:
        both.append((estimate, small["ms"]["median"] / ours["ms"]["median"]))
    cells = [f"{x:.2f}, measured {y:.2f}" for x, y in both]
    return [f"{NAMES[name]}, {dtype}", *cells, *[""] * (3 - len(cells))]


def _steps() -> Iterator[str]:
    found = _read("machinery")
    yield STEP
    for accum_steps in (1, 4):
        yield f"### {_count(accum_steps).capitalize()}\n"
        forms: dict[str, dict[str, float]] = {}
        for network in STEPS:
            for row in found[network]["rows"]:
                if row["accum_steps"] == accum_steps:
                    forms.setdefault(row["contestant"], {})[network] = row["bytes"]
        table = [
            [form, *(_ratio(moved.get(x), forms[FLOOR][x]) for x in STEPS)]
            for form, moved in forms.items()
        ]
        yield _table(["", *STEPS.values()], table)
    yield _source([found[network] for network in STEPS])


def _attention() -> Iterator[str]:
    found = _read("attention")
    yield ATTENTION
    for dtype, result in found.items():
        yield f"### {dtype}\n"
        forms: dict[str, dict[str, Row]] = {}
        for row in result["rows"]:
            forms.setdefault(row["network"], {})[row["form"]] = row
        table = []
        for name, both in forms.items():
            old, new = both["written"], both["fused"]
            amounts = [
                f"{row[key] / unit:.{digits}f}"
                for key, unit, digits in (("bytes", 1e9, 1), ("temp", 2**20, 0))
                for row in (old, new)
            ]
            shares = [_ratio(new[key], old[key]) for key in ("bytes", "temp")]
            table.append([name, *amounts[:2], shares[0], *amounts[2:], shares[1]])
        header = ["", "GB", "with cuDNN", "share", "temporary MiB", "with cuDNN"]
        yield _table([*header, "share"], table)
        yield _source([result])


def _prices() -> Iterator[str]:
    found = _read("price")
    yield PRICE
    for dtype in ("bfloat16", "float16"):
        for accum_steps in (1, 4):
            title = f"{dtype}, {accum_steps} micro-batches"
            if title not in found:  # not counted since autocast has changed
                continue
            result = found[title]
            yield f"### {dtype}, {_count(accum_steps)}\n"
            networks: dict[str, dict[str, Row]] = {}
            for row in result["rows"]:
                networks.setdefault(row["network"], {})[row["form"]] = row
            header = ["", "bytes", "less 6N", "memory"]
            header += [
                f"{x}: {y}" for x in ("rounded", "inside") for y in ("bytes", "memory")
            ]
            table = [[name, *_costs(forms)] for name, forms in networks.items()]
            yield _table(header, table)
            yield _source([result])


def _costs(forms: Mapping[str, Row]) -> Iterator[str]:
    floor = forms[FLOOR]
    for form in FORMS:
        row = forms.get(form, {})
        yield _ratio(row.get("bytes"), floor["bytes"])
        if form == AUTOCAST:
            yield _ratio(row["bytes"] - 6 * row["parameters"], floor["bytes"])
        yield _ratio(row.get("temp"), floor["temp"])


def _errors() -> Iterator[str]:
    found = _read("price")
    if any("errors" in title for title in found):
        yield ERROR
    for dtype in ("bfloat16", "float16"):
        if f"{dtype}, errors" not in found:
            continue
        result = found[f"{dtype}, errors"]
        yield f"### {dtype}\n"
        table = []
        for row in result["rows"]:
            values = [row[f"gradient, {form}"] for form in ERRORS]
            mark = " *" if values[1] > values[0] else ""
            table.append([row["network"] + mark, *(f"{x:.2%}" for x in values)])
        yield _table(["", *ERRORS.values()], table)
        yield _source([result])
    yield PASSES
    result = found[price.PASSES_TITLE]
    header = [f"{x}, {y}" for x in ("loss", "gradient") for y in price.PASSES]
    table = [
        [row["network"], *(f"{row[x]:.2e}" for x in header)] for row in result["rows"]
    ]
    yield _table(["", *header], table)
    yield _source([result])


def _residuals() -> Iterator[str]:
    found = _read("residuals")
    yield RESIDUALS
    table = []
    for name in (x for x in found if f"{x}, errors" in found):
        rows = {row["form"]: row for row in found[name]["rows"]}
        (away,) = found[f"{name}, errors"]["rows"]
        float32, bf16, ours = (rows[x] for x in ("float32", "bfloat16", "int8"))
        shares = [ours["temp"] / bf16["temp"], ours["temp"] / float32["temp"]]
        shares += [ours["bytes"] / bf16["bytes"], away["int8"] / away["bfloat16"]]
        again = [rows.get(x) for x in CHECKPOINTED]
        cells = [name, *(f"{x:.2f}" for x in shares)]
        for part in ("temp", "bytes"):
            cells += [_ratio(x and x[part], bf16[part]) for x in again]
        table.append((shares[0], cells))
    header = ["", "memory relative to bfloat16", "memory relative to float32"]
    header += ["traffic relative to bfloat16", "gradient error"]
    header += ["memory, `nn.remat`", "both", "traffic, `nn.remat`", "both"]
    yield _table(header, [row for _, row in sorted(table)])
    yield TRAINED
    trained = {x: y for x, y in found.items() if x.endswith(", trained")}
    forms = ["bfloat16", "int8", "fp8"]
    table = [
        [name.removesuffix(", trained"), *(y["rows"][0][x] for x in forms)]
        for name, y in trained.items()
    ]
    yield _table(["", *forms], table)
    yield _source([*trained.values()])


def _host() -> Iterator[str]:
    yield HOST
    for name, result in _read("host").items():
        yield f"### {name.capitalize()}\n"
        header = list(result["rows"][0])
        table = [[_cell(x) for x in row.values()] for row in result["rows"]]
        yield _table(header, table)
        yield _source([result])


def _read(name: str) -> dict[str, Any]:
    return json.loads((results.FOLDER / f"{name}.json").read_text())


def _count(accum_steps: int) -> str:
    return "one micro-batch" if accum_steps == 1 else "four micro-batches"


def _ratio(x: float | None, of: float) -> str:
    return "" if x is None else f"{x / of:.2f}"


def _cell(x: Any) -> str:
    if isinstance(x, Mapping):
        return f"{x['median']:.2f} ({x['low']:.2f} to {x['high']:.2f})"
    return f"{x:.4g}" if isinstance(x, float) else "" if x is None else str(x)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _source(found: Sequence[Row]) -> str:
    """Says which commands made a table, when, on what and with which versions."""
    commands = dict.fromkeys(x["command"] for x in found)
    dates = sorted({x["date"] for x in found})
    versions = found[0]["versions"]
    names = [f"{x} {versions[x]}" for x in ("jax", "flax", "optax") if x in versions]
    made = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = "\n".join(f"    {x}" for x in commands)
    return f"{lines}\n\n({found[0]['hardware']}; {', '.join(names)}; {made}.)\n"
