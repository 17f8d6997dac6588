"""Which prefill kernel flashinfer's attention takes, and that it is said: judged with a flashinfer that computes
nothing."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from engine.attention import flashinfer as module
from engine.attention.base import BatchLayout
from engine.attention.flashinfer import FA3_ROWS, FlashInferAttention, fa3_limit
from engine.errors import EngineError, UserError
from testing.models.shapes import config

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 6), (10, 0)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CPU, WORKSPACE = torch.device("cpu"), torch.zeros(64, dtype=torch.uint8)


class Wrapper:
    def __init__(self, fails: str, *args: Any, backend: str = "", **kwargs: Any) -> None:
        self.backend = backend
        self.fails = fails
        self.args: tuple[Any, ...] = ()
        self.planned: dict[str, Any] = {}
        self.buffers = [kwargs.get(f"paged_kv_{name}_buffer") for name in ("indptr", "indices", "last_page_len")]

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.planned = args, kwargs
        if self.backend == "fa3" and self.fails:
            raise RuntimeError(self.fails)

    def run(self, q: torch.Tensor, cache: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return q if out is None else out.copy_(q)


class Event:
    def synchronize(self) -> None: ...
    def record(self) -> None: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def attention(capability: tuple[int, int], fails: str = "", **options: Any) -> FlashInferAttention:
        class FlashInfer:
            BatchPrefillWithPagedKVCacheWrapper = staticmethod(lambda *a, **k: Wrapper(fails, *a, **k))
            BatchDecodeWithPagedKVCacheWrapper = staticmethod(lambda *a, **k: Wrapper(fails, *a, **k))
            fast_decode_plan = staticmethod(lambda wrapper, *a, **k: wrapper.plan(*a, **k, fast=True))

        class Ops:
            write_kv = staticmethod(lambda *args: None)

        parts = {"flashinfer": FlashInfer, "engine.ops.gpu_kernels": Ops}
        monkeypatch.setattr(module, "flashinfer_available", lambda: (True, ""))
        monkeypatch.setattr(module.importlib, "import_module", lambda name: parts[name])
        monkeypatch.setattr(module, "pinned", lambda values: torch.tensor(values, dtype=torch.int32))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return FlashInferAttention(
            config(head_dim=64).layers[0].attention, [0, 1], 4, BF16, CPU, 4, 4, workspace=WORKSPACE, **options
        )

    return attention


def layout(*rows: int) -> BatchLayout:
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row)
    none = torch.zeros(0, dtype=torch.int64)
    return BatchLayout(starts, list(rows), [array("i", range(-(-row // 16))) for row in rows], none, none)


@pytest.mark.parametrize(
    ("capability", "options", "fails", "note"),
    [
        (HOPPER, {}, "", f"fa3 for chunks of {FA3_ROWS} rows and more, fa2 below"),
        (HOPPER, {"prefill": "fa3"}, "", "flashinfer fa3"),
        (HOPPER, {"prefill": "fa2"}, "", "flashinfer fa2, as the rules say"),
        (HOPPER, {"kv_dtype": FP8}, "", "flashinfer fa2 (fa3 takes fp8 keys and values only with fp8 queries)"),
        (HOPPER, {}, "ninja\nfatal error: no header\nmore", "fa2 (fa3 could not be built: fatal error: no header)"),
        (AMPERE, {}, "", "flashinfer fa2 (fa3 is for compute capability 9.0 (Hopper), this GPU has 8.6)"),
        (BLACKWELL, {}, "", "this GPU has 10.0"),
    ],
    ids=str,
)
def test_what_is_used_is_said(make, capability, options, fails, note) -> None:
    attention = make(capability, fails, **options)
    assert len(attention.notes) == 1 and note in attention.notes[0]
    has_fa3 = "flashinfer fa3" in attention.notes[0]
    for rows, cut in (((3, 1), 2), ((1, 20, FA3_ROWS, 5), 2), ((FA3_ROWS,), 0)):
        batch = layout(*rows)
        attention.plan(batch)
        planned = attention._planned
        cut = cut if has_fa3 else len(rows)
        parts = [("fa2", 0, cut), ("fa3", cut, len(rows))]
        assert [(wrapper.backend, tokens) for wrapper, tokens in planned] == [
            (name, slice(batch.row_starts[a], batch.row_starts[b])) for name, a, b in parts if a != b
        ]
        for (wrapper, _), (_, a, b) in zip(planned, [part for part in parts if part[1] != part[2]], strict=True):
            assert wrapper.planned["kv_data_type"] == options.get("kv_dtype", BF16)
            starts, pages, indices, last = (part.tolist() for part in wrapper.args[:4])
            assert [starts[i + 1] - starts[i] for i in range(b - a)] == list(rows[a:b]) and starts[0] == pages[0] == 0
            assert indices == [block for table in batch.block_tables[a:b] for block in table]
            assert [pages[i + 1] - pages[i] for i in range(b - a)] == [len(t) for t in batch.block_tables[a:b]]
            assert last == [(row - 1) % 16 + 1 for row in rows[a:b]]
        q = torch.arange(batch.num_tokens * 8.0, dtype=BF16).view(-1, 2, 4)
        assert torch.equal(attention.forward(0, q, q, q), q)


def test_padded_steps_are_planned_where_graphs_read(make) -> None:
    """A size's own plan is for its first step; each step's arrays lie where its wrapper was told."""
    attention, seen = make(HOPPER), []
    for rows in ((3, 40), (5, 17), (20,), (16, 33, 1, 2), (6, 18)):
        batch = layout(*rows)
        batch.padded, batch.row_starts = True, list(range(len(rows) + 1))
        attention.plan(batch)
        ((wrapper, tokens),) = attention._planned
        assert tokens == slice(0, len(rows))
        pages = [-(-row // 16) for row in rows]
        expected = [
            [sum(pages[:i]) for i in range(len(rows) + 1)],
            [block for table in batch.block_tables for block in table],
            [(row - 1) % 16 + 1 for row in rows],
        ]
        assert [part.tolist() for part in wrapper.args[:3]] == expected
        starts, indices, last = wrapper.buffers
        assert [starts.tolist(), indices[: sum(pages)].tolist(), last.tolist()] == expected
        seen.append((len(rows), "fast" in wrapper.planned))
    assert seen == [(2, False), (2, True), (1, False), (4, False), (2, True)]
    with pytest.raises(EngineError, match="17 blocks in a step, 16 at most"):
        batch = layout(16 * 17)
        batch.padded = True
        attention.plan(batch)


@pytest.mark.parametrize(
    ("capability", "options", "fails", "message"),
    [
        (AMPERE, {"prefill": "fa3"}, "", "prefill fa3: fa3 is for compute capability 9.0"),
        (HOPPER, {"prefill": "fa3"}, "no header", "prefill fa3: fa3 could not be built: no header; use auto or fa2"),
        (HOPPER, {"prefill": "fa4"}, "", "prefill 'fa4': allowed are auto, fa2, fa3"),
        (AMPERE, {"kv_dtype": FP8}, "", "needs a GPU of compute capability 8.9 or later, this one has 8.6"),
        (HOPPER, {"kv_dtype": torch.float32}, "", "flashinfer takes bfloat16 and fp8"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(make, capability, options, fails, message) -> None:
    with pytest.raises(UserError, match=message):
        make(capability, fails, **options)


def test_the_cache_is_of_its_type(make) -> None:
    wide, narrow = make(HOPPER), make(HOPPER, kv_dtype=FP8)
    assert wide.cache[0][0].dtype == BF16 and narrow.cache[0][1].dtype == FP8
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token
    assert fa3_limit(HOPPER, BF16) is None
