"""Files that cannot be served are refused, naming file, tensor and type, before any weight is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from api.cli.launch import sampling_defaults
from api.config import ServeConfig
from api.text.tokenizer import load_tokenizer
from engine.config import EngineConfig
from engine.errors import ModelFileError, UserError
from engine.files.gguf.file import open_gguf
from engine.weights.open import open_model
from testing.models.gguf_writer import gguf_metadata, save_gguf
from testing.models.tiny import save_hf, tiny_model


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_model(str(path))
    return str(caught.value)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    save_gguf(tiny_model(0), path)
    return path


def patched(path: Path, find: bytes, replacement: bytes) -> None:
    data = path.read_bytes()
    assert data.count(find) == 1 and len(find) == len(replacement)
    path.write_bytes(data.replace(find, replacement))


def entry_of(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def patch_entry(path: Path, name: str, change: Callable[[list[int], int, int], tuple[list[int], int, int]]) -> None:
    """Rewrite a directory entry's (ne, type, offset)."""
    data = bytearray(path.read_bytes())
    at = data.index(entry_of(name)) + 8 + len(name)
    (count,) = struct.unpack_from("<I", data, at)
    *dims, kind, offset = struct.unpack_from(f"<{count}QIQ", data, at + 4)
    dims, kind, offset = change(dims, kind, offset)
    struct.pack_into(f"<{count}QIQ", data, at + 4, *dims, kind, offset)
    path.write_bytes(data)


def test_every_truncation_of_a_gguf_file(good: Path) -> None:
    data = good.read_bytes()
    tail = max(t.start + t.num_bytes for t in open_gguf(good).tensors.values())
    header = min(t.start for t in open_gguf(good).tensors.values())
    for size in [*range(0, header, 97), *range(header, tail, 4099), tail - 1]:
        good.write_bytes(data[:size])
        assert str(good) in refusal(good)


def test_truncation_names_the_tensor(good: Path) -> None:
    last = max(open_gguf(good).tensors.values(), key=lambda t: t.start)
    good.write_bytes(good.read_bytes()[: last.start + last.num_bytes - 1])
    message = refusal(good)
    assert f"{good}: tensor {last.name} ({last.type}, {list(last.shape)})" in message and "truncated" in message


@pytest.mark.parametrize(
    ("number", "said"), [(9, "Q8_1"), (15, "Q8_K"), (24, "I8"), (28, "F64"), (41, "Q1_0"), (4, "Q4_2"), (99, "99")]
)
def test_types_that_cannot_be_read(good: Path, number: int, said: str) -> None:
    name = "blk.1.ffn_up_exps.weight"
    patch_entry(good, name, lambda ne, kind, at: ([256, 1, 1], number, at))
    message = refusal(good)
    assert f"tensor {name}" in message and said in message and str(good) in message


def test_unreadable_type_of_the_right_shape(tmp_path: Path) -> None:
    """A whole file in a type without a dequantiser: named even though everything else is right."""
    path = tmp_path / "m.gguf"
    save_gguf(tiny_model(0, hidden_size=256), path, types={"token_embd.weight": "F32"}, dense_type="F32")
    patch_entry(path, "token_embd.weight", lambda ne, kind, at: (ne, 15, at))  # Q8_K is smaller than F32: it fits
    assert "tensor token_embd.weight has type Q8_K, which cannot be read" in refusal(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ne, kind, at: ([ne[0] - 32, *ne[1:]], kind, at), r"has shape [8, 64, 32]"),
        (lambda ne, kind, at: ([ne[0] - 1, *ne[1:]], kind, at), "whole Q8_0 blocks of 32"),
        (lambda ne, kind, at: ([0, *ne[1:]], kind, at), "impossible shape"),
        (lambda ne, kind, at: ([1 << 62, 1 << 62, 1 << 62], kind, at), "impossible shape"),
        (lambda ne, kind, at: ([1 << 40, 1, 1], kind, at), "the file ends at"),
        (lambda ne, kind, at: (ne, kind, 1 << 60), "the file ends at"),
        (lambda ne, kind, at: (ne, kind, at + 1), "multiple of the alignment"),
        (lambda ne, kind, at: (ne, kind, 0), "overlap"),
        (lambda ne, kind, at: (ne[::-1], kind, at), "has shape [64, 64, 8]"),
    ],
)
def test_directory_entries_that_are_wrong(
    good: Path, change: Callable[..., tuple[list[int], int, int]], said: str
) -> None:
    name = "blk.0.ffn_gate_exps.weight"
    if "[64, 64, 8]" in said:  # as a file with the experts' axis last would list it; only rows of whole blocks differ
        save_gguf(tiny_model(0), good, expert_type="F32")
    patch_entry(good, name, change)
    message = refusal(good)
    assert said in message and name in message


