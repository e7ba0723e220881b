"""How benchmarks keep what they measured."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import tempfile
from collections.abc import Iterable
from typing import Any

import jax

import jaxmp

# Those that the documentation quotes. Without `--save`, a run leaves them as they are.
FOLDER = pathlib.Path(__file__).parents[1] / "results"
SCRATCH = pathlib.Path(tempfile.gettempdir()) / "jaxmp_benchmarks"

_folder = SCRATCH
LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jmp",
    "mixed-precision-for-JAX",
    "equinox",
    "torch",
)


def write_to(folder: pathlib.Path) -> None:
    """Chooses the folder of the results that are written from now on."""
    global _folder
    _folder = folder


def is_saving() -> bool:
    """Whether what is measured is to be kept, as `--save` says."""
    return _folder == FOLDER


def target(name: str) -> pathlib.Path:
    """Returns the file that the results of a benchmark are written to."""
    return _folder / f"{name}.json"


def save(
    path: pathlib.Path, name: str, hardware: str, arguments: list[str], rows: Any
) -> None:
    """Puts results into a JSON file, with all that is needed to make them again.

    Args:
        path: The file. What it holds under other names stays.
        name: The name of the results in it.
        hardware: What was measured on.
        arguments: The command line after ``python -m benchmarks``.
        rows: The results.
    """
    results = json.loads(path.read_text()) if path.exists() else {}
    results[name] = {
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware,
        "versions": {"python": platform.python_version()} | _versions(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Put in place as a whole, because a program may be killed while it writes.
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def update(
    path: pathlib.Path,
    name: str,
    hardware: str,
    arguments: list[str],
    new: Iterable[dict[str, Any]],
    *by: str,
) -> list[dict[str, Any]]:
    """Saves rows one at a time, each in the place of the one that it counts anew.

    So a run that is broken off goes on with what it had not come to.

    Args:
        path: As for :func:`save`.
        name: The same.
        hardware: The same.
        arguments: The same.
        new: The rows, which may be counted while they are asked for.
        *by: The fields by which rows are told apart.

    Returns:
        All rows, those that were there before too.
    """

    def key(row):
        return tuple(row[field] for field in by)

    results = json.loads(path.read_text()) if path.exists() else {}
    rows = {key(row): row for row in results.get(name, {"rows": []})["rows"]}
    for row in new:
        rows[key(row)] = row
        save(path, name, hardware, arguments, [*rows.values()])
    return [*rows.values()]


def hardware() -> str:
    """Describes the processor, and the GPU if there is one."""
    name = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = [x.partition(":")[2].strip() for x in lines if "model name" in x]
        name = next(iter(models), name)
    devices = [d.device_kind for d in jax.devices() if d.platform != "cpu"]
    return ", ".join([f"{name}, {os.cpu_count()} cores", *devices])


def _versions() -> dict[str, str]:
    found = {"jaxmp": jaxmp.__version__}  # which need not be installed
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
