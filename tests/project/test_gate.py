"""jaxmp's machinery, compiled for an H200, costs what skipping costs."""

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from benchmarks import __main__, attention, fp8, gate, machinery, memory, price
from benchmarks.counting import hlo, results, targets
from benchmarks.counting.steps import contestants
from benchmarks.networks.basic import TINY
from conftest import rest_is_evidence
from jaxmp._optimizers import narrow_params as _narrow_params
from jaxmp._training import loss_scale as _loss_scale

UNAVAILABLE = targets.unavailable()
pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))


# Autocast, in the network that compiles fast. CI's leg of the gate
# compiles all.
USUAL = [("mlp", "jaxmp autocast", 1)]


@pytest.mark.parametrize(
    ("network", "contestant_name", "accum_steps"),
    rest_is_evidence({str(step): step for step in gate.STEPS}, *map(str, USUAL)),
)
def test_a_step_costs_what_skipping_costs(network, contestant_name, accum_steps):
    found = gate.measured(network, contestant_name, accum_steps)
    for check in gate.checks(contestant_name, found):
        assert check.holds, check


def test_a_cond_in_the_skip_does_not_pass(monkeypatch, capsys):
    def select_state(finite, new, old):
        return jax.lax.cond(finite, lambda: new, lambda: old)

    monkeypatch.setattr(_loss_scale, "_select_state", select_state)
    monkeypatch.setattr(gate, "STEPS", [("mlp", "jaxmp cast", 1)])
    monkeypatch.setattr(memory, "VARIANTS", {})
    monkeypatch.setattr(fp8, "FORMS", {})
    monkeypatch.setattr(gate, "attention_checks", lambda: ())
    checks = list(gate.gate())
    failed = {check.what for check in checks if not check.holds}
    # On JAX 0.12 it takes more memory, too.
    failed -= {"temporary memory"}
    assert failed == {"more bytes, in N", "more copies of a parameter"}
    monkeypatch.setattr(gate, "gate", lambda: checks)
    with pytest.raises(SystemExit, match="True"):
        gate.main()
    assert capsys.readouterr().out.count("too much") == sum(not c.holds for c in checks)


def test_a_product_in_float32_does_not_pass():
    found = gate.measured("mlp", "float32", 1)
    checks = gate.checks("mlp", found)
    assert "products of float32 operands" in {c.what for c in checks if not c.holds}


# Of a small decoder, tests/attention/test_kernel.py says it.
@pytest.mark.evidence
def test_attention_is_cudnns(monkeypatch):
    rows = list(attention.compared({"gpt": gate.NETWORKS["gpt"]}, "bfloat16"))
    monkeypatch.setattr(attention, "compared", lambda *args: rows)
    for check in gate.attention_checks():
        assert check.holds, check
    written, fused, _ = rows
    rows[:] = written, written | {"form": fused["form"]}
    assert not any(check.holds for check in gate.attention_checks())


@pytest.mark.parametrize(
    "name",
    rest_is_evidence(
        {name: name for name in memory.VARIANTS},
        "stochastic, bfloat16 state",
        "stochastic, int8 state",
    ),
)
def test_an_update_without_masters_moves_what_it_reads_and_writes(name):
    # Else there would be random numbers in memory, or float32 copies.
    for check in gate.narrow_checks(name):
        assert check.holds, check


def test_a_compensation_by_casts_does_not_pass(monkeypatch):
    # On a CPU it does what it should.
    def split(x, dtype):
        stored = x.astype(dtype).astype(jnp.float32)
        return stored, ((x - stored) * 2.0**20).astype(jnp.int16)

    monkeypatch.setattr(_narrow_params, "split", split)
    failed = {c.what for c in gate.narrow_checks("Kahan, float16") if not c.holds}
    assert failed == {"roundings left out"}


def test_products_of_layers_in_a_loop_are_float8():
    # Decoders, in all their forms, are evidence.
    def fun(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) @ w, None))
        return jax.lax.scan(layer, x, weights)[0].sum()

    ops = jaxmp.DEFAULT_OPS.with_fp8(min_size=256)
    cast = jaxmp.autocast(jax.grad(fun), "mixed_fp8", ops=ops)
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    weights = jax.ShapeDtypeStruct((3, 256, 256), jnp.float32)
    work = hlo.work(targets.compiled(cast, weights, x).as_text())
    assert all(map(fp8.is_float8, work.products)), work.products
    assert work.products.total() == 3 * (2 + 1 + 4)  # forward, once more, backward


