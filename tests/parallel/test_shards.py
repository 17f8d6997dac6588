"""What each rank has of a model and of an adapter, what it is told, and what is refused."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rules as rules_folder
from engine.config import EngineConfig
from engine.errors import UserError
from engine.launch.rank_plans import on_rank
from engine.lora.adapter import AdapterWeights, ExpertLora, LoraPair
from engine.memory.items import Kind
from engine.memory.limits import Memory
from engine.planning import plan as build
from engine.planning.plan import plan_engine
from engine.ranks.adapters import adapter_part
from engine.ranks.shard import Shard, ShardedSource
from engine.steps.inputs import StepArrays
from engine.steps.orders import Step, decode, encode
from engine.weights.open import open_model
from native import available
from rules import Machine
from scheduler.plan import NO_STATE, Idle, RowState
from testing.models.gguf_writer import save_gguf
from testing.models.shapes import config as model_config
from testing.models.tiny import save_hf, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(2, num_attention_heads=8, num_key_value_heads=4, moe_intermediate_size=128), path)
    return path


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "minimax_m2"])
def test_parts_make_the_whole(tmp_path, family):
    """Rows of q and k too that a file has in another order; heads' sinks and what of a norm over all heads is theirs;
    biases, of which the second rank has none that are added to a sum."""
    model = tiny_model(
        3, family=family, num_hidden_layers=1, num_key_value_heads=2, hidden_size=64, moe_intermediate_size=64
    )
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "model.gguf", expert_type="Q8_0", dense_type="Q4_0")
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        source = open_model(str(path))
        parts = [ShardedSource(source, Shard(rank, 2)) for rank in range(2)]
        for name in parts[0].names():
            whole, axis = source.tensor(name).dequantise(), 1 if "o_proj" in name else 0
            if name.endswith("o_proj.bias"):
                assert not parts[1].has(name) and torch.equal(parts[0].tensor(name).dequantise(), whole)
                continue
            held = [part.tensor(name).dequantise() for part in parts]
            of_heads = ("q_norm", "k_norm") if family == "minimax_m2" else ()
            divided = any(word in name for word in ("_proj", "lm_head", "sinks", *of_heads))
            assert torch.equal(torch.cat(held, axis) if divided else held[0], whole), name
            assert all(tuple(h.shape) == part.tensor(name).shape for h, part in zip(held, parts, strict=True))
        for projection, axis in (("gate", 1), ("up", 1), ("down", 2)):
            held = [part.experts(0).stacked(projection, torch.float32) for part in parts]
            assert torch.equal(torch.cat(held, axis), source.experts(0).stacked(projection, torch.float32))
        whole_experts = [ShardedSource(source, Shard(rank, 2, whole_experts=True)) for rank in range(2)]
        for projection, bias in source.experts(0).biases.items():
            first, second = (part.experts(0).biases[projection].dequantise() for part in parts)
            down = projection == "down"
            assert torch.equal(first if down else torch.cat((first, second), 1), bias.dequantise())
            assert not down or (second.shape == first.shape and not second.any())
            held = [part.experts(0).biases[projection].dequantise() for part in whole_experts]
            assert torch.equal(torch.cat(held), bias.dequantise())


def test_the_parts_of_an_adapter_add_up():
    g = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    x, h = random(5, 8), random(5, 12)
    expert = ExpertLora(
        random(2, 3, 8), random(2, 12, 3), random(2, 3, 8), random(2, 12, 3), random(2, 3, 12), random(2, 8, 3),
        0.5, 0.25, 2.0,
    )  # fmt: skip
    pairs = {
        "a.q_proj": LoraPair(random(3, 8), random(12, 3), 0.5),
        "a.o_proj": LoraPair(random(3, 12), random(8, 3), 1.5),
    }
    whole = AdapterWeights("a", "made", linears=pairs, experts={0: expert})
    parts = [adapter_part(whole, Shard(rank, 2), model_config()) for rank in range(2)]
    cut = [h[:, :6], h[:, 6:]]

    def times(pair: LoraPair, x: torch.Tensor) -> torch.Tensor:
        return x @ pair.a.T @ pair.b.T * pair.scale

    q = torch.cat([times(part.linears["a.q_proj"], x) for part in parts], 1)
    torch.testing.assert_close(q, times(pairs["a.q_proj"], x))
    o = sum(times(part.linears["a.o_proj"], mine) for part, mine in zip(parts, cut, strict=True))
    torch.testing.assert_close(o, times(pairs["a.o_proj"], h))
    gate = torch.cat([x @ part.experts[0].gate_a[1].T @ part.experts[0].gate_b[1].T for part in parts], 1)
    torch.testing.assert_close(gate, x @ expert.gate_a[1].T @ expert.gate_b[1].T)
    down = sum(
        mine @ part.experts[0].down_a[1].T @ part.experts[0].down_b[1].T for part, mine in zip(parts, cut, strict=True)
    )
    torch.testing.assert_close(down, h @ expert.down_a[1].T @ expert.down_b[1].T)


def test_a_step_arrives_as_it_was_told():
    arrays = StepArrays(
        row_starts=np.array([0, 1, 4]), context_lens=np.array([17, 3]),
        block_tables=[array("i", [4, 5, 6]), array("i", [7])],
        ids=np.array([9, 1, 2, 3]), sources=np.array([0, -1, -1, -1]), positions=np.array([16, 0, 1, 2]),
        slot_mapping=np.array([80, 112, 113, 114]), adapters=np.array([0, 2, 2, 2]), kept=np.array([0, 3]),
        kept_starts=np.array([0, 1, 2]), pending=True, adapted=True,
    )  # fmt: skip
    states = [RowState(3, 1), RowState(0, NO_STATE, ((16, 5), (17, 6)), replayed=2, keeps=True)]
    idle = Idle([1, 2], [5])
    arrays = replace(arrays, states=states)
    sent = Step.of(arrays, padded=False, every=True, greedy=False, logits=[(1, 3)], idle=idle)
    got = decode(encode(sent))
    assert isinstance(got, Step) and (got.padded, got.every, got.greedy, got.logits) == (False, True, False, [(1, 3)])
    for name in ("row_starts", "context_lens", "positions", "slot_mapping", "adapters", "kept", "kept_starts"):
        np.testing.assert_array_equal(getattr(got.arrays, name), getattr(arrays, name))
    assert [list(table) for table in got.arrays.block_tables] == [[4, 5], [7]]
    assert not got.arrays.ids.any() and (got.arrays.sources == -1).all()
    assert got.arrays.adapted and not got.arrays.pending
    assert got.arrays.states == states and got.idle == idle


@pytest.mark.parametrize("quantised", [False, True])
def test_experts_that_cannot_be_divided_are_dealt_out(tmp_path, quantised):
    """By the rows of their width, or by the blocks of `down`; adapters likewise."""
    width = 256 if quantised else 63
    model = tiny_model(4, num_hidden_layers=1, hidden_size=256, moe_intermediate_size=width, num_key_value_heads=2)
    if quantised:
        save_gguf(model, tmp_path / "model.gguf", expert_type="Q4_K", dense_type="Q8_0")
    save_hf(model, tmp_path)
    path = tmp_path / "model.gguf" if quantised else tmp_path
    settings = EngineConfig(model=str(path), device="cpu", rules="reference", tensor_parallel=2)
    plan = plan_engine(settings)
    assert plan.shard.whole_experts and any("some of the experts whole" in line for line in plan.lines)
    source = open_model(str(path))
    parts = [ShardedSource(source, replace(plan.shard, rank=rank)) for rank in range(2)]
    experts = source.config.num_experts
    assert [part.config.num_experts for part in parts] == [experts // 2] * 2
    assert [part.config.experts.held.start for part in parts] == [0, experts // 2]
    for projection in ("gate", "up", "down"):
        held = [part.experts(0).stacked(projection, torch.float32) for part in parts]
        assert torch.equal(torch.cat(held), source.experts(0).stacked(projection, torch.float32))
    g = torch.Generator().manual_seed(2)
    shapes = [(3, 256), (width, 3), (3, 256), (width, 3), (3, width), (256, 3)]
    lora = ExpertLora(*(torch.randn(experts, *shape, generator=g) for shape in shapes), 0.5, 0.25, 2.0)
    adapter = AdapterWeights("a", "made", experts={0: lora})
    each = [adapter_part(adapter, replace(plan.shard, rank=rank), source.config) for rank in range(2)]
    assert torch.equal(torch.cat([part.experts[0].up_b for part in each]), lora.up_b)
    assert each[1].experts[0].down_scale == 2.0


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "moe_intermediate_size"), ("mixtral", "intermediate_size")])
def test_a_width_of_experts_is_named_as_the_configuration_names_it(tmp_path, family, name):
    save_hf(tiny_model(family=family, moe_intermediate_size=63, num_experts=7, num_hidden_layers=1), tmp_path)
    settings = EngineConfig(model=str(tmp_path), device="cpu", rules="reference", tensor_parallel=2)
    with pytest.raises(UserError, match=rf"--tensor-parallel 2: {name} is 63; allowed for this model are 1$"):
        plan_engine(settings)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tensor_parallel": 3}, r"num_key_value_heads is 4; allowed for this model are 1, 2, 4$"),
        ({"tensor_parallel": 8}, r"num_key_value_heads is 4"),
        ({"tensor_parallel": 0}, r"--tensor-parallel 0: allowed is 1 to 64"),
        ({"tensor_parallel": 2, "rules": None, "deterministic": True}, r"--deterministic with --tensor-parallel 2"),
        ({"tensor_parallel": 2, "kv_disk": "1GiB"}, r"--kv-disk with --tensor-parallel: .* leave one out"),
    ],
)
def test_what_cannot_be_divided_is_refused(folder, config, said):
    if config.get("rules", "") is None and not available()[0]:
        pytest.skip(available()[1])
    settings = EngineConfig(model=str(folder), device="cpu", **({"rules": "reference"} | config))
    with pytest.raises(UserError, match=said):
        plan_engine(settings)


@pytest.mark.skipif(not available()[0], reason=available()[1])
def test_gpus_are_planned_for(tmp_path, monkeypatch):
    """Each holds its part of experts and cache, within what the fullest one has free. Parts of 64 rows for four would
    be too small for the kernels: they have two of eight experts each."""
    shape = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 8}
    save_hf(tiny_model(num_hidden_layers=3, intermediate_size=256, **shape), tmp_path / "model")
    free = {"cuda": 8 << 30, "cuda:1": 6 << 30}
    monkeypatch.setattr(
        build, "find_machine", lambda *_: Machine(gpu=True, native=True, flashinfer=True, gpu_count=len(free))
    )
    monkeypatch.setattr(build, "gpu_memory", lambda device: Memory("GPU 0", free[device], 8 << 30))

    def planned(**config) -> build.EnginePlan:
        return plan_engine(EngineConfig(model=str(tmp_path / "model"), kv_cache_tokens=1024, **config))

    def held(plan: build.EnginePlan, kind: Kind) -> int:
        return sum(i.num_bytes for i in plan.memory.items if i.device == "GPU 0" and i.kind is kind)

    one, two = (planned(expert_backend="gpu", tensor_parallel=ranks) for ranks in (1, 2))
    assert two.memory.devices[0].free_bytes == free["cuda:1"] and two.shard == Shard(0, 2, experts=True)
    for kind in (Kind.EXPERTS, Kind.KV_CACHE):
        assert 2 * held(two, kind) == held(one, kind) > 0
    other = on_rank(two, Shard(1, 2))
    assert other.placement.device == "cuda:1" and other.source.config == two.source.config
    assert other.source.identity != two.source.identity
    apart = planned(gpu_experts="none", tensor_parallel=2)
    assert not apart.shard.experts and apart.source.config.moe_intermediate_size == 64
    assert any("rank 0 computes the experts" in line for line in apart.lines)
    with pytest.raises(UserError, match=r"--tensor-parallel 4: this machine has 2 GPUs, .* allowed are 1 to 2"):
        planned(gpu_experts="none", tensor_parallel=4)
    free |= {f"cuda:{rank}": 7 << 30 for rank in range(2, 8)}
    for ranks in (4, 8):
        plan = planned(expert_backend="gpu", tensor_parallel=ranks)
        assert plan.shard == Shard(0, ranks, whole_experts=True) and plan.source.config.num_experts == 8 // ranks
        for kind in (Kind.EXPERTS, Kind.KV_CACHE):
            assert ranks * held(plan, kind) == held(one, kind)
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        (Path(rules_folder.__file__).parent / "gpu.yaml").read_text().replace("device: cuda", "device: cuda:1")
    )
    with pytest.raises(UserError, match="the rules place the model on cuda:1"):
        planned(rules=str(rules), tensor_parallel=2)


def test_blocks_are_not_cut(tmp_path):
    model = tiny_model(4, num_hidden_layers=1, hidden_size=256, moe_intermediate_size=256, num_experts=5)
    save_gguf(model, tmp_path / "model.gguf", expert_type={"gate": "Q4_K", "up": "Q4_K", "down": "Q4_K"})
    settings = EngineConfig(model=str(tmp_path / "model.gguf"), device="cpu", rules="reference", tensor_parallel=2)
    with pytest.raises(UserError, match=r"experts\.down_proj\[0\] is Q4_K, blocks of 256 values along its 256 inputs"):
        plan_engine(settings)
