"""What is built and installed: addresses, contents, and how it is imported."""

import email
import importlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOME = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["home"]

# The function of PEP 517 and PEP 660 that the backend has for each kind.
BUILD = {"wheel": "build_wheel", "sdist": "build_sdist", "editable": "build_editable"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds a wheel, an sdist and an editable install, without a network."""
    backend = importlib.import_module(PROJECT["build-system"]["build-backend"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # as whoever calls a backend does
        folders = {kind: tmp_path_factory.mktemp(kind) for kind in BUILD}
        return {
            kind: folder / getattr(backend, BUILD[kind])(str(folder))
            for kind, folder in folders.items()
        }


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [x for x in archive.namelist() if x.endswith("/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_a_package_says_where_the_project_lives(built):
    found = dict(x.split(", ") for x in metadata(built["wheel"]).get_all("Project-URL"))
    assert {*found} == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert found["Homepage"] == HOME
    assert all(address.startswith(HOME) for address in found.values())


def test_the_readme_of_a_package_has_absolute_links_alone(built):
    text = metadata(built["wheel"]).get_payload()
    assert "# jaxmp" in text
    targets = re.findall(r"\]\(([^)#]*)\)", text)
    assert len(targets) > 20
    assert [x for x in targets if not x.startswith("https://")] == []
    tag = "v" + metadata(built["wheel"])["Version"]
    picture = f"{HOME}/raw/{tag}/examples/figures/detector.png"
    assert picture in targets
    for target in targets:
        if target.startswith(f"{HOME}/"):
            kind, its_tag, path = target.removeprefix(f"{HOME}/").split("/", 2)
            assert kind in ("raw", "blob", "tree")
            assert its_tag == tag
            assert (ROOT / path).exists(), path


def test_the_address_stands_once_and_pages_repeat_it():
    for path in ("README.md", "docs/install.md"):
        clones = re.findall(r"git clone (\S+)", (ROOT / path).read_text())
        assert clones
        assert {*clones} == {HOME}, path


def test_an_sdist_has_what_packagers_ask_for_and_no_caches(built):
    with tarfile.open(built["sdist"]) as archive:
        names = {x.split("/", 1)[1] for x in archive.getnames()}
    wanted = "CHANGELOG.md LICENSE conftest.py docs/index.md tests/base/test_tree.py"
    assert {*wanted.split()} <= names
    assert not [x for x in names if re.search(r"__pycache__|_cache/|\.pyc$", x)]
    pictures = [x for x in names if x.endswith(".png")]
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("**/README.md")]
    text = "".join(x.read_text() for x in pages)
    assert [x for x in pictures if Path(x).name not in text] == []


def test_a_wheel_has_the_package_and_the_types_of_jmp(built):
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = archive.namelist()
    assert {x.split("/")[0] for x in names if ".dist-info" not in x} == {
        "jaxmp",
        "jmp-stubs",
    }
    assert "jaxmp/py.typed" in names
    assert len(names) == len({*names})


def test_a_script_beside_the_checkout_imports_an_editable_install(built, tmp_path):
    # A folder with the name of the package, and no package itself, comes first in the
    # path of such a script.
    (tmp_path / "jaxmp").symlink_to(ROOT, target_is_directory=True)
    site = tmp_path / "site"
    with zipfile.ZipFile(built["editable"]) as archive:
        archive.extractall(site)
    script = tmp_path / "script.py"
    program = f"import site; site.addsitedir({str(site)!r}); import jaxmp; "
    script.write_text(program + "print(jaxmp.loss_scaling.__name__)")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, script.name],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert run.stdout.strip() == "loss_scaling", run.stderr
