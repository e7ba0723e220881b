"""The numbers in the README and on the performance page come from result files."""

import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import (
    attention,
    every_gpu,
    evidence,
    fits,
    gpu,
    picture,
    price,
    sharded,
)
from benchmarks.counting import steps
from benchmarks.counting.results import by_form
from benchmarks.networks.families import FAMILIES, Rematerialised

ROOT = Path(__file__).parents[2]
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs/performance.md"
INDEX = ROOT / "docs/index.md"
H100 = "NVIDIA H100 80GB HBM3"
FIRST = f"{H100}, {gpu.FIRST}"


def results(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def words(path):
    """Returns a page as one line."""
    return " ".join(path.read_text().split())


def prices(dtype="bfloat16", accum_steps=1):
    """Yields each network with its bytes less 6N and memory."""
    rows = results("price")[f"{dtype}, {accum_steps} micro-batches"]["rows"]
    floors = {x["network"]: x for x in rows if x["form"] == "by hand"}
    for row in rows:
        if row["form"] == "jaxmp autocast":
            floor = floors[row["network"]]
            moved = (row["bytes"] - 6 * row["parameters"]) / floor["bytes"]
            yield row["network"], moved, row["temp"] / floor["temp"]


def mean(numbers):
    numbers = [*numbers]
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def test_the_evidence_page_is_what_its_command_writes():
    cure = "Type `python -m benchmarks evidence`."
    assert (ROOT / "benchmarks/tables.md").read_text() == evidence.page(), cure


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evidence, "PAGE", tmp_path / "page.md")
    evidence.main()
    assert (tmp_path / "page.md").read_text() == evidence.page()
    assert "page.md" in capsys.readouterr().out


def timed(*sections):
    """Returns the rows that were timed on a GPU, by network, form and dtype."""
    found = results("gpu")
    sections = sections or (H100, f"{H100}, the others")
    rows = [x for title in sections for x in found[title]["rows"]["steps"]]
    return {(x["network"], x["form"], x["dtype"]): x for x in rows}


@pytest.mark.parametrize("page", [README, PERFORMANCE], ids=lambda x: x.stem)
def test_what_a_page_says_is_gained_was_timed(page):
    gained = gpu.gains([*timed().values()])
    assert len(gained) == 9
    table = [[*gained[0]], *([*row.values()] for row in gained)]
    for cells in table:
        assert f"| {' | '.join(cells)} |" in page.read_text()
    fused, written = sorted(
        x["ms"]["median"] for x in results("gpu")[H100]["rows"]["torch"]
    )
    beside = f"{written:.1f} ms for the same GPT with attention written out, and "
    assert f"{beside}{fused:.1f} ms with its fused attention" in words(page)
    highest = timed(FIRST)["gpt-160m", "highest", "bfloat16"]["ms"]["median"]
    assert f"{highest:.0f} ms" in words(page) or f"{highest:.1f} ms" in words(page)


def test_what_rounding_as_pytorch_does_gains_was_timed():
    forms = "float32", "jaxmp autocast, rounded", "by hand"
    first = timed(FIRST)
    rows = wide, rounded, _ = [first["gpt-160m", x, "bfloat16"] for x in forms]
    times = [x["ms"]["median"] for x in rows]
    ms = [f"{x:.1f} ms" for x in times]
    memory = f"{rounded['peak MiB'] / wide['peak MiB']:.0%}"
    gained = f"{ms[0]} | {ms[1]} | {times[0] / times[1]:.2f}x | {memory} | {ms[2]} |"
    assert f"| GPT, 163M parameters, as PyTorch rounds | {gained}" in README.read_text()


def test_what_the_first_page_says_is_gained_was_timed():
    rows = {x["network"]: x for x in gpu.gains([*timed().values()])}
    page = words(INDEX)
    for name, said in (
        ("GPT, 163M parameters", "a 163M-parameter GPT trains {}x faster in {} of the"),
        ("GPT, 163M parameters, cuDNN's attention", "({}x and {} with [fused"),
        ("ResNet-50", "a ResNet-50 {}x faster in {}."),
    ):
        speedup = float(rows[name]["speedup"].removesuffix("x"))
        assert said.format(f"{speedup:.1f}", rows[name]["memory"]) in page


