"""The backend objects that a placement names: one of a kind, shared by the layers that use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from engine.attention.base import AttentionBackend
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.errors import RulesError, UserError
from engine.experts.base import ExpertBackend
from engine.experts.kt import KtExperts
from engine.experts.native import NativeExperts
from engine.experts.reference import ReferenceExperts
from engine.linear.base import LinearBackend
from engine.linear.native import NativeLinearBackend
from engine.linear.reference import ReferenceLinearBackend
from engine.model.load import Backends
from engine.model.native_ops import NativeOps
from engine.model.ops import TorchOps
from engine.model.rope import Rope
from engine.pack_cache import PackCache, model_folder
from engine.placement import Placement, activation_dtype
from engine.precision import Precision, choose_precision
from engine.weights.store import WeightSource
from native.topology import make_pool

T = TypeVar("T")


def make_backends(
    config: EngineConfig,
    source: WeightSource,
    placement: Placement,
    num_blocks: int,
    max_model_len: int,
    max_rows: int,
) -> Backends:
    """One object per backend that occurs, shared by the layers that use it; one worker pool for all native ones."""
    if placement.device != "cpu":
        from engine.backends_gpu import gpu_backends

        return gpu_backends(config, source, placement, num_blocks, max_model_len, max_rows)
    device, model, precision = torch.device("cpu"), source.config, choose_precision(config, placement)
    dtype = precision.activations
    pools: Shared[Any] = Shared("pool", {"native": lambda: make_pool(config.cpu_threads and cpu_threads(config))})
    cache = pack_cache(config, source)
    isa, rope = config.isa or "", Rope(model, max_model_len, device)

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
    attention: Shared[AttentionBackend] = Shared(
        "attention",
        {
            "reference": lambda: ReferenceAttention(model, num_blocks, dtype, device),
            "native": lambda: NativeAttention(
                model, num_blocks, dtype, pools.get("native"), isa, kv_dtype=precision.kv
            ),
        },
    )
    experts: Shared[ExpertBackend] = Shared(
        "experts",
        {
            "reference": lambda: ReferenceExperts(dtype, device),
            "native": lambda: native_experts(config, source, pools.get("native"), cache, precision),
            "kt": lambda: KtExperts(model, kt_method(config, placement), max_rows=max_rows, threads=config.cpu_threads),
        },
    )
    kinds = {choice.backend for choice in placement.choices.values()}
    all_native = "native" in kinds and placement.used("_proj") == placement.used(".self_attn") == ["native"]
    torch.set_num_threads(1 if all_native else cpu_threads(config))  # torch's threads would fight the pool's
    eps = model.rms_norm_eps
    return Backends(
        ops=NativeOps(eps, rope, pools.get("native"), isa) if all_native else TorchOps(eps, rope),
        linear=lambda name: linear.get(placement.backend(name)),
        router=router.get("native" if all_native else "reference"),
        attention=lambda layer: attention.get(placement.backend(f"model.layers.{layer}.self_attn")),
        experts=lambda layer: experts.get(placement.backend(f"model.layers.{layer}.mlp.experts")),
        dtype=dtype,
        packs_bf16=precision.weights == torch.bfloat16,
        device=device,
        cache=cache if "native" in kinds else None,
        pool=pools.get("native") if "native" in kinds else None,
    )


def cpu_threads(config: EngineConfig) -> int:
    """Threads to compute with: asked for, or as many as this process may run on."""
    available = len(os.sched_getaffinity(0))
    if config.cpu_threads is None:
        return available
    if not 1 <= config.cpu_threads <= 4 * available:
        raise UserError(
            f"--cpu-threads {config.cpu_threads}: 1 to {4 * available} on this machine", field="cpu_threads"
        )
    return config.cpu_threads


def native_experts(
    config: EngineConfig,
    source: WeightSource,
    pool: Any,
    cache: PackCache | None,
    precision: Precision | None = None,
) -> NativeExperts:
    """`precision`: by default activations and weights are of one type, as beside a GPU."""
    dtype = activation_dtype(config)
    return NativeExperts(
        source.config,
        precision.activations if precision else dtype,
        pool,
        plain=precision.weights if precision else dtype,
        isa=config.isa or "",
        quantise=config.quantise,
        cache=cache,
        deterministic=config.deterministic,
    )


def kt_method(config: EngineConfig, placement: Placement) -> str:
    """kt_kernel's class: the flag, or the one that the rules name."""
    if config.kt_method != "auto":
        return config.kt_method
    named = {str(c.options.get("method", "auto")) for c in placement.choices.values() if c.backend == "kt"} or {"auto"}
    if len(named) > 1:
        raise RulesError(f"rules name several kt methods ({', '.join(sorted(named))}); one pool has one", field="rules")
    return named.pop()


def pack_cache(config: EngineConfig, source: WeightSource) -> PackCache | None:
    """Where packed weights are kept: in the folder asked for, or beside the model; None: nowhere."""
    if config.pack_cache == "off":
        return None
    files = Path(config.gguf or config.model).expanduser().absolute()
    name = files.stem if files.suffix == ".gguf" else files.name
    if config.pack_cache != "auto":
        root = Path(config.pack_cache).expanduser()
    else:
        root = (files if files.is_dir() else files.parent) / ".ktserve"
    return PackCache(model_folder(root, name, source.identity), source.identity)


class Shared(Generic[T]):
    """Makes each named thing once, when it is first asked for."""

    def __init__(self, kind: str, makers: dict[str, Callable[[], T]]) -> None:
        self._kind = kind
        self._makers = makers
        self._made: dict[str, T] = {}

    def get(self, name: str) -> T:
        if name not in self._makers:
            raise UserError(f"there is no {name} backend for {self._kind}: {', '.join(self._makers)}", field="rules")
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]
