"""The order of lora_B on fused experts: markers decide, and where only Unsloth's traces are there, the call does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import AdapterError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.files.b_layout import GROUPED, RANK_MAJOR
from engine.lora.files.inspect import describe
from engine.lora.files.parse import parse_adapter
from tests.lora import make
from tests.lora.merge import all_deltas
from tests.lora.refuse import CONFIG, WEIGHTS, refused

MARKER = {"lora_B_layout": GROUPED}
UNSLOTH = {"auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True}}


def grouped(b: torch.Tensor) -> torch.Tensor:
    """PEFT's B [out, r E] with the expert slowest."""
    experts = CONFIG.num_experts
    return b.reshape(b.shape[0], -1, experts).transpose(1, 2).reshape(b.shape)


def write(folder: Path, packed: bool, **fields: Any) -> Path:
    tensors = make.fused_3d_keys(WEIGHTS)
    if packed:
        tensors = {key: grouped(t) if "lora_B" in key else t for key, t in tensors.items()}
    # gate_up is block-diagonal at twice the rank
    config = make.lora_config(6, 12.0, rank_pattern={"experts.down_proj": 3}, **fields)
    config["alpha_pattern"] = {"experts.down_proj": 6}
    return make.write(folder, tensors, config)


def assert_same(read: AdapterWeights) -> None:
    expected = make.random_adapter(CONFIG)
    expected.linears.clear()
    deltas, wanted = all_deltas(read), all_deltas(expected)
    assert deltas.keys() == wanted.keys()
    for name, delta in deltas.items():
        torch.testing.assert_close(delta, wanted[name])


def detail(**layouts: str) -> dict[str, Any]:
    parameters = {name: {"lora_B_layout": layout, "num_experts": 4} for name, layout in layouts.items()}
    return {"unsloth_fused_expert_lora": {"lora_A_layout": GROUPED, "parameters": parameters}}


@pytest.mark.parametrize(
    "packed, fields, call",
    [
        (False, {}, None),
        (False, {"lora_B_layout": RANK_MAJOR}, None),
        (True, MARKER, None),
        (True, MARKER | UNSLOTH | detail(gate_up_proj=GROUPED, down_proj=GROUPED), None),
        (False, UNSLOTH | {"lora_B_layout": RANK_MAJOR}, None),
        (True, detail(gate_up_proj=GROUPED, down_proj=GROUPED), None),
        (True, UNSLOTH, GROUPED),
        (False, UNSLOTH, RANK_MAJOR),
        (True, {"base_model_name_or_path": "unsloth/Qwen3-30B-A3B"}, GROUPED),
    ],
)
def test_layouts(tmp_path: Path, packed: bool, fields: dict[str, Any], call: str | None) -> None:
    assert_same(parse_adapter(write(tmp_path, packed, **fields), CONFIG, name="x", expert_b_layout=call))


def test_one_parameter_may_differ(tmp_path: Path) -> None:
    folder = write(tmp_path, False, **detail(gate_up_proj=GROUPED, down_proj=RANK_MAJOR))
    read = parse_adapter(folder, CONFIG, name="x")
    assert torch.equal(read.experts[0].down_b[..., :3], WEIGHTS.experts[0].down_b)
    assert not torch.equal(read.experts[0].gate_b[..., :3], WEIGHTS.experts[0].gate_b)


@pytest.mark.parametrize("fields", [UNSLOTH, {"base_model_name_or_path": "unsloth/x"}, detail(gate_up_proj=GROUPED)])
def test_files_that_do_not_tell_refuse(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = write(tmp_path, True, **fields)
    refused(folder, "give expert_b_layout: 'grouped_by_expert'")
    said = describe(folder, CONFIG).text
    assert "order of lora_B not settled by the files" in said
    assert not describe(folder, CONFIG, expert_b_layout=GROUPED).refused


def test_a_layout_that_is_not_needed_is_said(tmp_path: Path) -> None:
    read = parse_adapter(write(tmp_path, True, **MARKER), CONFIG, name="x", expert_b_layout=RANK_MAJOR)
    assert_same(read)
    assert read.warnings == ["expert_b_layout 'rank_major' was not needed: the files settle it"]
    with pytest.raises(UserError, match="expert_b_layout is 'new'"):
        parse_adapter(tmp_path, CONFIG, name="x", expert_b_layout="new")


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"lora_B_layout": "column_major"}, "lora_B_layout is 'column_major'"),
        ({"lora_B_layout": 3}, "lora_B_layout is 3"),
        (MARKER | detail(down_proj=RANK_MAJOR), "lora_B_layout is 'grouped_by_expert', but"),
        (detail(down_proj="other"), r"unsloth_fused_expert_lora\['down_proj'\] is 'other'"),
        ({"unsloth_fused_expert_lora": [1]}, "must be an object of objects"),
        ({"unsloth_fused_expert_lora": {"lora_A_layout": "other"}}, "lora_A_layout 'other'"),
    ],
)
def test_markers_that_are_not_known(tmp_path: Path, fields: dict[str, Any], match: str) -> None:
    refused(write(tmp_path, True, **fields), match)


def test_unsloth_alone_is_no_reason_to_refuse(tmp_path: Path) -> None:
    make.write(tmp_path, make.linear_keys(WEIGHTS), make.lora_config(**UNSLOTH))
    assert parse_adapter(tmp_path, CONFIG, name="x").warnings == []
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert content["auto_mapping"]["unsloth_fixed"]
    with pytest.raises(AdapterError, match="give expert_b_layout"):
        parse_adapter(write(tmp_path / "experts", True, **UNSLOTH), CONFIG, name="x")