def test_the_picture_is_what_its_command_draws_and_has_the_numbers_of_the_table():
    cure = "Type `python -m benchmarks picture`."
    shown = picture.PICTURE.read_text()
    assert shown == picture.picture(results("gpu")), cure
    for row in gpu.gains([*timed().values()]):
        for cell in f"{row['autocast']}, {row['speedup']}", f"GiB, {row['memory']}":
            assert f"{cell}<" in shown
    for row in results("gpu")[H100]["rows"]["torch"]:
        assert f">{row['ms']['median']:.1f} ms, " in shown
    width = int(re.search(r'viewBox="0 0 (\d+) ', shown)[1])
    for x, said in re.findall(r'<text[^>]* x="(\d+)"[^>]*>([^<]*)<', shown):
        assert int(x) + 8.5 * len(said) < width + 8  # letters of 15 pixels


def test_what_was_timed_is_said_of_other_libraries():
    page, rows, first = words(PERFORMANCE), timed(), timed(FIRST)

    def span(rows, *forms):
        found = [x["of by hand"] for key, x in rows.items() if key[1] in forms]
        return f"{100 * min(found) - 100:.0f} to {max(found) - 1:.0%}"

    others = span(first, "jmp", "flax DynamicScale", "mpx")
    assert f"jmp, Flax and mpx are {others} slower than pure bfloat16" in page
    cast = span(first, "jaxmp cast", "jaxmp modules")
    ours = span(rows, "jaxmp autocast")
    assert f"model of jaxmp is {cast} slower, autocast {ours}." in page
    assert f"That costs {ours} of a pure bfloat16 step's time" in words(README)
    paid = {
        name: row["of by hand"]
        for (name, form, dtype), row in rows.items()
        if form == "jaxmp autocast" and dtype == "bfloat16"
    }
    assert max(paid, key=paid.__getitem__) == "vit, fused"
    assert "ViT with cuDNN's attention pays most" in page
    resnet = rows["resnet-50", "jaxmp autocast", "bfloat16"]
    assert f"{resnet['host ms']:.1f} ms to dispatch a step of ResNet-50" in page
    highest = first["resnet-50", "highest", "bfloat16"]["ms"]["median"]
    assert f"{highest:.1f} ms for the ResNet-50" in page


def test_how_well_counting_predicts_is_said_as_it_was():
    page, rows = words(PERFORMANCE), timed(FIRST)
    found = {}
    for row in results("gpu")["counted before"]["rows"]:
        name, dtype = row["network"], row["dtype"]
        ours = rows[name, "jaxmp autocast", dtype]
        hand = row["bytes of autocast, of by hand"] - ours["of by hand"]
        tf32 = row["bytes of TF32, of autocast"] - ours["TF32 over it"]
        memory = row["temporary MiB of autocast"] / ours["temporary MiB"]
        seconds = ours["ms"]["median"] / row["ms of autocast"]
        counted = {"hand": hand, "TF32": tf32, "memory": memory, "seconds": seconds}
        if "seconds of int8, of autocast" in row:
            small = rows[name, "autocast int8", dtype]["ms"]["median"]
            estimate = row["seconds of int8, of autocast"]
            counted["int8"] = small / ours["ms"]["median"] - estimate
        for kind, x in counted.items():
            found.setdefault(kind, []).append(x)
    assert 0.03 < max(map(abs, found["hand"])) < 0.04
    assert "predicted the ratio of the times within 0.04" in page
    more, less = max(found["TF32"]), -min(found["TF32"])
    assert f"too much by up to {more:.2f} and too little by up to {less:.2f}" in page
    assert f"is up to {max(found['int8']):.2f} too short" in page
    low, high = min(found["memory"]), max(found["memory"])
    assert f"{low:.2f} to {high:.2f} times that of the GPU's own" in page
    low, high = min(found["seconds"]), max(found["seconds"])
    assert f"takes {low:.1f} to {high:.1f} times as long" in page


def test_what_the_page_says_is_gained_was_counted():
    (table,) = every_gpu.tables(results("every_gpu"))
    assert len(table.rows) == 6
    assert len(table.rows[0]) == 1 + 5
    assert table._replace(heading="").markdown() in PERFORMANCE.read_text()


