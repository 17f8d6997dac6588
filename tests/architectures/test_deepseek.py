"""DeepSeek V2 and V3: latent attention and their routers, from files in every form, equal to transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config

from engine.architectures.parts.mla import Latent
from engine.architectures.registry import config_from_hf
from engine.config import EngineConfig
from engine.diagnostics.check import check_model
from engine.errors import ModelFileError, UserError
from engine.launch.backends import make_backends
from engine.planning.plan import plan_engine
from engine.weights.open import open_model
from testing.harness import Harness, full_logits, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import BACKENDS, CLEAR, SETTINGS, prompts
from tests.engine.test_lora_serving import Family

# DeepSeek-V3's and DeepSeek-V2-Lite's config.json, without what is not read
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
FAMILIES = ["deepseek_v2", "deepseek_v3"]
each_family = pytest.mark.parametrize("family", FAMILIES)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


# ---- configurations


def test_a_position_of_v3_takes_576_values_a_layer() -> None:
    config = config_from_hf(V3)
    attention = config.layers[0].attention
    assert isinstance(attention, Latent) and attention.width == 576 and attention.expands_from == 171
    assert config.kv_bytes_per_token(2) == 61 * 576 * 2
    assert config.sparse_layers == list(range(3, 61)) and config.experts is not None
    assert config.experts.shared is not None and config.experts.shared.mlp.intermediate == 2048
    scale = 192**-0.5 * (0.1 * torch.log(torch.tensor(40.0)).item() + 1) ** 2
    assert attention.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(("hub", "theirs"), [(V3, DeepseekV3Config), (V2_LITE, DeepseekV2Config)])
def test_both_spellings_are_one_config(hub: dict, theirs) -> None:
    # Transformers' classes take no numbers without a point here.
    scaling = hub["rope_scaling"] | {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0}
    written = theirs(**hub | {"rope_scaling": scaling}).to_dict() | {"architectures": hub["architectures"]}
    assert config_from_hf(json.loads(json.dumps(written))) == config_from_hf(hub)


@pytest.mark.parametrize(
    ("base", "change", "said"),
    [
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; allowed are greedy and"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias is true"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (V2_LITE, {"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        (V2_LITE, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (V3, {"n_group": 7}, "n_group is 7, not a divisor of 256 experts"),
        (V3, {"topk_group": 9}, "topk_group is 9; allowed is 1 to n_group 8"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok is 33"),
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(base: dict, change: dict, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        config_from_hf(base | change)


# ---- files

CASES = [
    {},
    {"q_lora_rank": None},
    {"first_k_dense_replace": 0},
    {"rope_parameters": YARN},
    {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    {"n_group": None, "topk_group": None},
]


@each_family
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_gguf_metadata_gives_the_same_config(tmp_path: Path, family: str, case: dict, expanded: bool) -> None:
    if "n_group" in case and family == "deepseek_v3":
        case = {"n_group": 1, "topk_group": 1}
    model = tiny_model(0, family=family, bos_token_id=2, **case)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32", expanded=expanded)
    config = open_model(str(tmp_path / "hf")).config
    assert open_model(str(tmp_path / "m.gguf")).config == replace(config, left_out=())  # only a model's own layers
    assert open_model(str(tmp_path / "hf"), str(tmp_path / "m.gguf")).config == config


@each_family
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("expanded", [False, True])
def test_keys_and_values_of_gguf(tmp_path: Path, family: str, kind: str, expanded: bool) -> None:
    """One tensor or a half for each; the keys' half is transposed, and quantised so."""
    held = save_gguf(tiny_model(2, family=family), tmp_path / "m.gguf", dense_type=kind, expanded=expanded)
    source = open_model(str(tmp_path / "m.gguf"))
    name = "model.layers.1.self_attn.kv_b_proj"
    assert torch.equal(source.tensor(f"{name}.weight").dequantise(), held.get_submodule(name).weight)
    stored = set(source.file.tensors)
    assert ("blk.1.attn_k_b.weight" in stored) is not expanded and ("blk.1.attn_kv_b.weight" in stored) is expanded
    assert f"{name}.weight" in source.names()


