"""Eight CPU devices, the same examples on every run, and the docstrings' names."""

import contextlib
import functools
import gc
import itertools
import os
import platform
import re
import time

# XLA's threads. With fewer than devices that wait in independent collectives, JAX
# 0.10.2 waits for ever on CPU devices.
os.environ.setdefault("NPROC", "64")
# Also where there is a GPU, and where the compiler for one makes JAX look for it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most tests, and the programs that they start, compile for longer than they run. LLVM
# does less then, and XLA's passes are the same.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# What is imported and collected stays. Searched for garbage, it takes a quarter longer.
gc.disable()

import jax  # noqa: E402

# XLA sets up MLIR anew for each fusion, which takes two fifths of the time, unless it
# emits fusions as it did before. With fused multiply-adds, programs that should agree
# in every bit then differed at times in the last; without them none has. And programs
# as small as these take two fifths of the time if each is one LLVM module with short
# vectors. JAX 0.12 lacks the first flag, and one that XLA does not know ends the
# process.
if jax.__version_info__ < (0, 11) and platform.machine() in ("x86_64", "AMD64"):
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    flags += " --xla_cpu_prefer_vector_width=128"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

jax.config.update("jax_num_cpu_devices", 8)

# It ran once, with PyTorch, and made the arrays beside it.
collect_ignore = ["tests/diagnosis/stored/gpt.py"]

# JAX sets MLIR up anew for each program that it lowers, too, which takes a fifth of the
# time. Nothing public says that one setting may serve them all, as it may.
try:
    from jax._src.interpreters import mlir

    mlir.make_ir_context = functools.cache(mlir.make_ir_context)
except (ImportError, AttributeError):  # another JAX, and the tests take longer
    pass

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

import jaxmp  # noqa: E402
from jaxmp._autocast.plan import Planner  # noqa: E402

settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.load_profile("same")


def pytest_configure(config):
    """Keeps compiled programs in pytest's cache, for all workers and the next run."""
    if not hasattr(config, "cache"):  # `-p no:cacheprovider`
        return
    folder = config.cache.mkdir("jax")
    for old in folder.iterdir():
        if old.stat().st_mtime < time.time() - 7 * 24 * 3600:
            old.unlink(missing_ok=True)
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests start


# The files with the longest tests. Begun last, one of them would keep a worker busy
# while the others have nothing left to do.
LONGEST = (
    "test_gate",
    "test_docs",
    "test_readme",
    "test_processes",
    "test_benchmarks",
    "test_example",
    "test_experiments",
)


def pytest_collection_finish():
    """Lets the garbage collector pass over what is imported by now, and run less."""
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


# Folders whose tests compute gradients in float16 whose numbers need no scale. In
# `autocast` such a test has the mark `needs_no_scale`.
UNSCALED = (
    "attention",
    "devices",
    "diagnosis",
    "front_ends",
    "jaxprs",
    "ops",
    "programs",
    "residuals",
)
# Folders whose tests of autocast have values in 16 bits, but where they say otherwise.
NARROW = (
    "attention",
    "autocast",
    "devices",
    "gradients",
    "head",
    "ops",
    "residuals",
)
NEEDS_NO_SCALE = pytest.mark.filterwarnings(
    "ignore:These gradients are computed in float16 without a loss scale"
)


def pytest_collection_modifyitems(items):
    """Puts the longest tests first, and lets some do without a loss scale."""
    items.sort(key=lambda item: not item.path.stem.startswith(LONGEST))
    for item in items:
        marks = map(item.get_closest_marker, ("needs_no_scale", "evidence"))
        if item.path.parent.name in UNSCALED or any(marks):
            item.add_marker(NEEDS_NO_SCALE)


def rest_is_evidence(cases, *usual):
    """Returns named cases for `parametrize`, all but the usual marked as evidence."""
    assert set(usual) <= set(cases), set(usual) - set(cases)
    return [
        pytest.param(
            *(case if type(case) is tuple else [case]),
            id=name,
            marks=() if name in usual else pytest.mark.evidence,
        )
        for name, case in cases.items()
    ]


def crossed(names, *tables):
    """Parametrises over all cases of some tables, most of them as evidence.

    Of two tables, each value is in a usual case, those of the shorter table in turn. Of
    more, each two values are together in one.
    """
    named = [
        x if isinstance(x, dict) else {getattr(y, "__name__", str(y)): y for y in x}
        for x in tables
    ]
    keys, usual = [*itertools.product(*named)], []
    if len(named) == 2:
        longest = range(max(map(len, named)))
        usual = [tuple([*x][i % len(x)] for x in named) for i in longest]
    else:
        left = set().union(*map(_pairs, keys))
        while left:
            usual.append(max(keys, key=lambda key: len(_pairs(key) & left)))
            left -= _pairs(usual[-1])
    cases = {
        "-".join(key): tuple(x[k] for x, k in zip(named, key, strict=True))
        for key in keys
    }
    marked = rest_is_evidence(cases, *map("-".join, usual))
    return pytest.mark.parametrize(names.split(), marked)


def _pairs(key):
    return {*itertools.combinations(enumerate(key), 2)}


both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])

