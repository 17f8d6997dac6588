"""Folders with more than one source of weights: as transformers takes them, or refused by both names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ModelFileError, UserError
from engine.weights.gguf import GGUFSource
from engine.weights.open import open_model
from engine.weights.safetensors.source import SafetensorsSource
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model
from tests.lora import make
from tests.lora.refuse import WEIGHTS, refused

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 134\n"


def model_folder(path: Path, *kinds: str) -> Path:
    model = tiny_model()
    if "shards" in kinds:
        save_hf(model, path, sharded=True)
    if "single" in kinds:
        save_hf(model, path / "other")
        path.mkdir(exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            (path / "other" / name).replace(path / name)
    if "gguf" in kinds:
        path.mkdir(exist_ok=True)
        save_gguf(model, path / "model.gguf")
    if "bin" in kinds:
        (path / "pytorch_model-00001-of-00002.bin").touch()
    if "mmproj" in kinds:
        (path / "mmproj-F16.gguf").touch()
    if "adapter" in kinds:
        path.mkdir(exist_ok=True)
        make.write(path, make.linear_keys(WEIGHTS), make.lora_config())
    return path


@pytest.mark.parametrize(
    "kinds, source",
    [
        (("shards", "bin"), SafetensorsSource),
        (("single", "bin", "gguf"), SafetensorsSource),
        (("shards", "gguf", "mmproj"), SafetensorsSource),
        (("gguf", "mmproj"), GGUFSource),
    ],
)
def test_one_is_taken_as_transformers_does(tmp_path: Path, kinds: tuple[str, ...], source: type) -> None:
    assert type(open_model(str(model_folder(tmp_path / "model", *kinds)))) is source


@pytest.mark.parametrize(
    "kinds, named",
    [
        (("shards", "single"), ("model.safetensors, which", "model.safetensors.index.json")),
        (("gguf", "bin"), ("pytorch_model-00001-of-00002.bin", "model.gguf")),
        (("single", "adapter"), ("adapter_config.json", "--adapters NAME=")),
        (("shards", "adapter"), ("adapter_config.json", "--adapters NAME=")),
        (("gguf", "adapter"), ("adapter_config.json", "--adapters NAME=")),
        (("adapter",), ("is an adapter, no model", "--adapters NAME=")),
    ],
)
def test_two_are_refused_by_name(tmp_path: Path, kinds: tuple[str, ...], named: tuple[str, ...]) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_model(str(model_folder(tmp_path / "model", *kinds)))
    assert all(name in str(caught.value) for name in named)


def test_an_index_may_name_the_one_file(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", "single")
    names = open_model(str(path)).shards[0].tensors
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(open_model(str(path)).files) == 1


def test_a_projector_alone_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "mmproj-F16.gguf").touch()
    with pytest.raises(UserError, match=r"holds no \.gguf file"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.gguf", "model-00001-of-00003.safetensors"])
def test_git_lfs_pointers_say_so(tmp_path: Path, name: str) -> None:
    kind = "gguf" if name.endswith("gguf") else "single" if name == "model.safetensors" else "shards"
    path = model_folder(tmp_path / "model", kind)
    target = path / name if kind != "shards" or name == "config.json" else min(path.glob("model-*.safetensors"))
    target.write_text(POINTER)
    with pytest.raises(ModelFileError, match=f"{target.name}: is a Git LFS pointer.*git lfs pull"):
        open_model(str(path))


def test_so_does_an_adapters(tmp_path: Path) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        folder = make.write(tmp_path / name, make.linear_keys(WEIGHTS), make.lora_config())
        (folder / name).write_text(POINTER)
        refused(folder, f"{name}: is a Git LFS pointer")
