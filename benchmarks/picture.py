"""Draws the first picture of the documentation from the times of ``gpu``.

``docs/_static/gains.svg`` has the time and the memory of a training step of each
network in float32 and under autocast, and of PyTorch where it was timed. Each bar is
relative to the network's float32. Nothing in it is typed by hand.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import gpu
from .counting import results
from .counting.steps import AUTOCAST

PICTURE = pathlib.Path(__file__).parents[1] / "docs/_static/gains.svg"
H100 = "NVIDIA H100 80GB HBM3"
SECTIONS = H100, f"{H100}, the others"
FUSED = ", fused"  # in the names of networks with cuDNN's attention

# In the units of the picture: a phone shows it at two thirds of them.
WIDTH, LINE, BAR, LETTER = 520, 21, 14, 15
TIME, MEMORY, LONGEST = 134, 334, 88  # where the bars begin, and how long float32 is

STYLE = """\
text { font: 15px system-ui, sans-serif; fill: #1c2733 }
.head { font-weight: 600 }
.card { fill: #ffffff }
.float32 { fill: #a9b3bd }
.jaxmp { fill: #2f6fb0 }
.pytorch { fill: #d9843b }
@media (prefers-color-scheme: dark) {
  text { fill: #dfe5ec }
  .card { fill: #1a1d21 }
  .float32 { fill: #5f6a76 }
  .jaxmp { fill: #7db0e6 }
  .pytorch { fill: #e0995c }
}"""


class Bar(NamedTuple):
    """A training step."""

    name: str
    colour: str  # the class that has it
    ms: float
    speedup: float
    gib: float


def main() -> None:
    """Writes the picture."""
    PICTURE.write_text(picture(results.read("gpu", kept=True)))
    print(f"wrote {PICTURE}")


def picture(found: Mapping[str, Any]) -> str:
    """Returns the picture as SVG, of the results of ``gpu``."""
    shapes, y = [*_heads()], int(2.4 * LINE)
    for network, bars in groups(found).items():
        shapes.append(_text(LETTER, y, network, "head"))
        for bar in bars:
            y += LINE
            shapes += _bars(y, bar, bars[0])
        y += int(1.6 * LINE)
    height = y - LETTER
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<style>{STYLE}</style>",
            f'<rect class="card" width="{WIDTH}" height="{height}" rx="8"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def groups(found: Mapping[str, Any]) -> dict[str, list[Bar]]:
    """Returns the bars of each network, float32 first."""
    rows = [x for title in SECTIONS for x in found[title]["rows"]["steps"]]
    forms = results.by_form(x for x in rows if x["dtype"] == "bfloat16")
    torch = {x["fused"]: x for x in found[H100]["rows"]["torch"]}
    bars: dict[str, list[Bar]] = {}
    for name, steps in forms.items():
        network, fused, _ = name.partition(FUSED)
        group = bars.setdefault(gpu.NAMES[network], [])
        slow = steps["float32"]
        if not group:
            group.append(_bar("float32", "float32", slow, slow))
        group.append(_bar(f"jaxmp{fused}", "jaxmp", steps[AUTOCAST], slow))
        if network == "gpt-160m":  # the one that was timed in PyTorch too
            group.append(_bar(f"PyTorch{fused}", "pytorch", torch[bool(fused)], slow))
    return bars


def _bar(
    name: str, colour: str, row: Mapping[str, Any], slow: Mapping[str, Any]
) -> Bar:
    ms = row["ms"]["median"]
    # Rounds were timed in turns, and the median of their ratios has less noise.
    speedup = row.get("TF32 over it", slow["ms"]["median"] / ms)
    return Bar(name, colour, ms, speedup, row["peak MiB"] / 1024)


def _heads() -> Iterator[str]:
    yield _text(TIME, LINE, "time of a step", "head")
    yield _text(MEMORY, LINE, "memory", "head")


def _bars(y: int, bar: Bar, first: Bar) -> Iterator[str]:
    """Yields what stands in the line of a step."""
    yield _text(LETTER, y, bar.name)
    speedup = f", {bar.speedup:.2f}x" if bar != first else ""
    share = f", {bar.gib / first.gib:.0%}" if bar != first else ""
    for x, part, said in (
        (TIME, 1 / bar.speedup, f"{bar.ms:.1f} ms{speedup}"),
        (MEMORY, bar.gib / first.gib, f"{bar.gib:.1f} GiB{share}"),
    ):
        length = round(LONGEST * part, 1)
        yield (
            f'<rect class="{bar.colour}" x="{x}" y="{y - BAR + 2}" '
            f'width="{length}" height="{BAR}" rx="2"/>'
        )
        yield _text(round(x + length + 5), y, said)


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x}" y="{y}">{words}</text>'
