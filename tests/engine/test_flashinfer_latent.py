"""How steps of latent attention are planned for flashinfer, judged with a flashinfer that computes in torch."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.architectures.parts.mla import Latent
from engine.architectures.parts.rotation import Rotation
from engine.attention import flashinfer, flashinfer_expanded, flashinfer_latent
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.flashinfer import flashinfer_limit
from engine.attention.flashinfer_latent import FlashInferLatentAttention
from engine.attention.latent import ReferenceLatentAttention
from engine.errors import EngineError, UserError
from engine.linear.base import LoraBatch
from engine.linear.latent import TorchLatentUp
from engine.lora.adapter import LoraPair

HOPPER, AMPERE = (9, 0), (8, 6)
BF16, CPU = torch.bfloat16, torch.device("cpu")
SPEC = Latent(heads=4, q_rank=None, kv_rank=512, nope_dim=32, value_dim=32, rotation=Rotation(64, 1e4, 512))
BLOCKS = 24


class Wrapper:
    """With a graph it reads what it was made with, as a captured kernel does; else what the last plan gave."""

    def __init__(self, workspace: Any, use_cuda_graph: bool = False, backend: str = "", **buffers: Any) -> None:
        self.backend, self.graph, self.buffers = backend, use_cuda_graph, buffers
        self.plans = 0

    def plan(self, starts: Any, pages: Any, indices: Any, lengths: Any, *rest: Any) -> None:
        heads, rank, rope, page, causal, self.scale, q_type, kv_type = rest
        assert (heads, rank, rope, page, causal) == (4, 512, 64, BLOCK_SIZE, True) and q_type == kv_type == BF16
        assert all(part.dtype == torch.int32 for part in (starts, pages, indices, lengths))
        self.plans += 1
        self.starts, self.pages, self.lengths, self.indices = starts, pages, lengths, indices
        if self.graph:
            self.buffers["qo_indptr"].copy_(starts)
            self.buffers["kv_indptr"].copy_(pages)
            self.buffers["kv_len_arr"].copy_(lengths)
            self.buffers["kv_indices"][: len(indices)].copy_(indices)
            self.indices = self.buffers["kv_indices"]

    def run(self, q: Any, q_rope: Any, latents: Any, rotated: Any, out: torch.Tensor) -> torch.Tensor:
        assert q.shape[-1] == latents.shape[-1] == 512 and q_rope.shape[-1] == rotated.shape[-1] == 64
        for row, length in enumerate(self.lengths.tolist()):
            begin, end = self.starts[row : row + 2].tolist()
            blocks = self.indices[self.pages[row] : self.pages[row + 1]].long()
            c, k = (part[blocks].flatten(0, 1)[:length].float() for part in (latents, rotated))
            scores = torch.einsum("thc,sc->ths", q[begin:end].float(), c)
            scores = (scores + torch.einsum("thr,sr->ths", q_rope[begin:end].float(), k)) * self.scale
            at = torch.arange(length - (end - begin), length)
            scores.masked_fill_(torch.arange(length)[None, None] > at[:, None, None], -torch.inf)
            out[begin:end] = torch.einsum("ths,sc->thc", scores.softmax(-1), c).to(out.dtype)
        return out


def attend(q: Any, k: Any, v: Any, causal: bool, sm_scale: float, return_lse: bool, backend: str) -> tuple[Any, Any]:
    """As flashinfer's single_prefill_with_kv_cache: sums of the softmax as logarithms to the base of 2."""
    assert return_lse and backend in ("fa2", "fa3") and all(part.is_contiguous() for part in (q, k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * sm_scale
    if causal:
        scores = scores.masked_fill(~torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool(), -torch.inf)
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v.float())
    return out.to(q.dtype).contiguous(), (scores.logsumexp(-1) / math.log(2)).T.contiguous()


def merge(v: torch.Tensor, s: torch.Tensor, other: torch.Tensor, of_other: torch.Tensor) -> None:
    assert all(part.is_contiguous() for part in (v, s, other, of_other)) and v.shape[1] * v.shape[2] // 8 <= 1024
    both = torch.logaddexp2(s, of_other)
    mine, theirs = (torch.exp2(each - both)[..., None] for each in (s, of_other))
    v.copy_(v.float() * mine + other.float() * theirs)
    s.copy_(both)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def attention(
        capability: tuple[int, int] = HOPPER, fails: str = "", spec: Latent = SPEC, **options: Any
    ) -> FlashInferLatentAttention:
        def wrapper(*args: Any, **kwargs: Any) -> Wrapper:
            if fails and kwargs["backend"] == "fa3":
                raise RuntimeError(fails)
            return Wrapper(*args, **kwargs)

        event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
        library = SimpleNamespace(
            BatchMLAPagedAttentionWrapper=wrapper, single_prefill_with_kv_cache=attend, merge_state_in_place=merge
        )
        monkeypatch.setattr(flashinfer, "flashinfer_available", lambda: (True, ""))
        monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
        monkeypatch.setattr(flashinfer, "pinned", lambda values: torch.tensor(values, dtype=torch.int32))
        found = SimpleNamespace(import_module=lambda name: library)
        monkeypatch.setattr(flashinfer_latent, "importlib", found)
        monkeypatch.setattr(flashinfer_expanded, "importlib", found)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return FlashInferLatentAttention(spec, [0, 3], BLOCKS, BF16, CPU, 4, 6, **options)

    return attention


def layout(rows: list[tuple[int, int]], padded: bool = False) -> BatchLayout:
    """(tokens, positions) of each row."""
    free, starts, tables, positions, slots = list(range(BLOCKS))[::-1], [0], [], [], []
    for new, length in rows:
        tables.append(array("i", [free.pop() for _ in range(-(-length // BLOCK_SIZE) + 1)]))  # one more than is read
        starts.append(starts[-1] + new)
        positions += range(length - new, length)
        slots += [tables[-1][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length - new, length)]
    at = [torch.tensor(values, dtype=torch.int64) for values in (positions, slots)]
    return BatchLayout(starts, [length for _, length in rows], tables, at[0], at[1], padded)


STEPS = [
    ([(40, 40), (3, 3), (17, 17)], False),
    ([(1, 41), (5, 8), (40, 57)], False),
    ([(1, 42), (1, 9), (1, 58)], True),
    ([(1, 43), (1, 10), (1, 59)], True),
    ([(1, 44), (1, 1)], True),
]


@pytest.mark.parametrize("tiles", [1, 3, 8192])
def test_every_token_is_planned_once(make, monkeypatch, tiles: int) -> None:
    """Steps whose work does not fit into one wrapper are cut, also within a row."""
    monkeypatch.setattr(flashinfer_latent, "_TILES", tiles)
    ours, theirs = make(), ReferenceLatentAttention(SPEC, [0, 3], BLOCKS, BF16, CPU)
    for number, (rows, padded) in enumerate(STEPS):
        batch = layout(rows, padded)
        ours.plan(batch)
        theirs.plan(batch)
        most = tiles * 64 // SPEC.heads
        assert padded or all(tokens.stop - tokens.start <= most for _, tokens in ours._planned[0])
        g = torch.Generator().manual_seed(number)
        for layer in (0, 3):
            q, k = (torch.randn(batch.num_tokens, h, SPEC.width, generator=g).to(BF16) for h in (SPEC.heads, 1))
            got, want = (each.forward(layer, q, k, k[..., :512]) for each in (ours, theirs))
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
            assert torch.equal(ours.cache[layer], theirs.cache[layer])


WIDE = replace(SPEC, nope_dim=128, value_dim=128)


@given(st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_long_chunks_are_expanded_and_the_rest_absorbed(make, data: st.DataObject) -> None:
    """Drawn steps, pieces of few blocks, adapters of some rows: equal to the reference, which absorbs everything."""
    least, piece = data.draw(st.integers(2, 40)), BLOCK_SIZE * data.draw(st.integers(1, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_expanded, "PIECE", piece)
        ours = make(spec=WIDE, expand_from=least)
    whole = ReferenceLatentAttention(replace(WIDE, value_dim=4096), [0, 3], BLOCKS, BF16, CPU)  # expanding never pays
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weight = torch.randn(4, 256, 512, generator=g).to(BF16) / 16
    up = TorchLatentUp(weight, 128)
    up.set_adapter(1, LoraPair(torch.randn(8, 512, generator=g) / 16, torch.randn(1024, 8, generator=g) / 3, 0.5))
    rows = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 50)), min_size=1, max_size=3))
    batch = layout([(new, new + before) for new, before in rows])
    slots = [data.draw(st.integers(0, 1)) for _ in rows]
    of_tokens = torch.tensor([slot for slot, (new, _) in zip(slots, rows, strict=True) for _ in range(new)])
    groups = [(1, torch.where(of_tokens == 1)[0])] if any(slots) else []
    lora = LoraBatch(of_tokens.int(), groups)
    q_nope, q_rope = (torch.randn(batch.num_tokens, 4, n, generator=g).to(BF16) / 4 for n in (128, 64))
    kept = torch.randn(batch.num_tokens, 1, 576, generator=g).to(BF16)
    for cache in (ours.cache[0], whole.cache[0]):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
    ours.plan(batch)
    whole.plan(batch)
    assert [span.stop - span.start for span in ours.longs] == [new for new, _ in rows if new >= least]
    absorbed = torch.cat((up.absorb(q_nope, lora), q_rope), -1)
    want = up.values(whole.forward(0, absorbed, kept, kept[..., :512]), lora)
    got = torch.empty_like(want)
    ours.keep(0, kept)
    for number, tokens in enumerate(ours.longs):
        q = torch.cat((q_nope[tokens], q_rope[tokens]), -1)
        got[tokens] = ours.expanded(0, number, q, partial(up.expand, slot=lora.host_slots[tokens.start]))
    for number, tokens in enumerate(ours.shorts):
        own = lora.rows(torch.arange(tokens.start, tokens.stop))
        q = torch.cat((up.absorb(q_nope[tokens], own), q_rope[tokens]), -1)
        got[tokens] = up.values(ours.absorbed(0, number, q), own)
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)
    assert torch.equal(ours.cache[0], whole.cache[0])


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 9))
def test_each_query_meets_each_position_before_it_once(tokens: int, before: int, blocks: int) -> None:
    met = torch.zeros(tokens, tokens + before, dtype=torch.int64)
    for piece in flashinfer_expanded.pieces(tokens + before, blocks * BLOCK_SIZE):
        for call in flashinfer_expanded.calls(piece, tokens, tokens + before):
            seen = torch.ones(call.queries.stop - call.queries.start, piece.stop - piece.start, dtype=torch.int64)
            met[call.queries, piece] += seen.tril(seen.shape[1] - seen.shape[0]) if call.causal else seen
    assert torch.equal(met, torch.ones_like(met).tril(before))


def test_a_size_keeps_its_wrapper_and_its_arrays(make) -> None:
    attention, seen = make(), []
    for rows, padded in STEPS[2:]:
        attention.plan(layout(rows, padded))
        ((wrapper, tokens),) = attention._planned[0]
        assert wrapper.graph and tokens == slice(0, len(rows))
        seen.append((len(rows), wrapper.plans))
    assert seen == [(3, 1), (3, 2), (2, 1)]
    assert attention.kv_bytes_per_token == 2 * 576 * 2
    with pytest.raises(EngineError, match="blocks in a step, 24 at most"):
        batch = layout([(1, 250)], padded=True)
        batch.block_tables, batch.context_lens = [array("i", range(30))], [30 * BLOCK_SIZE]
        attention.plan(batch)


@pytest.mark.parametrize(
    ("capability", "options", "fails", "note"),
    [
        (HOPPER, {}, "", "flashinfer fa3, absorbed"),
        (HOPPER, {"prefill": "fa2"}, "", "flashinfer fa2, absorbed (as the rules say)"),
        (HOPPER, {}, "ninja\nfatal error: no header", "fa2, absorbed (fa3 could not be built: fatal error: no header)"),
        (AMPERE, {}, "", "fa2, absorbed (fa3 is for compute capability 9.0 (Hopper), this GPU has 8.6)"),
    ],
    ids=str,
)
def test_what_is_used_is_said(make, capability, options, fails, note) -> None:
    attention = make(capability, fails, **options)
    assert len(attention.notes) == 1 and note in attention.notes[0]
    attention.plan(layout([(3, 3)]))
    assert attention._planned[0][0][0].backend == ("fa3" if "fa3, absorbed" in note else "fa2")


def test_what_cannot_be_is_refused_with_the_reason(make) -> None:
    with pytest.raises(UserError, match=r"prefill fa3: fa3 is for compute capability 9\.0"):
        make(AMPERE, prefill="fa3")
    with pytest.raises(UserError, match="allowed are auto, fa2, fa3"):
        make(prefill="fa4")
    assert flashinfer_limit(SPEC, BF16) is None
    assert "takes bfloat16, not float32" in str(flashinfer_limit(SPEC, torch.float32))
    narrow = replace(SPEC, kv_rank=32)
    assert "takes 512 + 64 values a position, not 32 + 64" in str(flashinfer_limit(narrow, BF16))