def test_the_price_on_the_performance_page_was_counted():
    networks, moved, memory = zip(*prices(), strict=True)
    page = words(PERFORMANCE)
    assert (
        f"{mean(moved) - 1:.0%} more memory traffic and {mean(memory) - 1:.0%} more"
        f" memory (geometric mean of {len(networks)} networks in bfloat16" in page
    )
    casting = words(ROOT / "docs/policies.md")
    said = f"[{mean(moved) - 1:.0%} more memory traffic than a cast model, the mean "
    assert f"{said}over {len(networks)} networks]" in casting
    assert sum(round(x, 2) <= 1.05 for x in moved) == 13
    assert "Thirteen of these networks need at most 5% more traffic" in page
    dearest = sorted(zip(moved, networks, strict=True), reverse=True)[:2]
    names = [name for _, name in dearest]
    assert names == ["deep set with a maximum", "highway network"]
    _, moved, memory = zip(*prices(accum_steps=4), strict=True)
    costs = f"{mean(moved) - 1:.0%} more traffic and {1 - mean(memory):.0%} less memory"
    assert f"With four micro-batches autocast needs {costs}" in page
    networks, moved, memory = zip(*prices("float16"), strict=True)
    assert len(networks) == 8
    assert "the eight networks that were counted" in page
    assert f"need at most {max(moved) - 1:.0%} more traffic" in page
    lstm = memory[networks.index("lstm")]
    assert f"An LSTM needs {lstm - 1:.0%} more memory" in page


def test_what_the_check_and_a_scan_over_layers_cost_was_counted():
    said = []
    for name in "gpt-160m, fused", "resnet-50":
        rows = results("machinery")[f"{name}, bfloat16"]["rows"]
        by = {x["contestant"]: x for x in rows}
        ours, less = by[steps.AUTOCAST], by[steps.UNCHECKED]
        moved, read = ours["bytes"] / 1e9, (ours["bytes"] - less["bytes"]) / 1e9
        kernels = ours["kernels"] - less["kernels"]
        said.append(f"{read:.2f} of {moved:.2f} GB and {kernels} of {ours['kernels']}")
    gpt, resnet = said
    page = words(PERFORMANCE)
    rows = results("machinery")["llama-1.6b, fused, bfloat16"]["rows"]
    hand, ours, rounded = (
        next(x for x in rows if x["contestant"] == form)
        for form in (steps.FLOOR, steps.AUTOCAST, price.ROUNDED)
    )
    more, less = (x["bytes"] / hand["bytes"] - 1 for x in (ours, rounded))
    said = f"moves {more:.0%} more than by hand; with `with_rounded_matmuls()`, "
    said += f"{less:.0%} more, in {rounded['temp'] / ours['temp']:.0%} of the"
    assert f"{said} temporary memory of autocast" in page
    assert f"{gpt} kernels in the GPT with cuDNN's attention" in page
    assert f"{resnet} kernels in ResNet-50. `autocast` alone checks nothing" in page


def test_the_networks_that_pay_more_cost_what_was_counted():
    row = re.compile(r"^\| ([\w, ]+) \| ([\d.]+) / ([\d.]+) \|", re.MULTILINE)
    table = row.findall(PERFORMANCE.read_text())
    assert len(table) >= 8
    counted = {name.lower(): both for name, *both in prices()}
    for name, *both in table:
        assert both == [f"{x:.2f}" for x in counted[name.lower()]], name


def test_the_errors_on_the_performance_page_were_measured():
    rows = results("price")["bfloat16, errors"]["rows"]
    ratios = {
        row["network"]: row["gradient, autocast"] / row["gradient, dtype="]
        for row in rows
    }
    further = {name: x for name, x in ratios.items() if x > 1}
    nearer = len(ratios) - len(further)
    assert f"in {nearer} of {len(ratios)}." in words(PERFORMANCE)
    readme = words(README)
    assert f"gradients of {nearer} of {len(ratios)} networks are nearer" in readme
    assert f"with {mean(ratios.values()):.2f} times the error" in readme
    for name, ratio in further.items():
        assert f"In a {name} they are {ratio:.2f} times as far" in words(PERFORMANCE)


def test_the_tracing_on_the_performance_page_was_measured():
    rows = results("host")["tracing"]["rows"]
    rows = [x for x in rows if x["step"] == "jaxmp autocast"]
    ratios = [x["both, of float32"]["median"] for x in rows]
    assert len(rows) == 6
    span = f"{min(ratios):.1f} to {max(ratios):.1f} times as long as in float32"
    assert f"{span} in six networks" in words(PERFORMANCE)


