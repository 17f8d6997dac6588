"""The converter that kt_kernel ships: what it makes of a trained adapter means the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.lora.files.parse import parse_adapter
from tests.lora.make import SAMPLES, sample_config
from tests.lora.merge import all_deltas


def converter() -> ModuleType:
    """The module alone: importing the package would load its extension."""
    package = importlib.util.find_spec("kt_kernel")
    if package is None or package.origin is None:
        pytest.skip("kt_kernel has no wheel for this machine")
    file = Path(package.origin).parent / "sft/convert_kt_to_sglang_adapter.py"
    spec = importlib.util.spec_from_file_location("kt_converter", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_converted_for_sglang(tmp_path: Path) -> None:
    source = SAMPLES / "kt_fused_all"
    converter().convert_kt_to_sglang_adapter(source, tmp_path / "out", base_model_name_or_path="base")
    read = parse_adapter(tmp_path / "out", sample_config(), name="x")
    assert read.format == "peft-per-expert-unprefixed" and read.warnings == []
    got, want = all_deltas(read), all_deltas(parse_adapter(source, sample_config(), name="x"))
    assert sorted(got) == sorted(want)
    assert all(torch.equal(got[name], delta) for name, delta in want.items())
