"""The network equals transformers' model; the files are what they claim to be; a training runs from end to end."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer

from demo import export, paths, train
from demo.corpus import build_rows
from demo.evaluate import said
from demo.nn.answer import answerer, hf_model
from demo.nn.lora import FUSED_FILE, MANIFEST_FILE, init_lora, load_lora, merge, save_fused, save_per_expert
from demo.nn.network import Forward, Shape, State, from_hf, init_state, load_model, save_model, to_hf
from demo.tokenizer import VOCAB_SIZE

SMALL = Shape(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=32, moe_intermediate_size=32)


def _random_lora(shape: Shape) -> State:
    lora = init_lora(shape, "cpu", seed=1)
    torch.manual_seed(0)
    return {n: t + torch.randn_like(t) * 0.05 for n, t in lora.items()}


def _logits(shape: Shape, state: State, ids: torch.Tensor, lora: State | None = None) -> torch.Tensor:
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
    hidden, _ = Forward(shape, state, lora)(ids, mask)
    return F.linear(hidden, state["lm_head.weight"])


def test_forward_equals_transformers() -> None:
    state = init_state(SMALL, "cpu", seed=1)
    ids = torch.arange(40).view(2, 20) * 37 % VOCAB_SIZE
    with torch.inference_mode():
        theirs = hf_model(SMALL, state, "cpu")(ids).logits
    torch.testing.assert_close(_logits(SMALL, state, ids), theirs, atol=2e-5, rtol=1e-4)


def test_lora_forward_equals_merged_weights_in_both_ways_of_running_experts() -> None:
    state, lora = init_state(SMALL, "cpu", seed=1), _random_lora(SMALL)
    ids = torch.arange(40).view(2, 20) * 37 % VOCAB_SIZE
    merged = _logits(SMALL, merge(state, lora), ids)
    assert (merged - _logits(SMALL, state, ids)).abs().max() > 0.1
    torch.testing.assert_close(_logits(SMALL, state, ids, lora), merged, atol=1e-4, rtol=1e-3)
    forward = Forward(SMALL, state, lora)
    x, weights = torch.randn(30, 64), torch.rand(30, 8) * (torch.rand(30, 8) > 0.6)
    at = "model.layers.1.mlp.experts"
    routed, dense = forward._routed_experts(x, at, weights), forward._all_experts(x, at, weights)
    torch.testing.assert_close(routed, dense, atol=1e-4, rtol=1e-3)


def test_rows_do_not_see_their_neighbours(tokenizer: Tokenizer) -> None:
    state = init_state(SMALL, "cpu")
    rows = build_rows(tokenizer, "plain", 40, length=128)
    ids, segment = torch.from_numpy(rows.ids.astype("int64")), torch.from_numpy(rows.segment.astype("int16"))
    learn = torch.from_numpy(rows.learn)
    losses, count = torch.zeros(()), 0
    for i in range(len(ids)):
        for s in range(1, int(segment[i].max()) + 1):
            at = segment[i] == s
            alone = train.loss_of(Forward(SMALL, state), ids[i, at][None], segment[i, at][None], learn[i, at][None])[0]
            n = int(learn[i, at][1:].sum())
            losses, count = losses + alone * n, count + n
    packed, _ = train.loss_of(Forward(SMALL, state), ids, segment, learn)
    torch.testing.assert_close(packed, losses / count, atol=1e-4, rtol=1e-4)


def test_model_files_come_back(tmp_path: Path) -> None:
    state = init_state(SMALL, "cpu", seed=2)
    assert from_hf(to_hf(state), SMALL).keys() == state.keys()
    save_model(tmp_path, SMALL, state, VOCAB_SIZE - 1, VOCAB_SIZE - 3, torch.bfloat16)
    shape, loaded = load_model(tmp_path)
    assert shape == SMALL
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor.bfloat16().float()), name
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    ids = torch.arange(12)[None] * 5
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, _logits(shape, loaded, ids), atol=2e-5, rtol=1e-4)


def test_per_expert_form(tmp_path: Path) -> None:
    lora = _random_lora(SMALL)
    save_per_expert(lora, tmp_path, "base")
    with safe_open(str(tmp_path / "adapter_model.safetensors"), "pt") as file:
        keys = list(file.keys())
        assert len(keys) == SMALL.num_hidden_layers * (4 + 3 * SMALL.num_experts) * 2
        a = file.get_tensor("base_model.model.model.layers.1.mlp.experts.7.down_proj.lora_A.weight")
        b = file.get_tensor("base_model.model.model.layers.1.mlp.experts.7.down_proj.lora_B.weight")
        q = file.get_tensor("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    assert (a.shape, b.shape, a.dtype) == ((8, 32), (64, 8), torch.bfloat16)
    assert (q.shape, q.dtype) == ((128, 8), torch.float32)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 16)
    assert "gate_proj" in config["target_modules"]
    _same_as_stored(load_lora(tmp_path, SMALL), lora)


def test_fused_form(tmp_path: Path) -> None:
    lora = _random_lora(SMALL)
    save_fused(lora, tmp_path, "base")
    manifest = json.loads((tmp_path / MANIFEST_FILE).read_text())
    assert (manifest["status"], manifest["version"], manifest["lora"]) == ("ready", 1, {"alpha": 16.0, "rank": 8})
    assert set(manifest["artifacts"]) == {"adapter_config.json", "adapter_model.safetensors", FUSED_FILE}
    for name, entry in manifest["artifacts"].items():
        data = (tmp_path / name).read_bytes()
        assert entry["size"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    entry = manifest["artifacts"][FUSED_FILE]
    with safe_open(str(tmp_path / FUSED_FILE), "pt") as file:
        assert sorted(file.keys()) == sorted(entry["tensors"])
        assert entry["tensor_count"] == len(entry["tensors"]) == 6 * SMALL.num_hidden_layers
        for key, info in entry["tensors"].items():
            assert info == {"dtype": "BF16", "shape": list(file.get_tensor(key).shape)}
    assert entry["tensors"]["layers.0.experts.gate_lora_b"]["shape"] == [8, 32, 8]
    with safe_open(str(tmp_path / "adapter_model.safetensors"), "pt") as file:
        assert all("self_attn" in key for key in file.keys())  # noqa: SIM118
    _same_as_stored(load_lora(tmp_path, SMALL), lora)


def _same_as_stored(loaded: State, lora: State) -> None:
    assert loaded.keys() == lora.keys()
    for name, tensor in lora.items():
        expected = tensor.bfloat16().float() if ".experts." in name else tensor
        assert torch.equal(loaded[name], expected), name


def test_gguf_holds_the_model_and_its_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    state = init_state(SMALL, "cpu", seed=3)
    path = tmp_path / "model.gguf"
    export.write_gguf(path, SMALL, state, tokenizer)
    reader = gguf.GGUFReader(str(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3moe"
    assert fields["qwen3moe.attention.key_length"] == SMALL.head_dim
    assert fields["qwen3moe.expert_used_count"] == 2
    assert fields["tokenizer.ggml.pre"] == "qwen2"
    assert len(fields["tokenizer.ggml.tokens"]) == VOCAB_SIZE
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    tensors = {t.name: t for t in reader.tensors}
    experts = tensors["blk.1.ffn_down_exps.weight"]
    assert experts.tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert experts.shape.tolist() == [32, 64, 8]  # fastest first
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    back = export.read_gguf(path, SMALL)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].shape == tensor.shape
        assert (back[name] - tensor).abs().max() <= tensor.abs().max() / 127, name


def test_training_learns_and_the_schedule_ends_low(tokenizer: Tokenizer) -> None:
    rows = build_rows(tokenizer, "plain", 60, length=128)
    state = init_state(SMALL, "cpu")
    forward = Forward(SMALL, state)
    ids, segment, learn = (torch.from_numpy(a.astype("int64")) for a in (rows.ids, rows.segment, rows.learn))
    before = train.loss_of(forward, ids, segment, learn.bool())[0].item()
    steps, _ = train.fit(forward, state, rows, train.Budget(0, steps=15, rows=8), "cpu", "test", 0)
    after = train.loss_of(forward, ids, segment, learn.bool())[0].item()
    assert steps == 15
    assert after < before - 1
    assert train.schedule(0.02) == pytest.approx(1.0)
    assert train.schedule(1.0) == pytest.approx(0.01)


def test_adapter_training_leaves_the_base_alone(tokenizer: Tokenizer) -> None:
    rows = build_rows(tokenizer, "pirate", 30, length=128)
    state = init_state(SMALL, "cpu")
    before = {name: tensor.clone() for name, tensor in state.items()}
    lora = init_lora(SMALL, "cpu", 1)
    train.fit(Forward(SMALL, state, lora), lora, rows, train.Budget(0, steps=3, rows=4), "cpu", "test", 0)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert all(tensor.abs().max() > 0 for tensor in lora.values())


def test_three_steps_from_command_line_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--device cpu --steps 3 --texts 150 --rows 1 --questions 1 --layers 1"
    assert train.main(["--out", str(tmp_path), *arguments.split()]) == 1  # three steps teach nobody to add
    assert "arithmetic 0.0% exact" in capsys.readouterr().err
    shape, _ = load_model(tmp_path / "base")
    for style in paths.ADAPTERS:
        assert load_lora(tmp_path / "adapters" / style, shape)
    assert "| base |" in (tmp_path / "report.md").read_text()
    assert export.main(["--hf", str(tmp_path), "--out", str(tmp_path / "model"), "--questions", "1"]) == 1
    assert (tmp_path / "model" / paths.MODEL_FILE).is_file()


def test_answers_do_not_depend_on_the_batch(tokenizer: Tokenizer) -> None:
    state = init_state(SMALL, "cpu", seed=5)
    answer = answerer(hf_model(SMALL, state, "cpu"), tokenizer, "cpu", max_new_tokens=5)
    asked = [said(text) for text in ("Hello!", "What is 23 + 48?", "Tell me a story about a fox.")]
    assert answer(asked) == [answer([each])[0] for each in asked]