@each_family
@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"expert_gating_func": 3}, "expert_gating_func is 3; allowed is 1 or 2"),
        ({"leading_dense_block_count": 2}, "leading_dense_block_count is 2; other layers have a dense MLP"),
        ({"attention.key_length_mla": 16}, "attention.key_length_mla is 16; allowed is more than the rotated 32"),
        ({"expert_group_count": 3}, "expert_group_count does not go with the others"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1 without yarn"),
    ],
)
def test_metadata_that_contradicts_is_refused(tmp_path: Path, family: str, metadata: dict, said: str) -> None:
    changed = {f"deepseek2.{name}": value for name, value in metadata.items()}
    save_gguf(tiny_model(family=family), tmp_path / "m.gguf", metadata=changed)
    with pytest.raises(ModelFileError, match=said):
        open_model(str(tmp_path / "m.gguf"))


def test_the_layer_behind_the_last_of_gguf_is_left_out(tmp_path: Path) -> None:
    """GLM-4.7-Flash's files have one."""
    metadata, more = {"deepseek2.nextn_predict_layers": 1}, {"blk.3.nextn.enorm.weight": torch.ones(64)}
    model = tiny_model(3, family="deepseek_v3", num_hidden_layers=4)
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32", metadata=metadata, more=more)
    del model.model.layers[3]
    model.config.num_hidden_layers = 3
    engine = Harness(tmp_path / "m.gguf")
    assert any("layer 3 (multi-token prediction) is left out" in line for line in engine.plan.lines)
    expect(engine, model, prompts(3, [9]))
    engine.close()


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    save_gguf(tiny_model(family="deepseek_v3"), tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.1.attn_v_b.weight", b"blk.1.attn_x_b.weight"))
    with pytest.raises(ModelFileError, match=r"attn_v_b\.weight"):
        open_model(str(tmp_path / "m.gguf"))


def test_the_layer_behind_the_last_is_left_out(tmp_path: Path) -> None:
    """DeepSeek V3's own files have one that predicts a second token."""
    model = tiny_model(3, family="deepseek_v3", num_nextn_predict_layers=1)
    save_hf(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    own = {name: tensor.clone() for name, tensor in stored.items() if name.startswith("model.layers.2.")}
    extra = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in own.items()}
    extra |= {"model.layers.3.eh_proj.weight": torch.zeros(64, 128), "model.layers.3.enorm.weight": torch.ones(64)}
    save_file(stored | extra, tmp_path / "model.safetensors")
    engine = Harness(tmp_path)
    said = f"note: layer 3 (multi-token prediction) is left out: {len(extra)} tensors are not read"
    assert said in engine.plan.lines
    expect(engine, model, prompts(3, [9]))
    engine.close()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelFileError, match=r"model\.layers\.3\."):
        open_model(str(tmp_path))


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_states_keys_and_values_as_they_are_held(tmp_path: Path, dtype: str, expanded: bool) -> None:
    """Two tensors of a file keep their blocks; of one the values do."""
    sizes = {"num_hidden_layers": 1, "kv_lora_rank": 256, "qk_nope_head_dim": 192, "v_head_dim": 256}
    model = tiny_model(1, family="deepseek_v3", **sizes)
    heads, wide = model.config.num_attention_heads, 4 if dtype == "float32" else 2
    stated = {}
    for kind in ("F32", "Q8_0"):
        types = {"blk.0.attn_kv_b.weight": kind}
        save_gguf(model, tmp_path / f"{kind}.gguf", "F32", "F32", types=types, expanded=expanded)
        engine = Harness(tmp_path / f"{kind}.gguf", rules=None, dtype=dtype)
        items = [item for item in engine.plan.memory.items if item.label == "dense weights"]
        stated[kind] = sum(item.num_bytes for item in items)
        (up,) = (layer.attention.kv_b for layer in engine.runner.model.layers)
        engine.close()
    keys, values = heads * 256 * 192, heads * 256 * 256
    held = (keys * wide if expanded else keys * 34 // 32) + values * 34 // 32
    assert up.num_bytes == held
    saved = stated["F32"] - stated["Q8_0"]
    assert abs(saved - ((keys + values) * wide - held)) <= 4 * 4096


def test_a_plan_says_what_a_position_takes(tmp_path: Path) -> None:
    save_hf(tiny_model(family="deepseek_v3"), tmp_path)
    lines = plan_engine(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_tokens=64)).lines
    assert f"note: a position takes {3 * 64 * 2} bytes of the KV cache" in lines


