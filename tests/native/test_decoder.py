"""The attention half of a layer in one native call equals the same parts called one by one, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.errors import EngineError, UserError
from engine.experts.base import ExpertBuffers
from engine.linear.base import LoraBatch
from engine.linear.native import NativeLinear, NativeLinearBackend
from engine.linear.reference import ReferenceLinear
from engine.lora.adapter import LoraPair
from engine.model.native_decoder import NativeDecoder, NativeQwen3Moe, all_native
from engine.model.native_ops import NativeOps
from engine.model.qwen3_moe import DenseMlp, Layer, SparseMlp
from engine.model.rope import Rope
from engine.model_config import ModelConfig
from engine.weights.store import WeightTensor
from native import _native
from tests.engine.harness import Harness
from tests.native.isas import ISAS
from tests.native.shapes import config
from tests.tiny import save_hf, tiny_model

POOL = _native.WorkerPool([[0, 1, 2]])


class Parts:
    """Two layers, the second dense, with an adapter in slot 1 on all projections; fresh KV."""

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, isa: str = "", weights: torch.dtype | None = None
    ) -> None:
        """`weights`: type of plain weights and of the KV cache, by default `dtype`."""
        self.model, self.dtype = model, dtype
        self.random = torch.Generator().manual_seed(7)
        self.backend = NativeLinearBackend(dtype, POOL, isa, plain=weights)
        self.router = NativeLinearBackend(torch.float32, POOL, isa)
        self.ops = NativeOps(1e-6, Rope(model, 512, torch.device("cpu")), POOL, isa)
        self.attention = NativeAttention(model, 32, dtype, POOL, isa, kv_dtype=weights)
        self.layers = [self.layer(sparse=True), self.layer(sparse=False)]
        self.buffers = ExpertBuffers.allocate(64, model.num_experts_per_tok, model.hidden_size, dtype)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def linear(self, n: int, k: int, backend: NativeLinearBackend | None = None) -> NativeLinear:
        data = (self.draw(n, k) / k**0.5).view(torch.uint8).numpy().ravel()
        made = (backend or self.backend).load("w", WeightTensor("w", (n, k), "F32", data), None)
        made.set_adapter(1, LoraPair(self.draw(4, k) / k**0.5, self.draw(n, 4), 0.5))
        return made

    def layer(self, sparse: bool) -> Layer:
        m = self.model
        hidden, q, kv = m.hidden_size, m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
        linears = [self.linear(n, hidden) for n in (q, kv, kv)] + [self.linear(hidden, q)]
        norms = [self.draw(n).to(self.dtype) for n in (hidden, m.head_dim, m.head_dim, hidden)]
        nothing: Any = None
        mlp: SparseMlp | DenseMlp = DenseMlp(nothing, nothing, nothing)
        if sparse:
            mlp = SparseMlp(self.linear(m.num_experts, hidden, self.router), nothing, nothing)
        q_proj, k_proj, v_proj, o_proj = linears
        return Layer(
            input_norm=norms[0],
            q=q_proj,
            k=k_proj,
            v=v_proj,
            joined=self.backend.join(linears[:3]),
            o=o_proj,
            q_norm=norms[1],
            k_norm=norms[2],
            attention=self.attention,
            post_norm=norms[3],
            mlp=mlp,
        )

    def decoder(self) -> NativeDecoder:
        return NativeDecoder(self.model, self.ops, self.layers, self.buffers, self.dtype)

    def one_by_one(
        self, index: int, residual: torch.Tensor, delta: torch.Tensor | None, batch: BatchLayout, lora: LoraBatch
    ) -> list[torch.Tensor]:
        layer, m = self.layers[index], self.model
        x = self.ops.add_rms_norm(residual, delta, layer.input_norm)
        q, k, v = (part.view(len(x), -1, m.head_dim) for part in layer.qkv(x, lora))
        q, k = self.ops.qk_norm_rope(q, k, layer.q_norm, layer.k_norm, batch.positions)
        delta = layer.o(self.attention.forward(index, q, k, v).flatten(1), lora)
        x = self.ops.add_rms_norm(residual, delta, layer.post_norm)
        if isinstance(layer.mlp, DenseMlp):
            return [residual, x]
        return [residual, x, *self.ops.route(layer.mlp.router(x.float(), lora), m.num_experts_per_tok, True)]


def batch_of(rows: list[tuple[int, int]]) -> BatchLayout:
    """(new tokens, context) of each row; blocks in order."""
    starts, tables, used = [0], [], 0
    for tokens, context in rows:
        starts.append(starts[-1] + tokens)
        count = -(-context // 16)
        tables.append(tuple(range(used, used + count)))
        used += count
    positions = torch.cat([torch.arange(context - tokens, context) for tokens, context in rows])
    return BatchLayout(starts, [c for _, c in rows], tables, positions, torch.zeros(starts[-1], dtype=torch.int64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["bf16", "float32", "float32 over bf16"],
)
@settings(max_examples=10)
@given(
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([32, 48]),
    hidden=st.sampled_from([32, 96]),
    experts=st.sampled_from([5, 16]),
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    with_delta=st.booleans(),
)
def test_equals_its_parts(
    isa: str,
    dtype: torch.dtype,
    weights: torch.dtype,
    group: int,
    head_dim: int,
    hidden: int,
    experts: int,
    rows: list[tuple[int, int]],
    with_delta: bool,
) -> None:
    model = config(
        hidden_size=hidden,
        num_attention_heads=2 * group,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=3,
    )
    parts = Parts(model, dtype, isa, weights)
    decoder = parts.decoder()
    batch = batch_of([(tokens, tokens + before) for tokens, before in rows])
    tokens = batch.num_tokens
    slots = torch.arange(tokens, dtype=torch.int32) % 2
    lora = LoraBatch(slots, [(1, (slots == 1).nonzero()[:, 0])])
    residual = parts.draw(tokens, hidden).to(dtype)
    delta = parts.draw(tokens, hidden).to(dtype) if with_delta else None
    parts.attention.plan(batch)
    for index in (0, 1):
        ours = residual.clone()
        out = decoder.attend(index, ours, delta, batch, lora)
        got = [ours, out.clone()]
        if index == 0:
            got += [parts.buffers.weights[:tokens].clone(), parts.buffers.ids[:tokens].clone()]
            assert out.data_ptr() == parts.buffers.hidden.data_ptr()
        expected = parts.one_by_one(index, residual.clone(), delta, batch, lora)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_model_runs_two_calls_a_layer_with_the_same_bits(tmp_path: Path, sparse: bool, dtype: str) -> None:
    """With an observer the parts run one by one; without, the attention half is one call."""
    save_hf(tiny_model(3, num_hidden_layers=3, mlp_only_layers=[1] if sparse else [0, 1, 2]), tmp_path)
    harness = Harness(tmp_path, rules=None, dtype=dtype, pack_cache="off")
    model = harness.core.runner.model
    assert isinstance(model, NativeQwen3Moe)
    batch = batch_of([(5, 5), (1, 1), (18, 18)])
    ids = torch.arange(24) * 5 % 128
    with torch.inference_mode():
        together = model.forward(ids, batch, None).clone()
        one_by_one = model.forward(ids, batch, None, observe=lambda place, value: None)
    assert torch.isfinite(together).all() and torch.equal(together, one_by_one)
    harness.close()


def test_refusals() -> None:
    parts = Parts(config(), torch.bfloat16)
    decoder = parts.decoder()
    batch = batch_of([(2, 2)])
    parts.attention.plan(batch)
    good = torch.zeros(2, 64).bfloat16()
    with pytest.raises(EngineError, match="residual"):
        decoder.attend(0, good.float(), None, batch, None)
    with pytest.raises(EngineError, match="delta"):
        decoder.attend(0, good, good[:1], batch, None)
    with pytest.raises(EngineError, match="positions"):
        decoder.attend(0, good[:1], None, batch, None)
    with pytest.raises(EngineError, match="layer 1: tokens: 1"):
        decoder.attend(1, good[:1], None, dataclasses.replace(batch, positions=torch.zeros(1, dtype=torch.int64)), None)
    with pytest.raises(EngineError, match="experts' buffers hold 64"):
        decoder.attend(0, torch.zeros(65, 64).bfloat16(), None, batch, None)
    parts.layers[0].q = ReferenceLinear(torch.zeros(128, 64), None)
    assert not all_native(parts.layers, parts.ops)
    with pytest.raises(UserError, match="native"):
        parts.decoder()
    with pytest.raises(UserError, match=r"computes in torch.float32, its attention in torch.bfloat16"):
        mixed = Parts(config(), torch.bfloat16)
        NativeDecoder(mixed.model, mixed.ops, mixed.layers, mixed.buffers, torch.float32)
    parts.layers[0].q = parts.linear(64, 64)
    with pytest.raises(UserError, match=r"layer 0: q_proj: \[64, 64\]; allowed is \[128, 64\]"):
        parts.decoder()
