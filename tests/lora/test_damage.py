"""Damaged files: whatever byte is wrong, the adapter is read or refused, and nothing else happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.errors import AdapterError
from engine.lora.files.inspect import describe
from engine.lora.files.parse import parse_adapter
from tests.lora import make

CONFIG = make.model_config()


def folder(path: Path, form: str) -> Path:
    weights = make.random_adapter(CONFIG, rank=1, extra=1)
    tensors = make.linear_keys(weights) | make.extra_keys(weights)
    config = make.lora_config(1, rank_pattern={"q_proj": 1})
    if form == "fused":
        make.write(path, tensors, config, fused=make.fused_keys(weights))
        make.write_manifest(path, rank=1)
        return path
    tensors |= make.per_expert_keys(weights)
    make.write(path, None if form == "old bin" else tensors, config, binary=form == "bin")
    if form == "old bin":
        plain = {key: tensor.clone() for key, tensor in tensors.items()}
        torch.save(plain, path / "adapter_model.bin", _use_new_zipfile_serialization=False)
    return path


edits = st.tuples(
    st.integers(0, 2**32),  # where, modulo the length
    st.sampled_from(["set", "cut", "insert", "end"]),
    st.binary(min_size=1, max_size=6),
    st.sampled_from([64, 2000, 1 << 30]),  # among the first so many bytes: headers are more fragile
)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(
    st.sampled_from(["fused", "per expert", "bin", "old bin"]),
    st.integers(0, 9),
    st.lists(edits, min_size=1, max_size=4),
)
@hypothesis_settings(max_examples=250)
def test_damaged_bytes(tmp_path_factory: pytest.TempPathFactory, form: str, which: int, changes: list[Any]) -> None:
    path = folder(tmp_path_factory.mktemp("damage"), form)
    files = sorted(path.iterdir())
    file = files[which % len(files)]
    content = bytearray(file.read_bytes())
    for where, change, data, within in changes:
        at = where % max(min(len(content), within), 1)
        if change == "set":
            content[at : at + len(data)] = data
        elif change == "insert":
            content[at:at] = data
        else:
            del content[at : at + len(data) if change == "cut" else None]
    file.write_bytes(content)
    try:
        parse_adapter(path, CONFIG, name="x")
        served = True
    except AdapterError:
        served = False
    last = describe(path, CONFIG).text.splitlines()
    assert any(line.startswith("served     yes" if served else "refused") for line in last)
