"""What each backend states that it takes, before it loads anything, against what it then holds."""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from engine.experts.base import ExpertBuffers
from engine.experts.gpu.backend import GpuExperts
from engine.experts.gpu.layout import Elementwise, Sizes, expert_layout
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.native import NativeExperts, layer_bytes
from engine.experts.reference import ReferenceExperts
from engine.experts.streamed.backend import StreamedExperts
from engine.experts.streamed.layers import LayerStream
from engine.linear.embedding import TableEmbedding
from engine.linear.gpu import GpuLinearBackend, _Tables, embedding_matrix, padded_rank, slot_table_bytes
from engine.linear.native import NativeLinearBackend, embedding_bytes, weight_bytes
from engine.weights.store import WeightTensor
from engine.weights.tiled.layout import matrix_of
from engine.weights.tiled.packer import Packer
from native import available
from testing.bridge import HostBridge
from testing.models.shapes import config
from tests.native.expert_layers import BF16, F32, E, H, I, K, tensor
from tests.native.expert_layers import Layer as MadeLayer

pytestmark = pytest.mark.skipif(not available()[0], reason=f"no native kernels: {available()[1]}")
CPU, PAGE = torch.device("cpu"), 4096
CONFIG = config(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, num_hidden_layers=2)
TYPES = ["Q8_0", "Q5_1", "Q4_0", "Q4_K", "Q6_K", "BF16", "F16", "F32"]
SIZES: dict[str, int] = {"max_rows": 24, "max_slots": 2, "max_rank": 20}


Layer = functools.cache(MadeLayer)  # only read here


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def make_pool(groups: int = 1) -> Any:
    from native import _native

    return _native.WorkerPool([[0]] * groups)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("quantise", [None, "int8", "int4"])
@pytest.mark.parametrize("plain", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_native_experts(kind: str, plain: torch.dtype, quantise: str | None, groups: int) -> None:
    for biased in (False, True):
        store = Layer(kind, biased=biased).store
        backend = NativeExperts(CONFIG, plain, make_pool(groups), quantise=quantise)
        stated = layer_bytes(store, plain.itemsize, quantise)
        backend.load_layer(0, store)
        assert stated <= backend.num_bytes <= stated + groups * PAGE
        backend.close()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "F32"])
