"""The backend objects of a model on a GPU: attention, projections and routing there, experts where the rules say."""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.base import BLOCK_SIZE, AttentionBackend
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.reference import ReferenceAttention
from engine.backends import Shared, cpu_threads, kt_method, native_experts, pack_cache
from engine.config import EngineConfig
from engine.errors import RulesError
from engine.experts.base import ExpertBackend
from engine.experts.cuda_bridge import CudaBridge
from engine.experts.gpu import GpuExperts
from engine.experts.hybrid import HybridExperts
from engine.experts.kt import KtExperts
from engine.experts.kt_stream import KtStreamExperts
from engine.experts.reference import ReferenceExperts
from engine.experts.streamed import StreamedExperts
from engine.linear.base import LinearBackend
from engine.linear.gpu import GpuLinearBackend
from engine.linear.reference import ReferenceLinearBackend
from engine.memory_units import parse_bytes
from engine.model.gpu_ops import GpuOps
from engine.model.load import Backends
from engine.model.ops import Ops, TorchOps
from engine.model.rope import Rope
from engine.placement import Placement
from engine.precision import choose_precision
from engine.weights.store import WeightSource
from native.topology import make_pool, spare_cpus


def gpu_backends(
    config: EngineConfig,
    source: WeightSource,
    placement: Placement,
    num_blocks: int,
    max_model_len: int,
    max_rows: int,
) -> Backends:
    """As `engine.backends.make_backends`, with everything but the CPU's experts on `placement.device`.

    `config.gpu_expert_memory` is a number by now (`engine.memory_gpu.hot_expert_bytes`) if there are hybrid experts.
    """
    model, precision = source.config, choose_precision(config, placement)
    dtype = precision.activations
    cache = pack_cache(config, source)
    device = torch.device(placement.device)
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)  # kernels are launched on the current device
    slots, rank = config.max_adapter_slots, config.max_adapter_rank
    experts_choice = next((c for name, c in placement.choices.items() if name.endswith(".mlp.experts")), None)
    expert_device = torch.device("cpu") if experts_choice and experts_choice.device == "cpu" else device
    sizes: dict[str, Any] = {"max_rows": max_rows, "max_slots": slots, "max_rank": rank}

    pool_threads = config.cpu_threads and cpu_threads(config)
    pooled = bool({"native", "hybrid"} & set(placement.used(".mlp.experts")))

    def bridged() -> CudaBridge:
        pool = make_pool(pool_threads)
        return CudaBridge(native_experts(config, source, pool, cache), model, device)

    def hybrid() -> HybridExperts:
        cpu = placement.expert_option("cpu", "native")
        if cpu != "native":
            raise RulesError(
                f"hybrid experts with cpu: {cpu}: only native follows the GPU's stream by row", field="rules"
            )
        budget = parse_bytes(config.gpu_expert_memory or "0", "gpu_expert_memory")
        return HybridExperts(bridged(), model, dtype, device, budget_bytes=budget, **sizes)

    def streamed(inner: CudaBridge | HybridExperts) -> ExpertBackend:
        if not placement.streams_prefill:
            return inner
        limit = placement.expert_option("prefill_threshold", 0)
        threshold = None if limit == "auto" else int(limit)
        return StreamedExperts(inner, model, dtype, device, threshold=threshold, **sizes)

    def linears(of: torch.dtype) -> Shared[LinearBackend]:
        return Shared(
            "linear",
            {
                "reference": lambda: ReferenceLinearBackend(of, device),
                "gpu": lambda: GpuLinearBackend(of, device, slots, rank),
            },
        )

    attention: Shared[AttentionBackend] = Shared(
        "attention",
        {
            "reference": lambda: ReferenceAttention(model, num_blocks, dtype, device),
            "flashinfer": lambda: FlashInferAttention(
                model,
                num_blocks,
                dtype,
                device,
                config.max_num_seqs,
                -(-max_model_len // BLOCK_SIZE),
                kv_dtype=precision.kv,
                prefill=placement.attention_option("prefill", "auto"),
            ),
        },
    )
    experts: Shared[ExpertBackend] = Shared(
        "experts",
        {
            "reference": lambda: ReferenceExperts(dtype, expert_device),
            "native": lambda: streamed(bridged()),
            "hybrid": lambda: streamed(hybrid()),
            "kt": lambda: kt(model, kt_method(config, placement), max_rows=max_rows, threads=config.cpu_threads),
            "gpu": lambda: GpuExperts(model, dtype, device, **sizes),
        },
    )
    kt = KtStreamExperts if dtype == torch.bfloat16 else KtExperts
    linear, router = linears(dtype), linears(torch.float32)
    on_cpu = "reference" in placement.used(".mlp.experts") and expert_device.type == "cpu"
    torch.set_num_threads(cpu_threads(config) if on_cpu else 1)  # torch's threads would fight the pool's
    rope, fused = Rope(model, max_model_len, device), placement.used(".self_attn") != ["reference"]
    ops: Ops = GpuOps(model.rms_norm_eps, rope) if fused else TorchOps(model.rms_norm_eps, rope)
    return Backends(
        ops=ops,
        linear=lambda name: linear.get(placement.backend(name)),
        router=router.get(placement.used("_proj")[0]),
        attention=lambda layer: attention.get(placement.backend(f"model.layers.{layer}.self_attn")),
        experts=lambda layer: experts.get(placement.backend(f"model.layers.{layer}.mlp.experts")),
        dtype=dtype,
        device=device,
        cache=cache if pooled else None,
        spare_cpus=spare_cpus(pool_threads) if pooled and not on_cpu else [],
    )