def test_wrong_magic_version_and_byte_order(good: Path) -> None:
    data = good.read_bytes()
    for head, said in (
        (b"GGML" + data[4:8], "not a GGUF file"),
        (b"\x80\x04\x95\x00" + data[4:8], "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<I", 4), "GGUF version 4"),
    ):
        good.write_bytes(head + data[8:])
        assert said in refusal(good)
    good.write_bytes(b"")
    assert "empty" in refusal(good)


def test_version_2_is_read(good: Path) -> None:
    data = good.read_bytes()
    good.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    assert open_gguf(good).parts["output.weight"].version == 2


@pytest.mark.parametrize("count", [1 << 63, (1 << 64) - 1, 1 << 32])
def test_counts_beyond_the_file(good: Path, count: int) -> None:
    data = good.read_bytes()
    for at in (8, 16):  # tensors, metadata
        good.write_bytes(data[:at] + struct.pack("<Q", count) + data[at + 8 :])
        assert "truncated or corrupt" in refusal(good) or "twice" in refusal(good)


def test_array_lengths_beyond_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for values in (["a", "b"], [1, 2]):
        save_gguf(tiny_model(0), path, metadata={"some.array": values})
        data = bytearray(path.read_bytes())
        at = data.index(b"some.array") + len("some.array") + 8
        for length in ((1 << 64) - 1, 1 << 40, len(data) // 8):
            data[at : at + 8] = struct.pack("<Q", length)
            path.write_bytes(data)
            assert "some.array" in refusal(path) or "truncated" in refusal(path)


def test_other_architectures(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for architecture in ("gemma3", "deepseek", "qwen3"):
        writer = gguf.GGUFWriter(path, architecture)
        gguf_metadata(writer, tiny_model(0).config)
        writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        message = refusal(path)
        assert (
            f"{architecture!r}" in message and "can be served: qwen3moe, qwen2moe" in message and str(path) in message
        )


def test_missing_and_surplus_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(tiny_model(0), path)
    patched(path, entry_of("blk.1.attn_q_norm.weight"), entry_of("blk.1.attn_s_norm.weight"))
    assert "tensor blk.1.attn_q_norm.weight [32] is missing" in refusal(path)
    save_gguf(tiny_model(0), path, metadata={"qwen3moe.block_count": 1})
    message = refusal(path)
    assert "does not account for" in message and "blk.1.attn_k.weight" in message and "more" in message
    save_gguf(tiny_model(0, attention_bias=True), path)
    patched(path, entry_of("blk.1.attn_k.bias"), entry_of("blk.1.attn_z.bias"))
    assert "tensor blk.1.attn_k.bias [64] is missing" in refusal(path)
    save_gguf(tiny_model(0), path)
    data = path.read_bytes().replace(entry_of("blk.1.attn_q_norm.weight"), entry_of("blk.0.attn_q_norm.weight"))
    path.write_bytes(data)
    assert "tensor blk.0.attn_q_norm.weight appears twice" in refusal(path)


def test_rope_factors_are_not_dropped_silently(tmp_path: Path) -> None:
    """`rope_freqs.weight` rescales rotation; a reader that skips it computes something else."""
    path = tmp_path / "m.gguf"
    save_gguf(tiny_model(0), path)
    patched(path, entry_of("output.weight"), entry_of("rope_freqs.wt"))  # leaves a model with a tied head
    assert "does not account for: rope_freqs.wt" in refusal(path)


def test_split_sets(tmp_path: Path) -> None:
    save_gguf(tiny_model(0), tmp_path / "m.gguf", split=8)
    parts = sorted(tmp_path.iterdir())
    kept = {p: p.read_bytes() for p in parts}
    parts[1].unlink()
    assert str(parts[1]) in refusal(parts[0]) and "missing" in refusal(tmp_path)
    parts[1].write_bytes(kept[parts[2]])
    assert f"{parts[1]}: its metadata says part 3" in refusal(parts[0])
    parts[1].write_bytes(kept[parts[1]][:-4000])
    assert str(parts[1]) in refusal(parts[0]) and "truncated" in refusal(parts[0])
    parts[1].write_bytes(kept[parts[1]])
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(kept[parts[0]])
    assert "must be named" in refusal(alone)
    alone.unlink()
    first = kept[parts[0]]
    at = first.index(b"split.tensors.count") + len("split.tensors.count") + 4
    parts[0].write_bytes(first[:at] + struct.pack("<i", 5) + first[at + 4 :])
    assert "split.tensors.count says 5" in refusal(tmp_path)
    parts[0].write_bytes(first)
    name = next(iter(open_gguf(parts[0]).parts))
    number = kept[parts[1]].index(b"split.no") + len("split.no") + 4
    twin = bytearray(first)  # part 1 once more, but calling itself part 2
    twin[first.index(b"split.no") + len("split.no") + 4] = kept[parts[1]][number]
    parts[1].write_bytes(twin)
    assert f"tensor {name} is also in {parts[0].name}" in refusal(tmp_path)


def test_safetensors_types(tmp_path: Path) -> None:
    save_hf(tiny_model(0), tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.3.up_proj.weight"
    tensors = load_file(file)
    for dtype, said in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.float64, "F64")):
        save_file(tensors | {name: torch.zeros(64, 64).to(dtype)}, file)
        message = refusal(tmp_path)
        assert name in message and said in message and str(file) in message
    save_file(tensors | {name: tensors[name].bfloat16()}, file)
    assert "expert 0 has F32" in refusal(tmp_path) and name in refusal(tmp_path)


def test_safetensors_shapes_and_names(tmp_path: Path) -> None:
    save_hf(tiny_model(0), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_norm.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    assert f"tensor {name} [32] is missing" in refusal(tmp_path)
    save_file(tensors | {name: torch.zeros(16)}, file)
    assert "has shape [16]; the configuration needs [32]" in refusal(tmp_path)
    save_file(tensors | {"model.layers.2.self_attn.k_norm.weight": torch.zeros(32)}, file)
    assert "does not account for: model.layers.2.self_attn.k_norm.weight" in refusal(tmp_path)
    save_file(tensors | {"model.layers.0.mlp.experts.0.gate_proj.weight_scale": torch.ones(1)}, file)
    assert "weight_scale" in refusal(tmp_path)


def test_safetensors_files(tmp_path: Path) -> None:
    save_hf(tiny_model(0), tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for broken in (data[:4], data[:100], data[:-1], data + b"x", b"{}" * 50, struct.pack("<Q", 1 << 60) + data[8:]):
        file.write_bytes(broken)
        assert str(file) in refusal(tmp_path)
    for header in (b"[" * size, b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'):
        file.write_bytes(struct.pack("<Q", size) + header.ljust(size) + data[8 + size :])
        assert str(file) in refusal(tmp_path)


def test_safetensors_ranges(tmp_path: Path) -> None:
    save_hf(tiny_model(0), tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    name = "model.norm.weight"
    start, end = entries[name]["data_offsets"]
    for offsets in (
        [start - 4, end - 4],
        [start, end + 4],
        [end, start],
        [1 << 61, (1 << 61) + 256],
        [0.5, 1],
        [start],
    ):
        changed = json.dumps(entries | {name: entries[name] | {"data_offsets": offsets}}).encode()
        file.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])
        assert str(file) in refusal(tmp_path)


def test_sharded_folders(tmp_path: Path) -> None:
    save_hf(tiny_model(0), tmp_path, sharded=True)
    index = tmp_path / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    shard = original["weight_map"]["model.norm.weight"]
    kept = (tmp_path / shard).read_bytes()
    (tmp_path / shard).unlink()
    assert shard in refusal(tmp_path) and "missing" in refusal(tmp_path)
    (tmp_path / shard).write_bytes(kept)
    weight_map = original["weight_map"]
    other = next(name for name in weight_map.values() if name != shard)
    for change, said in (
        ({"model.norm.weight": other}, "should be here"),
        ({"model.norm.weight": "../" + shard}, "not a file name"),
        ({"model.norm.weight": 3}, "not a file name"),
        ({"model.norm.weight": "x" * 300}, "missing"),
        ({"ghost": shard}, "should be here"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map | change}))
        assert said in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {n: f for n, f in weight_map.items() if n != "model.norm.weight"}}))
    assert "model.norm.weight is not named" in refusal(tmp_path)
    for text in ("", "[1]", '{"weight_map": {}}', "{" * 9):
        index.write_text(text)
        assert str(index) in refusal(tmp_path)


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "x" * 5000, "/" + "y/" * 3000, "a\0b", ""])
def test_paths_that_cannot_be(path: str) -> None:
    with pytest.raises(UserError) as caught:
        open_model(path)
    assert caught.value.field == "model" and len(str(caught.value)) < 500


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path) -> None:
    """Of any error but that there is no such file: here names that become too long."""
    folder = tmp_path
    while len(str(folder)) < 3880:
        folder /= "y" * 200
    folder /= "y" * (4090 - len(str(folder)) - 1)
    folder.mkdir(parents=True)
    said = "cannot be read: File name too long"
    assert f"{folder}" in refusal(folder) and said in refusal(folder)
    with pytest.raises(ModelFileError, match=said):
        load_tokenizer(folder)
    assert sampling_defaults(EngineConfig(model=str(folder)), ServeConfig()) == ({}, [])


def test_config_files(tmp_path: Path) -> None:
    save_hf(tiny_model(0), tmp_path)
    config = tmp_path / "config.json"
    for raw in (b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000):
        config.write_bytes(raw)
        assert str(config) in refusal(tmp_path)
    config.unlink()
    assert "config.json is missing" in refusal(tmp_path)
