"""Windows and sinks by flashinfer's attention, with wrappers that compute what flashinfer documents: causal attention
over pages within `window_left` positions before each query's own, and log2 of the sum of exp(score)."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.rotation import Rotation
from engine.attention import flashinfer
from engine.attention.base import BLOCK_SIZE, BatchLayout
from engine.attention.flashinfer import FA3_ROWS, FlashInferAttention, flashinfer_limit
from engine.attention.reference import ReferenceAttention
from engine.errors import EngineError

BF16, F32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCKS = 4, 2, 64, 96


def spec(window: int | None) -> GroupedQuery:
    return GroupedQuery(HEADS, KV_HEADS, DIM, Rotation(DIM, 10000.0, 4096), window=window, sinks=True)


class Wrapper:
    """Of prefill, and of decode: that one has buffers, and its queries are single."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        self.options = options

    def plan(self, *args: Any, window_left: int, **kwargs: Any) -> None:
        first = [part.clone() for part in args[: 3 if self.graph else 4]]
        self.starts = torch.arange(len(first[0])) if self.graph else first.pop(0)
        self.pages, self.indices, self.last = first
        assert args[len(args) - 4 :] == (HEADS, KV_HEADS, DIM, BLOCK_SIZE)
        self.window = window_left

    @property
    def graph(self) -> bool:
        return bool(self.options.get("use_cuda_graph"))

    def run(
        self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, lse: torch.Tensor, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse and out.shape == q.shape and lse.shape == q.shape[:2] and lse.dtype == F32
        for row, last in enumerate(self.last.tolist()):
            begin, end = self.starts[row : row + 2].tolist()
            blocks = self.indices[self.pages[row] : self.pages[row + 1]].long()
            length = (len(blocks) - 1) * BLOCK_SIZE + last
            keys, values = (part[blocks].flatten(0, 1)[:length].repeat_interleave(2, 1).float() for part in cache)
            scores = torch.einsum("thd,shd->ths", q[begin:end].float(), keys) / math.sqrt(DIM)
            own, seen = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)[None]
            hidden = seen > own
            if self.window >= 0:
                hidden |= seen < own - self.window
            scores.masked_fill_(hidden[:, None], -torch.inf)
            out[begin:end] = torch.einsum("ths,shd->thd", scores.softmax(-1), values).to(out.dtype)
            lse[begin:end] = scores.logsumexp(-1) / math.log(2)
        return out, lse


def share_with_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """As engine/ops/gpu_kernels.py, which tests/gpu/test_kernels.py compares with a softmax over the sink too."""
    out.copy_(out.float() * torch.sigmoid(sums * math.log(2) - sinks)[..., None])


def write_kv(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        BatchDecodeWithPagedKVCacheWrapper=Wrapper,
        fast_decode_plan=lambda wrapper, *args, **kwargs: wrapper.plan(*args, **kwargs),
        write_kv=write_kv,
        share_with_sinks=share_with_sinks,
    )
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(flashinfer, "flashinfer_available", lambda: (True, ""))
    monkeypatch.setattr(flashinfer, "pinned", lambda values: torch.tensor(values, dtype=torch.int32))
    monkeypatch.setattr(flashinfer, "importlib", SimpleNamespace(import_module=lambda name: library))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    workspace = torch.zeros(8, dtype=torch.uint8)
    return lambda window: FlashInferAttention(spec(window), [0], BLOCKS, BF16, CPU, 4, 40, workspace=workspace)


class Sequences:
    """Rows of a step and of later ones, each over blocks of its own."""

    def __init__(self, lengths: list[int], most: int) -> None:
        self.lengths = [0] * len(lengths)
        each = -(-(max(lengths) + most) // BLOCK_SIZE)
        order = torch.randperm(each * len(lengths), generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [array("i", order[row * each : (row + 1) * each]) for row in range(len(lengths))]

    def step(self, new: list[int], padded: bool = False) -> BatchLayout:
        starts, positions, slots = [0], [], []
        for row, (count, table) in enumerate(zip(new, self.tables, strict=True)):
            for position in range(self.lengths[row], self.lengths[row] + count):
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            self.lengths[row] += count
            starts.append(starts[-1] + count)
        at = [torch.tensor(values, dtype=torch.int64) for values in (positions, slots)]
        return BatchLayout(starts, list(self.lengths), self.tables, at[0], at[1], padded)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(1, 70)),
    st.lists(st.integers(-6, 6), min_size=HEADS, max_size=HEADS),
    st.integers(0, 1 << 16),
)
def test_equals_plain_torch(make: Any, lengths: list[int], window: int | None, sinks: list[int], seed: int) -> None:
    """A prompt in one piece, another behind it, decode rows of a padded step: windows within, at and beyond the prompt
    and what is cached before."""
    ours, theirs = make(window), ReferenceAttention(spec(window), [0], BLOCKS, BF16, CPU)
    g, sequences = torch.Generator().manual_seed(seed), Sequences(lengths, 9)
    for attention in (ours, theirs):
        attention.set_sinks(0, torch.tensor(sinks, dtype=F32))
    ones = [1] * len(lengths)
    for new, padded in ((lengths, False), ([7] * len(lengths), False), (ones, True), (ones, True)):
        batch = sequences.step(new, padded)
        shapes = (HEADS, KV_HEADS, KV_HEADS)
        q, k, v = (torch.randn(batch.num_tokens, heads, DIM, generator=g).to(BF16) for heads in shapes)
        for attention in (ours, theirs):
            attention.plan(batch)
        got, want = ours.forward(0, q, k, v).float(), theirs.forward(0, q, k, v).float()
        assert float((got - want).abs().max()) < 0.02


def test_long_chunks_are_of_another_wrapper(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums lie behind those of the rows before."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FlashInferAttention, "_try", lambda self, wrapper: None)
    ours, theirs = make(20), ReferenceAttention(spec(20), [0], BLOCKS, BF16, CPU)
    batch, g = Sequences([FA3_ROWS, FA3_ROWS], 0).step([5, FA3_ROWS]), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch.num_tokens, heads, DIM, generator=g).to(BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    outs = []
    for attention in (ours, theirs):
        attention.set_sinks(0, torch.tensor([1.0, -2.0, 0.5, 4.0]))
        attention.plan(batch)
        outs.append(attention.forward(0, q, k, v).float())
    assert [tokens for _, tokens in ours._planned] == [slice(0, 5), slice(5, 5 + FA3_ROWS)]
    assert float((outs[0] - outs[1]).abs().max()) < 0.02


def test_what_it_takes(make: Any) -> None:
    assert flashinfer_limit(spec(128), BF16) is None
    assert "not float32" in str(flashinfer_limit(spec(128), F32))
    with pytest.raises(EngineError, match=r"sinks: .*wanted float32 \[4\]"):
        make(None).set_sinks(0, torch.zeros(5))
