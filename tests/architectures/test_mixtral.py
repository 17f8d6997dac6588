"""Mixtral as a third family: its files in every form, served, with adapters, equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig

from engine.architectures.registry import config_from_hf
from engine.config import EngineConfig
from engine.diagnostics.check import check_model
from engine.errors import ModelFileError
from engine.files.gguf.file import open_gguf
from engine.launch.backends import make_backends
from engine.planning.plan import plan_engine
from engine.weights.open import open_model
from testing.harness import Harness, greedy
from testing.models.gguf_writer import in_pairs, save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.parity import CLEAR, prompts

# Mixtral-8x7B-v0.1's config.json, as transformers 4 wrote it
HUB = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
BACKENDS = {"torch": {}, "native": {"rules": None}}
on_backends = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def tiny(seed: int = 0, **config) -> torch.nn.Module:
    return tiny_model(seed, family="mixtral", **config)


# ---- configurations


def test_both_spellings_are_one_config() -> None:
    config = config_from_hf(HUB)
    attention, experts = config.layers[0].attention, config.experts
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.qk_norm) == (32, 8, 128, "none")
    assert (experts.experts, experts.top_k, experts.intermediate, experts.shared) == (8, 2, 14336, None)
    assert experts.router.plain and experts.router.normalise == 0.0 and config.sparse_layers == list(range(32))
    assert config_from_hf(json.loads(json.dumps(MixtralConfig(**HUB).to_dict()))) == config


def test_absent_fields_are_transformers_defaults() -> None:
    config, theirs = config_from_hf({"model_type": "mixtral"}), MixtralConfig()
    wanted = theirs.to_dict() | {"head_dim": 128, "rope_theta": theirs.rope_parameters["rope_theta"]}
    wanted |= {"num_experts": theirs.num_local_experts, "moe_intermediate_size": theirs.intermediate_size}
    for name, value in config.numbers().items():
        assert value == wanted[name], name
    assert config.max_position_embeddings == theirs.max_position_embeddings


def test_a_window_that_nothing_reaches_is_none() -> None:
    assert config_from_hf(HUB | {"sliding_window": 32768}) == config_from_hf(HUB)
    with pytest.raises(ModelFileError, match="sliding_window is 4096 of 32768 positions"):
        config_from_hf(HUB | {"sliding_window": 4096})


def test_a_dense_llama_is_no_mixtral(tmp_path: Path) -> None:
    save_gguf(tiny(), tmp_path / "m.gguf", metadata={"llama.expert_count": 0})
    with pytest.raises(ModelFileError, match="a dense llama model"):
        open_model(str(tmp_path / "m.gguf"))


def test_experts_that_are_not_normalised_are_no_mixtral(tmp_path: Path) -> None:
    save_gguf(tiny(), tmp_path / "m.gguf", metadata={"llama.expert_weights_norm": False})
    with pytest.raises(ModelFileError, match=r"llama.expert_weights_norm is false"):
        open_model(str(tmp_path / "m.gguf"))


# ---- files


@pytest.mark.parametrize("case", [{}, {"head_dim": 32}, {"tie_word_embeddings": True}, {"rope_theta": 1e6}])
def test_gguf_metadata_gives_the_same_config(tmp_path: Path, case: dict) -> None:
    model = tiny(0, bos_token_id=2, **case)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", expert_type="F32", dense_type="F32")
    config = open_model(str(tmp_path / "hf")).config
    assert open_model(str(tmp_path / "m.gguf")).config == config
    assert open_model(str(tmp_path / "hf"), str(tmp_path / "m.gguf")).config == config


@pytest.mark.parametrize("fused", [False, True])
def test_names_of_both_generations(tmp_path: Path, fused: bool) -> None:
    """block_sparse_moe and w1, w2, w3 on the hub, stacked experts in transformers 5."""
    model = tiny(1)
    save_hf(model, tmp_path, fused=fused)
    stored = load_file(tmp_path / "model.safetensors")
    assert any("block_sparse_moe.experts.0.w1" in name for name in stored) is not fused
    source, held = open_model(str(tmp_path)), dict(model.named_parameters())
    experts = source.experts(1)
    gate, up = held["model.layers.1.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    assert torch.equal(experts.stacked("gate", torch.float32), gate)
    assert torch.equal(experts.stacked("up", torch.float32), up)
    assert torch.equal(experts.stacked("down", torch.float32), held["model.layers.1.mlp.experts.down_proj"])
    router = source.tensor("model.layers.0.mlp.gate.weight").dequantise()
    assert torch.equal(router, held["model.layers.0.mlp.gate.weight"])


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    save_hf(tiny(1), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.gate.weight"] = stored["model.layers.0.block_sparse_moe.gate.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="are one: leave one of them out"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("block_sparse_moe.experts.3.w2.weight", lambda t: t[1:].clone(), "has shape"),
        ("block_sparse_moe.experts.3.w2.weight", lambda t: t.bfloat16(), "has type"),
        ("block_sparse_moe.gate.weight", lambda t: t[1:].clone(), "has shape"),
        ("block_sparse_moe.gate.odd", None, "tensor"),
    ],
)
def test_errors_name_tensors_as_they_are_stored(tmp_path: Path, name: str, change, said: str) -> None:
    save_hf(tiny(1), tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), f"model.layers.0.{name}"
    stored[name] = torch.zeros(1) if change is None else change(stored[name])
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=rf"{name}\b") as caught:
        open_model(str(tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_rows_of_gguf_are_put_in_order(tmp_path: Path, kind: str) -> None:
    model = tiny(2)
    held = save_gguf(model, tmp_path / "m.gguf", dense_type=kind)
    source = open_model(str(tmp_path / "m.gguf"))
    for name in ("q_proj", "k_proj", "v_proj"):
        read = source.tensor(f"model.layers.1.self_attn.{name}.weight").dequantise()
        assert torch.equal(read, held.get_submodule(f"model.layers.1.self_attn.{name}").weight)
    stored = gguf.GGUFReader(tmp_path / "m.gguf")
    first = next(t for t in stored.tensors if t.name == "blk.1.attn_q.weight")
    values = torch.from_numpy(gguf.quants.dequantize(first.data, first.tensor_type).copy()).reshape(64, 64)
    weight = held.get_submodule("model.layers.1.self_attn.q_proj").weight
    assert torch.equal(values, in_pairs(weight, model.config)) and not torch.equal(values, weight)


def as_single_experts(path: Path, to: Path) -> None:
    """The same file with a tensor for each expert, as llama.cpp's converter wrote at first."""
    file = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, "llama")
    for field in file.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in file.tensors:
        if "_exps" in tensor.name:
            for expert, data in enumerate(tensor.data):
                name = tensor.name.replace("_exps", f".{expert}")
                writer.add_tensor(name, data.copy(), raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_single_experts_of_old_files(tmp_path: Path) -> None:
    save_gguf(tiny(3), tmp_path / "new.gguf")
    as_single_experts(tmp_path / "new.gguf", tmp_path / "old.gguf")
    assert "blk.0.ffn_down.3.weight" in open_gguf(tmp_path / "old.gguf").tensors
    new, old = open_model(str(tmp_path / "new.gguf")), open_model(str(tmp_path / "old.gguf"))
    assert new.config == old.config
    for projection in ("gate", "up", "down"):
        pair = (source.experts(1).stacked(projection, torch.float32) for source in (new, old))
        assert torch.equal(*pair)


# ---- served


@on_backends
@pytest.mark.parametrize("form", ["hf", "gguf", "single"])
def test_greedy_tokens_equal_transformers(tmp_path: Path, backend: dict, form: str) -> None:
    """A prompt, and again behind the cached one."""
    model = tiny(4, num_hidden_layers=2)
    path = tmp_path / ("hf" if form == "hf" else "m.gguf")
    if form == "hf":
        save_hf(model, path)
    else:
        save_gguf(model, path, expert_type="F32", dense_type="F32")
    if form == "single":
        as_single_experts(path, tmp_path / "old.gguf")
        path = tmp_path / "old.gguf"
    engine = Harness(path, max_num_batched_tokens=32, **backend)
    asked = prompts(4, [5, 40, 33])
    answers = [engine.generate(asked, max_tokens=6) for _ in range(2)]
    assert engine.core.scheduler.stats()["prefix_hit_tokens"] > 0
    engine.close()
    for got in answers:
        for prompt, tokens in zip(asked, got, strict=True):
            expected, gap = greedy(model, prompt, 6, tokens)
            assert tokens == expected or gap < CLEAR


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Adapters on attention, routers and experts."""
    return Family(tmp_path_factory.mktemp("family"), family="mixtral")


@on_backends
def test_a_mixed_batch_equals_merged_models(family: Family, backend: dict) -> None:
    names = [None, "adapter-0", "adapter-1", "adapter-2", None, "adapter-1"]
    asked = prompts(1, [3, 9, 20, 31, 14, 5])
    engine = family.engine(max_num_seqs=8, **backend)
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


@pytest.mark.parametrize("rules", ["reference", None])
def test_check_agrees_with_a_sound_model(tmp_path: Path, rules: str | None) -> None:
    save_gguf(tiny(1), tmp_path / "m.gguf", "Q8_0", "Q8_0")
    settings = {"dtype": "bfloat16", "kv_cache_tokens": 128, "max_num_batched_tokens": 32, "max_num_seqs": 1}
    config = EngineConfig(model=str(tmp_path / "m.gguf"), device="cpu", pack_cache="off", rules=rules, **settings)
    plan = plan_engine(config)
    lines: list[str] = []
    assert check_model(plan.source, make_backends(plan), list(range(2, 34)), lines.append) is None
    assert all(line.startswith("ok") for line in lines)
