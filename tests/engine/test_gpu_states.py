"""Models whose layers keep states, planned for a GPU that is not here."""

from __future__ import annotations

import pytest

from engine.attention.delta import StateSlots
from engine.attention.gpu_delta import GpuDeltaNet, gpu_delta_limit
from engine.config import EngineConfig
from engine.errors import UserError
from engine.launch.shared import state_slots
from engine.memory.items import Kind
from engine.memory.limits import Memory
from engine.planning import plan as build
from rules import Machine
from testing.models.tiny import STATEFUL, save_hf, tiny_model

GPU = Machine(gpu=True, native=True, flashinfer=True, gpu_count=1)


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """plan_engine() beside a GPU."""

    def plan(family="qwen3_next", machine=GPU, free=8 << 30, **settings):
        save_hf(tiny_model(family=family, head_dim=256, shared_expert_intermediate_size=64), tmp_path)
        monkeypatch.setattr(build, "find_machine", lambda config, model: machine)
        monkeypatch.setattr(build, "gpu_memory", lambda device: Memory("GPU 0", free, free))
        return build.plan_engine(EngineConfig(**{"model": str(tmp_path), "dtype": "bfloat16", **settings}))

    return plan


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("experts", [None, "native", "gpu", "hybrid"])
def test_states_are_planned_on_the_gpu(planned, family, experts):
    made = planned(family, expert_backend=experts)
    assert made.placement.device == "cuda" and made.placement.used(".self_attn") == ["flashinfer"]
    memory = made.memory
    assert (memory.num_states, memory.num_snapshots, memory.snapshot_blocks) == (32, 64, 0)
    assert state_slots(made) == StateSlots(96, 32, 0)
    held = {item.label: item.device for item in memory.items if item.kind is Kind.KV_CACHE}
    assert set(held.values()) == {"GPU 0"} and {"states, 32 sequences", "snapshots of states, 64"} < set(held)
    assert any("at most 64 snapshots of states" in line and "beside the KV cache" in line for line in made.lines)


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("experts", ["native", "gpu", "hybrid"])
def test_a_rank_has_states_of_its_heads(planned, family, experts):
    two_gpus = Machine(gpu=True, native=True, flashinfer=True, gpu_count=2)
    one, two = (
        planned(family, two_gpus, expert_backend=experts, speculate="ngram:4", tensor_parallel=ranks)
        for ranks in (1, 2)
    )
    (net,), (part,) = (made.source.config.delta_nets for made in (one, two))
    assert (part.key_heads, part.value_heads) == (net.key_heads // 2, net.value_heads // 2)
    assert state_slots(two) == state_slots(one)
    held = [
        {item.label: item.num_bytes for item in made.memory.items if "states" in item.label and item.device == "GPU 0"}
        for made in (one, two)
    ]
    assert held[0] == {label: 2 * num_bytes for label, num_bytes in held[1].items()} and len(held[0]) == 2


def test_drafts_have_room_beside_states(planned):
    assert planned(speculate="ngram:4").memory.kept_positions == 5


def test_in_float32_torch_computes(planned):
    made = planned(dtype="float32")
    assert made.placement.used(".self_attn") == ["reference"] and made.placement.device == "cuda"


def test_padded_steps_in_torch_are_refused(planned):
    with pytest.raises(UserError) as caught:
        planned(cuda_graphs="padded", dtype="float32")
    assert caught.value.field == "cuda_graphs"


def test_sizes_that_the_kernels_do_not_take(planned):
    (spec,) = planned().source.config.delta_nets
    assert gpu_delta_limit(spec) is None and GpuDeltaNet.captures
    wide = type(spec)(1, 1, 16, 512, 4, fused=True, fused_gates=True)
    assert gpu_delta_limit(wide) == "linear_value_head_dim 512 is over 128"
