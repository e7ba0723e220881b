"""Counts the pages of the documentation and their words.

    python .ci/words.py

A word has a letter or a digit, in prose, in a table or in a program. The reference, the
notebooks and the changelog are not counted.
"""

import pathlib
import re

DOCS = pathlib.Path(__file__).parents[1] / "docs"
INCLUDED = re.compile(r"^```{include} (\S+)", re.MULTILINE)


def counts() -> dict[str, int]:
    """Returns the words of each page, those of files that it includes among them."""
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        if name.startswith("api/") or name == "changelog.md":
            continue
        text = path.read_text()
        included = [(path.parent / x).read_text() for x in INCLUDED.findall(text)]
        words = " ".join([text, *included]).split()
        found[name] = sum(bool(re.search(r"\w", x)) for x in words)
    return found


def main() -> None:
    """Prints a line for each page, and the sums."""
    found = counts()
    for name, words in found.items():
        print(f"{words:7,}  {name}")
    print(f"{sum(found.values()):7,}  words on {len(found)} pages")


if __name__ == "__main__":
    main()
