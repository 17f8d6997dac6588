"""How many replicas: as many as open requests ask for, and more while first tokens come late. Knows nothing of Ray,
whose autoscaler calls `ByFirstTokens`, then keeps to its own delays, factors and bounds."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from cluster.scaling.first_tokens import counts, quantile

_SHARE = 0.9  # of first tokens that are to come in time
_FEW = 5  # first tokens: of fewer nothing is concluded
_GROWTH = 2.0  # times the replicas that run, at most, before it is looked at again
_EARLY = 0.5  # of the target: so early that one replica less would do, its requests on the others


@dataclass(frozen=True)
class Load:
    """`running`: replicas; `wanted`: as decided last. `requests`: open ones, of all replicas. `ttft_s`: in which nine
    of ten first tokens came since both numbers last changed; None: too few came. `settling`: so short is it since
    then that there need not have been any."""

    running: int
    wanted: int
    requests: float
    ttft_s: float | None
    settling: bool


def replicas(load: Load, per_replica: float, target_s: float) -> float:
    """`per_replica`: open requests that one is to have. `target_s`: in which first tokens are to come."""
    return max(load.requests / per_replica, float(_by_first_tokens(load, target_s)))


def _by_first_tokens(load: Load, target_s: float) -> int:
    """0: nothing is asked for."""
    if load.running != load.wanted or (load.ttft_s is None and load.settling):
        return load.wanted  # what is decided comes first, and what it did is not known yet
    if load.ttft_s is None:
        return 0
    late = load.ttft_s / target_s
    if late > 1.0:
        return max(load.running + 1, math.ceil(load.running * min(late, _GROWTH)))
    if load.running > 1 and late * load.running / (load.running - 1) <= _EARLY:
        return load.running - 1
    return load.running


class ByFirstTokens:
    """A policy for `ray.serve.config.AutoscalingPolicy`: called with its AutoscalingContext."""

    def __init__(self, ttft_target_s: float) -> None:
        self._target_s = ttft_target_s

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """Replicas, and what the next call finds in `ctx.policy_state`."""
        now, numbers = float(ctx.current_time), (ctx.current_num_replicas, ctx.target_num_replicas)
        if not ctx.current_num_replicas:
            return float(ctx.target_num_replicas), {}  # nothing to go by; Serve itself starts the first
        known = ctx.policy_state.get("numbers") == numbers
        since = float(ctx.policy_state["since"]) if known else now
        window_s = float(ctx.config.look_back_period_s)
        load = Load(
            running=ctx.current_num_replicas,
            wanted=ctx.target_num_replicas,
            requests=float(ctx.total_num_requests),
            ttft_s=_ttft(ctx.raw_metrics, max(since, now - window_s)),
            settling=now - since < window_s,
        )
        per_replica = float(ctx.config.get_target_ongoing_requests())
        return replicas(load, per_replica, self._target_s), {"numbers": numbers, "since": since}


def _ttft(reports: Any, since: float) -> float | None:
    """`reports`: by name and replica, points that have `timestamp` and `value`."""
    sums: dict[str, float] = defaultdict(float)
    for name, by_replica in (reports or {}).items():
        for points in by_replica.values():
            sums[name] += sum(point.value for point in points if point.timestamp > since)
    found = counts(sums)
    return quantile(_SHARE, found) if sum(found.values()) >= _FEW else None
