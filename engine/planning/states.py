"""What a model whose layers keep states cannot be served with yet."""

from __future__ import annotations

from engine.architectures.config import ModelConfig
from engine.attention.gpu_delta import gpu_delta_limit
from engine.config import EngineConfig
from engine.errors import UserError
from engine.planning.placement import Placement


def check_states(config: EngineConfig, model: ModelConfig, placement: Placement) -> None:
    """UserError with the setting that would have to change."""
    if not model.state_bytes:
        return
    keeps = "this model's linear attention layers keep a state of each sequence"
    pads = placement.used(".self_attn") == ["flashinfer"] and not any(map(gpu_delta_limit, model.delta_nets))
    if config.cuda_graphs == "padded" and not pads:
        raise UserError(
            f"--cuda-graphs padded: {keeps}, and here padding rows have none: allowed are auto and off",
            "cuda_graphs",
        )
