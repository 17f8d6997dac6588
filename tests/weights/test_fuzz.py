"""Damaged files: a typed refusal or a sound model, never a crash, an overrun or a large allocation."""

from __future__ import annotations

import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.files.gguf.file import GGUFArray, open_gguf
from engine.weights.open import open_model
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model

_HEAP_LIMIT = 8 << 20  # the files are a few hundred KiB


@cache
def good_gguf() -> tuple[bytes, int]:
    """(a whole file with vocabulary, where its tensors begin)."""
    metadata = {
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(128)],
        "tokenizer.ggml.token_type": [1] * 127 + [3],
        "tokenizer.ggml.scores": [0.5] * 128,
        "some.flag": True,
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        save_gguf(tiny_model(0, hidden_size=32, moe_intermediate_size=32, num_experts=2), path, metadata=metadata)
        return path.read_bytes(), min(t.start for t in open_gguf(path).tensors.values())


@cache
def good_safetensors() -> tuple[dict[str, bytes], int]:
    """(a folder's files, the length of the header)."""
    with TemporaryDirectory() as folder:
        save_hf(tiny_model(0, hidden_size=32, moe_intermediate_size=32, num_experts=2), Path(folder), fused=True)
        files = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    return files, 8 + int.from_bytes(files["model.safetensors"][:8], "little")


Edit = tuple[int, bytes, int]  # where (a share of the header, in 2^32), what, how many bytes it replaces
PIECES = st.binary(max_size=8) | st.sampled_from(
    [b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", (1 << 40).to_bytes(8, "little"), b"\x09\x00\x00\x00", b"GGUF"]
)
EDITS = st.lists(st.tuples(st.integers(0, (1 << 32) - 1), PIECES, st.integers(0, 8)), min_size=1, max_size=4)


def damaged(data: bytes, header: int, edits: list[Edit], cut: int | None) -> bytes:
    for where, piece, replaced in edits:
        at = where * header >> 32
        data = data[:at] + piece + data[at + replaced :]
    return data if cut is None else data[: cut * len(data) >> 32]


def read_all(path: Path) -> None:
    """Everything a server would touch."""
    source = open_model(str(path))
    for name in source.names():
        tensor = source.tensor(name)
        assert tensor.dequantise().shape == tensor.shape
    for layer in source.config.sparse_layers:
        for projection, _ in source.experts(layer).projections():
            source.experts(layer).expert(projection, source.config.num_experts - 1).dequantise()


def attempt(path: Path) -> None:
    """`path` is a file or folder."""
    tracemalloc.start()
    try:
        read_all(path)
    except ModelFileError as error:
        assert str(path) in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < _HEAP_LIMIT


@settings(max_examples=250)
@given(EDITS, st.none() | st.integers(0, 1 << 32))
def test_gguf(edits: list[Edit], cut: int | None) -> None:
    data, header = good_gguf()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(damaged(data, header, edits, cut))
        attempt(path)


@settings(max_examples=100)
@given(st.integers(0, (1 << 32) - 1), st.integers(0, 7))
def test_gguf_single_bits(where: int, bit: int) -> None:
    data, header = good_gguf()
    flipped = bytearray(data)
    flipped[where * header >> 32] ^= 1 << bit
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(flipped)
        attempt(path)


@settings(max_examples=100)
@given(EDITS)
def test_gguf_metadata_that_is_read_later(edits: list[Edit]) -> None:
    """Arrays are decoded when they are looked at: that too refuses by type."""
    data, header = good_gguf()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(damaged(data, header, edits, None))
        try:
            for value in open_gguf(path).metadata.values():
                if isinstance(value, GGUFArray):
                    assert len(list(value)) == len(value)
        except ModelFileError as error:
            assert str(path) in str(error)


@settings(max_examples=150)
@given(EDITS, st.none() | st.integers(0, 1 << 32))
def test_safetensors(edits: list[Edit], cut: int | None) -> None:
    files, header = good_safetensors()
    with TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        path = Path(folder) / "model.safetensors"
        path.write_bytes(damaged(files["model.safetensors"], header, edits, cut))
        attempt(path.parent)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        for name in ("m.gguf", "model.safetensors"):
            path = Path(folder) / name
            for content in (data, b"GGUF\x03\x00\x00\x00" + data):
                path.write_bytes(content)
                try:
                    open_gguf(path)
                except ModelFileError as error:
                    assert str(path) in str(error)
