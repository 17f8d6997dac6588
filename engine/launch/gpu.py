"""The backend objects of a model on a GPU: attention, projections and routing there, experts where the rules say."""

from __future__ import annotations

from functools import cache as once
from pathlib import Path
from typing import Any

import torch

from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.attention.base import BLOCK_SIZE, CacheBackend
from engine.attention.flashinfer import FlashInferAttention, make_workspace
from engine.attention.flashinfer_latent import FlashInferLatentAttention
from engine.attention.gpu_delta import GpuDeltaNet, gpu_delta_limit
from engine.experts.base import ExpertBackend
from engine.experts.bridge.backend import CudaBridge
from engine.experts.gpu.backend import GpuExperts
from engine.experts.hybrid.backend import HybridExperts
from engine.experts.kt.backend import KtExperts
from engine.experts.kt.stream import KtStreamExperts
from engine.experts.other_rank import OtherRankExperts
from engine.experts.reference import ReferenceExperts
from engine.experts.streamed.backend import StreamedExperts
from engine.launch.shared import (
    Shared,
    attention_of,
    native_experts,
    pack_cache,
    reference_attention,
    ropes,
    state_slots,
)
from engine.linear.base import LinearBackend
from engine.linear.gpu import GpuLinearBackend
from engine.linear.reference import ReferenceLinearBackend
from engine.model.load import Backends
from engine.ops.base import Ops, TorchOps
from engine.ops.gpu import GpuOps
from engine.planning.drafts import padded_rows
from engine.planning.placement import kt_method
from engine.planning.plan import EnginePlan
from engine.weights.tiled.packer import Packer
from native.topology import make_pool, spare_cpus


def gpu_backends(plan: EnginePlan) -> Backends:
    """One object per backend that occurs; everything but the CPU's experts is on the placement's device."""
    config, placement, model, dtype = plan.config, plan.placement, plan.source.config, plan.precision.activations
    cache = pack_cache(config, plan.source)
    device = torch.device(placement.device)
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)  # kernels are launched on the current device
    slots, rank, rows = config.max_adapter_slots, config.max_adapter_rank, padded_rows(config, model)
    experts_choice = next((c for name, c in placement.choices.items() if name.endswith(".mlp.experts")), None)
    expert_device = torch.device("cpu") if experts_choice and experts_choice.device == "cpu" else device
    sizes: dict[str, Any] = {"max_rows": plan.token_budget, "max_slots": slots, "max_rank": rank}

    pack = Packer(device, lambda: make_pool(plan.threads))
    pooled = bool({"native", "hybrid"} & set(placement.used(".mlp.experts")))

    def bridged() -> CudaBridge:
        pool = make_pool(plan.threads)
        return CudaBridge(native_experts(plan, pool, cache), model, device)

    def hybrid() -> HybridExperts:
        profile = None if config.expert_profile is None else Path(config.expert_profile)
        inner, budget = bridged(), plan.hot_expert_bytes
        return HybridExperts(
            inner, model, dtype, device, budget_bytes=budget, profile=profile,
            expert_bytes=plan.gpu_expert_bytes, **sizes,
        )  # fmt: skip

    def streamed(inner: CudaBridge | HybridExperts) -> ExpertBackend:
        if not placement.streams_prefill:
            return inner
        limit = placement.expert_option("prefill_threshold", 0)
        threshold = None if limit == "auto" else int(limit)
        lane = plan.lane_blocker is None
        return StreamedExperts(inner, model, dtype, device, threshold=threshold, prompt_lane=lane, **sizes)

    def linears(of: torch.dtype, pack: Packer | None) -> Shared[LinearBackend]:
        return Shared(
            "linear",
            {
                "reference": lambda: ReferenceLinearBackend(of, device),
                "gpu": lambda: GpuLinearBackend(of, device, slots, rank, config.quantise, pack),
            },
        )

    in_torch = reference_attention(plan, device)
    workspace = once(lambda: make_workspace(device))

    def in_kernels(spec: GroupedQuery | Latent | DeltaNet, layers: list[int]) -> CacheBackend:
        if isinstance(spec, DeltaNet):
            states = state_slots(plan)
            return in_torch(spec, layers) if gpu_delta_limit(spec) else GpuDeltaNet(spec, layers, states, device, rows)
        prefill = placement.attention_option("prefill", "auto")
        held = (layers, plan.cache_blocks, dtype, device, rows, -(-plan.max_model_len // BLOCK_SIZE))
        if isinstance(spec, Latent):
            return FlashInferLatentAttention(spec, *held, prefill=prefill)
        return FlashInferAttention(spec, *held, workspace=workspace(), kv_dtype=plan.precision.kv, prefill=prefill)

    attention = attention_of(
        model,
        lambda layer: placement.backend(f"model.layers.{layer}.self_attn"),
        {"reference": in_torch, "flashinfer": in_kernels},
    )
    experts: Shared[ExpertBackend] = Shared(
        "experts",
        {
            "reference": lambda: ReferenceExperts(dtype, expert_device),
            "native": lambda: streamed(bridged()),
            "hybrid": lambda: streamed(hybrid()),
            "kt": lambda: kt(model, kt_method(config, placement), max_rows=plan.token_budget, threads=plan.threads),
            "gpu": lambda: GpuExperts(model, dtype, device, quantise=plan.expert_quantise, pack=pack, **sizes),
        },
    )
    if plan.shard.rank and not plan.shard.experts:
        other = OtherRankExperts("cuda")
        experts = Shared("experts", dict.fromkeys(placement.used(".mlp.experts"), lambda: other))
    kt = KtStreamExperts if dtype == torch.bfloat16 else KtExperts
    linear, router = linears(dtype, pack), linears(torch.float32, None)
    on_cpu = "reference" in placement.used(".mlp.experts") and expert_device.type == "cpu"
    torch.set_num_threads(plan.torch_threads if on_cpu else 1)  # torch's threads would fight the pool's
    fused, eps = placement.used(".self_attn") != ["reference"], model.rms_norm_eps
    ops: Ops = GpuOps(eps, device) if fused else TorchOps(eps)
    return Backends(
        ops=ops,
        linear=lambda name: linear.get(placement.backend(name)),
        router=router.get(placement.used("_proj")[0]),
        rope=ropes(plan.max_model_len, device),
        attention=attention,
        experts=lambda layer: experts.get(placement.backend(f"model.layers.{layer}.mlp.experts")),
        dtype=dtype,
        device=device,
        cache=cache if pooled else None,
        spare_cpus=spare_cpus(plan.threads) if pooled and not on_cpu else [],
        packer=pack,
    )
