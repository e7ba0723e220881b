"""The examples teach what they say, and a killed run goes on as if it had not been."""

import gc
import io
import pickle
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import jaxmp

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import _data  # noqa: E402
import _results  # noqa: E402
import digits  # noqa: E402
import digits_nnx  # noqa: E402

FULL_RESNET, FULL_LOSS_SCALING = digits.ResNet, jaxmp.loss_scaling


pytestmark = pytest.mark.usefixtures("keys_that_compile_fast")


@pytest.fixture
def small(monkeypatch):
    """A net that compiles fast, under a scale that overflows, shrinks and grows."""
    shrink(monkeypatch.setattr)


def shrink(setattr):
    setattr(digits, "ResNet", partial(FULL_RESNET, widths=(8,)))
    setattr(jaxmp, "loss_scaling", restless_loss_scaling)


def restless_loss_scaling(inner, policy, **options):
    options |= {"init_scale": 2.0**22, "growth_interval": 2}
    return FULL_LOSS_SCALING(inner, policy, **options)


def run(**config):
    """Returns the only result of a run, and what an 80-column terminal showed."""
    console = terminal(force_terminal=True)
    results = digits.main(digits.Config(**config), console)
    return results[0], console.export_text()


def terminal(**options):
    return Console(record=True, width=80, file=io.StringIO(), **options)


def everything(state):
    return state.step, state.params, state.batch_stats, state.opt_state


def compare(**config):
    """Compares the three precisions; returns the results and what was printed."""
    compiled = digits.train_step._cache_size()
    console = terminal()
    results = digits.main(digits.Config(compare=True, **config), console)
    full, bfloat16, float16 = results
    assert digits.train_step._cache_size() == compiled + 3
    for result in results:
        assert result.stored_bytes == result.compute_bytes * (2 - (result is full))
        chex.assert_trees_all_equal_shapes_and_dtypes(
            result.state.opt_state, full.state.opt_state
        )
        leaves = jax.tree.leaves((result.state.params, result.state.batch_stats))
        assert {x.dtype for x in leaves} == {np.dtype("float32")}
    assert bfloat16.residual_bytes == float16.residual_bytes < full.residual_bytes
    printed = console.export_text()
    for words in (*digits.COMPARED, "Residuals of a batch", f"{float16.accuracy:.1%}"):
        assert words in printed
    assert "…" not in printed
    return results


# The runs below are those of `cast`.
@pytest.mark.evidence
@pytest.mark.parametrize("mode", ["cast", "autocast"])
def test_three_strings_give_three_precisions_of_one_program(small, mode, tmp_path):
    results = compare(mode=mode, epochs=1, batch_size=500, log_dir=tmp_path)
    for result in results:
        logged = read_by_tensorboard(tmp_path / result.policy)
        steps = [*range(1, int(result.state.step) + 1)]
        assert all([step for step, _ in x] == steps for x in logged.values())
        state = jaxmp.get_loss_scale_state(result.state.opt_state)
        assert logged["mixed_precision/loss_scale"][-1][1] == state.loss_scale
        skipped = [int(x) for _, x in logged["mixed_precision/skipped"]]
        assert skipped[-1] == state.skipped
        shares = [x for _, x in logged["mixed_precision/skipped_share"]]
        np.testing.assert_allclose(shares, np.array(skipped) / steps, rtol=1e-6)
        assert 0 < logged["accuracy"][-1][1] < 1
        assert logged["loss"][0][1] > 1


def read_by_tensorboard(folder):
    """Returns step and value of each scalar, as TensorBoard reads them."""
    # Which takes longer to import than JAX.
    from tensorboard.backend.event_processing import event_accumulator

    reader = event_accumulator.EventAccumulator(str(folder))
    reader.Reload()
    names = reader.Tags()["scalars"]
    return {name: [(x.step, x.value) for x in reader.Scalars(name)] for name in names}


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("mode", ["cast", "autocast"])
def test_three_precisions_learn_the_same(mode):
    for result in compare(mode=mode, epochs=4):
        assert result.accuracy > 0.93


