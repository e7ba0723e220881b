"""Makes the addresses in a checkout absolute, for a release.

    python .ci/addresses.py https://github.com/OWNER/NAME v0.1.0

A package index shows the README away from the repository, where links and pictures by
relative paths lead nowhere. Which repository is released, and at which tag, is known
to the release workflow alone. The project's addresses get into `pyproject.toml` so too.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def absolute_links(text: str, url: str, tag: str, root: Path) -> str:
    """Returns Markdown whose relative links lead to the repository at a tag."""

    def absolute(match: re.Match) -> str:
        picture, words, path, anchor = match.groups()
        if not (root / path).exists():
            raise FileNotFoundError(f"a link leads to `{path}`, which is not there")
        kind = "raw" if picture else "tree" if (root / path).is_dir() else "blob"
        return f"{picture}[{words}]({url}/{kind}/{tag}/{path}{anchor or ''})"

    return LINK.sub(absolute, text)


def with_urls(pyproject: str, url: str, tag: str) -> str:
    """Returns `pyproject.toml` with the project's addresses."""
    owner, name = url.split("/")[-2:]
    urls = {
        "Homepage": url,
        # Where the job `pages` of the release puts it.
        "Documentation": f"https://{owner}.github.io/{name}/",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    before = "[project.optional-dependencies]"
    assert "[project.urls]" not in pyproject
    assert pyproject.count(before) == 1
    return pyproject.replace(before, f"[project.urls]\n{lines}\n{before}")


def main(url: str, tag: str, root: Path) -> None:
    """Rewrites the README and `pyproject.toml` of a checkout."""
    url = url.rstrip("/")
    readme, pyproject = root / "README.md", root / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(), url, tag, root))
    pyproject.write_text(with_urls(pyproject.read_text(), url, tag))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:], root=Path(__file__).parent.parent)
