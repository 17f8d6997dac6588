"""Headers of model files: what their own libraries write is read back, and a file that is cut off names itself."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.errors import ModelFileError
from engine.files.gguf.file import GGUFArray, open_gguf
from engine.files.safetensors import open_safetensors

NAMES = st.text("abcdefgh._0123456789", min_size=1, max_size=20)
VALUES = (
    st.booleans()
    | st.integers(0, 2**32 - 1)
    | st.floats(width=32, allow_nan=False)
    | st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)  # their writer leaves an empty one out
    | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5)
    | st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=5)
)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
TENSORS = st.dictionaries(NAMES, SHAPES, min_size=1, max_size=5)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, list[int]]) -> None:
    writer = gguf.GGUFWriter(path, "drawn")
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.arange(math.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@given(st.dictionaries(NAMES.map(lambda name: f"drawn.{name}"), VALUES, max_size=6), TENSORS)
def test_a_gguf_header_is_read_as_it_was_written(metadata: dict[str, Any], tensors: dict[str, list[int]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_gguf(path, metadata, tensors)
        file = open_gguf(path)
        for key, value in metadata.items():
            read = file.metadata[key]
            assert (list(read) if isinstance(read, GGUFArray) else read) == value
        assert file.tensors.keys() == tensors.keys()
        for name, shape in tensors.items():
            assert list(file.tensors[name].shape) == shape
            assert file.data(name)[:].view(np.float32).tolist() == list(range(math.prod(shape)))


@given(TENSORS)
def test_a_safetensors_header_is_read_as_it_was_written(tensors: dict[str, list[int]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        save_file({name: np.arange(math.prod(s), dtype=np.float32).reshape(s) for name, s in tensors.items()}, path)
        file = open_safetensors(path)
        assert file.tensors.keys() == tensors.keys()
        for name, shape in tensors.items():
            assert list(file.tensors[name].shape) == shape
            assert file.data(name)[:].view(np.float32).tolist() == list(range(math.prod(shape)))


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_file_cut_off_anywhere_names_itself(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"whole.{kind}"
    if kind == "gguf":
        write_gguf(path, {"drawn.names": ["a", "b"], "drawn.flag": True}, {"x": [2, 3], "y": [4]})
    else:
        save_file({"x": np.zeros((2, 3), np.float32), "y": np.ones(4, np.float32)}, path)
    data = path.read_bytes()
    read = open_gguf if kind == "gguf" else open_safetensors
    cut = tmp_path / f"cut.{kind}"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        try:
            read(cut)
        except ModelFileError as error:
            assert cut.name in str(error)
        else:  # the padding behind the last tensor
            assert kind == "gguf" and len(data) - size < 32
