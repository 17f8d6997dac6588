"""How long a step takes, learnt while running: t = c0 + c1 tokens + c2 distinct experts + c3 pairs of a token
and a position that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from scheduler.plan import StepPlan, StepRow, pairs

MIN_SAMPLES = 8
DECAY = 0.98  # a sample's weight halves every 34 steps
FIT_ALL, FIT_EVERY = 64, 8  # samples: after each of the first ones, then after some
MAX_SURPRISE = 4.0  # a step is taken for at most so many times faster or slower than predicted


class CostModel:
    """Least squares of relative errors over exponentially weighted samples.

    Coefficients are never negative, so more work is never predicted to take less time. Deterministic; seconds come
    from the caller.
    """

    def __init__(self, initial_chunk: int) -> None:
        self._initial_chunk = initial_chunk
        self._num_samples = 0
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4
        self._coefficients = [0.0] * 4
        self.prompt_step_s: float | None = None  # of the last step in the lane of long prompts
        self._experts: dict[int, tuple[float, float]] = {}  # by bit length of tokens: mean tokens, mean experts

    def observe(self, plan: StepPlan, seconds: float, experts: int | None) -> None:
        """`experts`: distinct experts that the step touched, over all layers; None if nobody counted."""
        tokens = plan.num_tokens
        read = plan.num_read
        if not 0 < seconds < float("inf") or not tokens:
            return  # a clock that stood still or jumped tells nothing
        if experts is not None:
            self._learn_experts(tokens, experts)
        features = self._features(tokens, read, experts)
        size = seconds
        if self._num_samples >= MIN_SAMPLES and (expected := self._dot(features)) > 0:
            size = expected
            # a hiccup of the machine must not throw the fit over
            seconds = min(max(seconds, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        weight = size**-2  # relative errors count, so that small steps are learnt as well as large ones
        for i, (row, feature) in enumerate(zip(self._moments, features, strict=True)):
            weighted = weight * feature
            row[:] = [DECAY * moment + weighted * other for moment, other in zip(row, features, strict=True)]
            self._targets[i] = DECAY * self._targets[i] + weighted * seconds
        self._num_samples += 1
        if self._num_samples <= FIT_ALL or self._num_samples % FIT_EVERY == 0:
            self._coefficients = _fit(self._moments, self._targets)

    def predict(self, tokens: int, read: int) -> float:
        """Seconds of a step of so many tokens that read so many positions of the KV cache, all together."""
        return self._dot(self._features(tokens, read, None))

    @property
    def cautious_chunk(self) -> int | None:
        """The prefill tokens of a step while there are too few samples to predict from; then None."""
        return self._initial_chunk if self._num_samples < MIN_SAMPLES else None

    def chunk(self, tokens: int, read: int, start: int, most: int, target_s: float, least: int) -> int:
        """The most prefill tokens from position `start` on, at most `most`, that keep a step within target that has so
        many tokens and reads already. At least `least` of them, even if it is over target without any."""
        low, high = max(0, min(least, most)), most
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(tokens + middle, read + pairs(start, middle)) <= target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def allows_another(self, rows: Sequence[StepRow], target_s: float) -> bool:
        """Whether a step of decode rows keeps within target with one more that is like the last one."""
        read = sum(pairs(row.start, 1) for row in (*rows, rows[-1]))
        return self._num_samples >= MIN_SAMPLES and self.predict(len(rows) + 1, read) <= target_s

    def rows(self, most: int, read: int, target_s: float, beside: int = 0) -> int:
        """How many of `most` decode rows, which read so many positions all together, keep a step within target that has
        `beside` tokens of a prompt; the rows are taken for equally long."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(middle + beside, read * middle // most + pairs(0, beside)) <= target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _features(self, tokens: int, read: int, experts: int | None) -> list[float]:
        touched = self._expected_experts(tokens) if experts is None else float(experts)
        return [1.0, float(tokens), touched, float(read)]

    def _dot(self, features: list[float]) -> float:
        return sum(c * f for c, f in zip(self._coefficients, features, strict=True))

    def _learn_experts(self, tokens: int, experts: int) -> None:
        known = self._experts.get(tokens.bit_length())
        if known is None:
            self._experts[tokens.bit_length()] = (float(tokens), float(experts))
        else:
            self._experts[tokens.bit_length()] = (
                known[0] + (tokens - known[0]) / 8,
                known[1] + (experts - known[1]) / 8,
            )

    def _expected_experts(self, tokens: int) -> float:
        """Between the token counts seen, straight lines over their logarithm, since each further token touches fewer
        new ones, but no more than as many for each token as below; outside, the nearest (more tokens touch at most all
        experts, fewer at least none)."""
        below: tuple[float, float] = (0.0, 0.0)
        above: tuple[float, float] | None = None
        for count, experts in sorted(self._experts.values()):
            if above is not None:
                break
            point = (count, max(experts, below[1]))  # more tokens never touch fewer
            if count <= tokens:
                below = point
            else:
                above = point
        if above is None:
            return below[1]
        if not below[0]:
            return above[1] * tokens / above[0]
        share = log(tokens / below[0]) / log(above[0] / below[0])
        return min(below[1] + share * (above[1] - below[1]), below[1] * tokens / below[0])


def _fit(moments: list[list[float]], targets: list[float]) -> list[float]:
    """Non-negative least squares by leaving out the most negative feature until none is left."""
    active = [i for i in range(4) if moments[i][i] > 0]
    while active:
        solution = _solve([[moments[i][j] for j in active] for i in active], [targets[i] for i in active])
        worst = min(range(len(active)), key=lambda k: solution[k])
        if solution[worst] >= 0:
            found = [0.0] * 4
            for i, value in zip(active, solution, strict=True):
                found[i] = value
            return found
        del active[worst]
    return [0.0] * 4


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Cholesky with a small ridge, relative to each feature's own size: collinear features share, none explodes."""
    n = len(right)
    scale = [matrix[i][i] ** 0.5 for i in range(n)]
    lower = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            value = matrix[i][j] / (scale[i] * scale[j]) + (1e-6 if i == j else 0.0)
            value -= sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = max(value, 1e-12) ** 0.5 if i == j else value / lower[j][j]
    solution = [right[i] / scale[i] for i in range(n)]
    for i in range(n):
        solution[i] = (solution[i] - sum(lower[i][k] * solution[k] for k in range(i))) / lower[i][i]
    for i in reversed(range(n)):
        solution[i] = (solution[i] - sum(lower[k][i] * solution[k] for k in range(i + 1, n))) / lower[i][i]
    return [solution[i] / scale[i] for i in range(n)]
