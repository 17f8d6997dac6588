"""Whole sources as transformers' state dicts, to compare with models."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeForCausalLM

from engine.weights.store import WeightSource


def state_of(source: WeightSource) -> dict[str, torch.Tensor]:
    """Everything that a source holds, float32, in transformers' fused names."""
    state = {name: source.tensor(name).dequantise() for name in source.names()}
    for layer in source.config.sparse_layers:
        store = source.experts(layer)
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up = store.stacked("gate", torch.float32), store.stacked("up", torch.float32)
        state[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{experts}.down_proj"] = store.stacked("down", torch.float32)
    return state


def assert_same(source: WeightSource, model: Qwen3MoeForCausalLM) -> None:
    """Bitwise, every tensor, none missing and none too many."""
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    if source.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    state = state_of(source)
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
