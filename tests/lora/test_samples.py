"""Adapters from the real trainer, merged into their base, give the logits that were recorded beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from engine.lora.adapter import AdapterWeights
from engine.lora.files.parse import parse_adapter
from tests.lora.make import SAMPLES, sample_config
from tests.lora.merge import merge

TOLERANCE = 1e-5  # measured 2e-6; the references were made by another release of transformers


def read(name: str) -> AdapterWeights:
    return parse_adapter(SAMPLES / name, sample_config(), name=name, base="base")


@pytest.mark.parametrize("name", ["base-model", "kt_fused_all", "kt_peft_perexpert"])
def test_reference_logits(name: str) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(SAMPLES / "base-model", dtype=torch.float32)
    if name != "base-model":
        merge(model, read(name))
    reference = SAMPLES / name / "reference"
    for index, prompt in enumerate(json.loads((reference / "meta.json").read_text())["prompts"]):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].numpy()
        difference = np.abs(logits - np.load(reference / f"logits_{index}.npy")).max()
        assert difference < TOLERANCE, f"prompt {index}: {difference}"


def test_adapters_change_the_logits() -> None:
    base = np.load(SAMPLES / "base-model/reference/logits_0.npy")
    for name in ("kt_fused_all", "kt_peft_perexpert"):
        assert np.abs(base - np.load(SAMPLES / name / "reference/logits_0.npy")).max() > 100 * TOLERANCE


def test_forms_and_contents() -> None:
    fused, per_expert = read("kt_fused_all"), read("kt_peft_perexpert")
    assert (fused.format, per_expert.format) == ("kt-fused", "peft-per-expert")
    assert len(fused.linears) == 15 and "model.layers.2.mlp.gate" in fused.linears
    assert len(per_expert.linears) == 12 and "model.layers.2.mlp.gate" not in per_expert.linears
    for weights in (fused, per_expert):
        assert sorted(weights.experts) == [0, 1, 2] and weights.rank == 8 and weights.warnings == []
        assert {pair.scale for pair in weights.linears.values()} == {2.0}
        assert all(
            layer.gate_a.dtype == torch.bfloat16 and layer.down_scale == 2.0 for layer in weights.experts.values()
        )
        files = list((SAMPLES / weights.name).glob("*.safetensors"))
        assert 0.95 < weights.num_bytes / sum(file.stat().st_size for file in files) < 1  # the rest is headers
