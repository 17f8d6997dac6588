"""What a machine with a GPU would be given, judged without one."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from engine.architectures.config import ModelConfig
from engine.architectures.registry import config_from_hf
from engine.config import EngineConfig
from engine.errors import RulesError, UserError
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.widened import Widened
from engine.launch.assemble import pace
from engine.linear.gpu import slot_table_bytes
from engine.memory.items import Kind
from engine.memory.limits import Memory
from engine.planning import plan as build
from engine.planning.gpu_memory import adapter_copies, expert_items, gpu_items, hot_expert_bytes
from engine.planning.placement import choose
from rules import Machine
from testing.models.tiny import save_hf, tiny_model

GPU = Machine(gpu=True, native=True, flashinfer=True, gpu_count=1, reasons={"native": "", "flashinfer": "not there"})


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return config_from_hf(tiny_model(head_dim=64, num_hidden_layers=3, mlp_only_layers=[1]).config.to_dict())


def test_default_is_the_gpu_with_experts_on_the_cpu(model):
    placement = choose(EngineConfig(), model, GPU)
    assert placement.device == "cuda" and not placement.moved
    assert placement.used(".mlp.experts") == ["native"]
    assert placement.used(".self_attn") == ["flashinfer"] and placement.used("_proj") == ["gpu"]


def test_what_flashinfer_cannot_compute_is_said(model):
    narrow = config_from_hf(tiny_model(head_dim=48).config.to_dict())
    for config, odd in ((EngineConfig(dtype="float32"), model), (EngineConfig(), narrow)):
        placement = choose(config, odd, GPU)
        assert placement.device == "cuda" and placement.used(".self_attn") == ["reference"]
        assert any("attentions run in torch" in line and "flashinfer" in line for line in placement.lines)


def test_latent_attention_of_the_released_sizes_is_flashinfers():
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    for family in ("deepseek_v2", "deepseek_v3"):
        wide, narrow = (config_from_hf(tiny_model(family=family, **s).config.to_dict()) for s in (sizes, {}))
        placement = choose(EngineConfig(), wide, GPU)
        assert placement.device == "cuda" and placement.used(".self_attn") == ["flashinfer"]
        placement = choose(EngineConfig(), narrow, GPU)
        assert placement.used(".self_attn") == ["reference"]
        assert any("attentions run in torch" in line and "512 + 64" in line for line in placement.lines)


def test_a_gpu_without_flashinfer_is_not_used_and_that_is_said(model):
    machine = replace(GPU, flashinfer=False)
    placement = choose(EngineConfig(), model, machine)
    assert placement.device == "cpu" and any("the GPU is not used: not there" in line for line in placement.lines)
    with pytest.raises(UserError, match="not there"):
        choose(EngineConfig(device="cuda"), model, machine)


def test_reference_rules_compute_on_the_gpu(model):
    placement = choose(EngineConfig(rules="reference"), model, replace(GPU, flashinfer=False))
    assert placement.device == "cuda" and placement.used(".mlp.experts") == ["reference"]
    assert placement.choices["model.layers.0.mlp.experts"].device == "cuda"


def test_one_device_for_all_but_experts(model):
    with pytest.raises(RulesError, match="one device"):
        choose(EngineConfig(attention_backend="native"), model, GPU).device  # noqa: B018
    placement = choose(EngineConfig(expert_backend="gpu"), model, GPU)
    assert placement.device == "cuda" and placement.choices["model.layers.0.mlp.experts"].device == "cuda"


def test_an_embedding_on_the_cpu_is_noted(model, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {name: '^model.embed_tokens'}\n"
        "  replace: {class: default, kwargs: {generate_device: cpu, prefill_device: cpu}}\n"
        "- match: {name: '\\.mlp\\.experts$'}\n"
        "  replace: {class: ktserve.experts.native}\n"
        "  recursive: false\n"
        "- match: {name: '\\.self_attn$'}\n"
        "  replace: {class: ktserve.attention.flashinfer}\n"
        "- match: {class: torch.nn.Linear}\n"
        "  replace: {class: ktserve.linear.gpu}\n"
        "- match: {class: torch.nn.Module}\n"
        "  replace: {class: ktserve.torch, kwargs: {device: cuda}}\n"
    )
    placement = choose(EngineConfig(rules=str(rules)), model, GPU)
    assert placement.device == "cuda" and placement.moved == ["model.embed_tokens"]
    assert any("model.embed_tokens on cuda" in line for line in placement.lines)


def test_memory_of_a_gpu(model):
    config = EngineConfig(max_num_seqs=16, max_adapter_slots=2, max_adapter_rank=20)
    items = gpu_items(config, model, 2)
    assert [item.label for item in items if item.device == "CPU"] == ["attention plans, pinned"]
    assert {item.device for item in items} == {"GPU 0", "CPU"}
    assert any(item.label == "CUDA graphs, 2 x 5 sizes" for item in items)
    rank, hidden, q, kv = 32, 64, 256, 128
    attention = (3 * hidden + q + 2 * kv) + (q + hidden)
    narrow = 3 * attention + 3 * (hidden + 96)
    assert slot_table_bytes(model, 2, 20, 2) == 3 * rank * (narrow * 2 + 2 * (hidden + 8) * 4)
    fewer = gpu_items(EngineConfig(max_num_seqs=16, max_adapter_slots=0, cuda_graphs="off"), model, 2)
    assert [item.label for item in fewer] == ["attention workspace", "attention plans, pinned"]
    least = EngineConfig(max_adapter_slots=0, cuda_graphs="off")
    assert not gpu_items(least, model, 2, "cuda", "reference")  # whose cache is all it has


def test_each_attention_has_plans_of_its_own(model):
    """And all of them one workspace: layers with a window beside layers without, of gpt-oss."""
    layers = [replace(layer, attention=replace(layer.attention, window=16)) for layer in model.layers[:1]]
    two = replace(model, layers=(*layers, *model.layers[1:]))
    config = EngineConfig(max_num_seqs=16, max_adapter_slots=0, cuda_graphs="off")
    (one, one_pinned), (both, both_pinned) = (
        [item.num_bytes for item in gpu_items(config, of, 2)] for of in (model, two)
    )
    assert both_pinned == 2 * one_pinned and both - one == one_pinned


def test_prefill_is_streamed_where_the_rules_say(model):
    assert choose(EngineConfig(), model, GPU).streams_prefill
    assert choose(EngineConfig(), model, GPU).expert_option("prefill_threshold", 0) == "auto"
    assert not choose(EngineConfig(expert_backend="gpu"), model, GPU).streams_prefill
    kt = choose(EngineConfig(expert_backend="kt"), model, replace(GPU, kt=True))
    assert not kt.streams_prefill and any("not streamed" in line for line in kt.lines)


def test_layers_that_share_experts_share_their_options(model, tmp_path):
    rules = tmp_path / "rules.yaml"
    body = "".join(
        f"- match: {{name: '{name}'}}\n"
        "  replace: {class: ktserve.experts.native, kwargs: {prefill_device: cuda, prefill_threshold: "
        f"{limit}}}}}\n  recursive: false\n"
        for name, limit in (("layers.0.mlp.experts$", 100), ("\\.mlp\\.experts$", 200))
    )
    rules.write_text(
        body + "- match: {class: torch.nn.Module}\n  replace: {class: ktserve.torch, kwargs: {device: cuda}}\n"
    )
    with pytest.raises(RulesError, match="several values of prefill_threshold"):
        choose(EngineConfig(rules=str(rules)), model, GPU).expert_option("prefill_threshold", 0)


def test_memory_for_hot_experts(model):
    every = 2 * 8 * 3 * 64 * 64 * 2
    assert hot_expert_bytes(model, 1 << 40, 1000, 3 * 64 * 64 * 2, asked=False) == every
    assert hot_expert_bytes(model, 600, 500, 1 << 20, asked=False) == 360  # 0.6 of 600
    assert hot_expert_bytes(model, 600, 100, 1 << 20, asked=False) == 500
    assert hot_expert_bytes(model, 600, 500, 1 << 20, asked=True) == 100
    assert hot_expert_bytes(model, 600, 900, 1 << 20, asked=True) == 0


@pytest.mark.parametrize(
    ("backends", "streams", "gpu", "cpu"),
    [
        (["native"], False, [], ["expert rows"]),
        (["native"], True, ["expert scratch", "prefill streaming", "their LoRA"], ["expert rows"]),
        (["hybrid"], False, ["expert scratch"], ["expert rows"]),
        (["hybrid"], True, ["expert scratch", "prefill streaming", "their LoRA"], ["expert rows"]),
        (["gpu"], False, ["expert scratch"], []),
        (["reference"], False, [], []),
    ],
    ids=str,
)
def test_what_experts_need_beside_their_weights(model, backends, streams, gpu, cpu):
    config = EngineConfig(max_adapter_slots=3, max_adapter_rank=20)
    items = expert_items(config, model, 5000, 2, "cuda:1", backends, streams, 1 << 10)
    for device, wanted in (("GPU 1", gpu), ("CPU", cpu)):
        found = [item for item in items if item.device == device]
        assert all(any(item.label.startswith(label) for item in found) for label in wanted)
        assert len(found) == len(wanted)


def test_the_scratch_memory_is_what_is_taken(model):
    for rows in (100, 5000):
        sizes = {"max_rows": rows, "max_rank": 20}
        taken = GpuCompute(Sizes.of(model), torch.bfloat16, torch.device("cpu"), max_slots=2, **sizes).num_bytes
        assert GpuCompute.planned_bytes(Sizes.of(model), 2, **sizes, quantised=False) == taken
        config = EngineConfig(max_adapter_rank=20)
        plain = Sizes.of(model).expert_values * 2
        (scratch,) = expert_items(config, model, rows, 2, "cuda", ["gpu"], False, plain)
        assert scratch.num_bytes == taken
        hybrid = expert_items(config, model, rows, 2, "cuda", ["hybrid"], False, plain)
        assert hybrid[0].num_bytes == taken + rows * model.hidden_size * 4  # the GPU's own part of each row
        (scratch,) = expert_items(config, model, rows, 2, "cuda", ["gpu"], False, plain - 1)  # quantised
        widened = Widened.planned_bytes(Sizes.of(model), 2) if Widened.pays(Sizes.of(model), rows) else 0
        assert scratch.num_bytes == taken + widened and bool(widened) is (rows == 5000)


@pytest.mark.parametrize(
    ("backends", "streams", "expected"),
    [
        (["native"], False, {"CPU": 1}),
        (["native"], True, {"CPU": 2}),
        (["hybrid"], False, {"CPU": 2}),
        (["gpu"], False, {"CPU": 0, "GPU 0": 1}),
    ],
)
def test_how_often_an_adapter_is_held(backends, streams, expected):
    """In a slot: packed for the CPU's experts, pinned for the GPU's, on the GPU."""
    assert adapter_copies(backends, streams) == expected


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """plan_engine() beside a GPU of so many bytes."""
    save_hf(tiny_model(head_dim=64, num_hidden_layers=3, mlp_only_layers=[1]), tmp_path)

    def plan(free=1 << 36, machine=GPU, **settings):
        monkeypatch.setattr(build, "find_machine", lambda config, model: machine)
        monkeypatch.setattr(build, "gpu_memory", lambda device: Memory("GPU 0", free, 1 << 36))
        return build.plan_engine(EngineConfig(**{"model": str(tmp_path), **settings}))

    return plan


def test_both_memories_are_planned(planned, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(bytes(1000))
    plan = planned(adapters=[f"a={tmp_path / 'a'}"], gpu_experts="none")
    memory = plan.memory
    assert plan.adapter_budget.copies == 2
    assert [device.name for device in memory.devices] == ["GPU 0", "CPU"]
    text = memory.render()
    for line in ("memory plan, GPU 0", "memory plan, CPU", "attention workspace", "prefill streaming", "pinned"):
        assert line in text
    assert "and twice more on CPU in a slot" in text
    assert [i.num_bytes for i in memory.items if i.kind is Kind.ADAPTERS and i.device == "CPU"] == [3000]
    held = planned(adapters=[f"a={tmp_path / 'a'}"], expert_backend="gpu").memory.items
    start = {i.device: i.num_bytes for i in held if i.kind is Kind.ADAPTERS}
    assert start == {"CPU": 1000, "GPU 0": 1000}
    assert planned(expert_backend="gpu").adapter_budget.copies == 0


def test_routers_are_held_twice_beside_bf16_rows(planned):
    """In float32, and in bf16 for many rows."""
    plan = planned()
    sizes = {name: prod(plan.source.tensor(name).shape) for name in plan.source.names()}
    (dense,) = (item.num_bytes for item in plan.memory.items if item.kind is Kind.WEIGHTS)
    routers = sum(size for name, size in sizes.items() if name.endswith("mlp.gate.weight"))
    assert dense == 2 * sum(sizes.values()) + 4 * routers and routers


def test_steps_are_long_where_a_gpu_computes_their_experts(planned, monkeypatch):
    assert planned(expert_backend="gpu").token_budget == 8192
    assert planned(expert_backend="native").token_budget == planned(rules="hybrid").token_budget == 32768
    assert planned(max_num_batched_tokens=600).token_budget == 600
    assert planned(expert_backend="reference").token_budget == 512
    assert planned().mixed_chunk is None
    alone = planned(machine=Machine(native=True))
    assert (alone.token_budget, alone.mixed_chunk) == (1024, 512)
    assert any(item.label == "step buffers, 1024 tokens" for item in alone.memory.items)
    asked = planned(machine=Machine(native=True), max_num_batched_tokens=600)
    assert (asked.token_budget, asked.mixed_chunk) == (600, None)
    assert planned(machine=Machine(native=True), expert_backend="reference").token_budget == 512
    fixed = {"kv_cache_tokens": 512, "expert_backend": "native"}
    long = planned(max_num_batched_tokens=8192, **fixed).memory
    tight = planned(free=long.needed(long.devices[0]) - 1, **fixed)
    assert tight.token_budget == 512 and not tight.memory.short
    monkeypatch.setattr(build, "_STEP_SHARE", 0.0)
    assert planned(expert_backend="native").token_budget == 8192  # longer steps would take too much of the memory


def test_a_gpu_that_is_not_used_says_why(model):
    for machine, why in (
        (replace(GPU, native=False, reasons={"native": "no compiler"}), "the GPU is not used: no compiler"),
        (replace(GPU, gpu=False, reasons={"gpu": "a driver too old"}), "the GPU is not used: a driver too old"),
        (replace(GPU, flashinfer=False, reasons={}), "the GPU is not used: the package flashinfer is not installed"),
    ):
        placement = choose(EngineConfig(), model, machine)
        assert placement.device == "cpu" and any(why in line for line in placement.lines)
    assert not any("not used" in line for line in choose(EngineConfig(device="cpu"), model, Machine(native=True)).lines)


def test_a_step_that_has_no_room_for_every_request_is_refused(planned):
    with pytest.raises(UserError, match=r"is 16, must be at least max_num_seqs \(32\)") as caught:
        planned(max_num_batched_tokens=16, max_num_seqs=32)
    assert caught.value.field == "max_num_batched_tokens"


def test_the_configuration_stays_what_was_asked_for(planned):
    plan = planned(rules="hybrid")
    assert plan.config.max_num_batched_tokens is None and plan.config.gpu_expert_memory is None
    experts = [i.num_bytes for i in plan.memory.items if i.kind is Kind.EXPERTS and i.device == "GPU 0"]
    assert experts == [plan.hot_expert_bytes] and plan.hot_expert_bytes > 0
    assert planned(rules="hybrid", gpu_expert_memory="3MiB").hot_expert_bytes == 3 << 20


@pytest.mark.parametrize("rules", ["gpu-cpu-experts", "hybrid"])
def test_checking_streams_no_experts(planned, rules):
    plan = planned(rules=rules)
    assert plan.placement.streams_prefill and not plan.without_streaming().placement.streams_prefill


# ---- --gpu-experts


def experts_of(plan):
    return plan.placement.used(".mlp.experts")


FIXED = {"kv_cache_tokens": 4096, "max_num_batched_tokens": 512}


def needed(plan):
    """Bytes on the GPU."""
    return plan.memory.needed(plan.memory.devices[0])


def test_all_experts_go_where_they_fit(planned):
    whole = planned(free=needed(planned(gpu_experts="all", **FIXED)), **FIXED)
    assert experts_of(whole) == ["gpu"] and whole.hot_expert_bytes == 0 and not whole.memory.short
    assert any("experts on the GPU: all 16" in line for line in whole.lines)
    assert not any(item.device == "CPU" and item.kind is Kind.EXPERTS for item in whole.memory.items)


def test_without_memory_for_them_the_cpu_has_all(planned, tmp_path_factory):
    """Of many layers, so that all experts take more than the two that are streamed."""
    folder = tmp_path_factory.mktemp("deep")
    save_hf(tiny_model(head_dim=64, num_hidden_layers=12, moe_intermediate_size=128), folder)
    settings = {"model": str(folder), "max_adapter_slots": 0, "prompt_lane": "off", **FIXED}
    plan = planned(free=needed(planned(gpu_experts="none", **settings)), **settings)
    assert experts_of(plan) == ["native"] and not plan.memory.short
    some = planned(free=needed(planned(gpu_experts="4", **settings)), **settings)
    assert experts_of(some) == ["hybrid"] and some.hot_expert_bytes == 12 * 4 * 3 * 64 * 128 * 2
    assert any("experts on the GPU: none; hot ones pay from" in line for line in plan.lines)


def test_what_fits_beside_the_cache_is_for_the_hottest(planned):
    """A cache of the size that was asked for; the rest is for experts, and at most all of them."""
    expert = 3 * 64 * 64 * 2
    plan = planned(gpu_experts="3", **FIXED)
    assert experts_of(plan) == ["hybrid"] and plan.hot_expert_bytes == 2 * 3 * expert
    line = next(line for line in plan.lines if line.startswith("experts on the GPU"))
    assert "the hottest 6 of 16" in line and "38%" in line and "would hold 10 more (62.5%)" in line
    tight = planned(free=needed(plan), rules="hybrid", **FIXED)
    assert tight.hot_expert_bytes == 2 * 3 * expert and not tight.memory.short


def test_as_many_as_were_asked_for(planned):
    assert experts_of(planned(gpu_experts="all")) == experts_of(planned(gpu_experts="8")) == ["gpu"]
    assert experts_of(planned(gpu_experts="none")) == experts_of(planned(gpu_experts="0")) == ["native"]
    for settings in ({"gpu_experts": "1MiB"}, {"gpu_expert_memory": "1MiB"}):
        plan = planned(**settings)
        assert experts_of(plan) == ["hybrid"] and plan.hot_expert_bytes == 1 << 20
        assert planned(expert_backend="hybrid", **settings).hot_expert_bytes == 1 << 20
    assert experts_of(planned()) == ["gpu"]
    assert experts_of(planned(expert_backend="native")) == ["native"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpu_experts": "9"}, "of a layer's 8 experts"),
        ({"gpu_experts": "lots"}, "0 to 8"),
        ({"gpu_experts": "all", "expert_backend": "native"}, "with --expert-backend native"),
        ({"gpu_experts": "all", "rules": "hybrid"}, "with --rules hybrid"),
        ({"gpu_experts": "2", "gpu_expert_memory": "1GiB"}, "takes a size"),
        ({"gpu_experts": "2", "machine": Machine(native=True)}, "no GPU is used"),
    ],
    ids=str,
)
def test_what_gpu_experts_cannot_be_is_said(planned, settings, said):
    with pytest.raises(UserError, match=said) as caught:
        planned(**settings)
    assert caught.value.field in ("gpu_experts", "gpu_expert_memory")


def test_running_streams_are_kept_in_step_beside_long_chunks(planned):
    """By default within 100 ms or three decode steps; chunks that are streamed are no measure of others."""
    assert pace(planned(expert_backend="native")) == {
        "itl_target_s": 0.1, "itl_decode_steps": 3.0, "initial_chunk": 512,
    }  # fmt: skip
    assert pace(planned(expert_backend="native", prompt_lane="off"))["long_chunk"] == 1024
    assert "long_chunk" not in pace(planned(expert_backend="gpu"))
    asked = pace(planned(expert_backend="gpu", itl_target_ms=40))
    assert asked["itl_target_s"] == 0.04 and "itl_decode_steps" not in asked
    assert pace(planned(machine=Machine(native=True))) == {"itl_target_s": None}


def test_why_long_prompts_have_no_lane(planned):
    """One backend has all experts that are streamed; otherwise the start says why there is no lane."""
    plan = planned(expert_backend="native")
    assert plan.lane_blocker is None and plan.budgets[1] == plan.token_budget
    choices = dict(plan.placement.choices)
    name = next(name for name in choices if name.endswith(".mlp.experts"))
    choices[name] = replace(choices[name], backend="hybrid")
    mixed = replace(plan, placement=replace(plan.placement, choices=choices))
    assert mixed.lane_blocker == "experts are on several backends by their rules"
    assert planned(expert_backend="native", prompt_lane="off").lane_blocker == ""
    assert planned(expert_backend="gpu").budgets[1] is None
