"""How many of the routed experts a GPU holds (--gpu-experts): all, the hottest, or none of them.

all    the `gpu` backend, and the CPU computes none; where all fit beside a KV cache that is large enough
some   `hybrid`: the hottest, in what a KV cache for the requests leaves free; the CPU computes the rest
none   `native`; where fewer fit than pay for what it costs to split a row's experts
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.architectures.config import ModelConfig
from engine.config import EngineConfig
from engine.errors import UserError
from engine.experts.gpu.layout import SIZE_STEP
from engine.memory.plan import MemoryPlan, wanted_tokens
from engine.planning.placement import Placement
from engine.units import format_bytes, parse_bytes

LEAST_SHARE = 0.08  # of all experts' bytes, from which hot ones pay
WHOLE_KV_TOKENS = 32768  # of the KV cache beside all experts, if the requests want so many
GIB = 1 << 30


@dataclass(frozen=True)
class GpuShare:
    """The experts' backends to be planned for, of which the first is taken that `suits`; None: what the rules and flags
    say. `asked_bytes`: of GPU memory for hot experts, if it was said."""

    backends: tuple[str | None, ...] = (None,)
    asked_bytes: int | None = None


def gpu_share(
    config: EngineConfig, model: ModelConfig, placement: Placement, expert_bytes: Callable[[], int]
) -> GpuShare:
    """UserError for settings that cannot be. `expert_bytes`: of one expert on the GPU."""
    asked, older = config.gpu_experts, config.gpu_expert_memory
    if older is not None and asked != "auto":
        raise UserError(
            f"--gpu-expert-memory {older} with --gpu-experts {asked}: leave the first out, --gpu-experts takes a size",
            "gpu_expert_memory",
        )
    free = config.rules is None and config.expert_backend is None  # to choose the backend
    used, on_gpu = placement.used(".mlp.experts"), placement.device != "cpu"
    if older is not None:
        size = parse_bytes(older, "gpu_expert_memory")
        return GpuShare(("hybrid",) if free and on_gpu and used == ["native"] else (None,), size)
    if asked == "auto":
        possible = model.hidden_size % SIZE_STEP == 0 and model.moe_intermediate_size % SIZE_STEP == 0
        if not (free and on_gpu and used == ["native"] and possible):
            return GpuShare()
        # What is trained is packed on the CPU, so that a GPU may have copies of experts, but not take them.
        return GpuShare(("hybrid", "native") if config.fine_tuning else ("gpu", "hybrid", "native"))
    share = _said(asked, model, expert_bytes)
    if not on_gpu:
        if share.backends == ("native",):
            return GpuShare()
        raise UserError(f"--gpu-experts {asked}: no GPU is used here; allowed are auto and none", "gpu_experts")
    if not free and not (used == ["hybrid"] and share.asked_bytes is not None):
        by = f"--expert-backend {config.expert_backend}" if config.expert_backend else f"--rules {config.rules}"
        raise UserError(f"--gpu-experts {asked} with {by}: leave one of them out", "gpu_experts")
    return share if free else GpuShare((None,), share.asked_bytes)


def _said(asked: str, model: ModelConfig, expert_bytes: Callable[[], int]) -> GpuShare:
    if asked in ("all", "none"):
        return GpuShare(("gpu",) if asked == "all" else ("native",))
    if re.fullmatch(r"\d+", asked):
        count = int(asked)
        if count > model.num_experts:
            raise UserError(f"--gpu-experts {asked}: of a layer's {model.num_experts} experts", "gpu_experts")
        if count in (0, model.num_experts):
            return GpuShare(("gpu",) if count else ("native",))
        return GpuShare(("hybrid",), count * len(model.sparse_layers) * expert_bytes())
    try:
        return GpuShare(("hybrid",), parse_bytes(asked, "gpu_experts"))
    except UserError:
        raise UserError(
            f"--gpu-experts {asked!r}: allowed are auto, all, none, a number of each layer's experts (0 to "
            f"{model.num_experts}) or a size such as 20GiB",
            "gpu_experts",
        ) from None


def suits(
    backend: str | None, config: EngineConfig, model: ModelConfig, memory: MemoryPlan, hot: int, each: int
) -> bool:
    """Whether a plan with this backend is what --gpu-experts auto would have. `hot` bytes are for experts of `each`."""
    if backend not in ("gpu", "hybrid"):
        return True
    if memory.short:
        return False
    if backend == "hybrid":
        return hot >= LEAST_SHARE * len(model.sparse_layers) * model.num_experts * each
    asked = config.kv_cache_tokens is not None or config.kv_cache_memory is not None
    tokens = memory.kv_tokens + memory.kv_left_out  # a smaller cache costs less than experts on the CPU
    return asked or tokens >= min(WHOLE_KV_TOKENS, wanted_tokens(config, model))


def share_lines(placement: Placement, model: ModelConfig, hot: int, each: int) -> list[str]:
    """What was chosen, and what more memory would bring."""
    total = len(model.sparse_layers) * model.num_experts
    used = placement.used(".mlp.experts")
    if placement.device == "cpu" or not total:
        return []
    if used == ["gpu"]:
        return [f"experts on the GPU: all {total}; more memory would hold more KV cache only"]
    if used == ["hybrid"]:
        count = min(hot // each, total)
        more = min(GIB // each, total - count)
        return [
            f"experts on the GPU: the hottest {count} of {total} in {format_bytes(hot)}; evenly spread routing finds "
            f"{count / total:.0%} of a row's experts there, skewed routing more; the next GiB would hold {more} more "
            f"({more / total:.1%})"
        ]
    if used == ["native"]:
        least, every = format_bytes(int(LEAST_SHARE * total * each)), format_bytes(total * each)
        return [f"experts on the GPU: none; hot ones pay from {least} on, all of them take {every}"]
    return []
