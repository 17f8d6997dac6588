"""A step, and the attention half of a layer, in one native call equal the same parts called one by one, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.errors import EngineError, ExpertBackendError, UserError
from engine.experts.base import ExpertBuffers
from engine.linear.base import LoraBatch
from engine.linear.native import NativeLinear, NativeLinearBackend
from engine.linear.reference import ReferenceLinear
from engine.lora.adapter import LoraPair
from engine.model.layers import DenseMlp, Layer, SparseMlp, Trace
from engine.model.native_decoder import NativeDecoder, all_native
from engine.model.native_model import NativeQwen3Moe
from engine.model.native_ops import NativeOps
from engine.model.rope import Rope
from engine.model_config import ModelConfig
from engine.weights.store import WeightTensor
from native import _native
from tests.engine.harness import Harness
from tests.engine.test_lora_serving import Family
from tests.native.isas import ISAS
from tests.native.shapes import config

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


DENSE = pytest.mark.parametrize("dense", [[], [1], [2], [0, 1, 2]], ids=str)
IDS = torch.arange(25) * 5 % 128


def batch() -> BatchLayout:
    """Prefill, a first token, a decode row, a later chunk."""
    return batch_of([(5, 5), (1, 1), (1, 30), (18, 35)])


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[int]], Family]:
    @functools.cache
    def make(*dense: int) -> Family:
        return Family(tmp_path_factory.mktemp("family"), count=2, mlp_only_layers=list(dense))

    return lambda dense: make(*dense)


@contextmanager
def loaded(family: Family, **config: Any) -> Iterator[tuple[NativeQwen3Moe, LoraBatch]]:
    """The model with adapter 0 in slot 1 and adapter 1, which has MLPs of its own, in slot 2; a batch of the former."""
    harness = family.engine(rules=None, pack_cache="off", **config)
    model, registry = harness.core.runner.model, harness.core.registry
    assert isinstance(model, NativeQwen3Moe)
    for slot, name in enumerate(family.paths, 1):
        model.set_adapter(slot, registry.weights(registry.resolve(name)))
    slots = torch.arange(25, dtype=torch.int32) % 2
    with torch.inference_mode():
        yield model, LoraBatch(slots, [(1, slots.nonzero()[:, 0])])
    harness.close()


@DENSE
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("keep", [None, [4], [4, 5, 6, 24]], ids=str)
def test_a_step_in_one_call_has_the_bits_of_its_parts(
    family: Callable[[list[int]], Family], dense: list[int], dtype: str, with_lora: bool, keep: list[int] | None
) -> None:
    kept = None if keep is None else torch.tensor(keep)
    with loaded(family(dense), dtype=dtype) as (model, lora):
        used, traces = lora if with_lora else None, [Trace(), Trace()]
        assert model.runs_in_one_call(used)
        hidden, tokens = model.greedy_rows(IDS, batch(), used, kept, traces[0])
        rows = [model.forward(IDS, batch(), used)] if kept is None else [model.forward_rows(IDS, batch(), used, kept)]
        model._one_call = False
        by_layers, expected = model.greedy_rows(IDS, batch(), used, kept, traces[1])
        one_by_one = model.forward(IDS, batch(), used, observe=lambda place, value: None)
    rows += [by_layers, one_by_one if kept is None else one_by_one[kept]]
    assert torch.isfinite(hidden).all() and all(torch.equal(hidden, other) for other in rows)
    assert torch.equal(tokens, expected)
    assert len(traces[0].ids) == len(traces[1].ids) == 3 - len(dense)
    assert all(torch.equal(a, b) for a, b in zip(traces[0].ids, traces[1].ids, strict=True))
    assert traces[0].experts_touched == traces[1].experts_touched and (traces[0].experts_s > 0) == (len(dense) < 3)


def test_what_needs_python_between_layers_is_not_one_call(family: Callable[[list[int]], Family]) -> None:
    slots = torch.full((25,), 2, dtype=torch.int32)
    with loaded(family([1])) as (model, lora):
        own_mlps = LoraBatch(slots, [(2, torch.arange(25))])
        assert model.runs_in_one_call(lora) and not model.runs_in_one_call(own_mlps)
        hidden = model.forward_rows(IDS, batch(), own_mlps, torch.arange(25))
        assert torch.equal(hidden, model.forward(IDS, batch(), own_mlps, observe=lambda place, value: None))
    for other in ({"expert_backend": "reference"}, {"linear_backend": "reference"}):
        model = Harness(family([1]).model_path, rules=None, pack_cache="off", **other).core.runner.model
        assert not isinstance(model, NativeQwen3Moe) or not model.runs_in_one_call(None)


def test_an_error_in_one_call_names_its_layer_and_ends_that_step_only(
    family: Callable[[list[int]], Family],
) -> None:
    with loaded(family([0])) as (model, lora):
        expected = model.forward(IDS, batch(), lora)
        far = LoraBatch(torch.full((25,), 70000, dtype=torch.int32), [(70000, torch.arange(25))])
        with pytest.raises(ExpertBackendError, match="layer 1, native experts: slots: 70000; allowed are 0 to 65535"):
            model.forward(IDS, batch(), far)
        with pytest.raises(EngineError, match="keep: 4; allowed is rising, 5 to 24"):
            model.forward_rows(IDS, batch(), lora, torch.tensor([4, 4]))
        with pytest.raises(EngineError, match="kept: 26"):
            model.forward_rows(IDS, batch(), lora, torch.arange(26))
        with pytest.raises(EngineError, match=r"keep: torch\.int32"):
            model.forward_rows(IDS, batch(), lora, torch.tensor([4], dtype=torch.int32))
        with pytest.raises(EngineError, match="positions: 99999 of token 0"):
            model.forward(IDS, dataclasses.replace(batch(), positions=torch.full((25,), 99999)), lora)
        with pytest.raises(EngineError, match=r"slots: torch.int64 \(25,\)"):
            model.forward(IDS, batch(), LoraBatch(lora.slots.long(), lora.groups))
        assert torch.equal(model.forward(IDS, batch(), lora), expected)


def test_a_step_before_the_head_is_known_is_refused() -> None:
    parts = Parts(config(), torch.bfloat16)
    with pytest.raises(EngineError, match="only if every part is native"):
        parts.decoder().run(torch.zeros(2, 64).bfloat16(), batch_of([(2, 2)]), None, None, False, None)
    kernel = parts.decoder()._kernel
    with pytest.raises(ValueError, match="run: allowed behind set_head"):
        kernel.run(0, 0, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="dense MLP: allowed in layers without a router"):
        kernel.set_dense(0, *[parts.linear(64, 64).packed] * 3)
    with pytest.raises(ValueError, match=r"up_proj: \[32, 64\]; allowed is \[64, 64\]"):
        kernel.set_dense(1, *[parts.linear(n, 64).packed for n in (64, 32, 64)])
    kernel.set_head(0, parts.linear(128, 64).packed, 0, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="layer 0: no MLP; allowed is run behind set_experts or set_dense"):
        kernel.run(0, 0, 0, 0, 0, 0, 0, 0, 0)


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
