"""What keeps a model's decode steps from being captured or halved."""

from __future__ import annotations

from engine.model.qwen3_moe import Qwen3Moe


def graph_obstacle(model: Qwen3Moe) -> str | None:
    """Why a model's decode steps cannot be captured in CUDA graphs; None if they can."""
    if model.device.type != "cuda":
        return "no GPU"
    for attention in model.attention_backends:
        if not attention.captures:
            return f"attention by {type(attention).__name__} cannot be captured"
    for experts in model.expert_backends:
        if not experts.follows_stream:
            return f"experts by {type(experts).__name__} do not follow a stream"
    for name, linear in model.linears.items():
        if not linear.captures:
            return f"{name} by {type(linear).__name__} cannot be captured"
    return None


def halving_obstacle(model: Qwen3Moe) -> str | None:
    """Why a model's decode steps cannot run as two half-batches; None if they can."""
    if not model.expert_backends:
        return "no routed experts"
    for experts in model.expert_backends:
        if experts.beside_stream == "nothing":
            return f"experts by {type(experts).__name__} do not run beside the stream"
    for attention in model.attention_backends:
        if attention.parts < 2:
            return f"{type(attention).__name__} holds one plan at a time"
    return None
