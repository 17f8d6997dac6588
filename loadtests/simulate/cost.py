"""What a step takes: t = c0 + c1 tokens + c2 distinct experts + c3 pairs of a token and a position that it reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scheduler.plan import StepPlan


class Sample(NamedTuple):
    """A measured step; `experts` are summed over layers."""

    tokens: int
    experts: float
    pairs: float
    seconds: float


def _row(rows: int, experts: float, seconds: float) -> Sample:
    return Sample(rows, experts, 32.0 * rows, seconds)


# Qwen3-30B-A3B's shape with 8 layers in Q4_K_M, native kernels, two threads of an AMD EPYC (docs/performance.md):
# decode steps of 1, 8, 16 and 32 sequences; 512 tokens of prefill; the fourth 512 of 2048.
MEASURED = (
    _row(1, 64, 1 / 113),
    _row(8, 413, 8 / 313),
    _row(16, 660, 16 / 391),
    _row(32, 894, 32 / 547),
    Sample(512, 1024, 512 * 256, 512 / 1178),
    Sample(512, 1024, 512 * 1792, 512 / 1178 + (2048 / 957 - 2048 / 1178) / 2),
)


@dataclass(frozen=True)
class StepCost:
    """Seconds a step, and (log2 tokens, experts) of the measured steps, between which experts are interpolated."""

    coefficients: tuple[float, float, float, float]
    touched: tuple[tuple[float, float], ...]

    def experts(self, tokens: int) -> float:
        """Distinct experts that so many tokens touch, over all layers."""
        xs, ys = zip(*self.touched, strict=True)
        return float(np.interp(math.log2(tokens), xs, ys))

    def seconds(self, plan: StepPlan) -> float:
        tokens = plan.num_tokens
        pairs = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in plan.rows)
        features = (1.0, tokens, self.experts(tokens), pairs)
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))


@dataclass(frozen=True)
class LaneCost:
    """Of steps of long prompts, which other parts of the machine compute beside the others: all experts are brought
    there (`pass_s`) while a layer's are computed with (`token_s` a token); steps of the others meanwhile take `slower`
    times as long, since both read the same memory."""

    pass_s: float
    token_s: float
    slower: float

    def seconds(self, plan: StepPlan) -> float:
        return max(self.pass_s, self.token_s * plan.num_tokens)


def fitted(samples: Sequence[Sample]) -> StepCost:
    """Least squares of relative errors with no coefficient below 0. ValueError for fewer than four samples."""
    if len(samples) < 4:
        raise ValueError(f"{len(samples)} measured steps, at least 4 are needed")
    features = np.array([(1.0, s.tokens, s.experts, s.pairs) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    matrix = features / scale / seconds[:, None]
    active = list(range(4))
    found = np.zeros(4)
    while active:
        solution = np.linalg.lstsq(matrix[:, active], np.ones(len(samples)), rcond=None)[0]
        if solution.min() >= 0:
            found[active] = solution
            break
        del active[int(solution.argmin())]
    by_tokens: dict[int, list[float]] = {}
    for sample in samples:
        by_tokens.setdefault(sample.tokens, []).append(sample.experts)
    touched = tuple((math.log2(n), sum(counts) / len(counts)) for n, counts in sorted(by_tokens.items()))
    c0, c1, c2, c3 = map(float, found / scale)
    return StepCost((c0, c1, c2, c3), touched)


def measured_steps(path: Path) -> list[Sample]:
    """Of a `steps.jsonl` (docs/profiling.md): its steps of decode rows alone or of one prefill row alone (of others
    the pairs are not known). ValueError for a file without such steps."""
    steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    position = math.gcd(*(int(step["kv_bytes"]) for step in steps)) if steps else 0
    samples = []
    for step in steps:
        tokens, kv = step["tokens"], step["kv_bytes"] / (position or 1)
        one_prefill = step["prefill_rows"] == 1 and step["decode_rows"] == 0
        if step["prefill_rows"] == 0 or one_prefill:
            pairs = tokens * (kv - tokens / 2) if one_prefill else kv
            samples.append(Sample(tokens, sum(step["experts_touched"]), pairs, step["total_s"]))
    if not samples:
        raise ValueError(f"{path}: no step of decode rows alone or of one prefill row alone")
    return samples
