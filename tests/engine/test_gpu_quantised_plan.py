"""What a quantised model takes in GPU memory, planned from its types and shapes alone."""

from __future__ import annotations

from math import prod
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.planning.plan as build
from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import FLOAT32_MODULES
from engine.config import EngineConfig
from engine.errors import UserError
from engine.experts.gpu.layout import Sizes
from engine.files.model_file import ModelFile
from engine.lora.budget import AdapterSize
from engine.memory.limits import Memory
from engine.planning.gpu_experts import WHOLE_KV_TOKENS
from engine.planning.plan import EnginePlan
from engine.weights.layout import HEAD, expert_shape, tensors
from engine.weights.store import ExpertStore, WeightSource, WeightTensor
from native import available
from rules import Machine
from testing.models.shapes import config

pytestmark = pytest.mark.skipif(not available()[0], reason=f"no native kernels: {available()[1]}")
GPU = Machine(gpu=True, native=True, kt=False, flashinfer=True, gpu_count=1, reasons={})


class Unread:
    """Bytes of a file that nobody reads."""

    def __init__(self, kind: str, shape: tuple[int, ...]) -> None:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        self.nbytes = prod(shape) // block * size

    def __getitem__(self, _: slice) -> Unread:
        return self


class Q4KM(WeightSource):
    """A model as llama.cpp's Q4_K_M mixes types: values and `down` of some layers in Q6_K, the rest in Q4_K."""

    def __init__(self, model: ModelConfig) -> None:
        self.config = model
        self._shapes = {name: tensor.shape for name, tensor in tensors(model).items()}

    def _finer(self, layer: int) -> bool:
        count = self.config.num_hidden_layers
        return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2

    def _tensor(self, name: str, kind: str, shape: tuple[int, ...]) -> WeightTensor:
        return WeightTensor(name, shape, kind, Unread(kind, shape))  # type: ignore[arg-type]

    def tensor(self, name: str) -> WeightTensor:
        shape = self._shapes[name]
        kind = "Q4_K"
        if len(shape) == 1 or name.endswith(tuple(f"{module}.weight" for module in FLOAT32_MODULES)):
            kind = "F32"
        elif name == HEAD or (".v_proj." in name and self._finer(int(name.split(".")[2]))):
            kind = "Q6_K"
        return self._tensor(name, kind, shape)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> list[str]:
        return list(self._shapes)

    def experts(self, layer: int) -> ExpertStore:
        made = []
        for name in ("gate", "up", "down"):
            kind = "Q6_K" if name == "down" and self._finer(layer) else "Q4_K"
            made.append(self._tensor(name, kind, (self.config.num_experts, *expert_shape(self.config, name))))
        return ExpertStore(layer, *made)

    @property
    def num_bytes(self) -> int:
        dense = sum(self.tensor(name).num_bytes for name in self.names())
        return dense + sum(self.experts(layer).num_bytes for layer in self.config.sparse_layers)

    @property
    def files(self) -> list[ModelFile]:
        return []


def gpu_blocks(model: ModelConfig, rank: int) -> int:
    """Bytes of expert LoRA in bf16."""
    return 2 * len(model.sparse_layers) * model.num_experts * Sizes.of(model).lora_block(rank)


@pytest.fixture(scope="module")
def source() -> Q4KM:
    model = config(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        max_position_embeddings=40960,
    )  # fmt: skip
    return Q4KM(model)


def planned(source: Q4KM, mib: int, **flags: Any) -> EnginePlan:
    """On a card with so much free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "open_model", lambda *_, **__: source)
        patch.setattr(build, "find_machine", lambda *_: GPU)
        patch.setattr(build, "gpu_memory", lambda _: Memory("GPU 0", mib << 20, (mib + 504) << 20))
        patch.setattr(build, "cpu_memory", lambda: Memory("CPU", 60 << 30, 64 << 30))
        return build.plan_engine(EngineConfig(model="m", **flags))


def test_a_30b_model_in_q4_k_m_is_whole_on_a_card_of_24_gb(source: Q4KM) -> None:
    """With 32K positions of KV, of 24564 MiB as such cards state them, less what the driver takes."""
    model = source.config
    assert 18.0e9 < source.num_bytes < 19.0e9
    plan = planned(source, 24060, max_num_seqs=16, kv_cache_tokens=32768)
    assert not plan.memory.short and plan.memory.kv_tokens == 32768
    assert plan.placement.used(".mlp.experts") == ["gpu"] and plan.placement.used("_proj") == ["gpu"]
    held = {item.label: item.num_bytes for item in plan.memory.items if item.device == "GPU 0"}
    experts = sum(source.experts(layer).num_bytes for layer in model.sparse_layers)
    assert held["experts, 48 layers on gpu"] == pytest.approx(experts, rel=0.03)
    dense = sum(source.tensor(name).num_bytes for name in source.names())
    routers = 48 * 128 * 2048 * 2  # once more, in bf16
    assert held["dense weights"] == pytest.approx(dense + routers, rel=0.03)
    # an adapter on every expert takes 1.55 GiB in a slot: more than is left, so loading one is refused
    left = 24060 * (1 << 20) - sum(held.values())
    assert plan.memory.gpu_adapter_bytes == left and any("on GPU 0" in note for note in plan.memory.notes)
    new = AdapterSize(1 << 30, 1 << 30, gpu_blocks(model, 16))
    with pytest.raises(UserError, match=r"'pirate' would not fit into the GPU's memory.*--kv-cache-tokens"):
        plan.adapter_budget.check("pirate", [], [], new, pinned=False)
    plan.adapter_budget.check("attention", [], [], AdapterSize(1 << 24, 1 << 24), pinned=False)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.integers(24000, 48000), st.sampled_from([4, 16, 64, 256]), st.sampled_from([8, 16, 64]))
def test_a_cache_that_fills_the_gpu_leaves_room_for_an_adapter(source: Q4KM, mib: int, seqs: int, rank: int) -> None:
    """Of rank 16 on every expert, loaded at run time, and no more where the cache wants it."""
    plan = planned(source, mib, max_num_seqs=seqs, max_adapter_rank=rank)
    takes, memory = gpu_blocks(source.config, 16), plan.memory
    plan.adapter_budget.check("pirate", [], [], AdapterSize(1 << 20, 1 << 20, takes), pinned=False)
    assert not memory.short
    assert bool(memory.kv_left_out) == any("leaves room for one that is loaded" in note for note in memory.notes)
    if memory.kv_left_out:
        assert memory.gpu_adapter_bytes is not None and memory.gpu_adapter_bytes <= takes + (4 << 20)


def test_room_for_an_adapter_costs_cache_and_no_experts_on_the_gpu(source: Q4KM) -> None:
    plan = planned(source, 28200, max_num_seqs=64)
    assert plan.placement.used(".mlp.experts") == ["gpu"]
    assert plan.memory.kv_tokens < WHOLE_KV_TOKENS <= plan.memory.kv_tokens + plan.memory.kv_left_out
