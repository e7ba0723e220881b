"""What each part of the engine is worth: the price of autocast without it.

A part is a pass over the program or a kind of storage. It stays if without it some
network costs 2% more bytes or 5% more memory, or if a program that a test names loses
digits. ``python -m benchmarks price --without all`` counts, and writes the table at the
end of ``docs/internals.md``.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax

from jaxmp._autocast import needs, storage
from jaxmp._autocast.calls import Calls
from jaxmp._autocast.passes import MARKERS, REWRITES
from jaxmp._jaxprs.jaxpr import bind

from ..networks.families import FAMILIES
from . import h200, hlo, results
from .steps import contestant
from .tables import show

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "internals.md"
RESULTS = results.FOLDER / "worth.json"
HEADING = "## What each part is worth\n"
BYTES, MEMORY = 1.02, 1.05  # what a network must cost without a part, if that stays
SHOWN = 4  # networks in a cell of the page

INTRODUCTION = """\
A pass or a kind of storage stays if it is worth it: without it some network costs 2%
more bytes or 5% more memory, or the program of a test loses digits. The third column
names the networks that cost so much more. It has the bytes of a training step and its
temporary memory, relative to those with all parts. The code was compiled for an H200
and not run. The networks are {networks}:

    {command}

"""

Row = dict[str, Any]


class Part(NamedTuple):
    """A part of the engine, and how to leave it out."""

    left_out: Callable[[], contextlib.AbstractContextManager[Any]]
    what_for: str
    test: str  # that fails without it


def _passes() -> Iterator[tuple[str, Part]]:
    for table in (REWRITES, MARKERS):
        for name, (_, what_for, test) in table.items():

            @contextlib.contextmanager
            def left_out(table=table, name=name):
                with mock.patch.dict(table):
                    del table[name]
                    yield

            yield name, Part(left_out, what_for, test)


def _put(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, value)


_kept = storage.kept


def _not_kept(out, eqn, dtype, *, need, **options):
    if not needs.is_summed_and_handed_on(need):
        return out
    return _kept(out, eqn, dtype, need=need, **options)


def _not_sent_back(out, eqn, dtype, *, need, **options):
    if needs.is_summed_and_handed_on(need):
        return out
    return _kept(out, eqn, dtype, need=need, **options)


PARTS = dict(_passes()) | {
    "kept": Part(
        _put(storage, "kept", _not_kept),
        "stores in 16 bits what a matmul and the backward pass read (rule 7)",
        "test_dropout_lets_a_softmax_be_kept",
    ),
    "sent back": Part(
        _put(storage, "kept", _not_sent_back),
        "rounds once a gradient that is both summed and handed on (rule 7)",
        "test_what_products_send_back_to_a_norm_is_rounded_once_and_copies_are_not",
    ),
    "stacked": Part(
        _put(needs, "is_stacked", lambda *_: False),
        "stacks in bfloat16 what a scan keeps for the backward pass (rule 7)",
        "test_what_a_scan_stacks_for_the_backward_pass_is_bfloat16",
    ),
    "sums": Part(
        _put(storage, "axes_of_softmax", lambda *_: ()),
        "divides a stored softmax by its sums where the backward pass reads it",
        "test_a_softmax_that_is_kept_sends_back_nothing_to_all_scores_alike",
    ),
    "firm": Part(
        _put(storage, "firmly_rounded", lambda x: x),
        "makes XLA store 16 bits, not float32 that each reader rounds",
        "test_a_sum_that_several_read_is_stored_as_it_was_rounded",
    ),
    "choice": Part(
        _put(storage, "as_choice", lambda *_: None),
        "turns the scatter in the gradient of a lookup in each row into a `where`",
        "test_the_gradient_of_a_lookup_of_labels_is_a_choice",
    ),
    "same": Part(
        _put(storage, "same", lambda *_: None),
        "compares rounded values, where XLA would compare unrounded ones",
        "test_what_was_chosen_is_found_where_it_was_chosen_from",
    ),
    "sent": Part(
        _put(storage, "sent", lambda eqn, array, _: bind(eqn, [array])[0]),
        "sends a weight to all devices in 16 bits",
        "test_a_weight_is_sent_in_16_bits",
    ),
    "weights": Part(
        _put(Calls, "rounded_before", lambda self, eqn, ins, *_: ins),
        "rounds weights once before a loop or a remat",
        "test_a_loop_is_given_rounded_weights",
    ),
}


def parts(names: Iterable[str]) -> dict[str, Part]:
    """Returns some of the parts, or those that ``all`` stands for.

    Raises:
        SystemExit: If there is no part of such a name.
    """
    names = tuple(names)
    wanted = tuple(PARTS) if "all" in names else names
    check("part", wanted, PARTS)
    return {name: PARTS[name] for name in wanted}


def check(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Ends the program with a sentence if one of the names is not known."""
    known = tuple(known)
    for name in names:
        if name not in known:
            listed = ", ".join(f"`{x}`" for x in known)
            raise SystemExit(f"there is no {what} `{name}`; there are {listed}")


