"""What calls of the native paged attention may hold: tables, tensors, shapes; what is refused, and how."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.base import BatchLayout
from engine.errors import EngineError, UserError
from tests.native.test_attention import BF16, F32, Kernels, Shape, draw_sequences, step, whole


def test_slices_of_one_tensor() -> None:
    shape = Shape()
    (s,) = draw_sequences(shape, [40], torch.bfloat16, seed=2)
    expected = whole(shape.make(torch.bfloat16, Kernels()), s, [])
    fused = torch.cat([t.flatten(1) for t in (s.q, s.k, s.v)], dim=1)
    q, k, v = fused.split([8 * 64, 2 * 64, 2 * 64], dim=1)
    s.q, s.k, s.v = q.view(40, 8, 64), k.view(40, 2, 64), v.view(40, 2, 64)
    backend = shape.make(torch.bfloat16, Kernels())
    backend.plan(BatchLayout([0, 40], [40], [s.blocks], torch.arange(40), torch.zeros(40, dtype=torch.int64)))
    assert torch.equal(backend.forward(0, s.q, s.k, s.v), expected)


@pytest.mark.parametrize("head_dim", [0, 8, 24, 40, 272])
def test_head_dims_that_are_refused(head_dim: int) -> None:
    with pytest.raises(UserError, match=f"head_dim {head_dim}") as caught:
        Shape(head_dim=head_dim).make(torch.bfloat16, Kernels())
    assert caught.value.field == "head_dim"


def test_products_that_are_refused() -> None:
    with pytest.raises(UserError, match="products: float16"):
        Shape().make(BF16, Kernels("", "float16"))
    with pytest.raises(UserError, match="avx2 has those of int16 only"):
        Shape().make(BF16, Kernels("avx2", "bfloat16"))


def test_other_refusals() -> None:
    with pytest.raises(UserError, match=r"kv_dtype torch.float32: beside torch.bfloat16 it is"):
        Shape().make(BF16, Kernels(), kv=F32)
    with pytest.raises(UserError, match=r"kv_dtype torch.float16"):
        Shape().make(F32, Kernels(), kv=torch.float16)
    with pytest.raises(UserError, match="float16"):
        Shape().make(torch.float16, Kernels())
    with pytest.raises(UserError, match="kv_heads"):
        Shape(heads=9).make(torch.bfloat16, Kernels())
    with pytest.raises(UserError, match="num_blocks: 0"):
        Shape().make(torch.bfloat16, Kernels(), num_blocks=0)
    with pytest.raises(UserError, match="sse"):
        Shape().make(torch.bfloat16, Kernels("sse"))


@pytest.mark.parametrize(
    ("starts", "contexts", "tables", "message"),
    [
        ([0, 2], [2], [(256,)], "block_tables: 256"),
        ([0, 2], [2], [(-1,)], "block_tables: -1"),
        ([0, 2], [17], [(0,)], "blocks of a row: 1"),
        ([0, 2], [1], [(0,)], "context_lens: 1"),
        ([0, 0], [1], [(0,)], "tokens of a row: 0"),
        ([0, 2], [2, 3], [(0,)], "row_starts: 2"),
        ([1, 2], [2], [(0,)], "row_starts\\[0\\]: 1"),
    ],
)
def test_bad_plans(starts: list[int], contexts: list[int], tables: list[tuple[int, ...]], message: str) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(EngineError, match=message):
        Shape().make(torch.bfloat16, Kernels()).plan(BatchLayout(starts, contexts, tables, empty, empty))


@pytest.mark.parametrize(
    "table",
    [
        array("i", [5, 3, 9]),
        [5, 3, 9],
        array("q", [5, 3, 9]),
        np.array([5, 3, 9], np.int32),
        np.array([5, 0, 3, 0, 9], np.int32)[::2],
        array("i", [5, 3, 9, 256]),  # beyond what is read
    ],
)
def test_block_tables_of_any_kind(table: Any) -> None:
    (s,) = draw_sequences(Shape(), [40], BF16, seed=12)
    empty = torch.zeros(0, dtype=torch.int64)
    outs = []
    for blocks in (table, (5, 3, 9)):
        backend = Shape().make(BF16, Kernels())
        backend.plan(BatchLayout([0, 40], [40], [blocks], empty, empty))
        outs.append(
            (backend.forward(0, s.q, s.k, s.v), torch.from_numpy(backend.host_planes()[0][0, [3, 5, 9]].copy()))
        )
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_bad_calls() -> None:
    backend = Shape().make(torch.bfloat16, Kernels())
    (s,) = draw_sequences(Shape(), [4], torch.bfloat16, seed=2)
    step(backend, 0, [(s, 0, 4)])
    with pytest.raises(EngineError, match="layer: 2"):
        backend.forward(2, s.q, s.k, s.v)
    with pytest.raises(EngineError, match="tokens: 3"):
        backend.forward(0, s.q[:3], s.k[:3], s.v[:3])
    with pytest.raises(EngineError, match=r"k is torch\.float32"):
        backend.forward(0, s.q, s.k.float(), s.v)
    with pytest.raises(EngineError, match=r"v is torch\.bfloat16"):
        backend.forward(0, s.q, s.k, s.v[:, :1])
    with pytest.raises(EngineError, match=r"q is torch\.bfloat16"):
        backend.forward(0, s.q.transpose(1, 2).contiguous().transpose(1, 2), s.k, s.v)
    with pytest.raises(EngineError, match="layer: 2"):
        backend.set_sinks(2, torch.zeros(8))
    for wrong in (torch.zeros(7), torch.zeros(8, dtype=torch.bfloat16)):
        with pytest.raises(EngineError, match=r"sinks: .*; wanted float32 \[8\]"):
            backend.set_sinks(0, wrong)
