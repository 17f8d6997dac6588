"""Sampling for a whole step at once: penalties, bias, masks, temperature, filters, one draw per row.

A row's draw depends on its seed and position alone, so a request gets the same tokens whatever shares its batch
and however often it was preempted: the uniform number is a hash of (seed, position), the token its inverse CDF.
What is wrong with one row's logits, or fails in it, is that row's error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device import to_device, to_host
from engine.grammar.masks import TokenBitmask
from engine.messages import Logprob, TokenLogprobs
from engine.ops.greedy import NOT_FINITE, greedy_tokens
from scheduler.request import SamplingParams

_MASK = (1 << 64) - 1
_FIRST_TRY = 1024  # candidates sorted before the whole vocabulary has to be


@dataclass
class SampleRow:
    """What sampling needs of one row. Where it has penalties, `seen` int64 [n]: the distinct tokens of prompt and
    output; `counts` int64 [n]: how often each occurs in the output."""

    params: SamplingParams
    seed: int
    position: int  # of the token to be sampled
    seen: NDArray[np.int64]
    counts: NDArray[np.int64]
    words: TokenBitmask | None = None  # the tokens that a mask allows; None: all


@dataclass
class Sampled:
    """`errors` by row: why nothing could be sampled for it."""

    tokens: torch.Tensor  # int64 [R]; NOT_FINITE where the logits are not finite, anything where `errors` has the row
    logits: torch.Tensor  # float32 [R, V], after penalties, bias and masks
    errors: dict[int, Exception] = field(default_factory=dict)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> Sampled:
    """logits float32 [R, V], changed in place.

    On a GPU nothing here waits for it: whatever the host knows is sent, whatever it does not know is not looked at.
    """
    out = Sampled(logits.new_empty(0), logits, _penalise(logits, rows))
    forbid(logits, {i: row.words for i, row in enumerate(rows) if row.words is not None})
    out.tokens = greedy_tokens(logits)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0 and i not in out.errors]
    try:
        _draw_into(out.tokens, logits, rows, drawn)
    except Exception:  # noqa: BLE001 - found out row by row
        for i in drawn:
            try:
                _draw_into(out.tokens, logits, rows, [i])
            except Exception as error:  # noqa: BLE001 - as above
                out.errors[i] = error
    return out


def _draw_into(tokens: torch.Tensor, logits: torch.Tensor, rows: list[SampleRow], drawn: list[int]) -> None:
    """Rows with filters draw among the sorted tokens, others in order of id: apart, so that what a row draws does not
    depend on its neighbours' filters."""
    filtered = [i for i in drawn if _has_filter(rows[i].params, logits.shape[1])]
    plain = [i for i in drawn if i not in set(filtered)]
    for some in (plain, filtered):
        if some:
            index = to_device(some, torch.int64, logits.device)
            found = _draw(logits[index], [rows[i] for i in some])
            tokens[index] = torch.where(tokens[index] == NOT_FINITE, NOT_FINITE, found)


def _has_filter(p: SamplingParams, vocabulary: int) -> bool:
    return p.top_p < 1 or p.min_p > 0 or 0 < p.top_k < vocabulary