def test_digits_keeps_everything_on_a_skipped_step(small):
    data = _data.load_digits()
    state = digits.create_state(digits.Config(), data, 10)
    before = jax.tree.map(np.array, everything(state))
    images, labels = data.train_batch(0, 0, 20)
    images[0, 0, 0, 0] = np.inf
    state, metrics = digits.train_step(state, images, labels, 1)
    assert metrics["mixed_precision/skipped"] == 1
    _, *kept = everything(state)
    inner = kept[-1].inner_state, before[-1].inner_state
    chex.assert_trees_all_equal(kept[:2], list(before[1:3]))
    chex.assert_trees_all_equal(*inner)


def test_accumulation_keeps_the_statistics_of_the_last_micro_batch(small):
    data = _data.load_digits()
    state = digits.create_state(digits.Config(policy="float32"), data, 10)
    images, labels = data.train_batch(0, 0, 20)
    _, (expected, _) = jax.jit(digits.loss_fn)(
        state.params, state, images[3::4], labels[3::4]
    )
    state, metrics = digits.train_step(state, images, labels, 4)
    assert metrics["loss"].shape == metrics["accuracy"].shape == ()
    chex.assert_trees_all_close(state.batch_stats, expected, rtol=1e-5)


# Two epochs of five steps, a checkpoint every second one and at each epoch's end.
KILLED = {"epochs": 2, "batch_size": 300, "checkpoint_every": 2}


def run_until_dead(die, folder, setattr):
    """Begins a run that ends itself in its second epoch."""
    shrink(setattr)
    taken, train_step = 0, digits.train_step

    def step_and_die(*args):
        nonlocal taken
        result = train_step(*args)
        taken += 1
        if taken == 8:
            die()
        return result

    setattr(digits, "train_step", step_and_die)
    with jax.default_prng_impl("rbg"):
        run(checkpoint_dir=folder, **KILLED)


class Killed(BaseException):
    """Ends a run at once: it saves as it goes and has nothing to do in the end."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The checkpoints of a float16 run that ended in its second epoch."""

    def die():
        raise Killed

    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        run_until_dead(die, folder, patch.setattr)
    return folder


def copy_of(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "checkpoints"))


def test_a_killed_run_goes_on_bit_for_bit(small, killed, tmp_path):
    folder = copy_of(killed, tmp_path)
    steps = {int(p.name) for p in folder.iterdir() if p.name.isdigit()}
    assert max(steps) == 6  # after the 1st of 5 steps; the 7th and the 8th are lost
    whole, _ = run(**KILLED)
    resumed, printed = run(checkpoint_dir=folder, resume=True, **KILLED)
    assert "goes on from step 6" in printed
    bar = [line for line in printed.splitlines() if "skipped" in line][-1]
    for words in ("mixed_float16", "━", "2/2", "loss", "acc", "scale 2^"):
        assert words in bar
    assert "…" not in bar
    scale = jaxmp.get_loss_scale_state(whole.state.opt_state)
    assert scale.skipped > 0  # there is more to lose than parameters
    assert scale.loss_scale != 2.0**22
    chex.assert_trees_all_equal(everything(resumed.state), everything(whole.state))
    assert resumed.accuracy == whole.accuracy


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("float32", marks=pytest.mark.evidence)]
)
def test_a_float16_run_goes_on_in_another_precision(small, killed, tmp_path, policy):
    result, _ = run(
        policy=policy, checkpoint_dir=copy_of(killed, tmp_path), resume=True, **KILLED
    )
    scale = jaxmp.get_loss_scale_state(result.state.opt_state)
    assert result.state.step == 10
    assert scale.loss_scale == 1
    assert scale.skipped > 0  # those of the float16 run; the counters go on


def test_checkpoints_are_not_mixed_up(killed, tmp_path):
    with pytest.raises(SystemExit, match=r"holds a checkpoint of step 6 .*`--resume`"):
        run(checkpoint_dir=killed, **KILLED)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(checkpoint):
    """The file that holds the numbers."""
    return max(checkpoint.rglob("d/*"), key=lambda path: path.stat().st_size)


