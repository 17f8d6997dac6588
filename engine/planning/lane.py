"""Whether long prompts have steps of their own beside those of decode rows, and what these take."""

from __future__ import annotations

from collections.abc import Iterator

from engine.architectures.config import ModelConfig
from engine.architectures.parts.gqa import GroupedQuery
from engine.attention.flashinfer import PREFILL_PLAN_BYTES, WORKSPACE_BYTES
from engine.config import GPU_BATCHED_TOKENS, EngineConfig
from engine.experts.gpu.compute import GpuCompute
from engine.experts.gpu.layout import Sizes
from engine.memory.costs import buffer_row_bytes
from engine.memory.items import Item, Kind
from engine.planning.drafts import mtp_drafts
from engine.planning.placement import Placement


def lane_blocker(config: EngineConfig, placement: Placement, model: ModelConfig) -> str | None:
    """Why there is no lane of long prompts; None: there is one. "" where nobody would expect it."""
    if not placement.streams_prefill or config.prompt_lane == "off":
        return ""
    if config.tensor_parallel > 1:
        return "several GPUs take the same steps one after another"
    if mtp_drafts(config):
        return "the layer that predicts drafts follows each step"
    if config.fine_tuning:
        return "training beside serving takes the time between steps"
    if len(placement.used(".mlp.experts")) > 1:
        return "experts are on several backends by their rules"
    if not all(isinstance(layer.attention, GroupedQuery) for layer in model.layers):
        return "this model's attention takes one step at a time"
    return None


def tokens_beside(config: EngineConfig, budget: int) -> int:
    """Of a step beside one of long prompts, at most."""
    return min(budget, max(GPU_BATCHED_TOKENS, config.max_num_seqs))


def lane_items(
    config: EngineConfig,
    placement: Placement,
    model: ModelConfig,
    gpu: str,
    budget: int,
    element: int,
    expert_bytes: int,
) -> Iterator[Item]:
    """What a step takes beside one of long prompts, which has the token budget. `element`: bytes of an activation;
    `expert_bytes`: of the largest expert on the GPU."""
    rows = tokens_beside(config, budget)
    step = rows * buffer_row_bytes(model)
    grows = step if rows == budget else 0
    yield Item(gpu, Kind.STEP, f"step beside long prompts, {rows} tokens", step, grows)
    if placement.used(".self_attn") == ["flashinfer"]:
        yield Item(gpu, Kind.OTHER, "attention workspace of long prompts", WORKSPACE_BYTES + PREFILL_PLAN_BYTES)
    if "hybrid" in placement.used(".mlp.experts"):
        sizes = Sizes.of(model)
        quantised = expert_bytes < sizes.expert_values * element
        scratch = GpuCompute.planned_bytes(sizes, element, rows, config.max_adapter_rank, quantised=quantised)
        yield Item(gpu, Kind.STEP, "expert scratch beside long prompts", scratch)
