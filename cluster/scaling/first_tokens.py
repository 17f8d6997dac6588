"""Times to the first token, as numbers that Ray Serve carries from replicas to its autoscaler: of each bucket of the
server's histogram, how many first tokens came since the last call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

_BUCKET = "ktserve_time_to_first_token_seconds_bucket"
_NAME = "ttft_le_"  # and the bucket's upper bound, in seconds
LEAST_S, MOST_S = 0.01, 120.0  # the lowest and the highest bound of the histogram


class FirstTokens:
    """Of one server."""

    def __init__(self) -> None:
        self._before: dict[float, float] = {}

    def since(self, page: str) -> dict[str, float]:
        """By bucket (not summed over lower ones), since the last call; empty if none came. `page`: of /metrics."""
        now = _counted(page)
        grown = {bound: count - self._before.get(bound, 0.0) for bound, count in now.items()}
        self._before = now
        found, below = {}, 0.0
        for bound, count in sorted(grown.items()):
            found[f"{_NAME}{bound:g}"] = max(0.0, count - below)
            below = count
        return found if below > 0 else {}


def counts(reports: Mapping[str, float]) -> dict[float, float]:
    """By upper bound, from the names that `FirstTokens.since` gives them; other names are left out."""
    return {float(name.removeprefix(_NAME)): count for name, count in reports.items() if name.startswith(_NAME)}


def quantile(share: float, by_bound: Mapping[float, float]) -> float:
    """Seconds, within a bucket by rule of three; what is in the last bucket counts as `MOST_S`. ValueError for none."""
    wanted, below, lower = share * sum(by_bound.values()), 0.0, 0.0
    for bound, count in sorted(by_bound.items()):
        if count and below + count >= wanted:
            return MOST_S if math.isinf(bound) else lower + (bound - lower) * max(0.0, wanted - below) / count
        below, lower = below + count, bound
    raise ValueError("no first tokens")


def _counted(page: str) -> dict[float, float]:
    """Of all tenants, by upper bound; each includes those of lower ones."""
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(_lines(page.splitlines())):
        for sample in family.samples:
            bound = float(sample.labels["le"])
            found[bound] = found.get(bound, 0.0) + sample.value
    return found


def _lines(page: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in page if line.startswith(f"{_BUCKET}{{"))
