"""`ktserve check` names what diverges: the layer, the expert, the tensor."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.diagnostics.check import check_model
from engine.errors import UserError
from engine.experts.reference import ReferenceExperts
from engine.launch.backends import make_backends
from engine.main import main
from engine.planning.plan import plan_engine
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model

TOKENS = list(range(2, 34))


def plan(path, **config):
    settings = {"dtype": "bfloat16", "kv_cache_tokens": 128, "max_num_batched_tokens": 32, "max_num_seqs": 1}
    return plan_engine(EngineConfig(model=str(path), device="cpu", pack_cache="off", **(settings | config)))


@pytest.mark.parametrize("rules", ["reference", None])
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
def test_a_sound_model_agrees(tmp_path, rules, kind):
    save_gguf(tiny_model(1, mlp_only_layers=[1], num_hidden_layers=3), tmp_path / "m.gguf", kind, kind)
    planned = plan(tmp_path / "m.gguf", rules=rules)
    lines: list[str] = []
    assert check_model(planned.source, make_backends(planned), TOKENS, lines.append) is None
    assert len(lines) == 10 and all(line.startswith("ok") for line in lines)


@pytest.mark.parametrize("rules", ["reference", None])
def test_layers_with_states_agree(tmp_path, rules):
    save_hf(tiny_model(1, family="qwen3_next"), tmp_path)
    planned = plan(tmp_path, rules=rules)
    lines: list[str] = []
    assert check_model(planned.source, make_backends(planned), TOKENS, lines.append) is None
    assert all(line.startswith("ok") for line in lines)
    assert sum("self_attn" in line for line in lines) == 3


def test_a_wrong_expert_is_named(tmp_path, monkeypatch):
    save_hf(tiny_model(2, num_hidden_layers=3), tmp_path)
    planned = plan(tmp_path, rules="reference")
    backends = make_backends(planned)
    broken = backends.experts(0)
    original = ReferenceExperts.load_layer

    def load(self, layer, store):
        original(self, layer, store)
        if self is broken and layer == 1:
            self._layers[layer].down[5].mul_(1.5)

    monkeypatch.setattr(ReferenceExperts, "load_layer", load)
    lines: list[str] = []
    first = check_model(planned.source, backends, TOKENS, lines.append)
    assert first is not None and first.place == "model.layers.1.mlp.experts.5"
    assert [line for line in lines if "layers.0" in line and line.startswith("BAD")] == []


def test_a_wrong_head_is_named(tmp_path, monkeypatch):
    save_gguf(tiny_model(4), tmp_path / "m.gguf", "Q8_0", "Q8_0")
    planned = plan(tmp_path / "m.gguf", rules="reference")
    backends = make_backends(planned)
    linear = backends.linear("lm_head")
    load = linear.load

    def wrong(name, weight, bias):
        made = load(name, weight, bias)
        made.weight.mul_(1.5)
        return made

    monkeypatch.setattr(linear, "load", lambda *it: (wrong if it[0] == "lm_head" else load)(*it))
    first = check_model(planned.source, backends, TOKENS, lambda _: None)
    assert first is not None and first.place == "lm_head"


@pytest.mark.parametrize(
    "name,tied",
    [("embed_tokens.weight", False), ("embed_tokens.weight", True), ("norm.weight", True), ("lm_head.weight", False)],
)
def test_what_serving_would_refuse_is_named_outside_of_layers_too(tmp_path, name, tied):
    name = name if name.startswith("lm_head") else f"model.{name}"
    model = tiny_model(5, tie_word_embeddings=tied)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-3] = float("inf")
    save_hf(model, tmp_path)
    first = check_model(plan(tmp_path).source, make_backends(plan(tmp_path)), TOKENS, lambda _: None)
    assert first is not None and first.place == name and first.nonfinite == 1


@pytest.mark.parametrize("poison,said", [(np.float32("nan"), "not finite"), (np.float32(3e6), "scales look corrupt")])
def test_a_bad_tensor_is_named(tmp_path, poison, said):
    model = tiny_model(3)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] = float(poison)
    save_hf(model, tmp_path)
    planned = plan(tmp_path, rules="reference")
    first = check_model(planned.source, make_backends(planned), TOKENS, lambda _: None)
    assert first is not None and first.place == "model.layers.1.mlp.experts.3.down_proj" and said in first.note
    assert dataclasses.asdict(first)["nonfinite"] == int(not np.isfinite(poison))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(6, dtype=torch.bfloat16), path)
    return path


@pytest.mark.parametrize(
    "given",
    [
        {"max_model_len": 300},
        {"kv_cache_memory": "16MiB", "kv_disk": "16MiB", "max_num_seqs": 100},
        {"quantise": "int8"},
        {"quantise": "int4"},
    ],
    ids=str,
)
def test_settings_that_can_be_served_agree(folder, capsys, given):
    config = EngineConfig(model=str(folder), device="cpu", pack_cache="off", **given)
    status = main(["check", "--config-json", msgspec.json.encode(config).decode()])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("given", [{"max_model_len": 600}, {"adapters": ["a=/nowhere"]}], ids=str)
def test_settings_that_cannot_be_served_are_refused(folder, given):
    with pytest.raises(UserError) as caught:
        plan(folder, **given, kv_cache_tokens=None)
    assert caught.value.field == next(iter(given))
