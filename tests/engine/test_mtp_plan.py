"""The layer of `--speculate mtp:K` before a byte of weights is read: what is opened, planned, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ModelFileError, UserError
from engine.launch.null.build import build_null
from engine.memory.items import Kind
from engine.planning.plan import plan_engine
from engine.weights.open import open_model
from testing.models.tiny import save_hf, tiny_model
from tests.engine.test_mtp import each, made


def planned(path: Path, **config: Any) -> Any:
    defaults = {"kv_cache_tokens": 128, "max_num_seqs": 4, "rules": "reference", "dtype": "float32", "device": "cpu"}
    return plan_engine(EngineConfig(model=str(path), **(defaults | config)))


@each
def test_the_layer_is_loaded_only_if_it_is_asked_for(tmp_path: Path, name: str) -> None:
    made(name, tmp_path)
    plain, drafted = open_model(str(tmp_path)), open_model(str(tmp_path), mtp=True)
    count = plain.config.num_hidden_layers
    assert drafted.config.num_hidden_layers == count and len(drafted.config.layers) == count + 1
    assert drafted.config.without_mtp.layers == plain.config.layers
    own = {tensor for tensor in drafted.names() if tensor not in plain.names()}
    assert own and all(tensor.startswith(f"model.layers.{count}.") for tensor in own)
    assert any("multi-token prediction" in line and "copy" not in line for line in plain.left_out)
    assert all("copy" in line for line in drafted.left_out)


@each
def test_the_plan_counts_the_layer(tmp_path: Path, name: str) -> None:
    made(name, tmp_path)
    sizes = []
    for speculate in (None, "suffix:2", "mtp:1", "mtp:2", "mtp:18"):
        plan = planned(tmp_path, speculate=speculate)
        kinds = (Kind.EXPERTS, Kind.WEIGHTS, Kind.KV_CACHE)
        found = [sum(item.num_bytes for item in plan.memory.items if item.kind is kind) for kind in kinds]
        sizes.append((found, plan.cache_blocks - plan.num_blocks, plan.source.config.kv_bytes_per_token(4)))
    plain, texts, one, two, many = sizes
    assert plain[1:] == texts[1:] and plain[0][:2] == texts[0][:2]
    assert one[0][0] - plain[0][0] == 8 * 3 * 64 * 64 * 4, "a layer of experts"
    assert one[0][1] > plain[0][1] and one[2] > plain[2]
    assert [blocks for _, blocks, _ in sizes] == [1, 1, 1, 1 + 4, 1 + 2 * 4]
    assert many[0][2] - two[0][2] >= 4 * 16 * two[2] * (name not in ("qwen3_next", "qwen3_5_moe_text"))


@pytest.mark.parametrize(
    ("name", "folder", "why"),
    [
        ("qwen3_moe", "plain", "qwen3_moe models like this one have no layer"),
        ("glm4_moe", "plain", "have no layer"),
        ("minimax_m2", "plain", "have no layer"),
        ("qwen3_next", "plain", r"is not in the files \(no tensor mtp\.\*\)"),
    ],
)
def test_a_model_without_such_a_layer_is_refused(tmp_path: Path, name: str, folder: str, why: str) -> None:
    save_hf(tiny_model(3, family=name), tmp_path)
    with pytest.raises(UserError, match=rf"{why}.*--speculate suffix:K or ngram:K makes drafts without one") as error:
        planned(tmp_path, speculate="mtp:2")
    assert error.value.field == "speculate"


def test_a_part_of_the_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    made("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    open_model(str(tmp_path))
    with pytest.raises(ModelFileError, match=r"model\.layers\.2\.hnorm\.weight \[64\] is missing"):
        planned(tmp_path, speculate="mtp:2")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel 2: ranks do not divide the layer"),
        ({"fine_tuning": True}, "--fine-tuning: the layer of multi-token prediction is not trained"),
    ],
)
def test_what_it_cannot_be_had_with(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=rf"{why}.*--speculate suffix:K"):
        planned(tmp_path, speculate="mtp:2", **settings)


def test_the_null_engine_has_no_layer() -> None:
    with pytest.raises(UserError, match="the null engine has no layer that predicts"):
        build_null(EngineConfig(model="null:", speculate="mtp:2"), lambda message: None)
