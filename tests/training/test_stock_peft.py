"""What is trained is what stock PEFT loads over transformers' own model: whole, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

from engine.architectures.registry import architecture_of
from engine.lora.files.convert import convert
from engine.lora.files.parse import parse_adapter
from testing.models.tiny import FAMILIES, save_hf, tiny_model
from tests.lora import make
from tests.lora.forms import assert_same
from tests.lora.merge import merge
from tests.training.models import draw_b, ours
from training.config.fields import EXPERT_TARGETS
from training.loop.save import save_adapter

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys", "error:Found missing adapter")
IDS = torch.randint(2, 128, (1, 21), generator=torch.Generator().manual_seed(4))
TOLERANCE = 3e-5  # logits are about 5
DENSE: dict[str, dict[str, Any]] = {  # layer 0 or 1 without experts
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen2_moe": {"mlp_only_layers": [1]},
    "glm4_moe": {"first_k_dense_replace": 1},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS).logits[0]


def base(family: str, dense: bool) -> nn.Module:
    return tiny_model(family=family, num_hidden_layers=3, **(DENSE.get(family, {}) if dense else {}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("targets", [("all",), EXPERT_TARGETS], ids=["all", "experts"])
def test_what_training_saves(tmp_path: Path, family: str, dense: bool, targets: tuple[str, ...]) -> None:
    save_hf(base(family, dense), tmp_path / "model")
    model = draw_b(ours(tmp_path / "model", targets=targets))
    save_adapter(model, tmp_path / "adapter")
    want = logits(model)
    assert (want - logits(base(family, dense))).abs().max() > 0.1
    stock = PeftModel.from_pretrained(base(family, dense), tmp_path / "adapter").eval()
    assert (logits(stock) - want).abs().max() < TOLERANCE
    assert (logits(stock.merge_and_unload()) - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("experts", "linears"), [(False, True), (True, True), (True, False)])
def test_every_module_that_has_lora(tmp_path: Path, family: str, experts: bool, linears: bool) -> None:
    """Routers and gates of shared experts, which other trainers train, too; as `adapters convert` writes them."""
    save_hf(base(family, True), tmp_path / "model")
    config = make.config_of(base(family, True))
    weights = make.random_adapter(config, experts=experts, linears=linears, scale=0.1)
    stored = architecture_of(config).stored
    keys = make.named(make.linear_keys(weights) | make.per_expert_keys(weights), stored)
    make.write(tmp_path / "given", keys, make.lora_config())
    convert(str(tmp_path / "given"), "peft", str(tmp_path / "adapter"), str(tmp_path / "model"))
    stock = PeftModel.from_pretrained(base(family, True), tmp_path / "adapter").eval()
    assert (logits(stock) - logits(merge(base(family, True), weights))).abs().max() < TOLERANCE
    read = parse_adapter(tmp_path / "adapter", config, name="x")
    assert read.warnings == [] and read.rank == weights.rank
    assert_same(read, weights)
