"""What `--speculate` asks for."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import UserError
from scheduler.drafts import Drafter, OwnText, Proposer, RecentTexts

MAX_DRAFTS = 32
_PROPOSERS: dict[str, type[Proposer]] = {"ngram": OwnText, "suffix": RecentTexts}


def kept_positions(config: EngineConfig) -> int:
    """A token and its drafts; 0 without `speculate`. Raises UserError."""
    asked = _asked(config)
    return 0 if asked is None else 1 + asked[1]


def make_drafter(config: EngineConfig) -> Drafter | None:
    """None without `speculate`. Raises UserError."""
    asked = _asked(config)
    if asked is None:
        return None
    if config.overlap:
        raise UserError("--speculate needs each step's tokens before the next one: leave out --overlap", "overlap")
    kind, most, always = asked
    return Drafter(_PROPOSERS[kind](), most, always=always)


def _asked(config: EngineConfig) -> tuple[str, int, bool] | None:
    """Whose drafts, how many at most, and whether whatever that costs."""
    if config.speculate is None:
        return None
    kind, _, rest = config.speculate.partition(":")
    count, colon, how = rest.partition(":")
    if kind not in _PROPOSERS or count not in map(str, range(1, MAX_DRAFTS + 1)) or (colon and how != "always"):
        raise UserError(
            f"--speculate {config.speculate!r}: ngram:K or suffix:K is expected, K from 1 to {MAX_DRAFTS}, and :always "
            "behind it if the drafts are to be checked whatever that costs",
            field="speculate",
        )
    return kind, int(count), bool(colon)