def measure(options: Any, command: list[str]) -> None:
    """Counts, prints and saves, and writes the page from what is saved for it.

    Args:
        options: Those of `price`; ``without`` names the parts.
        command: The command line.
    """
    chosen = parts(options.without)
    path = options.output or results.target("worth")
    for dtype in options.dtypes:
        for steps in options.accum_steps:
            rows = [
                row
                for network in options.networks
                for form in options.forms or ("jaxmp autocast",)
                for row in _counted(network, form, dtype, steps, chosen)
            ]
            title = f"{dtype}, {steps} micro-batches"
            show(f"{title}: without a part, over all of them", table(rows))
            results.save(path, title, h200.HARDWARE, command, rows)
    if path == RESULTS:
        PAGE.write_text(page())


def _counted(
    network: str, form: str, dtype: str, steps: int, chosen: dict[str, Part]
) -> Iterator[Row]:
    """Yields the price of a network, with all parts and without each."""
    nothing = Part(contextlib.nullcontext, "", "")
    seen: dict[str, Row] = {}
    for name, part in {"": nothing, **chosen}.items():
        with part.left_out():
            found = contestant(form, FAMILIES[network], dtype=dtype, accum_steps=steps)
            state, shapes = jax.eval_shape(found.init), FAMILIES[network].shapes()
            lowered = h200.lowered(found.step, state, shapes, donated=1)
        text = lowered.as_text()
        if text not in seen:  # most parts change nothing in most networks
            compiled = lowered.compile(compiler_options=h200.OPTIONS)
            memory = compiled.memory_analysis().temp_size_in_bytes
            seen[text] = {"bytes": hlo.work(compiled.as_text()).bytes, "temp": memory}
        yield {"network": network, "form": form, "without": name} | seen[text]


def table(rows: list[Row]) -> list[dict[str, Any]]:
    """Returns bytes and memory without each part, as shares of those with all."""
    whole = {(x["network"], x["form"]): x for x in rows if not x["without"]}
    shown = []
    for row in rows:
        usual = whole[row["network"], row["form"]]
        if row["without"]:
            shown.append(
                {name: row[name] for name in ("without", "network", "form")}
                | {
                    "bytes": row["bytes"] / usual["bytes"],
                    "memory": row["temp"] / usual["temp"],
                }
            )
    return shown


def page() -> str:
    """Returns the page of the documentation, its table as the results have it.

    What stands above the heading of the table is written by hand.
    """
    text, _, _ = PAGE.read_text().partition(HEADING)
    (found,) = json.loads(RESULTS.read_text()).values()
    return "".join((text, HEADING, "\n", *_section(found)))


def _section(found: dict[str, Any]) -> Iterator[str]:
    shown = table(found["rows"])
    yield INTRODUCTION.format(
        networks=", ".join(dict.fromkeys(row["network"] for row in shown)),
        command=found["command"],
    )
    yield "| part | what it does | without it | test that fails without it |\n"
    yield "|---|---|---|---|\n"
    for name, part in PARTS.items():
        rows = [x for x in shown if x["without"] == name]
        dear = [x for x in rows if x["bytes"] >= BYTES or x["memory"] >= MEMORY]
        dear.sort(key=lambda x: -max(x["bytes"], x["memory"]))
        cells = [
            f"{x['network']} {x['bytes']:.2f} / {x['memory']:.2f}" for x in dear[:SHOWN]
        ]
        if len(dear) > SHOWN:
            cells.append(f"and {len(dear) - SHOWN} more")
        where = "; ".join(cells) or ("no more" if rows else "not counted")
        yield f"| {name} | {part.what_for} | {where} | `{part.test}` |\n"
