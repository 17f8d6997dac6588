"""Counts that a broken file states: what is made for each is not made before they are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.architectures.fields import Fields
from engine.errors import ModelFileError
from engine.weights.open import open_model
from testing.models.tiny import save_hf, tiny_model

LAYERS = ("num_hidden_layers", "block_count", "num_nextn_predict_layers", "nextn_predict_layers", "num_mtp_layers")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "expert_count")
COUNTS = st.sampled_from([(name, 512) for name in LAYERS] + [(name, 4096) for name in EXPERTS])


@given(COUNTS, st.integers(1, 1 << 40))
def test_a_count_is_of_a_model(count: tuple[str, int], value: int) -> None:
    name, most = count
    fields = Fields({name: value}, "a file")
    if value <= most:
        assert fields.integer(name) == value
        return
    with pytest.raises(ModelFileError, match=f"a file: {name} is {value}; allowed is an integer from 1 to {most}"):
        fields.integer(name)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts"])
def test_a_folder_that_states_a_million(tmp_path: Path, name: str) -> None:
    save_hf(tiny_model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = {"num_local_experts": 10**6} if name == "num_experts" else {}
    (tmp_path / "config.json").write_text(json.dumps({**config, name: 10**6, **other}))
    with pytest.raises(ModelFileError, match="is 1000000; allowed is an integer from"):
        open_model(str(tmp_path))
