"""What is known of a tenant."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tenant:
    """None: no limit; `models` None: all, `default_model` None: the base.

    `queue_share` is the part of `--max-queue` that its waiting requests may take. `priority_ceiling` is the smallest
    priority that a request may name (smaller runs first). Tenants with equal `cache_salt` share their prefix cache.
    `fine_tuning_jobs`: that have not ended; `fine_tuning_tokens`: that one job trains on, all epochs together;
    `fine_tuned_models`: that are kept, checkpoints included.
    `background`: asks for its batches, not for itself.
    """

    name: str = "default"
    weight: float = 1.0
    models: frozenset[str] | None = None
    default_model: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    queue_share: float | None = None
    priority_ceiling: int | None = None
    max_context: int | None = None
    cache_salt: str | None = None
    fine_tuning_jobs: int | None = None
    fine_tuning_tokens: int | None = None
    fine_tuned_models: int | None = None
    background: bool = False

    def sees(self, model: str) -> bool:
        return self.models is None or model in self.models

    def for_batches(self) -> Tenant:
        """Its batches are bounded by themselves, not by how many requests it may have at a time."""
        return replace(self, background=True, max_concurrency=None, queue_share=None)

    def context(self, model_len: int) -> int:
        """Tokens of prompt and output that a request may have."""
        return model_len if self.max_context is None else min(model_len, self.max_context)

    def max_waiting(self, max_queue: int) -> int | None:
        return None if self.queue_share is None else max(1, math.ceil(self.queue_share * max_queue))
