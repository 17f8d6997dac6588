"""Numbers of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtests.simulate.run import Outcome


@dataclass(frozen=True)
class Limits:
    """A request is good if its first token and 99 of 100 gaps come within these."""

    ttft_s: float = 10.0
    itl_s: float = 0.5


def summary(outcome: Outcome, limits: Limits) -> dict[str, float]:
    """Times in milliseconds; `goodput_s`: good requests a second. Percentiles of ITL are over all gaps."""
    answered = [seen for seen in outcome.requests if seen.token_s]
    ttft = np.array([seen.ttft_s for seen in answered]) * 1000
    gaps = [np.array(seen.itl_s) * 1000 for seen in answered]
    itl = np.concatenate([*gaps, np.zeros(1 if not any(map(len, gaps)) else 0)])
    good = sum(
        first <= 1000 * limits.ttft_s and (not len(own) or np.percentile(own, 99) <= 1000 * limits.itl_s)
        for first, own in zip(ttft, gaps, strict=True)
    )
    stats = outcome.stats
    found = {
        "requests": len(outcome.requests),
        "refused": outcome.refused,
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "tokens_s": sum(len(seen.token_s) for seen in answered) / outcome.seconds,
        "ttft_p50_ms": float(np.percentile(ttft, 50)),
        "ttft_p99_ms": float(np.percentile(ttft, 99)),
        "itl_p50_ms": float(np.percentile(itl, 50)),
        "itl_p99_ms": float(np.percentile(itl, 99)),
        "goodput_s": good / outcome.seconds,
        "prefix_hits": stats["prefix_hit_tokens"] / max(1, stats["prefix_lookup_tokens"]),
        "slot_hits": 1 - outcome.slots.cold / max(1, outcome.slots.uses),
        "preemptions": stats["preemptions"],
        "fairness_gap": outcome.gap.largest,
        "fairness_bound": outcome.gap.bound,
    }
    return {name: round(float(value), 4) for name, value in found.items()}
