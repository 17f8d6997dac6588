"""How far apart the service of two tenants grew while both had requests waiting, beside what the counter promises."""

from __future__ import annotations

from itertools import combinations

from scheduler.scheduler import Scheduler


class Gap:
    """Service by weight. The bound is that of Sheng et al. (OSDI 2024), theorem 4.4: twice the larger of the longest
    prompt's service and that of all tokens that can run at once; here, of what ran at most."""

    def __init__(self, prefill_weight: float, decode_weight: float) -> None:
        self._prefill_weight, self._decode_weight = prefill_weight, decode_weight
        self._weights: dict[str, float] = {}
        self._longest = self._most_running = 0
        self._since: dict[tuple[str, str], float] = {}  # by pair: its difference when both began to wait
        self.largest = 0.0

    def arrived(self, tenant: str, weight: float, prompt_tokens: int) -> None:
        self._weights[tenant] = weight
        self._longest = max(self._longest, prompt_tokens)

    @property
    def bound(self) -> float:
        least = min(self._weights.values(), default=1.0)
        prompt = self._prefill_weight * self._longest
        return 2 * max(prompt, self._decode_weight * self._most_running) / least

    def look(self, scheduler: Scheduler) -> None:
        """To be called once a step, after it was planned."""
        if len(self._weights) < 2:
            return
        running = scheduler.running
        self._most_running = max(self._most_running, sum(request.num_tokens for request in running))
        here = set(running)
        waiting = sorted({request.tenant for request in scheduler.requests() if request not in here})
        stats = scheduler.stats()
        served = {name: stats[f"tenant_service/{name}"] / self._weights[name] for name in waiting}
        pairs = {pair: served[pair[0]] - served[pair[1]] for pair in combinations(waiting, 2)}
        self._since = {pair: self._since.get(pair, difference) for pair, difference in pairs.items()}
        for pair, difference in pairs.items():
            self.largest = max(self.largest, abs(difference - self._since[pair]))
