"""Every form of an adapter on disk, written; and whether two adapters are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.lora.adapter import AdapterWeights
from tests.lora import make
from tests.lora.merge import all_deltas


def assert_same(read: AdapterWeights, expected: AdapterWeights, tolerance: float = 1e-6) -> None:
    got, want = all_deltas(read), all_deltas(expected)
    assert sorted(got) == sorted(want)
    for name, delta in want.items():
        torch.testing.assert_close(got[name], delta, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def write_form(folder: Path, form: str, weights: AdapterWeights, name: Callable[[str], str] = str) -> Path:
    """Write `weights` (rank 3, alpha 6) in the form of that letter, with keys that `name` renames."""
    prefix = "" if form == "D" else make.PREFIX
    tensors = make.linear_keys(weights, prefix) | make.extra_keys(weights, prefix)
    if form.startswith("A"):
        make.write(folder, make.named(tensors, name), make.lora_config(), fused=make.fused_keys(weights))
        if form == "A":
            make.write_manifest(folder)
        return folder
    if form.startswith("E"):
        doubled = {r".*\.gate_up_proj": 6}
        fields: dict[str, Any] = {"rank_pattern": doubled, "alpha_pattern": {r".*\.gate_up_proj": 12}}
        tensors |= make.fused_3d_keys(weights, swapped=form == "E 0.18")
        return make.write(folder, make.named(tensors, name), make.lora_config(**fields))
    tensors |= make.per_expert_keys(weights, prefix)
    return make.write(folder, make.named(tensors, name), make.lora_config(), binary=form == "B bin")


FORMS = {
    "A": "kt-fused",
    "A'": "kt-fused-no-manifest",
    "B": "peft-per-expert",
    "B bin": "peft-per-expert",
    "D": "peft-per-expert-unprefixed",
    "E": "peft-fused-3d",
    "E 0.18": "peft-fused-3d",
}
