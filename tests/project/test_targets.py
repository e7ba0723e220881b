"""Code is compiled for the GPU that is named."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__, attention, every_gpu, fits, price
from benchmarks.counting import hlo, results, steps, targets
from benchmarks.networks.basic import TINY

UNAVAILABLE = targets.unavailable()
pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))


@pytest.mark.parametrize("gpu", targets.GPUS)
def test_a_device_says_which_gpu_it_is(gpu):
    (device,) = targets.devices(gpu)
    major, minor = targets.GPUS[gpu].capability
    assert device.compute_capability == f"{major}.{minor}"
    assert device.core_count == targets.GPUS[gpu].cores
    assert device.device_kind.startswith(targets.GPUS[gpu].name)
    assert device.platform == "gpu"


@pytest.mark.parametrize("gpu", targets.GPUS)
def test_products_in_bfloat16_need_a_gpu_that_has_them(gpu):
    if reason := targets.unavailable(gpu):
        pytest.skip(reason)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    text = targets.compiled(jnp.matmul, x, x, gpu=gpu).as_text()
    (kind,) = hlo.work(text).products
    has_them = targets.GPUS[gpu].capability >= (8, 0)
    assert kind.startswith("matmul bf16" if has_them else "matmul f32")


@pytest.mark.usefixtures("scratch")
def test_benchmarks_count_for_the_gpu_that_is_named(monkeypatch):
    monkeypatch.setattr(price, "FAMILIES", TINY)
    which = "--networks mlp --dtypes float16 --accum-steps 1 --seeds 1 --forms float32"
    for gpu in "h200", "t4":
        __main__.main(["price", *which.split(), steps.AUTOCAST, "--gpu", gpu])
    monkeypatch.setattr(attention, "NETWORKS", {"gpt": TINY["gpt"]})
    __main__.main(["attention", "--networks", "gpt", "--gpu", "a100"])
    found = results.read("price")
    # Errors are computed on this machine, and once.
    titles = [
        "float16, 1 micro-batches",
        "float16, errors",
        "float16, 1 micro-batches, t4",
    ]
    assert [*found] == titles
    here, there = (found[title] for title in titles[::2])
    assert "H200" in here["hardware"]
    assert "T4" in there["hardware"]
    # Rates are those of an H200.
    assert all("seconds" in row for row in here["rows"])
    assert not any("seconds" in row for row in there["rows"])
    (counted,) = results.read("attention").values()
    assert "A100" in counted["hardware"]


@pytest.mark.usefixtures("scratch")
def test_every_gpu_is_in_one_table(monkeypatch):
    monkeypatch.setattr(every_gpu, "NETWORKS", {"an MLP": TINY["mlp"]})
    __main__.main(["every_gpu", "--networks", "an MLP", "--gpus", "t4", "h200"])
    (table,) = every_gpu.tables(results.read("every_gpu"))
    (row,) = table.rows
    assert [*row] == ["", "T4, float16", "H200, bfloat16"]


@pytest.mark.usefixtures("scratch")
def test_the_largest_batch_that_is_named_fits(monkeypatch):
    network, sizes = TINY["mlp"]._replace(batch_size=2**17), (0.1, 0.2)
    monkeypatch.setattr(fits, "LARGE", {"an MLP": ("", network)})
    monkeypatch.setattr(fits, "SIZES", sizes)
    __main__.main(["fits", "--networks", "an MLP", "--forms", "float32", "autocast"])
    _, table = fits.tables(results.read("fits"))
    (row,) = table.rows
    assert row[""] == "an MLP"
    for form in "float32", "autocast":
        step, _ = fits.FORMS[form]
        for size, count in zip(sizes, map(int, row[form].split("/")), strict=True):
            count -= count % 64  # XLA pads other rows
            few, many = (
                fits.needed(step, network._replace(batch_size=n))[1]
                for n in (count, count * 9 // 8)
            )
            assert few <= size * 1e9 * 1.02 < many  # of one batch XLA fuses other code


def test_what_is_saved_is_of_one_jax(monkeypatch):
    monkeypatch.setattr(targets, "JAXLIB", "0.0.1")
    targets.require("price")
    monkeypatch.setattr(results, "is_saving", lambda: True)
    with pytest.raises(SystemExit, match=r"saves what jaxlib 0\.0\.1 compiles"):
        targets.require("price")


def test_a_gpu_that_is_not_there_is_a_sentence():
    with pytest.raises(SystemExit, match="there is no GPU `h20`; there are"):
        __main__.main(["every_gpu", "--gpus", "h20"])


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where a benchmark that a test runs leaves its results."""
    monkeypatch.setattr(results, "SCRATCH", tmp_path)
