"""The backend objects of a model on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.attention.base import CacheBackend
from engine.attention.native import NativeAttention
from engine.attention.native_delta import NativeDeltaNet
from engine.experts.base import ExpertBackend
from engine.experts.kt.backend import KtExperts
from engine.experts.other_rank import OtherRankExperts
from engine.experts.reference import ReferenceExperts
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
from engine.linear.native import NativeLinearBackend
from engine.linear.reference import ReferenceLinearBackend
from engine.model.load import Backends
from engine.ops.base import TorchOps
from engine.ops.native import NativeOps
from engine.planning.placement import kt_method
from engine.planning.plan import EnginePlan
from native import available as native_available
from native.topology import make_pool

if TYPE_CHECKING:
    from native import _native


def cpu_backends(plan: EnginePlan, mapped: _native.MappedFiles | None = None) -> Backends:
    """One object per backend that occurs; one worker pool for all native ones. `mapped`: packed weights that are being
    read already (engine/weights/ahead.py)."""
    config, placement, model, precision = plan.config, plan.placement, plan.source.config, plan.precision
    device, dtype, rows = torch.device("cpu"), precision.activations, plan.token_budget
    pools: Shared[Any] = Shared("pool", {"native": lambda: make_pool(plan.threads)})
    if mapped is None and native_available()[0]:
        from native import _native

        mapped = _native.MappedFiles()
    cache = pack_cache(config, plan.source, mapped)
    isa = config.isa or ""

    linear: Shared[LinearBackend] = Shared(
        "linear",
        {
            "reference": lambda: ReferenceLinearBackend(dtype, device),
            "native": lambda: NativeLinearBackend(
                dtype,
                pools.get("native"),
                isa,
                config.quantise,
                plain=precision.weights,
                cache=cache,
                deterministic=config.deterministic,
            ),
        },
    )
    router: Shared[LinearBackend] = Shared(
        "router",
        {
            "reference": lambda: ReferenceLinearBackend(torch.float32, device),
            "native": lambda: NativeLinearBackend(torch.float32, pools.get("native"), isa, cache=cache),
        },
    )

    def in_native(spec: GroupedQuery | Latent | DeltaNet, layers: list[int]) -> CacheBackend:
        pool = pools.get("native")
        if isinstance(spec, DeltaNet):
            return NativeDeltaNet(spec, layers, state_slots(plan), pool, isa, one_by_one=config.deterministic)
        return NativeAttention(spec, layers, plan.cache_blocks, dtype, pool, isa, kv_dtype=precision.kv)

    attention = attention_of(
        model,
        lambda layer: placement.backend(f"model.layers.{layer}.self_attn"),
        {
            "reference": reference_attention(plan, device),
            "native": in_native,
        },
    )
    experts: Shared[ExpertBackend] = Shared(
        "experts",
        {
            "reference": lambda: ReferenceExperts(dtype, device),
            "native": lambda: native_experts(plan, pools.get("native"), cache),
            "kt": lambda: KtExperts(model, kt_method(config, placement), max_rows=rows, threads=plan.threads),
        },
    )
    if plan.shard.rank and not plan.shard.experts:
        other = OtherRankExperts("cpu")
        experts = Shared("experts", dict.fromkeys(placement.used(".mlp.experts"), lambda: other))
    kinds = {choice.backend for choice in placement.choices.values()}
    native_rows = placement.native(".self_attn", "_proj")
    torch.set_num_threads(1 if native_rows else plan.torch_threads)  # torch's threads would fight the pool's
    eps = model.rms_norm_eps
    return Backends(
        ops=NativeOps(eps, pools.get("native"), isa) if native_rows else TorchOps(eps),
        linear=lambda name: linear.get(placement.backend(name)),
        router=router.get("native" if native_rows else "reference"),
        rope=ropes(plan.max_model_len, device),
        attention=attention,
        experts=lambda layer: experts.get(placement.backend(f"model.layers.{layer}.mlp.experts")),
        dtype=dtype,
        packs_bf16=precision.weights == torch.bfloat16,
        device=device,
        cache=cache if "native" in kinds else None,
        pool=pools.get("native") if "native" in kinds else None,
    )