DAMAGES = {
    "truncated numbers": lambda checkpoint: halve(largest(checkpoint)),
    "no state": lambda checkpoint: shutil.rmtree(checkpoint / "default"),
}


# What is left of a restore that failed, Orbax's event loop, is collected at once, lest
# it warn in a later test.
left_by_orbax = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


def refusal_to_resume(folder):
    with pytest.raises(SystemExit) as stopped:
        run(checkpoint_dir=folder, resume=True, **KILLED)
    message = str(stopped.value)
    del stopped
    gc.collect()
    return message


@left_by_orbax
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    small, killed, tmp_path
):
    folder = copy_of(killed, tmp_path / "my run")
    DAMAGES["truncated numbers"](folder / "6")
    message = refusal_to_resume(folder)
    (command,) = re.findall("^    (rm .*)$", message, re.M)
    subprocess.run(command, shell=True, check=True)
    resumed, printed = run(checkpoint_dir=folder, resume=True, **KILLED)
    assert "goes on from step 5" in printed
    assert resumed.state.step == 10


@left_by_orbax
def test_where_the_only_checkpoint_is_damaged_the_run_begins_again(
    small, killed, tmp_path
):
    folder = copy_of(killed, tmp_path)
    shutil.rmtree(folder / "5")
    DAMAGES["no state"](folder / "6")
    assert "To begin again, delete it" in refusal_to_resume(folder)


def test_a_checkpoint_that_was_being_written_is_passed_over(killed, tmp_path):
    folder = copy_of(killed, tmp_path)
    (folder / "6").rename(folder / "6.orbax-checkpoint-tmp-0")
    checkpoints = digits.open_checkpoints(folder, resume=True)
    assert checkpoints.latest_step() == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": "float61"}, "float61"),
        ({"resume": True}, "`--resume` needs the `--checkpoint-dir`"),
        ({"batch_size": 2000}, r"`--batch-size` must lie in \[1, 1500\]"),
        ({"devices": 3}, "multiple of `--devices`, but 100 is not one of 3"),
        ({"devices": 50}, "`--devices 50`, but there are 8"),
        ({"data": "cifar10", "data_dir": Path("nowhere")}, "there is no folder"),
    ],
)
def test_a_wrong_flag_ends_in_one_sentence(config, message):
    with pytest.raises(SystemExit, match=message):
        run(**config)


def test_a_batch_depends_on_seed_and_step_alone():
    data = _data.load_digits()
    first, again = data.train_batch(1, 17, 100), data.train_batch(1, 17, 100)
    np.testing.assert_array_equal(first[0], again[0])
    assert (data.train_batch(2, 17, 100)[1] != first[1]).any()
    epoch = np.concatenate([data.train_batch(1, 15 + i, 100)[1] for i in range(15)])
    np.testing.assert_array_equal(np.bincount(epoch), np.bincount(data.train_labels))


# CIFAR-10

CIFAR_FILES = [*_data.CIFAR10_TRAIN, _data.CIFAR10_TEST]


