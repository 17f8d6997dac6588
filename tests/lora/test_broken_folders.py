"""Folders of adapters and of models whose JSON is of another form: read, or refused in one message."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.errors import AdapterError, UserError
from engine.lora.files.parse import parse_adapter
from engine.weights.open import open_model
from testing.fuzz.broken import broken
from testing.models.tiny import FAMILIES, save_hf, tiny_model
from tests.lora import make

CONFIG = make.model_config()
FEW = hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
Files = dict[str, bytes]


def _content(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file as its header and what stands behind it."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


@cache
def adapters() -> dict[str, Files]:
    made = {}
    for form in ("per expert", "fused"):
        with TemporaryDirectory() as name:
            folder = Path(name)
            weights = make.random_adapter(CONFIG, rank=1, extra=1)
            tensors = make.linear_keys(weights) | make.extra_keys(weights)
            config = make.lora_config(1, rank_pattern={"q_proj": 1}, alpha_pattern={"q_proj": 1}, layers_pattern=None)
            if form == "fused":
                make.write(folder, tensors, config, fused=make.fused_keys(weights))
                make.write_manifest(folder, rank=1)
            else:
                make.write(folder, tensors | make.per_expert_keys(weights), config)
            made[form] = _content(folder)
    return made


@cache
def models() -> dict[str, Files]:
    made = {}
    for family in FAMILIES:
        with TemporaryDirectory() as name:
            save_hf(tiny_model(family=family), Path(name), sharded=True)
            made[family] = _content(Path(name))
    return made


@st.composite
def changed(draw: st.DrawFn, folders: Callable[[], dict[str, Files]]) -> tuple[str, Files]:
    """A folder, one of whose JSON files or headers is changed once or twice."""
    name = draw(st.sampled_from(sorted(folders())))
    files = dict(folders()[name])
    which = draw(st.sampled_from(sorted(f for f in files if f.endswith((".json", ".safetensors")))))
    if which.endswith(".json"):
        value = json.loads(files[which])
        for _ in range(draw(st.integers(1, 2))):
            value = draw(broken(value))
        files[which] = json.dumps(value).encode()
    else:
        header, rest = header_of(files[which])
        for _ in range(draw(st.integers(1, 2))):
            header = draw(broken(header))
        files[which] = with_header(header, rest)
    return name, files


def write(folder: Path, files: Files) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


@FEW
@given(changed(adapters))
def test_adapters(made: tuple[str, Files]) -> None:
    with TemporaryDirectory() as name:
        write(Path(name), made[1])
        try:
            parse_adapter(Path(name), CONFIG, name="x")
        except AdapterError as error:
            assert 10 < len(str(error)) < 5000


@FEW
@given(changed(models))
def test_models(made: tuple[str, Files]) -> None:
    with TemporaryDirectory() as name:
        write(Path(name), made[1])
        try:
            open_model(Path(name))
        except UserError as error:
            assert 10 < len(str(error)) < 5000


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize(
    "kind", ["empty", "pointer", "folder", "loop", "gone", "huge header", "short", "zeros", "null"]
)
@pytest.mark.parametrize("place", [("adapter", 0), ("adapter", 1), ("model", 0), ("model", 1), ("model", 2)])
def test_kinds_of_files(tmp_path: Path, place: tuple[str, int], kind: str) -> None:
    files = adapters()["per expert"] if place[0] == "adapter" else models()["qwen3_moe"]
    write(tmp_path, files)
    names = {"adapter": ["adapter_config.json", "adapter_model.safetensors"],
             "model": ["config.json", "model.safetensors.index.json", ""]}[place[0]]  # fmt: skip
    name = names[place[1]] or next(each for each in sorted(files) if each.endswith(".safetensors"))
    path = tmp_path / name
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "gone":
            path.symlink_to(tmp_path / "nowhere")
        case _:
            content = {"empty": b"", "pointer": POINTER, "huge header": b"\xff" * 7 + b"\0{}", "short": b"\x08",
                       "zeros": bytes(4096), "null": b"null"}  # fmt: skip
            path.write_bytes(content[kind])
    with pytest.raises(UserError) as caught:
        if place[0] == "adapter":
            parse_adapter(tmp_path, CONFIG, name="x")
        else:
            open_model(tmp_path)
    assert name in str(caught.value) or "adapter_config" in str(caught.value), caught.value


@pytest.mark.parametrize(
    "target", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", ".", "", "a\0b", "x" * 300]
)
def test_an_index_names_files_of_its_folder(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, models()["qwen3_moe"])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = min(index["weight_map"])
    shard = folder / index["weight_map"][first]
    (tmp_path / "x.safetensors").write_bytes(shard.read_bytes())
    index["weight_map"][first] = target
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json"):
        open_model(folder)
