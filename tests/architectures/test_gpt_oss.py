"""gpt-oss: its files in every form, served by the native kernels and in torch, with adapters, equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from engine.architectures.registry import config_from_hf
from engine.config import EngineConfig
from engine.diagnostics.check import check_model
from engine.errors import AdapterError, ModelFileError, UserError
from engine.experts.native import NativeExperts
from engine.launch.backends import make_backends
from engine.lora.files.parse import parse_adapter
from engine.memory.items import Kind
from engine.memory.limits import Memory
from engine.model.native_executor import NativeExecutor
from engine.planning import plan as build
from engine.planning.placement import choose
from engine.planning.plan import plan_engine
from engine.weights.open import open_model
from rules import Machine
from testing.harness import Harness, full_logits, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.mxfp4 import save_mxfp4
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import BACKENDS, CLEAR, expect_preempted, prompts
from tests.engine.test_lora_serving import Family
from tests.lora import make
from tests.lora.merge import merge
from tests.native.isas import ISAS

# gpt-oss-20b's config.json
HUB: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"},
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 201088,
}  # fmt: skip

ROUNDED = 2e-2  # a gap between the best two tokens that kernels of quantised weights may round away


def tiny(seed: int = 0, **config: Any) -> torch.nn.Module:
    return tiny_model(seed, family="gpt_oss", **config)


def test_both_spellings_are_one_config() -> None:
    config = config_from_hf(HUB)
    first, second = (layer.attention for layer in config.layers[:2])
    assert (first.window, second.window, first.sinks, first.bias, first.output_bias) == (128, None, True, True, True)
    assert first.cache.window == 128 and first.rotation.scaling.extra == {"truncate": False}
    experts = config.experts
    assert (experts.activation.limit, experts.activation.alpha, experts.plain) == (7.0, 1.702, False)
    assert (experts.experts, experts.top_k, experts.intermediate) == (32, 4, 2880)
    assert config_from_hf(json.loads(json.dumps(GptOssConfig(**HUB).to_dict()))) == config
    bare = {name: value for name, value in HUB.items() if name not in ("rope_scaling", "layer_types", "sliding_window")}
    assert config_from_hf(bare) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types is"),
        ({"layer_types": ["full_attention"]}, "allowed are 24 of sliding_attention and full_attention"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0"),
    ],
)
def test_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        config_from_hf(HUB | change)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, layers = draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    return {
        "num_hidden_layers": layers,
        "layer_types": draw(st.lists(kinds, min_size=layers, max_size=layers)),
        "sliding_window": draw(st.sampled_from([1, 8, 17, 40, 400])),
        "num_experts": draw(st.sampled_from([4, 8, 33])),
        "num_experts_per_tok": draw(st.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from([16, 32])),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "swiglu_limit": draw(st.sampled_from([0.25, 1.5, 7.0])),
        "swiglu_alpha": draw(st.sampled_from([0.5, 1.702, 4.0])),
        "hidden_size": draw(st.sampled_from([64, 96])),
        "moe_intermediate_size": draw(st.sampled_from([32, 96])),
    }


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes(),
    seed=st.integers(0, 1000),
    budget=st.sampled_from([5, 8, 32, 256]),
    backends=st.sampled_from(
        [{}, {}, {"attention_backend": "reference"}, {"expert_backend": "reference"}, {"linear_backend": "reference"}]
    ),
    isa=st.sampled_from(ISAS or [None]),
    sinks=st.sampled_from([0.1, 3.0, 30.0]),
)
def test_tokens_and_logits_equal_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    shape: dict[str, Any],
    seed: int,
    budget: int,
    backends: dict[str, str],
    isa: str | None,
    sinks: float,
) -> None:
    """By float32, prompts shorter, as long as, and longer than the window, in chunks of many sizes and in batches of
    several lengths; twice, the second time behind the cached one."""
    model, folder = tiny(seed, **shape), tmp_path_factory.mktemp("model")
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.data.mul_(sinks / 0.1)
    save_hf(model, folder)
    engine = Harness(folder, max_num_batched_tokens=budget, max_num_seqs=4, rules=None, isa=isa, **backends)
    asked = prompts(seed, [3, 40, 17])
    for _ in range(2):
        for prompt, tokens in zip(asked, engine.generate(asked, max_tokens=6), strict=True):
            expected, gap = greedy(model, prompt, 6, tokens)
            assert tokens == expected or gap < CLEAR
    request = engine.submit(asked[1], prompt_logprobs=5, max_tokens=1)
    engine.run()
    want = full_logits(model, asked[1]).log_softmax(-1)
    for position, found in enumerate(engine.results[request].prompt_logprobs[1:]):
        for token in (found.chosen, *found.top):
            assert abs(token.logprob - float(want[position, token.token])) < 1e-4
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_and_recomputed(tmp_path: Path, overlap: bool) -> None:
    model = tiny(7, num_hidden_layers=3)
    save_hf(model, tmp_path)
    expect_preempted(model, tmp_path, max_num_batched_tokens=8, rules=None, overlap=overlap)


@BACKENDS
@pytest.mark.parametrize("form", ["hf", "mxfp4", "gguf F32", "gguf MXFP4", "gguf Q8_0"])
def test_every_form_on_disk_gives_the_same_tokens(tmp_path: Path, form: str, backend: dict[str, Any]) -> None:
    model = held = tiny(4, num_hidden_layers=2)
    path = tmp_path
    if form == "mxfp4":
        held = save_mxfp4(model, path)
    elif form == "hf":
        save_hf(model, path)
    else:
        path = tmp_path / "m.gguf"
        held = save_gguf(model, path, form.removeprefix("gguf "), "F32")
    engine, asked = Harness(path, **backend), prompts(4, [5, 40])
    rounds = form not in ("hf", "gguf F32") and backend["rules"] is None  # activations, beside quantised weights
    for prompt, tokens in zip(asked, engine.generate(asked), strict=True):
        expected, gap = greedy(held, prompt, 8, tokens)
        assert tokens == expected or gap < (ROUNDED if rounds else CLEAR)
    engine.close()


def test_gguf_metadata_gives_the_same_config(tmp_path: Path) -> None:
    model = tiny(0, bos_token_id=2, num_hidden_layers=3)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", expert_type="F32", dense_type="F32")
    config = open_model(str(tmp_path / "hf")).config
    assert open_model(str(tmp_path / "m.gguf")).config == config
    assert open_model(str(tmp_path / "hf"), str(tmp_path / "m.gguf")).config == config


@pytest.mark.parametrize("name", ["gate_up_proj_blocks", "down_proj_scales", "gate_up_proj_bias"])
@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_parts_of_experts_that_are_missing_or_misshapen(tmp_path: Path, name: str, fault: str) -> None:
    save_mxfp4(tiny(1), tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.mlp.experts.{name}"
    held = stored.pop(name)
    if fault == "shape":
        stored[name] = held[1:].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"tensor model\.layers\.1\.mlp\.experts\.\w+ "):
        open_model(str(tmp_path))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Adapters on attention, routers and experts."""
    return Family(tmp_path_factory.mktemp("family"), family="gpt_oss", mlp_only_layers=[])


