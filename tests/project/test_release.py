"""The checklist of a release sees what is left to do, and two builds are the same."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
release = importlib.util.module_from_spec(SPEC)
sys.modules["release"] = release  # which NamedTuple reads
SPEC.loader.exec_module(release)

HEAD = "Written by a command.\n\n# network gpt\n"
PLAN = "add 16 (2) x 2\nadd 32 (3) x 9\ntanh 16 (2) x 2 in bfloat16, 0 in float16\n"
API = ".. currentmodule:: jaxmp\n.. autofunction:: autocast\n.. autofunction:: audit\n"


class Checkout:
    """A small repository, whose version 1.2.0 is released."""

    def __init__(self, root):
        self.root = root
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@b.c")
        self.write("tests/autocast/golden.txt", HEAD + PLAN)
        self.write("tests/autocast/golden_on_0.10.2.txt", "Differences.\n")
        self.write("docs/api/autocast.md", API)
        self.write("pyproject.toml", 'home = "https://jaxmp.dev/jaxmp"\n')
        self.version("1.2.0")
        self.commit("v1.2.0")

    def git(self, *words):
        subprocess.run(["git", *words], cwd=self.root, check=True, capture_output=True)

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def version(self, version, notes=""):
        self.write("jaxmp/_version.py", f'__version__ = "{version}"\n')
        self.write("CITATION.cff", f"title: a\nversion: {version}\n")
        heading = f"# Changelog\n\n## {version} (2026-11-28)\n\n{notes}\n"
        self.write("CHANGELOG.md", heading + "## 1.2.0 (2026-01-01)\n")

    def commit(self, tag=None):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "change")
        if tag:
            self.git("tag", tag)

    def left(self, step):
        return getattr(release, step)(release.release(self.root))


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_a_release_with_nothing_left_is_ready(checkout):
    checkout.version("1.2.1")
    checkout.commit("v1.2.1")
    assert release.release(checkout.root).last == "v1.2.0"
    for step in release.STEPS:
        if step not in (release.passes_tests, release.builds_the_same_bytes):
            assert checkout.left(step.__name__) == "", step


def test_each_step_says_what_to_type(checkout):
    assert "Raise the version" not in checkout.left("has_version")  # tagged itself
    checkout.version("1.1.9")
    assert "above v1.2.0" in checkout.left("has_version")
    checkout.version("1.3")
    assert "three numbers" in checkout.left("has_version")
    checkout.version("1.3.0")
    assert checkout.left("has_version") == ""
    assert "_version.py" in checkout.left("is_clean")
    assert checkout.left("has_tag").startswith("git tag -a v1.3.0")
    checkout.write("CITATION.cff", "version: 1.2.0\n")
    assert "CITATION.cff" in checkout.left("has_version")
    checkout.write("CHANGELOG.md", "# Changelog\n\n## 1.3.0 (unreleased)\n")
    assert "## 1.3.0 (YYYY-MM-DD)" in checkout.left("has_changelog")
    checkout.write("pyproject.toml", 'home = "https://example.org/jaxmp"\n')
    assert "Change https://example.org/jaxmp" in checkout.left("has_address")


def test_a_patch_release_moves_no_dtype_and_a_minor_one_lists_each(checkout):
    plan = PLAN.replace("16 (2) x 2\nadd 32 (3) x 9", "16 (2) x 1\nadd 32 (3) x 10")
    checkout.write("tests/autocast/golden.txt", HEAD + plan)
    checkout.version("1.2.1")
    said = checkout.left("lists_dtypes")
    assert "A patch release moves no dtype" in said
    assert "`add`, in 2 programs" in said
    assert "network gpt: 16 x 2, 32 x 9 -> 16 x 1, 32 x 10" in said
    checkout.version("1.3.0")
    assert "Write add under `**Dtypes that move**`" in checkout.left("lists_dtypes")
    checkout.version("1.3.0", "**Dtypes that move**\n\n- `add` of a bias is float32.\n")
    assert checkout.left("lists_dtypes") == ""


@pytest.mark.parametrize(
    ("before", "now", "moves"),
    [
        ("add 16 (2) x 2", "add 16 (gates) x 2", False),  # another rule
        ("add 32 (3) x 9", "add 32 (3) x 10", False),  # one more of them
        ("tanh 16 (2) x 2 in bfloat16, 0 in float16", "tanh 32 (3) x 2", True),
        ("add 16 (2) x 2", "add 16 stored (5) x 2", True),
    ],
)
def test_another_dtype_is_a_move_and_another_rule_or_number_is_none(
    checkout, before, now, moves
):
    checkout.write("tests/autocast/golden.txt", HEAD + PLAN.replace(before, now))
    assert bool(release.moved(release.release(checkout.root))) is False  # same version
    checkout.version("1.3.0")
    assert bool(release.moved(release.release(checkout.root))) is moves


def test_what_moves_on_the_older_jax_alone_is_seen(checkout):
    checkout.version("1.3.0")
    differences = "Differences.\n\n# network gpt\n- add 16 (2) x 2\n+ add 32 (3) x 11\n"
    checkout.write("tests/autocast/golden_on_0.10.2.txt", differences)
    ((place,),) = release.moved(release.release(checkout.root)).values()
    assert place.startswith("network gpt, older JAX: ")


def test_a_public_name_goes_in_a_minor_release_alone_and_is_listed(checkout):
    checkout.write("docs/api/autocast.md", API.replace("audit", "explain"))
    checkout.version("1.2.1")
    assert "Put back jaxmp.audit" in checkout.left("keeps_names")
    checkout.version("1.3.0")
    assert "jaxmp.audit under `**Gone**`" in checkout.left("keeps_names")
    checkout.version("1.3.0", "**Gone**\n\n- `jaxmp.audit`\n")
    assert checkout.left("keeps_names") == ""


def test_the_golden_plans_are_read_whole():
    texts = [
        (ROOT / "tests/autocast" / name).read_text()
        for name in (release.NEWEST, release.OLDER)
    ]
    found = release.plans(*texts)
    assert len(found) == 2 * texts[0].count("\n# ") > 200
    assert all(found.values())


def test_two_builds_in_two_folders_have_the_same_bytes(tmp_path):
    source = tmp_path / "jaxmp"
    left_out = shutil.ignore_patterns(".*cache", ".git", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_out, copy_function=shutil.copy)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in ["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]:
        subprocess.run([*git, *words], cwd=source, check=True)
    new = release.Release(source, "0", "")
    one, another = (release.build(new, tmp_path / x) for x in ("one", "another"))
    assert [x.suffix for x in sorted(one.iterdir())] == [".whl", ".gz"]
    assert release.hashes(one) == release.hashes(another)
    for path in source.rglob("*.py"):
        path.touch()
    assert release.hashes(one) == release.hashes(release.build(new, tmp_path / "third"))
