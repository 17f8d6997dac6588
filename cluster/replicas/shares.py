"""A tenant's limits as a replica's part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency")


def divided(text: str, replicas: int) -> str:
    """A file of tenants with each limit divided by so many replicas, at least 1. Whatever else it is stays as it is,
    for the server to refuse."""
    said: Any = yaml.safe_load(text)
    tenants = said.get("tenants") if isinstance(said, dict) else None
    for entry in tenants.values() if isinstance(tenants, dict) else ():
        for name in _LIMITS if isinstance(entry, dict) else ():
            if type(entry.get(name)) is int:  # not of true
                entry[name] = max(1, entry[name] // replicas)
    return yaml.safe_dump(said, sort_keys=False)


def write_share(source: Path, into: Path, replicas: int) -> None:
    """In one move: a server may be reading it. OSError if the file cannot be read."""
    try:
        text = divided(source.read_text(encoding="utf-8"), max(1, replicas))
    except (yaml.YAMLError, UnicodeDecodeError):
        text = source.read_text(encoding="utf-8", errors="replace")  # the server says what is wrong with it
    fresh = into.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(into)