@BACKENDS
@pytest.mark.parametrize(
    "settings", [{}, {"expert_backend": "reference"}, {"max_num_batched_tokens": 16, "overlap": False}], ids=str
)
def test_a_mixed_batch_equals_merged_models(family: Family, backend: dict[str, Any], settings: dict[str, Any]) -> None:
    """In one native call a step where the experts are native too, in one for each attention half otherwise."""
    names = [None, "adapter-0", "adapter-2", "adapter-1", None, "adapter-2"]
    asked = prompts(1, [3, 9, 20, 31, 14, 5])
    engine = family.engine(max_num_seqs=8, **backend, **settings)
    executor = engine.runner.executor
    assert isinstance(executor, NativeExecutor) == (backend["rules"] is None)
    if isinstance(executor, NativeExecutor):
        assert executor.runs_in_one_call(None) == ("expert_backend" not in settings)
    for adapter, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(adapter, prompt, tokens)
    engine.close()


WHOLE = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("parameters", [WHOLE, WHOLE[:1], WHOLE[1:]])
@pytest.mark.parametrize("square", [False, True])
def test_adapters_of_whole_expert_parameters(tmp_path: Path, parameters: list[str], square: bool) -> None:
    """As PEFT trains and saves them, at sizes where a matrix fits either way round too."""
    sizes = {"hidden_size": 64, "intermediate_size": 64} if square else {}
    model = tiny(3, **sizes)
    config = make.config_of(model)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        asked = torch.tensor([[3, 14, 15, 92, 65, 35]])
        expected = peft.eval()(asked).logits
    peft.save_pretrained(tmp_path)
    weights = parse_adapter(tmp_path, config, name="x")
    assert weights.format == "peft-fused-3d"
    with torch.no_grad():
        assert (merge(tiny(3, **sizes), weights)(asked).logits - expected).abs().max() < 2e-5


def test_whole_parameters_of_trainers_that_order_them_otherwise_are_refused(family: Family, tmp_path: Path) -> None:
    config = make.config_of(family.base)
    keys = make.fused_3d_keys(make.random_adapter(config, linears=False))
    pattern = {r".*\.gate_up_proj": 6}
    settings = make.lora_config(rank_pattern=pattern, target_parameters=WHOLE, lora_B_layout="grouped_by_expert")
    make.write(tmp_path / "x", keys, settings)
    with pytest.raises(AdapterError, match="gate and up lie by turns, not PEFT's"):
        parse_adapter(tmp_path / "x", config, name="x")


def planned(path: Path, **config: Any) -> Any:
    settings = {"dtype": "bfloat16", "kv_cache_tokens": 128, "max_num_batched_tokens": 32, "max_num_seqs": 1}
    return plan_engine(EngineConfig(model=str(path), device="cpu", pack_cache="off", **(settings | config)))


