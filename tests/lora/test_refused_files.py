"""Folders, weight files and manifests that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.lora.files.parse import parse_adapter
from tests.lora import make
from tests.lora.make import PREFIX
from tests.lora.refuse import CONFIG, WEIGHTS, peft_tensors, refused, write_fused

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    return write_fused(tmp_path / "fused")


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "kt_adapter_manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


# ---- paths and files


def test_paths(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "cannot be opened")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    refused(tmp_path / "a", "cannot be opened")
    refused(tmp_path / "nul\0", "cannot be opened")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no adapter")


def test_a_link_to_an_adapter_is_followed(tmp_path: Path) -> None:
    make.write(tmp_path / "real", peft_tensors(), make.lora_config())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert parse_adapter(tmp_path / "link", CONFIG, name="x").rank == 3


def test_a_weight_file_that_links_to_itself(tmp_path: Path) -> None:
    make.write(tmp_path, None, make.lora_config())
    (tmp_path / "adapter_model.safetensors").symlink_to(tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "cannot be read|corrupt")


def test_truncated_and_corrupt_safetensors(tmp_path: Path) -> None:
    file = make.write(tmp_path, peft_tensors(), make.lora_config()) / "adapter_model.safetensors"
    content = file.read_bytes()
    for broken in (content[:-1], content[:100], b"", b"\xff" * 64):
        file.write_bytes(broken)
        assert refused(tmp_path, "truncated|shorter than").keys == ["adapter_model.safetensors"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("pickle ran code",))


@pytest.mark.parametrize("content", [{"x": Evil()}, b"not a pickle", b""])
def test_pickles_that_hold_more_than_tensors(tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make.write(tmp_path, None, make.lora_config())
    file = tmp_path / "adapter_model.bin"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    refused(tmp_path, "corrupt, or holds more than plain tensors")
    assert "pickle ran code" not in capsys.readouterr().out


@pytest.mark.parametrize("content, match", [([1], "must hold a dictionary"), ({"a": 3}, "is a int, not a tensor")])
def test_pickles_of_something_else(tmp_path: Path, content: Any, match: str) -> None:
    make.write(tmp_path, None, make.lora_config())
    torch.save(content, tmp_path / "adapter_model.bin")
    refused(tmp_path, match)


@pytest.mark.parametrize("binary", [False, True])
def test_type_that_is_not_read(tmp_path: Path, binary: bool) -> None:
    key = f"{PREFIX}{Q}.lora_A.weight"
    tensors = peft_tensors()
    tensors[key] = tensors[key].double()
    error = refused(make.write(tmp_path, tensors, make.lora_config(), binary=binary), "has type .*64")
    assert error.keys == [key] if binary else key in str(error)


def test_both_weight_files(tmp_path: Path) -> None:
    make.write(tmp_path, peft_tensors(), make.lora_config())
    (tmp_path / "adapter_model.bin").write_bytes(b"whatever")
    (tmp_path / "value_head.safetensors").write_bytes(b"whatever")
    assert parse_adapter(tmp_path, CONFIG, name="x").warnings == [
        "adapter_model.bin was not read: adapter_model.safetensors is there too",
        "files that are no part of an adapter were not read: value_head.safetensors",
    ]


def test_full_experts(tmp_path: Path) -> None:
    make.write(tmp_path, peft_tensors(), make.lora_config())
    (tmp_path / "kt_full_experts.index.json").write_text("{}")
    assert refused(tmp_path, "full expert weights").keys == ["kt_full_experts.index.json"]


# ---- the KT manifest


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda m: m.update(version=2), "version is 2"),
        (lambda m: m.pop("version"), "version is None"),
        (lambda m: m.update(status="writing"), "status is 'writing'"),
        (lambda m: m.pop("artifacts"), "artifacts must be an object"),
        (lambda m: m.update(lora=[]), "lora must be an object"),
        (lambda m: m["lora"].update(rank=2), "rank 3 of the tensors disagrees with rank 2"),
        (lambda m: m["lora"].update(rank="3"), "lora.rank is '3'"),
        (lambda m: m["lora"].update(alpha=-1), "lora.alpha is -1"),
        (lambda m: m["artifacts"]["adapter_model.safetensors"].update(size=7), "size .* but .* says 7"),
        (lambda m: m["artifacts"]["adapter_config.json"].update(sha256="0" * 64), "SHA-256 differs"),
        (lambda m: m["artifacts"].pop("adapter_model.safetensors"), "does not list: adapter_model.safetensors"),
        (lambda m: m["artifacts"].pop("fused_expert_lora.safetensors"), "does not list: fused_expert_lora"),
        (lambda m: m["artifacts"].update({"gone.safetensors": {}}), "not there: gone.safetensors"),
        (lambda m: m["artifacts"].update({"../x": {}}), "'../x' is no file of this folder"),
        (lambda m: m["artifacts"].update({"adapter_config.json": 3}), "'adapter_config.json' is no file"),
        (lambda m: fused_record(m).pop("tensors"), "has no tensors"),
        (lambda m: fused_record(m).update(tensor_count=3), "tensor_count is 3"),
        (lambda m: fused_record(m)["tensors"].pop("layers.0.experts.up_lora_a") and None, "tensor_count is 12"),
        (
            lambda m: fused_record(m)["tensors"]["layers.0.experts.up_lora_a"].update(shape=[1]),
            "shape or dtype differs",
        ),
        (lambda m: fused_record(m)["tensors"]["layers.0.experts.up_lora_a"].update(dtype="I8"), "shape or dtype"),
    ],
)
def test_manifest(fused: Path, change: Callable[[dict[str, Any]], object], match: str) -> None:
    rewrite_manifest(fused, change)
    assert refused(fused, match).keys


def fused_record(manifest: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = manifest["artifacts"]["fused_expert_lora.safetensors"]
    return record


def test_manifest_with_missing_and_extra_tensors(fused: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        record = fused_record(manifest)
        record["tensors"]["layers.7.experts.up_lora_a"] = record["tensors"].pop("layers.0.experts.up_lora_a")

    rewrite_manifest(fused, change)
    error = refused(fused, "but not in both")
    assert error.keys == ["layers.0.experts.up_lora_a", "layers.7.experts.up_lora_a"]


def test_changed_file_of_the_same_size(fused: Path) -> None:
    file = fused / "fused_expert_lora.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert refused(fused, "SHA-256 differs").keys == [file.name]


def test_manifest_that_lacks_a_layer_of_the_base(tmp_path: Path) -> None:
    tensors = {key: t for key, t in make.fused_keys(WEIGHTS).items() if key.startswith("layers.0")}
    make.write(tmp_path, make.linear_keys(WEIGHTS), make.lora_config(), fused=tensors)
    make.write_manifest(tmp_path)
    refused(tmp_path, "lacks layer 2, which the base has")


def test_manifest_of_another_base_type_is_said(fused: Path) -> None:
    rewrite_manifest(fused, lambda m: m.update(expert_weight_format="int8", base={"model_name_or_path": "/a/Other"}))
    read = parse_adapter(fused, CONFIG, name="x", base="this")
    assert read.warnings == ["trained on '/a/Other', served on 'this'", "trained over int8 base experts"]


def test_manifest_without_the_fused_file(tmp_path: Path, fused: Path) -> None:
    (fused / "fused_expert_lora.safetensors").unlink()
    assert refused(fused, "not there").keys == ["fused_expert_lora.safetensors"]