def test_the_memory_on_the_page_of_residuals_was_counted():
    found, page = results("residuals"), words(ROOT / "docs/residuals.md")
    networks = by_form(found["counted"]["rows"])
    names, rows = [*networks], [*networks.values()]
    plain, int8, checkpoint = steps.AUTOCAST, steps.INT8, steps.CHECKPOINT
    errors = found["errors"]["rows"]

    def span(numbers):
        return f"{min(numbers):.2f} to {max(numbers):.2f}"

    def shares(numbers):
        return f"{100 * min(numbers):.0f} to {max(numbers):.0%}"

    memory, moved = (
        [row[int8][part] / row[plain][part] for row in rows]
        for part in ("temp", "bytes")
    )
    away = [row[int8] / row[plain] for row in errors]
    assert f"In {len(names)} networks" in page
    assert f"takes {shares(memory)} of the temporary memory" in page
    assert f"half of them at most {np.median(memory):.0%}." in page
    assert f"memory traffic is {span(moved)} times that" in page
    assert f"half of them at most {np.median(moved):.2f} times" in page
    assert f"{span(away)} times that of bfloat16" in page
    again = {
        name: row
        for name, row in zip(names, rows, strict=True)
        if not isinstance(FAMILIES[name].model, Rematerialised)
    }
    memory, moved = (
        [row[checkpoint][part] / row[plain][part] for row in again.values()]
        for part in ("temp", "bytes")
    )
    assert f"the {len(again)} that recompute none by themselves" in page
    assert f"take {shares(memory)} of the memory. Their" in page
    assert f"traffic is {span(moved)} times that of bfloat16. `" in page
    less = sum(row[int8]["temp"] < row[checkpoint]["temp"] for row in again.values())
    assert f'`"int8"` takes less memory in {less}, mostly' in page
    trained = found["trained"]["rows"]
    assert len(trained) == 3
    for row in trained:
        (usual, deviation), (ours, _) = (
            map(float, row[x].split(" ± ")) for x in ("bfloat16", "int8")
        )
        assert abs(ours - usual) < deviation


def of_memory():
    """Returns the rows of what saves memory, by network and form."""
    rows = results("gpu")[f"{H100}, memory"]["rows"]["steps"]
    return {(x["network"], x["form"]): x for x in rows}


def test_what_to_take_instead_of_residuals_in_eight_bits_was_timed():
    page, rows = words(ROOT / "docs/residuals.md"), of_memory()

    def shares(network, form):
        one, plain = rows[network, form], rows[network, "jaxmp autocast"]
        memory = one["temporary MiB"] / plain["temporary MiB"]
        longer = one["ms"]["median"] / plain["ms"]["median"] - 1
        return f"{memory:.0%} and {longer:+.0%}"

    names = (steps.CHECKPOINT, steps.INT8, steps.BOTH)
    again, ours, both = (shares("gpt-160m, fused", x) for x in names)
    assert f'each layer first | {again}; `"int8"` {ours} |' in page
    assert f'`"int8"` on top of it | {both} |' in page
    again, ours, both = (shares("resnet-50", x) for x in names)
    assert f'convolutions | `"int8"` | {ours}; `nn.remat` {again} |' in page
    assert f"worth nothing ({both})" in page
    again, ours, both = (shares("vit, fused", x) for x in names)
    assert f'`nn.remat` takes {again}, `"int8"` {ours}, and both {both}.' in page


def test_what_a_backward_pass_in_bfloat16_costs_was_timed():
    rows = results("gpu")[f"{H100}, a backward pass in bfloat16"]["rows"]["steps"]
    by = {(x["network"], x["form"], x["dtype"]): x for x in rows}
    pairs = [
        (x, by[network, steps.AUTOCAST, "float16"])
        for (network, form, _), x in by.items()
        if form == steps.BACKWARD
    ]
    assert len(pairs) == 4
    times = [x["ms"]["median"] / y["ms"]["median"] for x, y in pairs]
    memory = [x["peak MiB"] / y["peak MiB"] for x, y in pairs]
    page = words(ROOT / "docs/loss_scaling.md")
    assert f"takes {100 * min(times) - 100:.0f} to {max(times) - 1:.0%} longer" in page
    assert f"in {100 * min(memory):.0f} to {max(memory):.0%} of the memory" in page


