"""What states of sequences take of a device's memory, where layers keep some. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import KV_BLOCK_TOKENS, EngineConfig
from engine.units import format_bytes

if TYPE_CHECKING:
    from engine.architectures.config import ModelConfig

_STATE_SHARE = 0.5  # of the cache's memory, that states of running sequences may take
_SNAPSHOT_SHARE = 1.0  # of what they leave, that snapshots may take, as far as blocks do not need it
_GPU_SNAPSHOT_SHARE = 0.5  # likewise on a GPU, where blocks cannot have it


@dataclass(frozen=True)
class StateSizes:
    """Of a model, whose states are all 0 bytes if its layers keep none; `kept_positions` of a sequence with drafts."""

    config: EngineConfig
    model: ModelConfig
    kept_positions: int
    on_gpu: bool

    @property
    def each(self) -> int:
        return self.model.state_bytes

    @property
    def running_bytes(self) -> int:
        """Of a running sequence's state, and of what it keeps of drafts."""
        return self.each + self.kept_positions * self.model.kept_bytes

    @property
    def scratch_bytes(self) -> int:
        """Of the slot beside a GPU's that padding rows write to."""
        return self.each if self.on_gpu else 0

    @property
    def snapshot_share(self) -> float:
        """Of the memory of blocks and snapshots, that snapshots may take."""
        share = self.config.snapshot_share
        return (_GPU_SNAPSHOT_SHARE if self.on_gpu else _SNAPSHOT_SHARE) if share is None else share

    @property
    def wanted_snapshots(self) -> int:
        """On a GPU, where memory that blocks leave cannot become that of snapshots: a conversation's last prompt's and
        last answer's, of so many as run."""
        return 2 * self.config.max_num_seqs if self.each and self.config.prefix_caching else 0

    @property
    def wanted_bytes(self) -> int:
        """Of running sequences and snapshots on a GPU, if memory allows."""
        running = self.config.max_num_seqs * self.running_bytes + self.scratch_bytes
        return running + self.wanted_snapshots * self.each

    def running(self, affordable: int) -> int:
        """Running sequences, in their share of the bytes that the cache may take; at least one, if layers keep any."""
        if not self.each:
            return 0
        return max(1, min(self.config.max_num_seqs, int(_STATE_SHARE * affordable) // self.running_bytes))

    def apart_bytes(self, affordable: int) -> int:
        """What snapshots have to themselves on a GPU, before the size of the cache is known."""
        if not (self.on_gpu and self.each):
            return 0
        return min(self.wanted_snapshots, int(self.snapshot_share * affordable) // self.each) * self.each

    def snapshots(self, tokens: int, token_bytes: int, affordable: int) -> tuple[int, int]:
        """(snapshots at most beside a cache of `tokens`, blocks that each takes the memory of); on a GPU they take what
        the cache leaves of `affordable` bytes."""
        if not self.each:
            return 0, 0
        if self.on_gpu:
            share, left = self.config.snapshot_share, max(affordable - tokens * token_bytes, 0)
            if share is not None and share < 1:
                left = min(left, int(share / (1 - share) * tokens * token_bytes))
            return min(self.wanted_snapshots, left // self.each), 0
        blocks = -(-self.each // (KV_BLOCK_TOKENS * token_bytes))
        most = int(self.snapshot_share * (tokens // KV_BLOCK_TOKENS)) // blocks
        return (most if self.config.prefix_caching else 0), blocks

    def notes(self, states: int, snapshots: int, snapshot_blocks: int) -> list[str]:
        if not self.each:
            return []
        config, each = self.config, format_bytes(self.each)
        kept, notes = self.kept_positions * self.model.kept_bytes, []
        if kept:
            notes.append(f"drafts take {format_bytes(kept)} beside the state of each running request")
        if states < config.max_num_seqs:
            notes.append(
                f"at most {states} requests run at the same time instead of {config.max_num_seqs}: the state of each "
                f"takes {each}"
            )
        if snapshots and self.on_gpu:
            notes.append(f"at most {snapshots} snapshots of states, {each} each, beside the KV cache")
        elif snapshots:
            positions = snapshot_blocks * KV_BLOCK_TOKENS
            notes.append(
                f"the KV cache has at most {snapshots} snapshots of states; each takes {each}, as {positions} positions"
            )
        elif config.prefix_caching:
            has = "beside the KV cache" if self.on_gpu else "of the KV cache"
            notes.append(f"the prefix cache is not used: a snapshot of a state takes {each}, more than it may {has}")
        return notes
