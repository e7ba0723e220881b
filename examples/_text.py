"""English text that every Python has, as characters or as words."""

import ast
import collections
import pydoc_data.topics
import re
import sysconfig
from pathlib import Path

import numpy as np

# Newline and the printable ASCII characters; whatever else there is becomes a space.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


def read() -> str:
    """Returns the language reference and the docstrings of the standard library.

    About 1.35 million characters, in the same order everywhere; from one Python to
    the next a little of it changes.
    """
    parts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, documented):
                parts.append(ast.get_docstring(node) or "")
    return "\n".join(parts)


def as_characters(text: str) -> np.ndarray:
    """Returns the characters as indices into :data:`CHARACTERS`."""
    ascii_text = text.encode("ascii", "replace")
    table = np.full(256, CHARACTERS.index(" "), np.int32)
    table[np.frombuffer(CHARACTERS.encode(), np.uint8)] = np.arange(len(CHARACTERS))
    return table[np.frombuffer(ascii_text, np.uint8)]


def as_words(text: str, size: int) -> np.ndarray:
    """Returns words, numbers and punctuation marks, numbered from the most frequent.

    Those that are not among the ``size - 1`` most frequent are 0.
    """
    words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower())
    counts = collections.Counter(words)
    # Sorted, so that words of the same count come in an order that is the same.
    common = sorted(counts, key=lambda word: (-counts[word], word))[: size - 1]
    index = {word: i for i, word in enumerate(common, start=1)}
    return np.array([index.get(word, 0) for word in words], np.int32)


def split(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts tokens into rows of ``length``; every tenth is for validation."""
    rows = tokens[: len(tokens) // length * length].reshape(-1, length)
    held_out = np.arange(len(rows)) % 10 == 9
    return rows[~held_out], rows[held_out]