def _penalise(logits: torch.Tensor, rows: list[SampleRow]) -> dict[int, Exception]:
    """Bias; then repetition over prompt and output (CTRL, arXiv 1909.05858); then presence and frequency over the
    output, as OpenAI. Of all rows at once; by row, why it could not be done."""
    errors: dict[int, Exception] = {}

    def valid(i: int, ids: NDArray[np.int64]) -> bool:
        if len(ids) and not 0 <= ids.min() <= ids.max() < logits.shape[1]:
            errors[i] = IndexError(f"token {ids.min()} or {ids.max()} is outside 0..{logits.shape[1] - 1}")
        return len(ids) > 0 and i not in errors

    def send(parts: list[NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
        return to_device(np.concatenate(parts), dtype, logits.device)

    biased = [
        (i, np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias)))
        for i, row in enumerate(rows)
        if (bias := row.params.logit_bias)
    ]
    biased = [part for part in biased if valid(*part[:2])]
    if biased:
        at = send([np.full(len(ids), i) for i, ids, _ in biased], torch.int64)
        ids = send([ids for _, ids, _ in biased], torch.int64)
        logits[at, ids] += send([values for *_, values in biased], torch.float32)
    penalised = [i for i, row in enumerate(rows) if valid(i, row.seen)]
    if penalised:
        at = send([np.full(len(rows[i].seen), i) for i in penalised], torch.int64)
        ids = send([rows[i].seen for i in penalised], torch.int64)
        counts = send([rows[i].counts for i in penalised], torch.int64)
        params = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (r.params for r in rows)]
        repetition, presence, frequency = to_device(np.array(params).T, torch.float32, logits.device)[:, at]
        values = logits[at, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[at, ids] = values - torch.where(counts > 0, presence + frequency * counts, 0.0)
    return errors


def _draw(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    device, vocabulary = logits.device, logits.shape[1]

    def column(values: list[float]) -> torch.Tensor:
        return to_device(values, torch.float32, device)[:, None]

    params = [row.params for row in rows]
    probs = torch.softmax(logits / column([p.temperature for p in params]), dim=-1)
    uniform = column([_uniform(row.seed, row.position) for row in rows])
    if not any(_has_filter(p, vocabulary) for p in params):
        return _inverse_cdf(probs, uniform)
    top_p = column([p.top_p for p in params])
    width = min(vocabulary, max([_FIRST_TRY, *(p.top_k for p in params)]))
    if device.type == "cuda" and any(p.top_k == 0 for p in params):
        width = vocabulary  # whether fewer would do is known on the GPU only, and asking it would take longer
    values, ids = probs.sort(dim=-1, descending=True) if width == vocabulary else probs.topk(width, dim=-1)
    if width < vocabulary and device.type == "cpu":  # are the candidates all that any row can need?
        open_ended = column([float(p.top_k == 0) for p in params])
        floor = column([p.min_p for p in params]) * values[:, :1]
        short = (open_ended > 0) & (values.sum(-1, keepdim=True) < top_p) & (values[:, -1:] >= floor)
        if bool((short | ((open_ended > 0) & (top_p >= 1) & (values[:, -1:] >= floor))).any()):
            values, ids = probs.sort(dim=-1, descending=True)
            width = vocabulary
    rank = torch.arange(width, device=device)[None]
    top_k = to_device([p.top_k or vocabulary for p in params], torch.int64, device)[:, None]
    keep = (rank < top_k) & (values >= column([p.min_p for p in params]) * values[:, :1])
    values = values * keep
    values = values / values.sum(-1, keepdim=True)
    before = values.cumsum(-1) - values
    values = values * ((before < top_p) | (rank == 0))  # the smallest set that reaches top_p
    return ids.gather(1, _inverse_cdf(values, uniform)[:, None])[:, 0]


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index per row drawn in proportion to `weights` [R, n]; never one of weight 0."""
    cdf = weights.double().cumsum(-1)
    index = torch.searchsorted(cdf, uniform.double() * cdf[:, -1:], right=True)[:, 0]
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)  # rounding may run past the end
    return torch.minimum(index, last)


def _uniform(seed: int, position: int) -> float:
    """[0, 1) from (seed, position) by splitmix64 (Steele et al., 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return (x >> 11) / (1 << 53)


class PendingLogprobs:
    """Log-probabilities of tokens [R] and of the `top[i]` most probable ones, computed where the logits [R, V] are.

    `read` needs them on the host: on a GPU, not before the stream has got as far as it was when this was made.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, top: list[int | None]) -> None:
        self._top = top
        self._wanted = [i for i, n in enumerate(top) if n is not None]
        if not self._wanted:
            return
        index = to_device(self._wanted, torch.int64, logits.device)
        logprobs = torch.log_softmax(logits[index].float(), dim=-1)
        tokens = tokens[index].clamp(min=0)
        chosen = logprobs.gather(1, tokens[:, None])
        ranks = (logprobs > chosen).sum(-1) + 1
        width = max((top[i] or 0) for i in self._wanted)
        values, ids = logprobs.topk(width, dim=-1) if width else (logprobs[:, :0], logprobs[:, :0].long())
        self._parts = [to_host(part) for part in (tokens, chosen[:, 0], ranks, values, ids)]

    def read(self) -> list[TokenLogprobs | None]:
        """None where top[i] is None."""
        out: list[TokenLogprobs | None] = [None] * len(self._top)
        if not self._wanted:
            return out
        table = zip(self._wanted, *(part.tolist() for part in self._parts), strict=True)
        for i, token, logprob, rank, row_values, row_ids in table:
            n = self._top[i] or 0
            pairs = enumerate(zip(row_ids[:n], row_values[:n], strict=True), 1)
            best = [Logprob(t, v, r) for r, (t, v) in pairs if v != -math.inf]  # what a mask forbids is no alternative
            out[i] = TokenLogprobs(Logprob(token, logprob, rank), best)
        return out


def forbid(logits: torch.Tensor, words: dict[int, TokenBitmask]) -> None:
    """Set what is not allowed to -inf, in place: logits float32 [R, V], `words` by row. NaN stays."""
    if not words:
        return
    device, vocabulary = logits.device, logits.shape[1]
    stacked = np.stack(list(words.values()))
    if device.type == "cpu":  # torch's masked_fill is scalar there: 0.7 ms a row of 150,000 tokens
        allowed = np.unpackbits(stacked.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
        most = (torch.from_numpy(allowed) - 0.5) * float("inf")
        for row, limit in zip(words, most, strict=True):
            torch.minimum(logits[row], limit, out=logits[row])
        return
    rows = to_device(list(words), torch.int64, device)
    packed = to_device(stacked.view(np.int32), torch.int32, device)
    bits = (packed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    forbidden = bits.reshape(len(words), -1)[:, :vocabulary] == 0
    logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
