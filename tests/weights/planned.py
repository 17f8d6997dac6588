"""The memory plan of a small model, as the tests of memory ask for it."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from engine.memory.items import Kind
from engine.memory.limits import Memory
from engine.memory.plan import Inputs, MemoryPlan, plan_memory
from engine.memory.stated import STATED
from engine.weights.store import WeightSource


def plan(
    source: WeightSource, cpu: int = 64 << 30, element: int = 2, backend: str = "reference", **more: Any
) -> MemoryPlan:
    gpu, extra = more.pop("gpu", None), more.pop("extra", ())
    linear, copies = more.pop("linear_backend", "reference"), more.pop("adapter_copies", None)
    config = EngineConfig(model="m", **more)
    inputs = Inputs(
        config,
        source,
        STATED,
        lambda layer: backend,
        linear,
        element_bytes=element,
        activation_bytes=element,
        kv_token_bytes=source.config.kv_bytes_per_token(element),
        token_budget=config.max_num_batched_tokens or 512,
        cpu=Memory("CPU", cpu, 2 * cpu),
        gpu=gpu,
        adapter_copies={"CPU": 1} if copies is None else copies,
        kt_method=config.kt_method,
        expert_quantise=config.quantise,
        extra=tuple(extra),
    )
    return plan_memory(inputs)


def size(made: MemoryPlan, kind: Kind) -> int:
    (item,) = [item for item in made.items if item.kind is kind]
    return item.num_bytes
