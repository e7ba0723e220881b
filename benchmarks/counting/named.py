"""What a command line may name."""

from collections.abc import Iterable


def check(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Ends the program with a sentence if one of the names is not known."""
    known = tuple(known)
    for name in names:
        if name not in known:
            listed = ", ".join(f"`{x}`" for x in known)
            raise SystemExit(f"there is no {what} `{name}`; there are {listed}")