# For sweeps over many programs, whose law does not depend on the dtype.
usually_bfloat16 = pytest.mark.parametrize(
    "dtype",
    rest_is_evidence({"bfloat16": "bfloat16", "float16": "float16"}, "bfloat16"),
)


def in_both_dtypes(cases, *usual):
    """Returns named cases in both dtypes, in float16 all but the usual as evidence."""
    return rest_is_evidence(
        {f"{n}-{d}": (x, d) for n, x in cases.items() for d in ("bfloat16", "float16")},
        *(f"{name}-bfloat16" for name in cases),
        *(f"{name}-float16" for name in usual),
    )


def answered(table):
    """Parametrises over what is typed, each with what of the answer is below it."""
    rows = re.findall(r"^([^#\s].*)\n {4}(.+)$", table, re.M)
    assert 2 * len(rows) == sum(x[:1] not in ("", "#") for x in table.splitlines())
    return pytest.mark.parametrize(("typed", "answer"), rows)


def normal(seed, *shape, scale=1.0):
    """Draws normal numbers, without a program that would have to be compiled."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(np.float32(scale) * numbers)  # `asarray` is a program


def bits(tree):
    """Returns the leaves as dtypes, shapes and bytes, which tell -0.0 from 0.0."""

    def leaf_bits(x):
        if not hasattr(x, "dtype"):
            return x
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if is_key else x
        return x.dtype, x.shape, np.asarray(data).tobytes()

    return jax.tree.map(leaf_bits, tree)


def at_once(*funs):
    """Compiles functions of the same arguments as one program."""
    return jax.jit(lambda *args: [fun(*args) for fun in funs])


def mapped(fun, mesh, in_specs, out_specs, check_vma=True):
    """Maps a function over the shards of its arguments."""
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(fun, mesh=mesh, **specs, check_vma=check_vma)


def assert_near(found, exact, dtype, digits):
    """Checks that each leaf is off by less than so many last digits of a dtype."""
    limit = digits * float(jnp.finfo(dtype).eps)
    for x, y in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        x, y = np.ravel(x).astype(float), np.ravel(y).astype(float)
        assert np.linalg.norm(x - y) <= limit * np.linalg.norm(y)


def assert_gradients_near(loss, dtype, digits, *args, argnums=0):
    """Checks a loss and its gradients, by autocast around them and inside."""
    exact, *found = at_once(*in_both_orders(loss, dtype, argnums))(*args)
    for one in found:
        assert_near(one, exact, dtype, digits)


@contextlib.contextmanager
def checking_leaks():
    """Looks for tracers that outlive their trace, among what is made from here on."""
    # JAX looks through all objects for each trace, those of earlier tests too.
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield


def in_both_orders(loss, dtype, argnums=0, grad=jax.value_and_grad):
    """Returns a gradient in float32, and by autocast around it and inside of it."""
    inside = grad(jaxmp.autocast(loss, dtype), argnums)
    return grad(loss, argnums), jaxmp.autocast(grad(loss, argnums), dtype), inside


@pytest.fixture(autouse=True)
def names_of_the_docstrings(doctest_namespace):
    """Lets every docstring use the same four names."""
    doctest_namespace.update(jax=jax, jnp=jnp, optax=optax, jaxmp=jaxmp)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a test of autocast in which no value has 16 bits: it tests nothing.

    So it is with products of fewer than eight terms. A test that means to keep all in
    float32 has the mark `keeps_float32`, or its module has.
    """
    marks = "keeps_float32", "evidence"  # the law of evidence has a cheaper test
    if item.path.parent.name not in NARROW or any(map(item.get_closest_marker, marks)):
        return (yield)
    planned, program = [], Planner.program

    def noted(self, *args, **kwargs):
        plan = program(self, *args, **kwargs)
        if not any(planned):
            planned.append(any(map(_has_16_bits, plan.all_steps())))
        return plan

    Planner.program = noted
    try:
        result = yield
    finally:
        Planner.program = program
    if planned and not any(planned):
        pytest.fail(
            "No value in this test has 16 bits, so that it tests nothing of autocast. "
            "Multiply by matrices whose sums have eight terms or more; or mark it: "
            "`@pytest.mark.keeps_float32`.",
            pytrace=False,
        )
    return result


def _has_16_bits(step):
    return step.kind == "product" or any(x.half for x in step.outs)


@pytest.fixture
def few_objects():
    """Hides what other tests have made, all of which is searched for primitives."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def keys_that_compile_fast():
    """Draws random numbers by a short program."""
    with jax.default_prng_impl("rbg"):
        yield


@pytest.fixture
def optimized():
    """Compiles with all optimizations, for programs that run for long."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def compiled_anew():
    """Does without the cache, for what XLA writes down while it compiles."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def failed_if_skipped(report):
    """Turns a skip into a failure where nothing may be skipped.

    Else tests/test_gate.py would be skipped everywhere, unseen, by the next jaxlib.
    """
    if report.skipped and not hasattr(report, "wasxfail"):
        *_, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"JAXMP_NO_SKIPS is set, and this was skipped. {reason}"
    return report


if os.environ.get("JAXMP_NO_SKIPS"):

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport():
        """Reports a skipped test."""
        return failed_if_skipped((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report():
        """Reports a skipped module."""
        return failed_if_skipped((yield))
