"""What `--speculate` asks for."""

from __future__ import annotations

from engine.architectures.config import ModelConfig
from engine.config import EngineConfig
from engine.errors import UserError
from scheduler.drafts import Drafter, OwnText, Predicted, Proposer, RecentTexts

MAX_DRAFTS = 32
PADDED_DRAFTS = 32  # of a step: one that checks more is long beside its launches
_MTP = "mtp"
_PROPOSERS: dict[str, type[Proposer]] = {"ngram": OwnText, "suffix": RecentTexts, _MTP: Predicted}


def kept_positions(config: EngineConfig) -> int:
    """A token and its drafts; 0 without `speculate`. Raises UserError."""
    asked = _asked(config)
    return 0 if asked is None else 1 + asked[1]


def mtp_drafts(config: EngineConfig) -> int:
    """How many drafts of a row the model's layer of multi-token prediction makes; 0: none. Raises UserError."""
    asked = _asked(config)
    return asked[1] if asked is not None and asked[0] == _MTP else 0


def padded_rows(config: EngineConfig, model: ModelConfig) -> int:
    """Rows of a padded decode step, at most: a token of each request and, where no layer keeps states, some drafts.
    Raises UserError."""
    drafts = 0 if model.delta_nets else max(0, kept_positions(config) - 1)
    return config.max_num_seqs + min(config.max_num_seqs * drafts, PADDED_DRAFTS)


def check_mtp(config: EngineConfig) -> None:
    """UserError for what drafts by such a layer cannot be had with."""
    if not mtp_drafts(config):
        return
    if config.overlap:
        raise UserError(
            f"--speculate {config.speculate} with --overlap: the layer of multi-token prediction needs a step's tokens "
            "before the next step; leave out --overlap",
            "overlap",
        )
    other = "leave it out, or have drafts from texts: --speculate suffix:K"
    if config.tensor_parallel > 1:
        raise UserError(
            f"--speculate {config.speculate} with --tensor-parallel {config.tensor_parallel}: ranks do not divide the "
            f"layer of multi-token prediction; {other}",
            "speculate",
        )
    if config.fine_tuning:
        raise UserError(
            f"--speculate {config.speculate} with --fine-tuning: the layer of multi-token prediction is not trained; "
            f"{other}",
            "speculate",
        )


def make_drafter(config: EngineConfig) -> Drafter | None:
    """None without `speculate`. Raises UserError."""
    asked = _asked(config)
    if asked is None:
        return None
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
            f"--speculate {config.speculate!r}: ngram:K, suffix:K or mtp:K is expected, K from 1 to {MAX_DRAFTS}, and "
            ":always behind it if the drafts are to be checked whatever that costs",
            field="speculate",
        )
    return kind, int(count), bool(colon)
