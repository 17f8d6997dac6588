"""Names of modules in files, where they are not those here. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredNames:
    """`pairs`: (what safetensors, adapters and KTransformers' rules say, what is said here), one word or several with
    dots between them, `*` for a number: ("experts.*.w1", "experts.*.gate_proj"). Whole words are replaced, wherever
    they are in a name, pair by pair. ValueError for pairs that cannot be turned round."""

    pairs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for pair in self.pairs:
            if pair[0].split(".").count("*") != pair[1].split(".").count("*"):
                raise ValueError(f"{pair[0]} and {pair[1]} must have as many *")

    def canonical(self, stored: str) -> str:
        """The name here of a tensor or module that files call `stored`."""
        for there, here in self.pairs:
            stored = _replaced(stored, there, here)
        return stored

    def stored(self, canonical: str) -> str:
        """The inverse of `canonical`."""
        for there, here in reversed(self.pairs):
            canonical = _replaced(canonical, here, there)
        return canonical


AS_HERE = StoredNames()


def _replaced(name: str, words: str, by: str) -> str:
    pattern = re.escape(words).replace(r"\*", r"(\d+)")

    def numbered(match: re.Match[str]) -> str:
        numbers = iter(match.groups())
        return ".".join(next(numbers) if word == "*" else word for word in by.split("."))

    return re.sub(rf"(?<![^.]){pattern}(?![^.])", numbered, name)
