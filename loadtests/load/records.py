"""What users saw, one record an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Answer:
    """`group`: a tenant, a model or a kind of prompt. Times in seconds, `began_s` by the clock of day. `gaps_s` are
    between pieces of text. `outcome`: "ok", "refused" (429 where that is expected), "hung up" (by us) or the error."""

    group: str
    began_s: float
    total_s: float = 0.0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    outcome: str = "ok"

    @property
    def failed(self) -> bool:
        return self.outcome not in ("ok", "refused", "hung up")


@dataclass(frozen=True)
class Stage:
    """`users` at the same time, or open arrivals of `rate` a second, for so long from `began_s` on."""

    label: str
    began_s: float
    duration_s: float
    answers: Sequence[Answer]

    @property
    def concurrency(self) -> float:
        """Answers open on average, by Little's law."""
        return sum(answer.total_s for answer in self.answers) / self.duration_s

    @property
    def tokens_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.duration_s
