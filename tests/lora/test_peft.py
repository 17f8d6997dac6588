"""Adapters that the installed peft writes: ours merged gives the logits of peft's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Qwen3MoeForCausalLM

from engine.lora.adapter import AdapterWeights
from engine.lora.files.parse import parse_adapter
from testing.models.tiny import tiny_model
from tests.lora import make
from tests.lora.merge import all_deltas, merge

# peft misses parameters there
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
PROMPT = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]])
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOLERANCE = 2e-5  # peft adds the delta at another place, logits are about 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def base() -> Qwen3MoeForCausalLM:
    return tiny_model(seed=4, mlp_only_layers=[1], num_hidden_layers=3)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(PROMPT).logits[0]


def trained(model: nn.Module, folder: Path, swapped: bool = False, **fields: Any) -> torch.Tensor:
    """Wrap the model by peft, give every B a value, save; returns peft's logits. `swapped`: peft still stores
    modules that say they are transposed as releases before 0.19 stored all."""
    experts = [model.model.layers[layer].mlp.experts for layer in (0, 2)]
    for module in experts if swapped else ():
        module.is_transposed = True
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, **fields))
    for module in experts if swapped else ():
        module.is_transposed = False
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    peft_model.eval().save_pretrained(folder)
    return logits(peft_model)


def read(folder: Path, **kwargs: Any) -> AdapterWeights:
    return parse_adapter(folder, make.config_of(base()), name="x", **kwargs)


def assert_equals_peft(folder: Path, expected: torch.Tensor, **kwargs: Any) -> AdapterWeights:
    weights = read(folder, **kwargs)
    difference = (logits(merge(base(), weights)) - expected).abs().max()
    assert difference < TOLERANCE
    assert (logits(base()) - expected).abs().max() > 1000 * TOLERANCE
    return weights


@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[:1], EXPERTS[1:]])
def test_target_parameters(tmp_path: Path, parameters: list[str]) -> None:
    expected = trained(base(), tmp_path, target_modules=ATTENTION, target_parameters=parameters)
    weights = assert_equals_peft(tmp_path, expected)
    assert weights.format == "peft-fused-3d" and sorted(weights.experts) == [0, 2]
    assert len(weights.warnings) == (0 if len(parameters) == 2 else 2)


@pytest.mark.parametrize("rslora", [False, True])
def test_target_parameters_with_patterns_and_router(tmp_path: Path, rslora: bool) -> None:
    expected = trained(
        base(),
        tmp_path,
        target_modules=[],
        target_parameters=[*EXPERTS, "mlp.gate.weight"],
        rank_pattern={"gate_up_proj": 3, r"layers.2.mlp.gate.weight": 2},
        alpha_pattern={"experts.down_proj": 9, "gate": 100},
        use_rslora=rslora,
    )
    weights = assert_equals_peft(tmp_path, expected)
    assert weights.warnings == ["patterns that match no module: gate"]  # peft matches "mlp.gate.weight"
    assert weights.linears["model.layers.2.mlp.gate"].rank == 2 and weights.experts[0].rank == 4


def test_layout_before_peft_0_19(tmp_path: Path) -> None:
    expected = trained(base(), tmp_path, swapped=True, target_modules=ATTENTION, target_parameters=EXPERTS)
    assert_equals_peft(tmp_path, expected)


@pytest.mark.parametrize("rslora", [False, True])
def test_attention_only(tmp_path: Path, rslora: bool) -> None:
    expected = trained(
        base(),
        tmp_path,
        target_modules=ATTENTION,
        rank_pattern={r"layers\.[01]\.self_attn\.q_proj": 7, "q_proj": 2, r".*\.1\.self_attn\.o_proj": 1},
        alpha_pattern={"v_proj": 32, r"model.layers.(0|2).self_attn.o_proj": 3},
        use_rslora=rslora,
    )
    weights = assert_equals_peft(tmp_path, expected)
    assert weights.format == "peft-attention" and weights.warnings == [] and weights.rank == 7
    assert len(weights.linears) == 3 * 4 and weights.linears["model.layers.2.self_attn.q_proj"].rank == 2


@pytest.mark.parametrize("alpha, linears", [(8.0, True), (3.0, False)])
def test_per_expert_keys_as_peft_loads_and_saves_them_again(tmp_path: Path, alpha: float, linears: bool) -> None:
    """peft turns per-expert keys into fused ones at twice the rank; both folders mean the same."""
    config = make.config_of(base())
    weights = make.random_adapter(config, rank=4, alpha=alpha, linears=linears, scale=0.1)
    weights.linears = {module: pair for module, pair in weights.linears.items() if "self_attn" in module}
    targets = ["gate_proj", "up_proj", "down_proj"] + (ATTENTION if linears else [])
    tensors = make.linear_keys(weights) | make.per_expert_keys(weights)
    original = make.write(tmp_path / "v4", tensors, make.lora_config(4, alpha, target_modules=targets))
    peft_model = PeftModel.from_pretrained(base(), original).eval()
    expected = logits(peft_model)
    peft_model.peft_config["default"].base_model_name_or_path = None  # or peft looks for it on the network
    peft_model.save_pretrained(tmp_path / "v5")
    first, second = assert_equals_peft(original, expected), assert_equals_peft(tmp_path / "v5", expected)
    assert (first.format, second.format) == ("peft-per-expert", "peft-fused-3d")
    assert first.rank == second.rank == 4
    ours, again = all_deltas(first), all_deltas(second)
    assert sorted(ours) == sorted(again)
    for name, delta in ours.items():
        torch.testing.assert_close(again[name], delta)