def test_experts_held_in_one_type(kind: str, dtype: torch.dtype) -> None:
    store = Layer(kind).store
    reference = ReferenceExperts(dtype, CPU)
    reference.load_layer(0, store)
    held = reference._layers[0]
    assert num_bytes(held.gate, held.up, held.down) == store.num_weights * dtype.itemsize


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", [*TYPES, "IQ4_XS", "MXFP4", "F8_E4M3", "Q3_K"])
def test_gpu_experts_and_projections(kind: str, dtype: torch.dtype, quantise: str | None) -> None:
    """As large as in the file, where the GPU has a form for its type; hardly larger with odd sizes."""
    store = Layer(kind).store
    pack = Packer(CPU, make_pool)
    gpu = GpuExperts(CONFIG, dtype, CPU, **SIZES, quantise=quantise, pack=pack)
    gpu.load_layer(0, store)
    assert gpu.num_bytes == E * expert_layout(store, dtype.itemsize, quantise).num_bytes
    biased = GpuExperts(CONFIG, dtype, CPU, **SIZES, quantise=quantise, pack=pack)
    biased.load_layer(0, Layer(kind, biased=True).store)
    assert biased.num_bytes == gpu.num_bytes + Elementwise.planned_bytes(Sizes.of(CONFIG))
    weight = store.expert("gate", 0)
    linear = GpuLinearBackend(dtype, CPU, 2, 16, quantise, pack).load("p", weight, None)
    stated = matrix_of(weight, dtype.itemsize, quantise).num_bytes
    assert linear.product.weights.num_bytes == stated
    assert (embedding_matrix(weight, dtype.itemsize) is not None) == (weight.quantised and kind != "Q3_K")
    if weight.quantised and kind != "Q3_K":
        assert gpu.num_bytes <= 1.03 * store.num_bytes and stated <= 1.03 * weight.num_bytes
    elif quantise is None:
        assert gpu.num_bytes == store.num_weights * dtype.itemsize


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("plain", [BF16, F32], ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [*TYPES, "IQ1_S"])
def test_native_projections_and_embeddings(kind: str, plain: torch.dtype, quantise: str | None, tied: bool) -> None:
    if kind == "IQ1_S":  # no packed form
        weight = WeightTensor("w", (512, 256), kind, np.zeros(512 * 50, np.uint8))
    else:
        weight = tensor(kind, "w", 512, 256, 1, experts=1)[0][0]
    backend = NativeLinearBackend(F32, make_pool(), quantise=quantise, plain=plain)
    head = backend.load("head", weight, None)
    stated = weight_bytes(weight, plain.itemsize, quantise)
    assert 0 <= stated - head.num_bytes < PAGE
    made = backend.embedding("embedding", weight, head if tied else None)
    beside = embedding_bytes(weight, plain.itemsize, quantise, tied)
    if made is None:
        assert beside is None
    else:
        assert not isinstance(made, TableEmbedding) and beside is not None
        assert 0 <= beside - made.num_bytes < PAGE


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_rows_of_a_step(dtype: torch.dtype) -> None:
    b = ExpertBuffers.allocate(24, K, H, dtype)
    assert 24 * ExpertBuffers.row_bytes(K, H, dtype.itemsize) == num_bytes(b.ids, b.weights, b.slots, b.hidden, b.out)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_streamed_and_hybrid_experts(dtype: torch.dtype) -> None:
    """On the GPU, for which the CPU stands in."""
    sizes, layer = Sizes.of(CONFIG), Layer("F32")  # packed, an expert is never larger than what it is unpacked into
    bridge = HostBridge(NativeExperts(CONFIG, dtype, make_pool()), CONFIG, CPU)
    expert = sizes.expert_values * dtype.itemsize
    hybrid = HybridExperts(bridge, CONFIG, dtype, CPU, budget_bytes=3 * expert + 5, **SIZES)
    streamed = StreamedExperts(hybrid, CONFIG, dtype, CPU, threshold=1, **SIZES)
    for index in range(2):
        streamed.load_layer(index, layer.store)
    before = streamed.num_bytes
    streamed.begin_step(8, lora=False, eager=True)
    tables = 2 * (SIZES["max_slots"] + 1) * E * (8 + 4)
    assert streamed.num_bytes - before == LayerStream.buffer_bytes(sizes, expert) + tables
    hybrid.bind(0, ExpertBuffers.allocate(24, K, H, dtype))
    assert num_bytes(*hybrid._extra.values()) == HybridExperts.scratch_bytes(sizes, 24)
    assert num_bytes(hybrid._expert_slots) == 3 * expert
    streamed.close()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_slot_tables(dtype: torch.dtype) -> None:
    model = config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96, num_experts=8,
        moe_intermediate_size=32, num_experts_per_tok=2, num_hidden_layers=3, mlp_only_layers=(1,),
    )  # fmt: skip
    slots, rank = 2, padded_rank(20)
    q, kv = 4 * 32, 2 * 32
    attention = [((q + 2 * kv, 64), 3), ((64, q), 1)]
    dense = [((96, 64), 1), ((96, 64), 1), ((64, 96), 1)]
    shapes = [*attention * 3, *dense]
    tables = [_Tables(torch.empty(shape, dtype=dtype), parts, slots, rank) for shape, parts in shapes]
    tables += [_Tables(torch.empty(8, 64), 1, slots, rank) for _ in model.sparse_layers]
    held = num_bytes(*chain.from_iterable((t.a, t.b) for t in tables))
    assert held == slot_table_bytes(model, slots, 20, dtype.itemsize)
