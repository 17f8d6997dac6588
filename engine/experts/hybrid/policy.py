"""Which experts should be on the GPU: the most used of all layers, by an online exponential average.

Host-side and deterministic; knows nothing of memory or streams. A layer's expert is one number: layer * E + expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import EngineError


@dataclass(frozen=True)
class Moves:
    """`evict` leave, then `admit` come; experts as numbers, the hottest first."""

    evict: list[int]
    admit: list[int]


class HotPolicy:
    """`decay` is per observed step; an expert replaces another only if it is `margin` hotter, so that near ties do not
    travel. After a change of the routing, averages follow within a few times 1 / (1 - decay) steps.

    Averages of few uses differ by chance. As far as their variance is that of counts (a mean of m uses a step varies by
    m (1 - decay) / (1 + decay)), differences say nothing: what is compared are averages drawn towards their mean by
    that share of the variance. So evenly spread routing moves nothing, and skewed routing all it did."""

    def __init__(self, experts: int, *, decay: float = 0.98, margin: float = 0.25) -> None:
        if not 0 <= decay < 1:
            raise EngineError(f"decay {decay}: at least 0 and less than 1")
        self.average = torch.zeros(experts)
        self.resident = torch.zeros(experts, dtype=torch.bool)
        self._decay = decay
        self._margin = margin

    def observe(self, uses: torch.Tensor, steps: int = 1) -> None:
        """uses [experts]: how often each was chosen in the last `steps` steps."""
        keep = self._decay**steps
        self.average.mul_(keep).add_(uses, alpha=(1 - keep) / steps)

    def moves(self, capacity: int, most: int) -> Moves:
        """At most `most` admissions that bring the residents nearer to the `capacity` hottest; `resident` is updated.
        If the capacity has shrunk, whoever is too much leaves at once."""
        held = int(self.resident.sum())
        evict = self._coldest(held - capacity)
        self.resident[evict] = False
        held -= len(evict)
        wanted = torch.where(self.resident, -1.0, self.average)
        hottest, numbers = wanted.topk(min(most, wanted.numel()))
        free = capacity - held
        admit = [int(n) for n, heat in zip(numbers, hottest, strict=True) if heat > 0]
        victims = self._coldest(max(0, len(admit) - free))
        kept = admit[:free]
        heat = self._likely() if victims else self.average
        for candidate, victim in zip(admit[free:], victims, strict=False):
            if heat[candidate] <= heat[victim] * (1 + self._margin):
                break
            kept.append(candidate)
            evict.append(victim)
        self.resident[evict] = False
        self.resident[kept] = True
        return Moves(evict, kept)

    def drop(self, count: int) -> list[int]:
        """The coldest residents, which leave now."""
        evict = self._coldest(count)
        self.resident[evict] = False
        return evict

    def _likely(self) -> torch.Tensor:
        """The averages without what is chance in their differences."""
        mean, variance = self.average.mean(), self.average.var(correction=0)
        chance = mean * (1 - self._decay) / (1 + self._decay)
        return mean + (self.average - mean) * (1 - chance / variance).clamp(min=0) if variance > 0 else self.average

    def _coldest(self, count: int) -> list[int]:
        count = min(count, int(self.resident.sum()))
        if count <= 0:
            return []
        heat = torch.where(self.resident, self.average, torch.inf)
        return [int(n) for n in heat.topk(count, largest=False).indices]
