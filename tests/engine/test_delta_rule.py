"""The delta rule over chunks equals the recurrence, token by token in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.delta import CHUNK, delta_chunks


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `delta_chunks`, one token after the other."""
    out = []
    for q_t, k_t, v_t, decay_t, rate_t in zip(q, k, v, decay, rate, strict=True):
        s = s * decay_t.exp()[:, None, None]
        change = (v_t - torch.einsum("hd,hde->he", k_t, s)) * rate_t[:, None]
        s = s + torch.einsum("hd,he->hde", k_t, change)
        out.append(torch.einsum("hd,hde->he", q_t, s))
    return torch.stack(out), s


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 2 * CHUNK + 2), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])),
    heads=st.integers(1, 3),
    sizes=st.sampled_from([(4, 4), (16, 8), (8, 32)]),
    strength=st.sampled_from([0.0, 1e-3, 0.3, 5.0, 40.0]),
    alike=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunks_equal_the_recurrence(tokens, heads, sizes, strength, alike, seed):
    """Whether nothing is forgotten or nearly all (`strength` of the decay), and where all keys are nearly the same:
    then what a token writes depends the most on those before it."""
    g = torch.Generator().manual_seed(seed)
    key, value = sizes

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    q, k, v = unit(normal(tokens, heads, key)), unit(normal(tokens, heads, key)), normal(tokens, heads, value)
    k = unit(k[:1] + 0.01 * k) if alike else k
    decay, rate = -strength * normal(tokens, heads).abs(), torch.sigmoid(2 * normal(tokens, heads))
    s = normal(heads, key, value)
    given_before = s.clone()
    expected, last = recurrence(q, k, v, decay, rate, s)
    found, state = delta_chunks(*(x.float() for x in (q, k, v, decay, rate, s)))
    scale = max(1.0, float(expected.abs().max()))
    assert float((found.double() - expected).abs().max()) < 1e-4 * scale
    assert float((state.double() - last).abs().max()) < 1e-4 * max(1.0, float(last.abs().max()))
    assert torch.equal(s, given_before)
