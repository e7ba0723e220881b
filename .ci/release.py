"""Walks through the checklist of a release, and checks each step.

    python .ci/release.py             what is done, and what to type for the rest
    python .ci/release.py --dtypes    what moved to another dtype since the last one
    python .ci/release.py --no-tests  without the tests, which run last and take long

It changes nothing. Its status is 0 if nothing is left to do. The last release is the
newest tag behind this commit that is not the version itself. It needs the extra `test`
and twine.
"""

import argparse
import collections
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NEWEST, OLDER = "golden.txt", "golden_on_0.10.2.txt"
ROW = re.compile(r"^(\S+) (\d\d(?: \w+)?) \(.*\) x (.+)$")  # of a golden plan
MOVED, GONE = "**Dtypes that move**", "**Gone**"  # headings in the changelog

# Of a program: how often each operation runs in each way, in bfloat16 and in float16.
Plan = dict[str, dict[str, tuple[int, int]]]


class Release(NamedTuple):
    """What is to be released from a checkout."""

    root: Path
    version: str
    last: str  # the tag of the last release, empty before the first

    @property
    def is_patch(self) -> bool:
        """Whether only the third number is another than that of the last release."""
        last = self.last.removeprefix("v")
        return self.version.split(".")[:2] == last.split(".")[:2]

    def git(self, *words: str) -> str:
        """Returns what a command of git prints."""
        done = subprocess.run(
            ["git", *words], cwd=self.root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def then(self, path: str) -> str:
        """Returns a file of the last release."""
        return self.git("show", f"{self.last}:{path}")

    def section(self) -> str:
        """Returns the changelog of the version, with its heading."""
        text = (self.root / "CHANGELOG.md").read_text()
        found = re.search(
            rf"^## {re.escape(self.version)} .*?(?=^## |\Z)", text, re.M | re.S
        )
        return found[0] if found else ""


def release(root: Path = ROOT) -> Release:
    """Returns what a checkout would release."""
    text = (root / "jaxmp" / "_version.py").read_text()
    version = re.findall(r'__version__ = "(.+)"', text)[0]
    made = Release(root, version, "")
    tags = made.git("tag", "--merged", "HEAD", "--list", "v*", "--sort=-v:refname")
    others = [x for x in tags.split() if x != f"v{version}"]
    return made._replace(last=others[0] if others else "")


# The steps. Each returns what is left to do, or nothing.


def is_clean(new: Release) -> str:
    """Everything is committed."""
    return "Commit:\n" + changed if (changed := new.git("status", "--short")) else ""


def has_version(new: Release) -> str:
    """The version is new, and CITATION.cff has it."""

    def numbers(version: str) -> list[int]:
        return [*map(int, version.removeprefix("v").split("."))]

    if not re.fullmatch(r"\d+\.\d+\.\d+", new.version):
        return f"`{new.version}` in jaxmp/_version.py is not three numbers."
    if new.last and numbers(new.version) <= numbers(new.last):
        return f"Raise the version in jaxmp/_version.py above {new.last}."
    if f"\nversion: {new.version}\n" not in (new.root / "CITATION.cff").read_text():
        return f"Write `version: {new.version}` in CITATION.cff."
    return ""


def has_changelog(new: Release) -> str:
    """CHANGELOG.md has a section of the version, with its date."""
    heading = new.section().partition("\n")[0]
    if re.fullmatch(r"## \S+ \(\d{4}-\d\d-\d\d\)", heading):
        return ""
    return f"Begin CHANGELOG.md with `## {new.version} (YYYY-MM-DD)`."


def has_address(new: Release) -> str:
    """pyproject.toml has the address of the repository, not a placeholder."""
    home = re.findall(
        r'^home = "(.+)"', (new.root / "pyproject.toml").read_text(), re.M
    )
    if "example.org" not in home[0]:
        return ""
    return f"Change {home[0]} in pyproject.toml, README.md and docs/install.md."


def lists_dtypes(new: Release) -> str:
    """No dtype moves in a patch release; the changelog of another lists what moves."""
    found = moved(new)
    if not found:
        return ""
    lines = "\n".join(said(found))
    if new.is_patch:
        return f"A patch release moves no dtype. Raise the second number, for\n{lines}"
    listed = new.section().partition(MOVED)[2]
    left = [x for x in found if f"`{x}`" not in listed]
    if not left:
        return ""
    names = ", ".join(left)
    return f"Write {names} under `{MOVED}` in CHANGELOG.md, because of\n{lines}"


def keeps_names(new: Release) -> str:
    """No public name goes in a patch release; the changelog of another lists it."""
    if not new.last:
        return ""
    pages = new.git("ls-tree", "--name-only", new.last, "docs/api/").split()
    then = {name for page in pages for name in public(new.then(page))}
    files = (new.root / "docs" / "api").glob("*.md")
    gone = then - {name for file in files for name in public(file.read_text())}
    listed = new.section().partition(GONE)[2]
    left = [x for x in sorted(gone) if new.is_patch or f"`{x}`" not in listed]
    if not left:
        return ""
    names = ", ".join(left)
    if new.is_patch:
        return f"A patch release takes no name away. Put back {names}."
    return (
        f"Write {names} under `{GONE}` in CHANGELOG.md, if {new.last} warned of it. "
        "Otherwise put it back, with a warning."
    )


def builds_the_same_bytes(new: Release) -> str:
    """Two builds in two folders have the same bytes, and twine finds no fault."""
    with tempfile.TemporaryDirectory() as folder:
        builds = [build(new, Path(folder) / name) for name in ("one", "another")]
        if hashes(builds[0]) != hashes(builds[1]):
            return f"Find out why two builds differ: {hashes(builds[0])}."
        files = [str(x) for x in builds[0].iterdir()]
        check = [sys.executable, "-m", "twine", "check", "--strict", *files]
        done = subprocess.run(check, capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode else ""


def passes_tests(new: Release) -> str:
    """`.ci/run` passes, with the evidence, and `.ci/newest`."""
    for command in ".ci/run", ".ci/newest":
        env = os.environ | {"EVIDENCE": "1"}
        if subprocess.run([new.root / command], cwd=new.root, env=env).returncode:
            return f"`EVIDENCE=1 {command}` failed."
    return ""


def has_tag(new: Release) -> str:
    """This commit has the tag of the version."""
    tag = f"v{new.version}"
    if tag in new.git("tag", "--points-at", "HEAD").split():
        return ""
    return f"git tag -a {tag} -m {tag} && git push origin {tag}"


STEPS: tuple[Callable[[Release], str], ...] = (
    is_clean,
    has_version,
    has_changelog,
    has_address,
    lists_dtypes,
    keeps_names,
    builds_the_same_bytes,
    passes_tests,
    has_tag,
)


# What they are made of


def plans(newest: str, older: str) -> dict[str, Plan]:
    """Returns the plan of each program on both versions of JAX, from their files."""
    found = {}
    blocks, differences = _blocks(newest), _blocks(older)
    for name, rows in blocks.items():
        found[name] = _plan(rows)
        lines = differences.get(name, [])
        gone = {x[2:] for x in lines if x.startswith("-")}
        new = [x[2:] for x in lines if x.startswith("+")]
        older_rows = [x for x in rows if x not in gone] + new
        found[f"{name}, older JAX"] = _plan(older_rows)
    return found


def _blocks(text: str) -> dict[str, list[str]]:
    found = (block.strip().splitlines() for block in text.split("\n\n# ")[1:])
    return {name: rows for name, *rows in found}


def _plan(rows: list[str]) -> Plan:
    found: Plan = collections.defaultdict(dict)
    for row in rows:
        # Without the rule that says so: a rule may have another name.
        operation, how, times = ROW.fullmatch(row).groups()  # pyright: ignore
        first, *second = map(int, re.findall(r"\b(\d+)\b", times))
        ways = found[operation]
        before = ways.get(how, (0, 0))
        ways[how] = before[0] + first, before[1] + (second or [first])[0]
    return found


def moved(new: Release) -> dict[str, list[str]]:
    """Returns where each operation runs otherwise than in the last release."""
    if not new.last:
        return {}
    folder = "tests/autocast/"
    before = plans(*(new.then(folder + x) for x in (NEWEST, OLDER)))
    now = plans(*((new.root / folder / x).read_text() for x in (NEWEST, OLDER)))
    found = collections.defaultdict(list)
    for program in before.keys() & now.keys():
        for operation in before[program].keys() & now[program].keys():
            ways = before[program][operation], now[program][operation]
            if is_moved(*ways):
                text = " -> ".join(map(_ways, ways))
                found[operation].append(f"{program}: {text}")
    return {x: sorted(places) for x, places in sorted(found.items())}


def is_moved(
    before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]
) -> bool:
    """Whether fewer of an operation run in one way, and more of it in another.

    A program may also have more or fewer of it, which is not a move.
    """
    for dtype in (0, 1):
        more = [
            now.get(how, (0, 0))[dtype] - before.get(how, (0, 0))[dtype]
            for how in before.keys() | now.keys()
        ]
        if min(more) < 0 < max(more):
            return True
    return False


def _ways(found: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{how} x {_times(*both)}" for how, both in sorted(found.items()))


def _times(bfloat16: int, float16: int) -> str:
    same = bfloat16 == float16
    return f"{bfloat16}" if same else f"{bfloat16} in bfloat16, {float16} in float16"


def said(found: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields lines on operations that run otherwise, with some of the programs."""
    for operation, places in found.items():
        yield f"- `{operation}`, in {len(places)} programs"
        yield from (f"    {place}" for place in places[:3])


def public(page: str) -> Iterator[str]:
    """Yields the public names on a page of the reference."""
    module = ""
    for line in page.splitlines():
        if found := re.match(r"\.\. currentmodule:: (\S+)", line):
            module = found[1]
        elif found := re.match(r"\.\. auto(?:function|class|data):: (\w+)$", line):
            yield f"{module}.{found[1]}"


def build(new: Release, folder: Path) -> Path:
    """Builds a wheel and an sdist of what is committed, in a folder of their own."""
    committed = subprocess.run(
        ["git", "archive", "HEAD"], cwd=new.root, capture_output=True, check=True
    )
    source, made = folder / "source", folder / "made"
    with tarfile.open(fileobj=io.BytesIO(committed.stdout)) as archive:
        archive.extractall(source, filter="data")
    when = {"SOURCE_DATE_EPOCH": new.git("log", "-1", "--format=%ct")}
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(made)]
    subprocess.run(
        command, cwd=source, env=os.environ | when, check=True, capture_output=True
    )
    return made


def hashes(folder: Path) -> dict[str, str]:
    """Returns a hash of each file."""
    files = sorted(folder.iterdir())
    return {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in files}


def main(arguments: list[str] | None = None) -> int:
    """Goes through the steps, and returns whether one is left."""
    parser = argparse.ArgumentParser("python .ci/release.py")
    parser.add_argument("--dtypes", action="store_true")
    parser.add_argument("--no-tests", action="store_true")
    given = parser.parse_args(arguments)
    new = release()
    if given.dtypes:
        print("\n".join(said(moved(new))) or f"no dtype moves since {new.last or '-'}")
        return 0
    print(f"{new.version}, after {new.last or 'no release'}")
    left = 0
    for step in STEPS:
        if step is passes_tests and (left or given.no_tests):
            print("[ ] .ci/run and .ci/newest: not run")
            continue
        to_do = step(new)
        left += bool(to_do)
        doc = (step.__doc__ or "").rstrip(".")
        print(f"[{' ' if to_do else 'x'}] {doc}", flush=True)
        if to_do:
            print("    " + to_do.strip().replace("\n", "\n    "))
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
