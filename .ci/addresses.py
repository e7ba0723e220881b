"""Gives a package its addresses: the project's, and absolute links in the README.

A package index shows the README away from the repository, where links and pictures by
relative paths lead nowhere. `pyproject.toml` has the address of the repository, under
`tool.hatch.metadata.hooks.custom`, and Hatchling calls this file for each build. It
writes nothing into the checkout.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def absolute_links(text: str, home: str, tag: str, root: Path) -> str:
    """Returns Markdown whose relative links lead to the repository at a tag."""

    def absolute(match: re.Match) -> str:
        picture, words, path, anchor = match.groups()
        if not (root / path).exists():
            raise FileNotFoundError(f"a link leads to `{path}`, which is not there")
        kind = "raw" if picture else "tree" if (root / path).is_dir() else "blob"
        return f"{picture}[{words}]({home}/{kind}/{tag}/{path}{anchor or ''})"

    return LINK.sub(absolute, text)


class Addresses(MetadataHookInterface):
    """Fills in the fields `urls` and `readme` of the metadata."""

    def update(self, metadata: dict) -> None:
        """Adds what depends on the address of the repository."""
        home, root = self.config["home"], Path(self.root)
        version = (root / "jaxmp" / "_version.py").read_text()
        tag = "v" + re.findall(r'__version__ = "(.+)"', version)[0]
        metadata["urls"] = {
            "Homepage": home,
            "Documentation": f"{home}/tree/{tag}/docs",
            "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{home}/issues",
        }
        text = absolute_links((root / "README.md").read_text(), home, tag, root)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
