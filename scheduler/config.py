"""What the scheduler is told once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and policy. Raises ValueError for a value outside its range.

    `num_blocks` blocks of `block_size` positions hold all KV. `max_num_seqs` requests run at the same time;
    a step has at most `max_num_batched_tokens` tokens, so every running request has room for its decode row.
    `itl_target_s` bounds the predicted time of steps that mix decode rows with prefill, or `itl_decode_steps` times
    that of their decode rows alone, if that is longer. Without `itl_decode_steps` it bounds the decode rows of several
    tenants too, for a while after they were there (policy/turns.py). None: the budget bounds a step, and `mixed_chunk`,
    the most prefill tokens of such a step. Steps of prefill alone with `long_chunk` tokens and more are computed in
    another way: their time tells nothing of mixed ones. `lane_tokens`: prompts that miss so many tokens all together
    are computed in steps of their own beside the others (batching/prompts.py), each that misses so many there alone;
    None: one step at a time is computed. A step there has at most `lane_budget` tokens (None: as the others).
    `disk_bytes` is what blocks on disk may take, `disk_block_bytes` what each does (0: there is no disk),
    `disk_state_bytes` what a snapshot of states does.
    `num_states`: of a model whose layers keep states, how many sequences' there is room for (0: it keeps none),
    `num_snapshots`: of how many beginnings beside them at most, of which each takes the memory of `snapshot_blocks`
    blocks (0: memory of its own).
    """

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queue: int
    num_adapter_slots: int  # slots 1 .. num_adapter_slots; slot 0 is the base and always there
    eos_token_ids: tuple[int, ...]
    block_size: int = 16
    prefix_caching: bool = True
    itl_target_s: float | None = None
    itl_decode_steps: float = 0.0
    long_chunk: int | None = None
    mixed_chunk: int | None = None
    lane_tokens: int | None = None
    lane_budget: int | None = None
    disk_bytes: int = 0
    disk_block_bytes: int = 0
    disk_state_bytes: int = 0
    num_states: int = 0
    num_snapshots: int = 0
    snapshot_blocks: int = 0

    aging_s: float = 10.0  # one step of priority is worth this much waiting
    overtake_s: float = 15.0  # a request that has waited for so long is overtaken by none whose prefix is cached
    slot_patience_s: float = 4.0  # after it, a waiting adapter makes a resident one stop taking requests

    # service per token (Virtual Token Counter: Sheng et al., Fairness in Serving Large Language Models, 2024)
    prefill_weight: float = 1.0
    decode_weight: float = 2.0
    cached_weight: float = 0.1

    # prefill tokens beside decode rows while the cost model has too few samples, and its lower bound ever after
    initial_chunk: int = 64
    min_chunk: int = 16

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_queue",
            "block_size",
            "initial_chunk",
            "min_chunk",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.mixed_chunk is not None and self.mixed_chunk < 1:
            raise ValueError(f"mixed_chunk is {self.mixed_chunk}, must be at least 1")
        if self.lane_tokens is not None and self.lane_tokens < 2:
            raise ValueError(f"lane_tokens is {self.lane_tokens}, must be at least 2")
        if self.lane_budget is not None and self.lane_budget < self.max_num_batched_tokens:
            raise ValueError(f"lane_budget is {self.lane_budget}, must be at least max_num_batched_tokens")
        if self.lane_tokens is not None and self.num_states:
            raise ValueError("lane_tokens: layers that keep states are computed in one step at a time")
        for name in ("num_adapter_slots", "num_states", "num_snapshots", "snapshot_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")
        if self.disk_block_bytes and bool(self.num_states) != bool(self.disk_state_bytes):
            raise ValueError(
                f"disk_state_bytes is {self.disk_state_bytes}, num_states {self.num_states}: both, or none"
            )
        least = self.disk_block_bytes + self.disk_state_bytes
        if self.disk_block_bytes and not 0 < least <= self.disk_bytes:
            raise ValueError(f"disk_bytes is {self.disk_bytes}, must hold a block and a snapshot ({least})")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs room for one token in a step"
            )
        for name in (
            "itl_decode_steps",
            "aging_s",
            "overtake_s",
            "slot_patience_s",
            "prefill_weight",
            "decode_weight",
            "cached_weight",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, must be a finite number, at least 0")
        if self.itl_target_s is not None and not 0 < self.itl_target_s < float("inf"):
            raise ValueError(f"itl_target_s is {self.itl_target_s}, must be a finite number above 0")

    @property
    def most_running(self) -> int:
        """Requests that run at the same time at most."""
        return min(self.max_num_seqs, self.num_states) if self.num_states else self.max_num_seqs

    @property
    def max_tokens_held(self) -> int:
        """The longest prompt plus output: the model's length, or what all blocks together hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
