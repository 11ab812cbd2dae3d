"""The nearest valid word, for errors about misspelt ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: object, valid: Iterable[str]) -> str | None:
    """The valid word most like `word` (case ignored); None only if nothing is valid."""
    folded = {name.casefold(): name for name in sorted(valid, reverse=True)}
    found = get_close_matches(str(word).casefold(), list(folded), n=1, cutoff=0.0)
    return folded[found[0]] if found else None