@pytest.fixture
def cifar(tmp_path):
    """A folder with CIFAR-10's six files, of eight images each, as Python 2 wrote."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for k, name in enumerate(CIFAR_FILES):
        rng = np.random.default_rng(k)
        batch = {
            b"data": rng.integers(0, 256, (8, 3072), np.uint8),
            b"labels": rng.integers(0, 10, 8).tolist(),
            b"batch_label": name.encode(),
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return tmp_path


def test_cifar10_is_read_in_its_order(cifar):
    data = _data.load_cifar10(cifar)
    assert data.train_images.shape == (40, 32, 32, 3)
    assert data.test_images.shape == (8, 32, 32, 3)
    rows = np.random.default_rng(1).integers(0, 256, (8, 3072), np.uint8)
    red, green, blue = rows[0, :1024], rows[0, 1024:2048], rows[0, 2048:]
    image = data.train_images[8]  # the first of the second file
    for channel, plane in enumerate((red, green, blue)):
        np.testing.assert_array_equal(image[..., channel].ravel(), plane)
    assert data.train_labels.dtype == np.int32


def test_a_resnet_50_is_trained_on_cifar10_in_three_precisions(
    cifar, tmp_path, monkeypatch
):
    narrow = partial(digits.ResNet50, blocks=(1, 1), width=8)
    monkeypatch.setattr(digits, "ResNet50", narrow)
    config = digits.Config(
        model="resnet50",
        optimizer="sgd",
        data="cifar10",
        data_dir=cifar,
        batch_size=8,
        epochs=2,
        compare=True,
        checkpoint_dir=tmp_path / "runs",
        table=tmp_path / "table.md",
    )
    console = terminal()
    results = digits.main(config, console)
    full, *mixed = results
    for result in results:
        assert result.stored_bytes == full.stored_bytes
        assert result.state.step == 10
        assert (tmp_path / "runs" / result.policy / "10").is_dir()
    for result in mixed:
        assert result.compute_bytes * 2 == full.compute_bytes == full.stored_bytes
        assert result.residual_bytes < full.residual_bytes
    lines = (tmp_path / "table.md").read_text().splitlines()
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["", *digits.COMPARED]
    said = {name: cells for name, *cells in rows}
    printed = console.export_text()
    for name in (
        "Test accuracy",
        "of the best epoch",
        "Time per epoch",
        "Parameters, as stored",
        "in compute dtype",
        "Peak memory of a step",
    ):
        assert len(said[name]) == 3
        assert all(cell in printed for cell in said[name])
    assert said["Test accuracy"] == [f"{x.accuracy:.1%}" for x in results]


def test_a_resnet_50_has_the_parameters_of_its_paper():
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    init = partial(digits.ResNet50().init, train=False)
    params = jax.eval_shape(init, jax.random.key(0), image)["params"]
    half = jax.eval_shape(partial(jaxmp.cast_tree, dtype="bfloat16"), params)
    assert [_results.size(_results.nbytes(x)) for x in (params, half)] == [
        "94.1 MB",
        "47.0 MB",
    ]


def test_sgd_and_its_defaults_are_those_of_the_papers(small):
    config = digits.Config(optimizer="sgd", data="cifar10", policy="float32")
    assert (config.learning_rate, config.batch_size) == (0.1, 128)
    other = digits.Config()
    assert (other.learning_rate, other.batch_size) == (3e-3, 100)
    config = digits.Config(optimizer="sgd", policy="float32")
    state = digits.create_state(config, _data.load_digits(), steps=4)
    params = jax.tree.map(np.array, state.params)
    velocity = jax.tree.map(np.zeros_like, params)
    for step in range(4):
        rate = 0.1 * (1 + np.cos(np.pi * step / 4)) / 2
        grads = jax.tree.map(lambda x: np.cos(x + step), params)  # noqa: B023
        velocity = jax.tree.map(
            lambda v, g, p: 0.9 * v + (g + 5e-4 * p), velocity, grads, params
        )
        params = jax.tree.map(lambda p, v: p - rate * v, params, velocity)  # noqa: B023
        state = state.apply_gradients(grads=grads)
    chex.assert_trees_all_close(state.params, params, rtol=1e-5, atol=1e-6)


def test_the_checkpoint_of_the_best_epoch_is_kept(small, tmp_path, monkeypatch):
    accuracies = [0.25, 0.75, 0.5, 0.25, 0.125]
    left = iter(accuracies)
    monkeypatch.setattr(digits, "evaluate", lambda state, data: next(left))
    config = {"epochs": 5, "batch_size": 500, "checkpoint_dir": tmp_path}
    result, printed = run(**config)
    assert sorted(int(x.name) for x in tmp_path.iterdir()) == [6, 12, 15]
    assert f"The best checkpoint is {tmp_path / '6'}" in "".join(printed.splitlines())
    assert (result.accuracy, result.best) == (0.125, 0.75)
    checkpoints = digits.open_checkpoints(tmp_path, resume=True)
    assert checkpoints.metrics(6) == {"accuracy": 0.75}
    # Going on from the last one, and not from the best.
    left = iter([0.0])
    _, printed = run(**config, resume=True)
    assert "goes on from step 15" in printed


def test_augmentation_moves_and_mirrors_whole_images():
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (64, 32, 32, 3), np.uint8)
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    seen = set()
    for k, image in enumerate(_data.augment(images, rng, pad=4, flip=True)):
        for mirrored, candidate in enumerate((image, image[:, ::-1])):
            for top in range(9):
                for left in range(9):
                    crop = padded[k, top : top + 32, left : left + 32]
                    if (crop == candidate).all():
                        seen.add((k, mirrored, top, left))
    assert len(seen) == 64  # each is one crop of its own image, mirrored or not
    _, mirrored, top, left = zip(*seen, strict=True)
    assert 16 < sum(mirrored) < 48
    assert set(top) == set(left) == set(range(9))


def test_a_missing_cifar10_file_is_named(cifar):
    (cifar / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError) as error:
        _data.load_cifar10(cifar)
    message = str(error.value)
    assert f"`{cifar / 'cifar-10-batches-py' / 'data_batch_3'}`" in message
    assert "holds data_batch_1, data_batch_2, data_batch_4" in message
    assert "Unpack https://" in message
    assert "--data-dir" in message


@pytest.mark.parametrize("length", [0, 20_000])
def test_a_truncated_cifar10_file_is_named(cifar, length):
    path = cifar / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(path.read_bytes()[:length])
    size = f"{path.stat().st_size:,} bytes"
    with pytest.raises(ValueError) as error:
        _data.load_cifar10(cifar)
    for words in (f"`{path}`", size, "cut short", "Unpack https://"):
        assert words in str(error.value)


class Calls:
    """Pickles as a call."""

    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


def test_no_code_in_a_cifar10_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data_batch_1"
    for batch in (Calls(), {b"data": [], b"labels": [], b"other": [Calls()]}):
        path.write_bytes(pickle.dumps(batch))
        with pytest.raises(ValueError, match=r"data_batch_1` .* but found `\w+\.\w+`"):
            _data._load_cifar10_batch(path)
    assert [p.name for p in tmp_path.iterdir()] == ["data_batch_1"]


# NNX


def test_nnx_runs_from_end_to_end():
    console = terminal()
    config = digits_nnx.Config(policy="mixed_float16", epochs=1)
    accuracy, optimizer = digits_nnx.main(config, console)
    assert jaxmp.get_loss_scale(optimizer.opt_state) > 1
    assert f"test accuracy {accuracy:.1%}" in console.export_text()


def test_nnx_keeps_everything_on_a_skipped_step():
    policy = jaxmp.get_policy("mixed_float16")
    model = digits_nnx.Net(nnx.Rngs(0))
    tx = jaxmp.loss_scaling(optax.adamw(1e-3), policy)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_step = digits_nnx.make_train_step(policy)
    x, y = jnp.ones((4, 8, 8, 1)), jnp.arange(4)
    train_step(model, optimizer, x, y)

    def numbers():
        kept = nnx.state(model, (nnx.Param, nnx.BatchStat))
        inner = jaxmp.get_loss_scale_state(optimizer.opt_state).inner_state
        return jax.tree.map(np.array, (nnx.to_pure_dict(kept), jax.tree.leaves(inner)))

    def dropout_count():
        return int(model.dropout.rngs.count[...])

    before, count = numbers(), dropout_count()
    train_step(model, optimizer, x.at[0, 0, 0, 0].set(jnp.inf), y)
    assert not jaxmp.last_step_finite(optimizer.opt_state)
    chex.assert_trees_all_equal(numbers(), before)
    assert dropout_count() == count + 1  # the next try drops other units
    train_step(model, optimizer, x, y)
    mean = before[0]["norm1"]["mean"]
    assert (numbers()[0]["norm1"]["mean"] != mean).any()
    assert train_step.jitted_fn._cache_size() == 1
