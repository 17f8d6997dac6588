"""A whole model in bfloat16 against float32, beside stock PEFT in bfloat16: routing apart, ours is as near or nearer.

Where two experts are as good as equal to a router, bfloat16 before it decides which one is taken, in either model; such
batches say nothing of gradients, and are compared in number only.
"""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from testing.models.tiny import save_hf, tiny_model
from tests.training.models import Experts, copy_lora, draw_b, ours, plain
from training.config import TrainConfig
from training.kernels import expert_maker
from training.layer import ExpertsLoraLayer

_MODELS, _BATCHES = 12, 3


def _watched(model: nn.Module) -> list[torch.Tensor]:
    """Gets each layer's chosen experts at every forward."""
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, ExpertsLoraLayer | Experts):
            module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].sort(-1)[0]))
    return chosen


def _gradients(model: nn.Module, names: list[str]) -> torch.Tensor:
    """All of LoRA's, in one order, whichever model it is."""
    held = dict(model.named_parameters())
    found = []
    for name in names:
        if name in held:
            found.append(held[name].grad)
            continue
        block, _, matrix = name.partition(".lora_experts.default.")
        projection, _, half = matrix.partition("_lora_")
        key = f"{projection}_proj.lora_{half.upper()}.default.weight"
        single = [held[f"{block}.{expert}.{key}"] for expert in range(8)]
        found.append(torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in single]))
    return torch.cat([grad.float().flatten() for grad in found])


def test_gradients_are_as_near_to_float32_as_stock_pefts(tmp_path: Path):
    errors: list[tuple[float, float]] = []
    flipped = [0, 0]
    for seed in range(_MODELS):
        base, folder = tiny_model(seed=seed), tmp_path / str(seed)
        save_hf(base, folder)
        exact = draw_b(ours(folder, seed=seed), seed)
        mine = ours(folder, expert_maker(TrainConfig(bf16=True, kt_num_threads=1)), dtype=torch.bfloat16)
        mine.load_state_dict({key: value for key, value in exact.state_dict().items() if "lora" in key}, strict=False)
        stock = plain(copy.deepcopy(base).to(torch.bfloat16))
        copy_lora(exact, stock)
        models = (exact, mine, stock)
        chosen = [_watched(model) for model in models]
        names = [name for name, parameter in exact.named_parameters() if parameter.requires_grad]
        for batch in range(_BATCHES):
            generator = torch.Generator().manual_seed(100 * seed + batch)
            ids = torch.randint(2, 128, (2, 24), generator=generator)
            for model, each in zip(models, chosen, strict=True):
                each.clear()
                model.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
            want, *found = (_gradients(model, names) for model in models)
            others = [sum(int((a != b).any(-1).sum()) for a, b in zip(each, chosen[0], strict=True)) for each in chosen]
            flipped = [flipped[i] + others[i + 1] for i in range(2)]
            if not any(others):
                near, far = (float((grad - want).norm() / want.norm()) for grad in found)
                errors.append((near, far))
    assert len(errors) >= 5
    assert mean(near for near, _ in errors) < mean(far for _, far in errors)
    assert all(near < 1.2 * far for near, far in errors)
    assert flipped[0] < 1.5 * flipped[1] + 10