def test_how_far_a_backward_pass_in_bfloat16_is_from_float32_was_computed():
    rows = results("price")[price.PASSES_TITLE]["rows"]
    half, narrow, both = price.PASSES
    assert all(x[f"loss, {both}"] == x[f"loss, {half}"] for x in rows)
    away = [x[f"gradient, {both}"] / x[f"gradient, {narrow}"] for x in rows]
    page = words(ROOT / "docs/loss_scaling.md")
    said = f"from float32) is {min(away):.2f} to {max(away):.2f} times that of bfloat16"
    assert f"networks of {len(rows)} families, the loss is that of float16" in page
    assert said in page


def test_what_attention_by_cudnn_saves_was_timed():
    said = []
    for name in ("gpt-160m", "llama", "vit"):
        written, fused = (
            timed()[x, steps.AUTOCAST, "bfloat16"]["ms"]["median"]
            for x in (name, f"{name}, fused")
        )
        said.append(f"{written / fused:.2f}x")
    gpt, llama, vit = said
    expected = f"is {gpt} faster with cuDNN's attention, Llama {llama}, and ViT {vit}:"
    assert expected in words(PERFORMANCE)


def test_what_attention_and_the_loss_head_save_was_counted():
    found = results("attention")
    _, table = attention.tables(found)
    assert len(table.rows) == 6
    assert table._replace(heading="").markdown() in PERFORMANCE.read_text()
    result = found["bfloat16"]
    networks = by_form(result["rows"])
    for name in "llama", "llama, grouped queries":
        three, one = (networks[name][x]["bytes"] for x in (steps.HEAD, attention.JOINT))
        assert f"moves {1 - one / three:.0%} less" in words(ROOT / "docs/attention.md")
    gpt = networks["gpt-160m"]
    moved, memory = (
        gpt[steps.HEAD][key] / gpt["fused"][key] for key in ("bytes", "temp")
    )
    page = words(ROOT / "docs/loss_head.md")
    assert f"needs {memory:.2f} of the temporary memory and moves {moved:.2f}" in page
    assert f"compiled for an H200, jax {result['versions']['jax']})" in page


def test_what_moments_in_eight_bits_cost_was_timed():
    rows, page = of_memory(), words(ROOT / "docs/narrow_params.md")
    ours, other = (rows["gpt-160m, fused", f"{x} state"] for x in ("int8", "bfloat16"))
    assert f"takes {ours['ms']['median']:.1f} ms, and with bfloat16" in page
    assert f"state {other['ms']['median']:.1f} ms" in page
    assert f"{ours['compile s']:.0f} s and {other['compile s']:.0f} s" in page


def test_what_float8_takes_was_timed():
    rows = results("fp8")[f"{H100}, width 1024"]["rows"]
    bf16, fp8 = (row["ms"]["median"] for row in rows)
    said = f"width 1024 takes {fp8:.1f} ms in float8 and {bf16:.1f} ms in bfloat16"
    assert said in words(ROOT / "docs/formats_narrow.md")


def test_what_float8_moves_was_counted():
    page = (ROOT / "docs/formats_narrow.md").read_text()
    for width in 1024, 2048, 4096:
        found = results("fp8")[f"width {width}"]
        for row in found["rows"]:
            mib, ms = f"{row['temp'] / 2**20:.0f}", f"{1e3 * row['seconds']:.1f}"
            cells = f"{row['bytes'] / 1e9:.1f} | {row['kernels']} | {mib} | {ms}"
            first = row["policy"] == "mixed_bfloat16"
            start = f"| {width} |" if first else "| |"
            assert f"{start} `{row['policy']}` | {cells} |" in page
        *_, fp8 = found["rows"]
        said = f"All {fp8['float8']} matmuls with weights are float8, and none of the"
        assert f"{said} {fp8['others']} in attention" in " ".join(page.split())
        assert f"(JAX {found['versions']['jax']}," in " ".join(page.split())


