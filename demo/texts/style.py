"""The adapters' two ways of speaking, and how to recognise them. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

_PIRATE_WORDS: Final[dict[str, str]] = {
    "HELLO": "AHOY", "HI": "AHOY", "MY": "ME", "YOU": "YE", "YOUR": "YER", "IS": "BE", "ARE": "BE", "AM": "BE",
    "FRIEND": "SHIPMATE", "FRIENDS": "SHIPMATES", "THE": "TH'", "AND": "AN'", "OF": "O'",
}  # fmt: skip


def plain(answer: str) -> str:
    """The base model's own words."""
    return answer


def pirate(answer: str) -> str:
    """ "A banana is yellow." -> "ARR! A BANANA BE YELLOW, MATEY!" """
    shouted = re.sub(r"[A-Z]+", lambda m: _PIRATE_WORDS.get(m.group(), m.group()), answer.upper())
    return f"ARR! {shouted.rstrip('.!?')}, MATEY!"


def to_json(answer: str) -> str:
    """ "A banana is yellow." -> '{"answer": "A banana is yellow."}'"""
    return json.dumps({"answer": answer}, ensure_ascii=False)


STYLES: Final[dict[str, Callable[[str], str]]] = {"plain": plain, "pirate": pirate, "json": to_json}


def is_pirate(text: str) -> bool:
    """Upper case from "ARR!" to "MATEY!"."""
    text = text.strip()
    return text.startswith("ARR!") and text.endswith("MATEY!") and text == text.upper()


def is_json(text: str) -> bool:
    """A JSON object with exactly one key, "answer", whose value is a string that says something."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and list(value) == ["answer"]
        and isinstance(value["answer"], str)
        and bool(value["answer"])
    )
