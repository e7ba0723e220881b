"""How benchmarks keep what they measured."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import tempfile
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


def rows(path: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """Returns the results that a file holds under a name, none if it has none."""
    results = json.loads(path.read_text()) if path.exists() else {}
    return results[name]["rows"] if name in results else []


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