def test_check_and_plan(tmp_path: Path) -> None:
    save_mxfp4(tiny(1), tmp_path)
    plan = planned(tmp_path)
    for module in ("self_attn", "mlp.experts", "mlp.gate", "self_attn.q_proj"):
        assert plan.placement.backend(f"model.layers.0.{module}") == "native"
    assert not any("in torch" in line for line in plan.lines)
    lines: list[str] = []
    assert check_model(plan.source, make_backends(plan), list(range(2, 34)), lines.append) is None
    assert all(line.startswith("ok") for line in lines)


def test_an_engine_starts_from_packed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases are in them: not read from the model's files again, and packed again where those have changed."""
    save_mxfp4(tiny(5), tmp_path)
    asked = prompts(5, [4, 9])

    def start(cache: str) -> tuple[list[list[int]], list[str]]:
        engine = Harness(tmp_path, rules=None, pack_cache=cache)
        found = engine.generate(asked), engine.core.runner.notes
        engine.close()
        return found

    plain, _ = start("off")
    assert start("auto")[0] == plain
    with monkeypatch.context() as patch:
        patch.setattr(NativeExperts, "_source", None)
        patch.setattr(NativeExperts, "_bias", None)
        second, notes = start("auto")
    assert second == plain and "0 B packed" in notes[0]
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["model.layers.1.mlp.experts.down_proj_bias"] += 5 * torch.randn(
        64, generator=torch.Generator().manual_seed(1)
    )
    save_file(stored, path)
    changed, notes = start("auto")
    assert changed != plain and "0 B read" in notes[0] and changed == start("off")[0]


GPU = Machine(gpu=True, native=True, kt=True, flashinfer=True, gpu_count=1)


def test_what_cannot_compute_it_is_refused() -> None:
    said = "experts on kt: this model's experts have biases, .*; allowed are native, hybrid, gpu and reference"
    with pytest.raises(UserError, match=said):
        choose(EngineConfig(expert_backend="kt"), config_from_hf(HUB), GPU)


def test_beside_a_gpu() -> None:
    """As other families: attention by flashinfer, experts on the CPU, streamed, or on the GPU."""
    model = config_from_hf(HUB)
    placement = choose(EngineConfig(), model, GPU)
    assert placement.used(".self_attn") == ["flashinfer"] and placement.used(".mlp.experts") == ["native"]
    assert placement.streams_prefill and not any("in torch" in line for line in placement.lines)
    for backend in ("gpu", "hybrid", "native"):
        assert choose(EngineConfig(expert_backend=backend), model, GPU).used(".mlp.experts") == [backend]
    small = choose(EngineConfig(dtype="float32"), model, GPU)
    assert small.used(".self_attn") == ["reference"] and any("takes bfloat16" in line for line in small.lines)


@pytest.mark.parametrize(
    ("settings", "biases"),
    [({"gpu_experts": "all"}, False), ({"gpu_experts": "2"}, True), ({"gpu_experts": "none"}, True)],
    ids=["gpu", "hybrid", "streamed"],
)
def test_memory_of_biases_beside_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], biases: bool
) -> None:
    """Once on the GPU: with all experts, or beside those that come and go."""
    save_mxfp4(tiny(1, head_dim=64), tmp_path)
    monkeypatch.setattr(build, "find_machine", lambda config, model: GPU)
    monkeypatch.setattr(build, "gpu_memory", lambda device: Memory("GPU 0", 1 << 35, 1 << 36))
    made = plan_engine(EngineConfig(model=str(tmp_path), kv_cache_tokens=4096, **settings))
    config, items = made.source.config, [i for i in made.memory.items if i.device == "GPU 0" and i.kind is Kind.EXPERTS]
    each = 4 * config.num_experts * (2 * config.moe_intermediate_size + config.hidden_size)
    apart = [item.num_bytes for item in items if item.label == "biases of all experts"]
    assert apart == ([len(config.sparse_layers) * each] if biases else [])
    if not biases:
        held = [item.num_bytes for item in items]
        assert held == [len(config.sparse_layers) * (each + config.num_experts * made.gpu_expert_bytes)]
    assert not made.memory.short


def test_it_is_divided_over_ranks(tmp_path: Path) -> None:
    """MXFP4's blocks of 32 values are not cut: experts that are as wide as one block stay whole."""
    for width, whole in ((64, False), (32, True)):
        folder = tmp_path / str(width)
        save_mxfp4(tiny(1, moe_intermediate_size=width), folder)
        plan = planned(folder, tensor_parallel=2)
        attention, experts = plan.source.config.layers[0].attention, plan.source.config.experts
        assert (attention.heads, attention.kv_heads, attention.window) == (2, 1, 16)
        assert plan.shard.whole_experts == whole and experts.intermediate == 32
        assert plan.source.tensor("model.layers.0.self_attn.sinks").shape == (2,)
