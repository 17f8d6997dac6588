"""Native projections against float32 of the dequantised weights; adapters; a row's bits depend on that row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, UserError
from engine.linear.base import LoraBatch
from engine.linear.embedding import BlockEmbedding, PackedEmbedding
from engine.linear.native import NativeLinear, NativeLinearBackend
from engine.lora.adapter import LoraPair
from engine.weights.scaled_blocks import F8
from engine.weights.store import WeightTensor
from native import _native
from testing.models.block_types import encode
from testing.models.quantised import made_blocks
from tests.native.blocks import QUANTISED, values_of_block
from tests.native.isas import ISAS

POOL = _native.WorkerPool([[0, 1, 2]])
BF16, F32 = torch.bfloat16, torch.float32
# mean|d| / mean|ref|: bf16 and float32 round the result; int8 activations cost the rest
BOUNDS = {"f32": 2e-6, "bf16": 0.004, "int8": 0.015}
BLOCKS = QUANTISED


def tensor(values: torch.Tensor, type: str) -> tuple[WeightTensor, torch.Tensor]:
    """(the weight as a file holds it, the float32 values it stands for)."""
    if type == "BF16":
        data = values.to(BF16).contiguous().view(torch.uint8).numpy().ravel()
        return WeightTensor("w", tuple(values.shape), type, data), values.to(BF16).float()
    if type == F8 or type.startswith("INT4"):
        blocks, exact = made_blocks(values, type)
        return WeightTensor("w", tuple(values.shape), type, blocks), exact
    data, exact = encode(values, type)
    return WeightTensor("w", tuple(values.shape), type, np.ascontiguousarray(data).view(np.uint8).ravel()), exact


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora_batch(slots: list[int]) -> LoraBatch:
    groups = [(s, torch.tensor([i for i, t in enumerate(slots) if t == s])) for s in sorted(set(slots) - {0})]
    return LoraBatch(torch.tensor(slots, dtype=torch.int32), groups)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).abs().mean() / expected.abs().mean())


def pairs(out_features: int, in_features: int, dtype: torch.dtype, ranks: dict[int, int]) -> dict[int, LoraPair]:
    return {
        slot: LoraPair(
            (draw(rank, in_features, seed=slot) * 0.3).to(dtype),
            (draw(out_features, rank, seed=slot + 50) * 0.3).to(dtype),
            0.5 * slot,
        )
        for slot, rank in ranks.items()
    }


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", *BLOCKS])
@settings(max_examples=12)
@given(data=st.data())
def test_equals_float32(isa: str, type: str, data: st.DataObject) -> None:
    unit = values_of_block(type) if type in BLOCKS else 1
    n, k = data.draw(st.integers(1, 150)), unit * data.draw(st.integers(1, 512 // unit))
    rows = data.draw(st.one_of(st.integers(1, 20), st.sampled_from([95, 97, 200])))
    dtype = data.draw(st.sampled_from([BF16, F32]))
    biased = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 999))
    weight, exact = tensor(draw(n, k, seed=seed), type)
    bias, exact_bias = tensor(draw(n, seed=seed + 1) * 5, "F32")
    x = draw(rows, k, seed=seed + 2).to(dtype)
    linear = NativeLinearBackend(dtype, POOL, isa).load("w", weight, bias if biased else None)
    expected = x.float() @ exact.T + (exact_bias if biased else 0)
    out = linear(x, None)
    assert out.dtype == dtype and out.shape == (rows, n)
    wide = type in ("F32", "F16", "BF16") and dtype == F32
    bound = BOUNDS["int8" if type in BLOCKS else "f32" if wide else "bf16"]
    # a handful of outputs has no mean to speak of: measured against their spread, |x| |w| / sqrt(k), and more loosely
    spread = x.float().norm(dim=1)[:, None] * exact.norm(dim=1) / k**0.5
    bound *= 3 if n * rows < 256 else 1
    assert (out.float() - expected).abs().mean() < bound * max(expected.abs().mean(), spread.mean())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@settings(max_examples=8)
@given(data=st.data())
def test_adapters_act_on_their_rows_only(isa: str, type: str, dtype: torch.dtype, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 90)), 256
    slots = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=80))
    stored = data.draw(st.sampled_from([BF16, F32]))
    ranks = {slot: data.draw(st.integers(1, 40)) for slot in (1, 2, 4)}  # slot 3 has no pair for this projection
    weight, _ = tensor(draw(n, k, seed=1), type)
    backend = NativeLinearBackend(dtype, POOL, isa)
    linear, plain = backend.load("w", weight, None), backend.load("w", weight, None)
    x = draw(len(slots), k, seed=3).to(dtype)
    held = pairs(n, k, stored, ranks)
    for slot, pair in held.items():
        linear.set_adapter(slot, pair)
    out, base = linear(x, lora_batch(slots)), plain(x, None)
    delta = torch.zeros(len(slots), n)
    for i, slot in enumerate(slots):
        if slot in held:
            p = held[slot]
            delta[i] = p.scale * (x[i].float() @ p.a.float().T) @ p.b.float().T
        else:
            assert torch.equal(out[i], base[i])
    if delta.any():
        bound = 1e-5 if linear.format == "f32" else 0.006
        error = (out.float() - (base.float() + delta)).abs().mean()
        assert error / (base.float() + delta).abs().mean() < bound


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", ["F32", "BF16", *BLOCKS])
def test_a_row_does_not_see_its_neighbours(isa: str, type: str) -> None:
    n, k = 75, 512
    weight, _ = tensor(draw(n, k, seed=1), type)
    bias, _ = tensor(draw(n, seed=2), "F32")
    for dtype in (BF16, F32):
        linear = NativeLinearBackend(dtype, POOL, isa, deterministic=True).load("w", weight, bias)
        for slot, pair in pairs(n, k, BF16, {1: 16, 2: 5}).items():
            linear.set_adapter(slot, pair)
        x = draw(300, k, seed=4).to(dtype)
        slots = [i * i % 3 for i in range(300)]
        alone = torch.cat([linear(x[i : i + 1], lora_batch(slots[i : i + 1])) for i in range(300)])
        for begin, end in ((0, 300), (0, 2), (3, 6), (10, 17), (5, 13), (40, 80), (99, 196), (1, 258)):
            assert torch.equal(linear(x[begin:end], lora_batch(slots[begin:end])), alone[begin:end])
        order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
        assert torch.equal(linear(x[order], lora_batch([slots[i] for i in order])), alone[order])
        for _ in range(10):
            assert torch.equal(linear(x, lora_batch(slots)), alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", BLOCKS)
def test_many_rows(isa: str, type: str) -> None:
    """Unless deterministic, many rows may be rounded otherwise, at least as well, and the same every time."""
    weight, values = tensor(draw(75, 512, seed=1), type)
    x = draw(300, 512, seed=4)
    exact, fast = (NativeLinearBackend(F32, POOL, isa, deterministic=d).load("w", weight, None) for d in (True, False))
    errors = [relative_error(linear(x, None), x @ values.T) for linear in (exact, fast)]
    assert errors[1] < 1.1 * errors[0]
    out = fast(x, None)
    other = NativeLinearBackend(F32, _native.WorkerPool([[0], [1]]), isa).load("w", weight, None)
    assert torch.equal(other(x, None), out)
    assert torch.equal(fast(x[:5], None), exact(x[:5], None))
    x[150:] = 100  # the other rows' values never show
    assert torch.equal(fast(x, None)[:150], out[:150])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_projections_of_one_input_in_one_call(isa: str, rows: int) -> None:
    k = 256
    backend = NativeLinearBackend(BF16, POOL, isa)
    types = [("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 33), ("BF16", 7)]
    linears = [backend.load("w", tensor(draw(n, k, seed=i), t)[0], None) for i, (t, n) in enumerate(types)]
    linears[1].set_adapter(2, pairs(32, k, F32, {2: 8})[2])
    linears[3].set_adapter(2, pairs(7, k, F32, {2: 3})[2])
    x, lora = draw(rows, k, seed=9).to(BF16), lora_batch([i % 3 for i in range(rows)])
    for together, linear in zip(backend.join(linears)(x, lora), linears, strict=True):
        assert torch.equal(together, linear(x, lora))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_K"])
def test_shards_change_no_bit(isa: str, type: str) -> None:
    """Nodes that do not exist here: their memory is wherever it is touched, the split is the real one."""
    sizes, k = (1, 16, 70, 300), 256
    bias, _ = tensor(draw(300, seed=2), "F32")
    x, lora = draw(100, k, seed=9), lora_batch([i % 3 for i in range(100)])
    held = pairs(300, k, BF16, {1: 5, 2: 17})

    def outputs(pool: Any) -> list[torch.Tensor]:
        backend = NativeLinearBackend(F32, pool, isa)
        linears = [backend.load("w", tensor(draw(n, k, seed=n), type)[0], bias if n == 300 else None) for n in sizes]
        assert {linear.packed.shards for linear in linears} == {pool.groups}
        for slot, pair in held.items():
            linears[3].set_adapter(slot, pair)
        ends = [linears[3].packed.first_panel(shard) for shard in range(pool.groups + 1)]
        assert ends[0] == 0 and ends[-1] == 19 and ends == sorted(ends)
        outs = [linear(x[:rows], lora.rows(torch.arange(rows))) for linear in linears for rows in (1, 3, 17, 100)]
        return [*outs, *backend.join(linears)(x, lora)]

    expected = outputs(POOL)
    for groups in ([[0], [0]], [[0, 1], [0]], [[0], [0], [0]], [[0, 0], [0], [0], [0]]):
        for got, want in zip(outputs(_native.WorkerPool(groups)), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", *BLOCKS, "IQ1_S"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_rows_are_the_files(type: str, dtype: torch.dtype, tied: bool) -> None:
    weight, exact = tensor(draw(150, 256, seed=1), type)
    for pool in (POOL, _native.WorkerPool([[0], [0]])):
        backend = NativeLinearBackend(dtype, pool)
        embedding = backend.embedding("embed", weight, backend.load("head", weight, None) if tied else None)
        packed = type in BLOCKS or (type == "F16" and dtype == BF16) or (tied and (dtype == F32 or type == "BF16"))
        if embedding is None:
            assert not weight.quantised and not packed
            continue
        assert isinstance(embedding, PackedEmbedding if packed else BlockEmbedding)
        assert embedding.num_bytes <= (0 if tied and packed else 1.7 * weight.num_bytes)
        for ids in ([], [149], [3, 3, 0, 148, 16, 15], list(range(150)) * 2):
            assert torch.equal(embedding(torch.tensor(ids, dtype=torch.int64)), exact[ids])
        for wrong in (-1, 150):
            with pytest.raises(EngineError, match="allowed"):
                embedding(torch.tensor([0, wrong]))


def test_a_quantised_on_request_head_is_no_embedding() -> None:
    weight, _ = tensor(draw(40, 64, seed=1), "BF16")
    backend = NativeLinearBackend(BF16, POOL, quantise="int8")
    assert backend.embedding("embed", weight, backend.load("head", weight, None)) is None


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", ["F32", "BF16", *BLOCKS])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(isa: str, type: str, value: float) -> None:
    weight, _ = tensor(draw(40, 256, seed=1), type)
    linear = NativeLinearBackend(BF16, POOL, isa).load("w", weight, None)
    x = draw(9, 256, seed=2).to(BF16)
    expected = linear(x, None)
    x[4, 33] = value
    out = linear(x, None)
    assert not torch.isfinite(out[4]).any()
    rest = [i for i in range(9) if i != 4]
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.parametrize("isa", ISAS)
def test_many_rows_and_many_outputs(isa: str) -> None:
    backend = NativeLinearBackend(BF16, POOL, isa)
    weight, exact = tensor(draw(64, 64, seed=1), "Q8_0")
    x = draw(4096, 64, seed=2).to(BF16)
    assert relative_error(backend.load("w", weight, None)(x, None), x.float() @ exact.T) < BOUNDS["int8"]
    weight, exact = tensor(draw(151936, 32, seed=1), "Q8_0")
    assert relative_error(backend.load("w", weight, None)(x[:2, :32], None), x[:2, :32].float() @ exact.T) < 0.015


@pytest.mark.parametrize("isa", ISAS)
def test_strided_rows_and_no_rows(isa: str) -> None:
    weight, _ = tensor(draw(40, 64, seed=1), "BF16")
    linear = NativeLinearBackend(BF16, POOL, isa).load("w", weight, None)
    wide = draw(5, 200, seed=2).to(BF16)
    assert torch.equal(linear(wide[:, 100:164], None), linear(wide[:, 100:164].contiguous(), None))
    assert linear(wide[:0, :64], None).shape == (0, 40)


def test_an_adapter_is_replaced_and_cleared() -> None:
    weight, _ = tensor(draw(40, 64, seed=1), "BF16")
    linear = NativeLinearBackend(BF16, POOL).load("w", weight, None)
    x, lora = draw(3, 64, seed=2).to(BF16), lora_batch([1, 0, 1])
    base = linear(x, lora)
    assert not linear.packed.has_adapters
    first, second = pairs(40, 64, F32, {1: 4, 2: 9}).values()
    linear.set_adapter(1, first)
    with_first = linear(x, lora)
    linear.set_adapter(1, second)
    with_second = linear(x, lora)
    assert not torch.equal(with_first, with_second) and torch.equal(with_second[1], base[1])
    linear.set_adapter(1, first)
    assert torch.equal(linear(x, lora), with_first)
    linear.set_adapter(1, None)
    assert torch.equal(linear(x, lora), base) and not linear.packed.has_adapters


@pytest.mark.parametrize("quantise", ["int8", "int4"])
def test_quantised_on_request(quantise: str) -> None:
    weight, exact = tensor(draw(64, 128, seed=1), "BF16")
    linear = NativeLinearBackend(BF16, POOL, quantise=quantise).load("w", weight, None)
    x = draw(20, 128, seed=2).to(BF16)
    assert linear.format == {"int8": "i8", "int4": "i4m"}[quantise]
    assert relative_error(linear(x, None), x.float() @ exact.T) < {"int8": 0.02, "int4": 0.15}[quantise]


@pytest.mark.parametrize("type", ["F32", "BF16", "F16", *BLOCKS])
def test_weights_are_kept_as_the_file_has_them(type: str) -> None:
    weight, exact = tensor(draw(19, 512, seed=1), type)
    linear = NativeLinearBackend(F32, POOL).load("w", weight, None)
    rows, ids = torch.empty_like(exact), torch.arange(19)
    linear.packed.rows(POOL, ids.data_ptr(), 19, rows.data_ptr())
    assert torch.equal(rows, exact)


def test_types_without_a_packed_format_are_dequantised() -> None:
    weight, exact = tensor(draw(32, 256, seed=1), "IQ1_S")
    linear = NativeLinearBackend(BF16, POOL).load("w", weight, None)
    x = draw(8, 256, seed=2).to(BF16)
    assert linear.format == "bf16"
    assert relative_error(linear(x, None), x.float() @ exact.T) < BOUNDS["bf16"]


def make(n: int = 40, k: int = 64) -> NativeLinear:
    return NativeLinearBackend(BF16, POOL).load("q_proj", tensor(draw(n, k, seed=1), "BF16")[0], None)


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="float16"):
        NativeLinearBackend(torch.float16, POOL)
    with pytest.raises(UserError, match="allowed are int8, int4"):
        NativeLinearBackend(BF16, POOL, quantise="q2")
    with pytest.raises(UserError, match="sse"):
        NativeLinearBackend(BF16, POOL, isa="sse")
    backend = NativeLinearBackend(BF16, POOL)
    weight, _ = tensor(draw(4, 64, seed=1), "BF16")
    with pytest.raises(UserError, match="q_proj: shape"):
        backend.load("q_proj", WeightTensor("w", (4, 8, 8), "BF16", weight.data), None)
    with pytest.raises(UserError, match="q_proj: data_bytes"):
        backend.load("q_proj", WeightTensor("w", (5, 64), "BF16", weight.data), None)
    with pytest.raises(UserError, match="q_proj: bias"):
        backend.load("q_proj", weight, tensor(draw(5, seed=1), "F32")[0])
    x = draw(3, 64, seed=1).to(BF16)
    linear = make()
    for bad in (x.half(), x[:, :32], x[None], x.T.contiguous().T):
        with pytest.raises(EngineError, match="q_proj: x"):
            linear(bad, None)
    with pytest.raises(EngineError, match="slots"):
        linear(x, lora_batch([1, 1]))
    with pytest.raises(EngineError, match="slot 0"):
        linear.set_adapter(0, None)
    with pytest.raises(EngineError, match="LoRA A"):
        linear.set_adapter(1, LoraPair(torch.zeros(2, 65), torch.zeros(40, 2), 1.0))
    with pytest.raises(EngineError, match="LoRA A"):
        linear.set_adapter(1, LoraPair(torch.zeros(2, 64), torch.zeros(41, 2), 1.0))
    with pytest.raises(EngineError, match="share their input"):
        backend.join([make(), make(k=32)])
