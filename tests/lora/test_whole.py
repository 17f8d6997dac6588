"""An embedding and a head beside the LoRA: the base's own are passed over, any other refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.errors import AdapterError, UserError
from engine.lora.files.parse import parse_adapter
from engine.lora.files.whole import base_tables
from engine.ranks.shard import Shard, ShardedSource
from engine.weights.open import open_model
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.lora import make

MODULES = ("model.embed_tokens", "lm_head")
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_hf(tiny_model(seed=4, tie_word_embeddings=request.param), folder)
    return folder


def tensors_of(base: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The base's own embedding and head, in `dtype`."""
    source = open_model(str(base))
    embed = source.tensor("model.embed_tokens.weight").dequantise()
    head = source.tensor("lm_head.weight").dequantise() if source.has("lm_head.weight") else embed
    return {"model.embed_tokens": embed.to(dtype), "lm_head": head.to(dtype)}


def written(folder: Path, base: Path, whole: dict[str, torch.Tensor], suffix: str = "", **fields: object) -> Path:
    weights = make.random_adapter(open_model(str(base)).config, experts=False)
    tensors = {f"{make.PREFIX}{module}{suffix}.weight": tensor for module, tensor in whole.items()}
    return make.write(folder, make.linear_keys(weights) | tensors, make.lora_config(**fields))


def parse(folder: Path, base: Path) -> list[str]:
    """The warnings."""
    source = open_model(str(base))
    return parse_adapter(folder, source.config, name="x", tables=base_tables(source)).warnings


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("suffix", ["", ".base_layer"])
@pytest.mark.parametrize("fields", [{}, {"modules_to_save": ["lm_head", "model.embed_tokens"]}])
def test_those_of_the_base_are_passed_over(
    tmp_path: Path, base: Path, dtype: torch.dtype, suffix: str, fields: dict[str, object]
) -> None:
    assert parse(written(tmp_path, base, tensors_of(base, dtype), suffix, **fields), base) == []


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_other_refuses(tmp_path: Path, base: Path, module: str, dtype: torch.dtype) -> None:
    own = tensors_of(base, dtype)
    value = own[module].clone()
    value[-1, -1] += 0.5
    for wrong in (value, own[module][:-1], torch.full_like(value, torch.nan), value[0]):
        folder = written(tmp_path, base, own | {module: wrong})
        with pytest.raises(AdapterError, match=f"a whole {module} that is not the base's") as caught:
            parse(folder, base)
        assert caught.value.keys == [f"{make.PREFIX}{module}.weight"]


def test_without_a_base_nothing_is_compared(tmp_path: Path, base: Path) -> None:
    folder = written(tmp_path, base, tensors_of(base, torch.float32))
    with pytest.raises(AdapterError, match="no base to compare it with"):
        parse_adapter(folder, open_model(str(base)).config, name="x")


def test_a_rank_compares_with_the_whole_base(base: Path) -> None:
    source = open_model(str(base))
    assert base_tables(ShardedSource(source, Shard(0, 2))) == base_tables(source)


def test_a_quantised_base_is_dequantised(tmp_path: Path) -> None:
    path = tmp_path / "base.gguf"
    save_gguf(tiny_model(seed=4), path)
    assert parse(written(tmp_path / "same", path, tensors_of(path, torch.float32)), path) == []


def test_as_peft_saves_them_and_the_engine_loads_them(tmp_path: Path, base: Path) -> None:
    model = tiny_model(seed=4, tie_word_embeddings=open_model(str(base)).config.tie_word_embeddings)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    peft_model.save_pretrained(tmp_path / "good", save_embedding_layers=True)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 1
    peft_model.save_pretrained(tmp_path / "bad", save_embedding_layers=True)
    engine = Harness(base)
    engine.adapter("good", tmp_path / "good")
    with pytest.raises(UserError, match="that is not the base's"):
        engine.adapter("bad", tmp_path / "bad")
    engine.close()
