"""A NaN or an infinity anywhere in a model's weights is found while it loads, and the error names the tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import ModelFileError, UserError
from engine.weights.dequant import first_nonfinite
from engine.weights.store import WeightTensor
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import BACKENDS

LAYER = "model.layers.0."
TENSORS = [
    "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
    *(f"{LAYER}self_attn.{p}_proj.weight" for p in "qkvo"), f"{LAYER}self_attn.q_norm.weight",
    f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight", f"{LAYER}mlp.gate.weight",
    *(f"{LAYER}mlp.experts.1.{p}_proj.weight" for p in ("gate", "up", "down")), "model.layers.1.mlp.up_proj.weight",
]  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=["nan", "inf"])
def test_found_at_load(tmp_path: Path, backend: dict[str, Any], name: str, value: float) -> None:
    save_hf(tiny_model(3, mlp_only_layers=[1], num_hidden_layers=2), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[-3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="not finite") as caught:
        Harness(tmp_path, **backend)
    message = str(caught.value)
    one_of_many = name.replace("experts.1", "experts.0") in message and "expert 1, row" in message
    assert name.removesuffix(".weight") in message or one_of_many


@given(
    size=st.integers(1, 3000),
    at=st.integers(0, 2999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    others=st.sampled_from([0.0, 1e4, -1e4]),
    all_behind=st.booleans(),
)
def test_the_first_is_found(
    size: int, at: int, dtype: torch.dtype, bad: float, others: float, all_behind: bool
) -> None:
    values = torch.full((size,), others, dtype=dtype)
    assert first_nonfinite(values) is None
    values[at % size : None if all_behind else at % size + 1] = bad
    assert first_nonfinite(values) == at % size


def test_the_error_says_where() -> None:
    values = torch.zeros(3, 4)
    values[1, 2] = float("inf")
    weight = WeightTensor("some.weight", (3, 4), "F32", values.view(torch.uint8).flatten().numpy())
    with pytest.raises(ModelFileError, match=r"some\.weight: value \[1, 2\] of \[3, 4\] is not finite"):
        weight.dequantise()
