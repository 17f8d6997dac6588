"""Stored types: sizes, values and non-finite numbers, against the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.files.gguf import types as ggml_types
from engine.weights import dequant
from engine.weights.dequant import dequantise, nonfinite
from engine.weights.open import open_model
from engine.weights.store import WeightTensor
from testing.models.block_types import CRAFTED, QUANTISABLE, encode, random_blocks
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model
from tests.weights.states import assert_same

PROMISED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
SCALED = sorted(dequant._SCALES)


def test_the_table_is_that_of_the_gguf_package() -> None:
    sizes = dict(gguf.GGML_QUANT_SIZES)
    del sizes[gguf.GGMLQuantizationType.Q8_1]  # there with two float32, in ggml with two float16; never in files
    for kind, (block, size) in sizes.items():
        assert ggml_types.by_number(kind.value) == (kind.name, block, size)
        assert ggml_types.by_name(kind.name) == (kind.name, block, size)


def test_readable_is_what_the_gguf_package_dequantises() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            values = gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            assert kind.name not in ggml_types.READABLE
        else:
            assert kind.name in ggml_types.READABLE and values.size == block
    assert set(PROMISED_TYPES) < ggml_types.READABLE


@pytest.mark.parametrize("type", [*QUANTISABLE, *CRAFTED])
def test_every_expert_of_every_type(tmp_path: Path, type: str) -> None:
    model = tiny_model(1, hidden_size=256, moe_intermediate_size=256, num_experts=3)
    held = save_gguf(model, tmp_path / "m.gguf", expert_type=type, dense_type="BF16")
    source = open_model(str(tmp_path / "m.gguf"))
    assert_same(source, held)
    store = source.experts(1)
    experts = held.model.layers[1].mlp.experts
    wanted = {"gate": experts.gate_up_proj[:, :256], "up": experts.gate_up_proj[:, 256:], "down": experts.down_proj}
    for projection, values in wanted.items():
        assert store.type(projection) == type
        for index in range(3):
            weight = store.expert(projection, index)
            assert weight.shape == (256, 256) and nonfinite(weight.data, weight.type, weight.shape) == 0
            assert torch.equal(weight.dequantise(), values[index])
            half = weight.dequantise(torch.bfloat16)
            assert half.dtype == torch.bfloat16 and torch.equal(half, values[index].bfloat16())


@pytest.mark.parametrize("type", ["IQ1_M", "NVFP4", "MXFP4"])
def test_types_with_scales_of_another_kind(type: str) -> None:
    kind = gguf.GGMLQuantizationType[type]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (12, size), dtype=np.uint8)
    raw[:3, 0] = 0xFD, 0xFE, 0xFF
    with np.errstate(over="ignore"):
        values = gguf.quants.dequantize(raw, kind).reshape(-1)
        got = dequantise(raw.reshape(-1), type, (12, block)).reshape(-1).numpy()
        assert np.array_equal(got, values, equal_nan=True)
        bad = nonfinite(raw.reshape(-1), type, (12, block))
    if type != "NVFP4":
        assert bad == np.count_nonzero(~np.isfinite(values.reshape(12, -1)).all(axis=1))
    else:
        assert bad == np.count_nonzero((raw[:, :4] & 0x7F == 0x7F).any(axis=1))


@settings(max_examples=40)
@given(st.sampled_from(PROMISED_TYPES), st.integers(1, 5), st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_pieces_do_not_show(type: str, experts: int, out: int, blocks: int, seed: int) -> None:
    """However a tensor is cut, its values are those of the whole."""
    shape = (experts, out, blocks * 256)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    data, wanted = encode(values, type, seed)
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    size = dequant.PIECE_VALUES
    try:
        dequant.PIECE_VALUES = 256 * (1 + seed % 7)
        assert torch.equal(dequantise(raw, type, shape), wanted)
    finally:
        dequant.PIECE_VALUES = size
    assert torch.equal(WeightTensor("w", shape, type, raw)[experts - 1].dequantise(), wanted[-1])


@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_values_are_counted(type: str, value: float) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]
    values = torch.randn(7, 64).to(dtype)
    values[0, 0] = values[3, 5] = values[6, 63] = value
    raw = values.view(torch.uint8).numpy().reshape(-1)
    assert nonfinite(raw, type, (7, 64)) == 3
    largest = torch.full((2, 32), torch.finfo(dtype).max, dtype=dtype).view(torch.uint8).numpy().reshape(-1)
    assert nonfinite(largest, type, (2, 32)) == 0


@pytest.mark.parametrize("type", SCALED)
def test_blocks_with_a_nonfinite_scale_are_counted(type: str) -> None:
    """Exactly the blocks whose values the gguf package would make NaN or infinite."""
    blocks = random_blocks((40, 256), type, seed=3).reshape(
        -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    )
    for index, at in ((1, dequant._SCALES[type][0]), (5, dequant._SCALES[type][-1])):
        blocks[index, at : at + 2] = np.array([np.nan if index == 1 else np.inf], np.float16).view(np.uint8)
    with np.errstate(invalid="ignore"):
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type])
    assert np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist() == [1, 5]
    assert nonfinite(blocks.reshape(-1), type, (40, 256)) == 2


def test_what_is_not_a_tensor_of_that_type() -> None:
    with pytest.raises(ModelFileError, match="type Q8_K cannot be read"):
        dequantise(np.zeros(292, np.uint8), "Q8_K", (256,))
    with pytest.raises(ModelFileError, match="33 bytes are not a Q8_0 tensor"):
        dequantise(np.zeros(33, np.uint8), "Q8_0", (32,))
    with pytest.raises(ModelFileError, match="not a Q8_0 tensor of shape"):
        nonfinite(np.zeros(34, np.uint8), "Q8_0", (2, 16))
