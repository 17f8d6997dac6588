"""What keeps a model's decode steps from being captured in CUDA graphs."""

from __future__ import annotations

from engine.model.causal_lm import CausalLM


def graph_blocker(model: CausalLM) -> str | None:
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
