"""A base model with adapters, and what each of them merged gives."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from engine.architectures.registry import architecture_of
from testing.harness import Harness, greedy
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import CLEAR
from tests.lora.make import (
    config_of,
    extra_keys,
    linear_keys,
    lora_config,
    named,
    per_expert_keys,
    random_adapter,
    write,
)
from tests.lora.merge import merge


class Family:
    """A base model on disk with adapters, named as its files are, and each of them merged, unless `merged` is false."""

    def __init__(self, folder: Path, count: int = 3, scale: float = 0.3, *, merged: bool = True, **shape) -> None:
        self.base = tiny_model(21, **({"num_hidden_layers": 3, "num_experts": 8, "mlp_only_layers": [1]} | shape))
        self.model_path = folder / "base"
        save_hf(self.base, self.model_path)
        self.paths: dict[str, Path] = {}
        self.merged: dict[str | None, torch.nn.Module] = {None: self.base}
        config = config_of(self.base)
        for i in range(count):
            rank = 2 + i
            weights = random_adapter(config, rank=rank, alpha=2.0 * rank, seed=50 + i, extra=i % 2, scale=scale)
            keys = {**linear_keys(weights), **per_expert_keys(weights), **extra_keys(weights)}
            keys = named(keys, architecture_of(config).stored)
            name = f"adapter-{i}"
            self.paths[name] = write(folder / name, keys, lora_config(rank, 2.0 * rank))
            if merged:
                self.merged[name] = merge(copy.deepcopy(self.base), weights)

    def engine(self, **config) -> Harness:
        harness = Harness(self.model_path, **config)
        for name, path in self.paths.items():
            harness.adapter(name, path)
        return harness

    def expect(self, name: str | None, prompt: list[int], tokens: list[int]) -> None:
        expected, gap = greedy(self.merged[name], prompt, len(tokens), tokens)
        assert tokens == expected or gap < CLEAR