# ---- served


@st.composite
def options(draw: st.DrawFn) -> dict:
    groups = draw(st.sampled_from([1, 2, 4]))
    rope = draw(st.sampled_from([None, YARN, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}]))
    layers = draw(st.integers(1, 3))
    return {
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw(st.integers(0, layers - 1)),
        "num_attention_heads": draw(st.sampled_from([1, 2, 4])),
        "q_lora_rank": draw(st.sampled_from([None, 32, 48])),
        "kv_lora_rank": draw(st.sampled_from([16, 32, 64])),
        "qk_nope_head_dim": draw(st.sampled_from([16, 32, 32])),
        "qk_rope_head_dim": draw(st.sampled_from([8, 32, 32])),
        "v_head_dim": draw(st.sampled_from([16, 32, 32])),
        "n_group": groups,
        "topk_group": draw(st.integers(1, groups)),
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "n_shared_experts": draw(st.sampled_from([1, 2])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "norm_topk_prob": draw(st.booleans()),
        **({} if rope is None else {"rope_parameters": rope}),
    }


def expect(engine: Harness, model, asked: list[list[int]]) -> None:
    """Greedy tokens, and the log-probabilities of the prompts to 1e-4."""
    requests = [engine.submit(prompt, max_tokens=5, prompt_logprobs=3) for prompt in asked]
    engine.run()
    for prompt, request in zip(asked, requests, strict=True):
        result = engine.results[request]
        expected, gap = greedy(model, prompt, 5, result.tokens)
        assert result.tokens == expected or gap < CLEAR
        want = torch.log_softmax(full_logits(model, prompt), -1)
        for position, found in enumerate(result.prompt_logprobs[1:]):
            for token in (found.chosen, *found.top):
                assert token.logprob == pytest.approx(float(want[position, token.token]), abs=1e-4)


@each_family
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=options(), interleaved=st.booleans(), grouped=st.booleans(), seed=st.integers(0, 1000),
    budget=st.sampled_from([8, 32, 256]),
)  # fmt: skip
def test_logits_equal_transformers(tmp_path_factory, family, options, interleaved, grouped, seed, budget) -> None:
    """Prompts on both sides of where keys and values are expanded, in chunks of either kind; on every backend."""
    if family == "deepseek_v3":
        options = options | {"rope_interleave": interleaved}
    else:
        options = options | {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    model = tiny_model(seed, family=family, **options)
    folder = tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    for backend in SETTINGS:
        engine = Harness(folder, max_num_batched_tokens=budget, max_num_seqs=8, **backend)
        expect(engine, model, prompts(seed, [3, 17, 110]))
        engine.close()


@BACKENDS
@each_family
def test_preempted_cached_and_whoever_shares_the_step(tmp_path: Path, family: str, backend: dict) -> None:
    """A cache too small for all at once; prompts that begin alike."""
    model = tiny_model(5, family=family, kv_lora_rank=64)
    save_hf(model, tmp_path)
    start = prompts(5, [40])[0]
    asked = [start + tail for tail in prompts(6, [1, 9, 20])] + prompts(7, [30])
    sizes = {"kv_cache_tokens": 144, "max_model_len": 112, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    engine = Harness(tmp_path, **sizes, **backend)
    got = [engine.generate(asked, max_tokens=24) for _ in range(2)]
    stats = engine.core.scheduler.stats()
    assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0
    engine.close()
    for answers in got:
        for prompt, tokens in zip(asked, answers, strict=True):
            expected, gap = greedy(model, prompt, 24, tokens)
            assert tokens == expected or gap < CLEAR


@BACKENDS
@each_family
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_gguf_is_served(tmp_path: Path, family: str, form: str, backend: dict) -> None:
    """Of quantised projections native kernels round activations: those are compared elsewhere."""
    model, kind = tiny_model(6, family=family), "Q8_0" if backend["rules"] else "F32"
    held = save_gguf(model, tmp_path / "m.gguf", kind, kind, expanded=form == "expanded")
    engine = Harness(tmp_path / "m.gguf", **backend)
    expect(engine, held, prompts(6, [5, 40]))
    engine.close()


def test_fp8_blocks_are_read(tmp_path: Path) -> None:
    """As the vendor ships V3: float8 in blocks of 128 x 128 beside their scales."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256, "kv_lora_rank": 128}
    model = tiny_model(7, family="deepseek_v3", q_lora_rank=128, **sizes)
    save_hf(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [n for n in stored if n.endswith("_proj.weight") or ("kv_a_proj" in n and n.endswith("weight"))]:
        weight = stored.pop(name)
        rows, columns = (-(-size // 128) for size in weight.shape)
        scale = torch.empty(rows, columns)
        values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                at = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                scale[row, column] = weight[at].abs().max() / 448
                values[at] = (weight[at] / scale[row, column]).to(torch.float8_e4m3fn)
        stored |= {name: values, f"{name}_scale_inv": scale}
        each = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        put(model, name, values.float() * each)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": V3["quantization_config"]}))
    engine = Harness(tmp_path)
    expect(engine, model, prompts(7, [5, 40]))
    engine.close()


@torch.no_grad()
def put(model, name: str, values: torch.Tensor) -> None:
    """A weight by its name in files into transformers' model, whose experts are stacked."""
    module, _, _ = name.rpartition(".")
    if ".experts." not in module:
        model.get_submodule(module).weight.copy_(values)
        return
    at, _, rest = module.partition(".experts.")
    index, _, projection = rest.partition(".")
    experts, half = model.get_submodule(f"{at}.experts"), values.shape[0]
    if projection == "down_proj":
        experts.down_proj[int(index)].copy_(values)
    else:
        rows = slice(0, half) if projection == "gate_proj" else slice(half, 2 * half)
        experts.gate_up_proj[int(index), rows].copy_(values)


@BACKENDS
def test_latents_come_back_from_disk(tmp_path: Path, backend: dict) -> None:
    model = tiny_model(1, family="deepseek_v3")
    save_hf(model, tmp_path / "model")
    prompt = prompts(1, [70])[0]
    for cached in (0, 64):
        engine = Harness(tmp_path / "model", kv_disk="16MiB", kv_disk_dir=str(tmp_path / "kv"), **backend)
        request = engine.submit(prompt, max_tokens=5)
        result = engine.run()[request]
        engine.close()
        assert result.end.cached_tokens == cached
        expected, gap = greedy(model, prompt, 5, result.tokens)
        assert result.tokens == expected or gap < CLEAR


# ---- Kimi K2


def packed_int4(stored: dict[str, torch.Tensor], model) -> dict[str, torch.Tensor]:
    """Routed experts as compressed-tensors packs them, in groups of 32; the model gets the values."""
    result = {}
    for name, weight in stored.items():
        if ".experts." not in name:
            result[name] = weight
            continue
        groups = weight.unflatten(1, (-1, 32))
        scale = (groups.abs().amax(-1) / 7).bfloat16()
        quants = (groups / scale.float()[..., None]).round().clamp(-8, 7)
        put(model, name, (quants * scale.float()[..., None]).flatten(1))
        nibbles = (quants.flatten(1).to(torch.int64) + 8).unflatten(1, (-1, 8))
        words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
        at = name.removesuffix(".weight")
        result[f"{at}.weight_packed"] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        result[f"{at}.weight_scale"] = scale
        result[f"{at}.weight_shape"] = torch.tensor(weight.shape)
    return result


@pytest.mark.parametrize("vision", [False, True], ids=["kimi_k2", "kimi_k25"])
@BACKENDS
def test_kimi_is_served_from_packed_int4(tmp_path: Path, vision: bool, backend: dict) -> None:
    """One group of experts; K2.5's text model lies under its vision tower's neighbour."""
    model = tiny_model(8, family="deepseek_v3", n_group=1, topk_group=1)
    save_hf(model, tmp_path)
    stored = packed_int4(load_file(tmp_path / "model.safetensors"), model)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    if vision:
        stored = {f"language_model.{name}": tensor for name, tensor in stored.items()}
        stored["vision_tower.patch_embed.weight"] = torch.zeros(2, 2)
        config = {
            "model_type": "kimi_k25",
            "architectures": ["KimiK25ForConditionalGeneration"],
            "text_config": config,
        }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Harness(tmp_path, **backend)
    assert any("the vision tower is left out" in line for line in engine.plan.lines) is vision
    asked = prompts(8, [5, 40])
    if backend["rules"]:
        expect(engine, model, asked)
    else:  # int4 weights meet rounded activations
        assert [len(tokens) for tokens in engine.generate(asked, max_tokens=4)] == [4, 4]
    engine.close()


# ---- adapters


@pytest.fixture(scope="module", params=[("deepseek_v2", None), ("deepseek_v3", 64)], ids=["v2-lite", "v3"])
def adapters(request, tmp_path_factory) -> Family:
    """On every projection of attention, routers, shared experts, dense layers and experts; latents so wide that long
    prompts are expanded."""
    family, q_rank = request.param
    shape = {"kv_lora_rank": 64, "q_lora_rank": q_rank, "mlp_only_layers": None}
    return Family(tmp_path_factory.mktemp("family"), family=family, **shape)


@BACKENDS
@pytest.mark.parametrize("budget", [16, 256])
def test_a_mixed_batch_equals_merged_models(adapters: Family, backend: dict, budget: int) -> None:
    names = [None, "adapter-0", "adapter-1", "adapter-2", None, "adapter-1"]
    asked = prompts(1, [3, 9, 20, 31, 150, 140])
    engine = adapters.engine(max_num_seqs=8, max_num_batched_tokens=budget, **backend)
    got = engine.generate(asked, names)
    for name, prompt, tokens in zip(names, asked, got, strict=True):
        adapters.expect(name, prompt, tokens)
    assert len({tuple(t) for t in got}) > 3
    engine.close()


@BACKENDS
def test_alone_and_in_company_the_tokens_are_the_same(adapters: Family, backend: dict) -> None:
    prompt, names = prompts(2, [24])[0], [None, "adapter-0", "adapter-1", "adapter-2"]
    engine = adapters.engine(**backend)
    alone = [engine.generate([prompt], [name])[0] for name in names]
    together = engine.generate([prompt] * 4, names)
    engine.close()
    assert together == alone and len({tuple(t) for t in together}) == 4


@each_family
@pytest.mark.parametrize("rules", ["reference", None])
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("others", ["Q8_0", "BF16"])
def test_check_agrees_with_a_sound_model(
    tmp_path: Path, family: str, others: str, expanded: bool, rules: str | None
) -> None:
    types = {f"blk.{layer}.attn_kv_b.weight": "Q8_0" for layer in range(3)}
    save_gguf(tiny_model(1, family=family), tmp_path / "m.gguf", others, others, types=types, expanded=expanded)
    settings = {"dtype": "bfloat16", "kv_cache_tokens": 128, "max_num_batched_tokens": 32, "max_num_seqs": 1}
    config = EngineConfig(model=str(tmp_path / "m.gguf"), device="cpu", pack_cache="off", rules=rules, **settings)
    plan = plan_engine(config)
    lines: list[str] = []
    assert check_model(plan.source, make_backends(plan), list(range(2, 34)), lines.append) is None
    assert all(line.startswith("ok") for line in lines)


def test_a_cache_of_int8_latents_is_refused(tmp_path: Path) -> None:
    save_hf(tiny_model(family="deepseek_v3"), tmp_path)
    with pytest.raises(UserError, match="kv_cache_dtype int8: latents") as error:
        Harness(tmp_path, rules=None, kv_cache_dtype="int8")
    assert error.value.field == "kv_cache_dtype"
