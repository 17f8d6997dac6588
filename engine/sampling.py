"""Sampling for a whole step at once: penalties, bias, temperature, filters, one draw per row.

A row's draw depends on its seed and position alone, so a request gets the same tokens whatever shares its batch
and however often it was preempted: the uniform number is a hash of (seed, position), the token its inverse CDF.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from engine.messages import Logprob, TokenLogprobs
from scheduler.request import SamplingParams

_MASK = (1 << 64) - 1
_FIRST_TRY = 1024  # candidates sorted before the whole vocabulary has to be


@dataclass
class SampleRow:
    """What sampling needs of one row. `prompt` and `output` are token counts, for penalties."""

    params: SamplingParams
    seed: int
    position: int  # of the token to be sampled
    prompt: Counter[int]
    output: Counter[int]


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [R, V] (changed in place) -> tokens int64 [R], and the logits after penalties and bias."""
    for i, row in enumerate(rows):
        _penalise(logits[i], row)
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw(logits[index], [rows[i] for i in drawn])
    return tokens, logits


def _penalise(logits: torch.Tensor, row: SampleRow) -> None:
    """Repetition over prompt and output (CTRL, arXiv 1909.05858); presence and frequency over the output, as OpenAI."""
    p = row.params
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(p.logit_bias.values()), device=logits.device)
    if p.repetition_penalty != 1.0 and (row.prompt or row.output):
        ids = torch.tensor(sorted(row.prompt.keys() | row.output.keys()), device=logits.device)
        seen = logits[ids]
        logits[ids] = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and row.output:
        ids = torch.tensor(list(row.output), device=logits.device)
        counts = torch.tensor(list(row.output.values()), device=logits.device)
        logits[ids] -= p.presence_penalty + p.frequency_penalty * counts


def _draw(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    device, vocabulary = logits.device, logits.shape[1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    params = [row.params for row in rows]
    probs = torch.softmax(logits / column([p.temperature for p in params]), dim=-1)
    uniform = column([_uniform(row.seed, row.position) for row in rows])
    if all(p.top_p >= 1 and p.min_p <= 0 and not 0 < p.top_k < vocabulary for p in params):
        return _inverse_cdf(probs, uniform)
    top_p = column([p.top_p for p in params])
    width = min(vocabulary, max([_FIRST_TRY, *(p.top_k for p in params)]))
    values, ids = probs.topk(width, dim=-1)
    if width < vocabulary:  # are the candidates all that any row can need?
        open_ended = column([float(p.top_k == 0) for p in params])
        floor = column([p.min_p for p in params]) * values[:, :1]
        short = (open_ended > 0) & (values.sum(-1, keepdim=True) < top_p) & (values[:, -1:] >= floor)
        if bool((short | ((open_ended > 0) & (top_p >= 1) & (values[:, -1:] >= floor))).any()):
            values, ids = probs.sort(dim=-1, descending=True)
            width = vocabulary
    rank = torch.arange(width, device=device)[None]
    top_k = torch.tensor([p.top_k or vocabulary for p in params], device=device)[:, None]
    keep = (rank < top_k) & (values >= column([p.min_p for p in params]) * values[:, :1])
    values = values * keep
    values = values / values.sum(-1, keepdim=True)
    before = values.cumsum(-1) - values
    values = values * (before < top_p)  # the smallest set that reaches top_p; its first member always stays
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


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: list[int | None]) -> list[TokenLogprobs | None]:
    """Log-probabilities of `tokens` [R] and of the `top[i]` likeliest ones; None where top[i] is None."""
    wanted = [i for i, n in enumerate(top) if n is not None]
    out: list[TokenLogprobs | None] = [None] * len(top)
    if not wanted:
        return out
    index = torch.tensor(wanted, device=logits.device)
    logprobs = torch.log_softmax(logits[index].float(), dim=-1)
    chosen = logprobs.gather(1, tokens[index][:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    width = max((top[i] or 0) for i in wanted)
    values, ids = logprobs.topk(width, dim=-1) if width else (logprobs[:, :0], logprobs[:, :0].long())
    table = zip(
        wanted,
        tokens[index].tolist(),
        chosen[:, 0].tolist(),
        ranks.tolist(),
        values.tolist(),
        ids.tolist(),
        strict=True,
    )
    for i, token, logprob, rank, row_values, row_ids in table:
        n = top[i] or 0
        best = [Logprob(t, v, r + 1) for r, (t, v) in enumerate(zip(row_ids[:n], row_values[:n], strict=True))]
        out[i] = TokenLogprobs(Logprob(token, logprob, rank), best)
    return out