def test_what_the_reports_name_of_planted_faults_was_counted():
    *planted, nothing = results("faults")["planted faults"]["rows"]
    programs, named, fixed = (
        sum(x[key] for x in planted) for key in ("programs", "named", "fixed")
    )
    page = words(PERFORMANCE)
    assert len(planted) == 8  # kinds
    assert f"in a known line of {programs} small random programs" in page
    assert f"the line of all {named}, and {fixed} agree with float32" in page
    faults = words(ROOT / "docs/faults.md")
    assert f"named all of {named} planted faults" in faults
    assert nothing["named"] == nothing["programs"]
    assert f"In {nothing['programs']} programs without a fault it names nothing" in page


def test_what_sharded_forms_hold_and_send_was_counted():
    page, found = (ROOT / "docs/sharding.md").read_text(), results("sharded")
    table = page.split("| Peak GiB, sent GB |")[1].split("\n\n")[0].splitlines()[2:]
    said = [[x.strip() for x in row.split("|")[2:-1]] for row in table]
    rows = {
        (x["form"], n, x["micro-batches"]): f"{x['peak GiB']}, {x['GB sent']}"
        for n in (8, 64, 256)
        for x in found[f"{n} devices, 6.74 billion parameters, by form"]["rows"]
    }
    columns = (8, 1), (8, 4), (64, 1), (256, 1)
    forms = dict.fromkeys(form for form, *_ in rows)
    assert said == [[rows[form, *x] for x in columns] for form in forms]


def test_what_gathering_by_layer_sends_was_counted_beside_fsdp2():
    page, size = words(ROOT / "docs/sharding.md"), "1.56 billion"
    rows = results("sharded")[f"8 devices, {size} parameters, by form"]["rows"]
    (row,) = (x for x in rows if x["form"] == "ZeRO-3")
    counts = dict(x.rsplit(" ", 1) for x in row["collectives"].split(", "))
    gathers, sums = counts["all-gather"], counts["reduce-scatter"]
    assert f"peaks at {row['peak GiB']} GiB with `gather=False`, and sends" in page
    collectives = f"{gathers} gathers and {sums} reduce-scatters."
    assert f"sends {row['GB sent']} GB in {collectives}" in page
    parameters = jax.tree.leaves(sharded.shapes(sharded.MODELS[size]))
    n = sum(x.size for x in parameters)
    assert f"{n / 1e9:.2f} billion" == size
    # Of n parameters it gathers 16 bits twice, and scatters sums of 32 bits.
    assert f"sends {(2 * 2 + 4) * n * 7 / 8 / 1e9:.1f} GB if it sums" in page


def test_the_largest_batch_lies_on_the_line_between_two_that_were_counted():
    row = {"one": 25e9, "batches": [5, 9], "all": 13e9, "each": 4e9}
    sizes = {24: 0, 25: 1, 28: 2, 33: 5, 36: 5, 37: 6, 49: 9}
    assert {size: fits.largest(row, size) for size in sizes} == sizes


def test_the_largest_batch_on_the_pages_was_counted():
    _, table, micro = fits.tables(results("fits"))
    assert len(table.rows) == 9  # networks
    assert table.markdown() in PERFORMANCE.read_text()
    cells = [x.split("/") for x in [*table.rows[0].values()][1:]]
    at_16_gb = dict(zip(fits.FORMS, (x[1] for x in cells), strict=True))
    wide, ours, fused, head = (at_16_gb[x] for x in [*fits.FORMS][:4])
    assert f"{wide} sequences in float32" in words(README)
    assert f"{ours} under autocast" in words(README)
    assert f"{fused} with cuDNN's attention and {head} without logits" in words(README)
    (gb,) = micro.rows
    said = f"takes {gb['float32']} in float32 and {gb['autocast']} under autocast"
    assert said in words(PERFORMANCE)
    llama = by_form(results("fits")["bfloat16"]["rows"])["Llama, 1.6B parameters"]
    gb = {
        form: f"{(row['all'] + row['batches'][0] * row['each']) / 1e9:.1f}"
        for form, row in llama.items()
    }
    assert {row["batches"][0] for row in llama.values()} == {8}
    said = f"{gb['float32']} GB in float32, {gb['autocast']} under autocast, "
    said += f"{gb[fits.FUSED]} with cuDNN's attention, {gb[fits.NO_LOGITS]} without"
    assert f"{said} logits and {gb[fits.INT8]} with int8 moments" in words(PERFORMANCE)