@pytest.mark.evidence
@pytest.mark.parametrize("form", fp8.FORMS)
def test_a_gradient_in_float8_moves_little_more(form):
    for check in gate.fp8_checks(form):
        assert check.holds, check


@pytest.mark.evidence
@pytest.mark.parametrize(("form", "limit"), [("plain", 1.12), ("scan, remat", 1.14)])
def test_a_wide_gradient_in_float8_pays(form, limit):
    decoder, form = fp8.Decoder(2048), fp8.FORMS[form]
    bf16, found = (fp8.count(decoder, form, policy) for policy in fp8.POLICIES)
    assert (found["float8"], found["others"]) == decoder.products(form)
    assert found["bytes"] < limit * bf16["bytes"]
    assert found["seconds"] < 0.9 * bf16["seconds"]


def test_what_is_not_donated_is_not_aliased():
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    for donated in (0, 1):
        found = targets.compiled(lambda x: x + 1, x, donated=donated)
        assert found.memory_analysis().alias_size_in_bytes == donated * 4 * x.size


def test_checking_a_deep_model_takes_tens_of_kernels():
    layer = {"kernel": (512, 512), "scale": (512,), "bias": (512,)}
    shapes = {f"layer_{i}": layer for i in range(24)}
    grads = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float16),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    size = sum(x.size for x in jax.tree.leaves(grads))
    work = hlo.work(targets.compiled(jaxmp.all_finite, grads).as_text())
    assert work.kernels < 10  # of 72 leaves
    assert work.bytes < 2.01 * size


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where a benchmark that a test runs leaves its results."""
    monkeypatch.setattr(results, "SCRATCH", tmp_path)


@pytest.mark.usefixtures("scratch")
def test_the_same_program_gives_the_same_numbers_and_a_table(monkeypatch, capsys):
    monkeypatch.setattr(machinery, "TIMED", TINY)
    options = ["--networks", "mlp", "--accum-steps", "1", "--contestants", "by hand"]
    found = []
    for more in (["jmp"], []):
        __main__.main(["machinery", *options, *more])
        found.append(results.read("machinery")["mlp"])
    a, b = found
    assert a["rows"] == b["rows"]
    assert [row["contestant"] for row in a["rows"]] == ["by hand", "jmp"]
    assert a["versions"]["jax"] == jax.__version__
    assert "H200" in a["hardware"]
    assert a["command"].startswith("python -m benchmarks machinery --networks mlp")
    assert "One micro-batch" in capsys.readouterr().out


def test_a_contestant_that_cannot_take_part_is_named():
    lines = []
    found = contestants(TINY["mlp"], ["mpx"], accum_steps=2, report=lines.append)
    assert list(found) == []
    assert len(lines) == 1
    assert lines[0].startswith("mpx is left out: ")


@pytest.mark.parametrize("option", ["networks", "forms"])
def test_what_there_is_not_is_a_sentence(option):
    with pytest.raises(SystemExit, match=r"there is no .* `nothing`; there are"):
        __main__.main(["price", f"--{option}", "nothing"])


@pytest.mark.usefixtures("scratch")
def test_the_price_of_autocast_is_counted_beside_its_errors(monkeypatch):
    monkeypatch.setattr(price, "FAMILIES", TINY)
    monkeypatch.setattr(price, "SMALL", TINY)
    which = "--networks mlp --dtypes bfloat16 --accum-steps 1 --seeds 1 --forms"
    forms = ["by hand", "jaxmp autocast, rounded"]
    __main__.main(["price", *which.split(), *forms])
    found = {name: x["rows"] for name, x in results.read("price").items()}
    counted, errors = found["bfloat16, 1 micro-batches"], found["bfloat16, errors"]
    assert [row["form"] for row in counted] == forms
    for row in counted:
        assert row["seconds"] > 0.999 * row["bytes"] / 4.8e12
    (row,) = errors
    assert row.pop("network") == "mlp"
    # A network this small has few units, and one that changes its side is far away: in
    # Flax's own 16 bits as under autocast.
    for form in ("autocast", "rounded", "inside"):
        assert 0 < row[f"loss, {form}"] <= row["loss, dtype="] < 1e-3
        assert 0 < row[f"gradient, {form}"] < 1.01 * row["gradient, dtype="]
