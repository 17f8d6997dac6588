"""What the backends of a CPU and those beside a GPU are made from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.rotation import Rotation
from engine.attention.base import CacheBackend
from engine.attention.delta import StateSlots
from engine.attention.latent import torch_attention
from engine.config import EngineConfig
from engine.errors import UserError
from engine.experts.native import NativeExperts
from engine.ops.rope import Rope
from engine.planning.plan import EnginePlan
from engine.weights.pack_cache import PackCache, cache_root, model_folder
from engine.weights.store import WeightSource

if TYPE_CHECKING:
    from native import _native

T = TypeVar("T")


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


def attention_of(
    model: ModelConfig,
    backend_of: Callable[[int], str],
    makers: dict[str, Callable[[GroupedQuery | Latent | DeltaNet, list[int]], CacheBackend]],
) -> Callable[[int], CacheBackend]:
    """By layer: layers of one attention on one backend share it. Made when it is first asked for."""
    keys = [(backend_of(index), layer.attention) for index, layer in enumerate(model.layers)]
    made: dict[tuple[str, GroupedQuery | Latent | DeltaNet], CacheBackend] = {}

    def attention(index: int) -> CacheBackend:
        name, spec = key = keys[index]
        if name not in makers:
            raise UserError(f"there is no {name} backend for attention: {', '.join(makers)}", field="rules")
        if key not in made:
            made[key] = makers[name](spec, [layer for layer, other in enumerate(keys) if other == key])
        return made[key]

    return attention


def reference_attention(
    plan: EnginePlan, device: torch.device
) -> Callable[[GroupedQuery | Latent | DeltaNet, list[int]], CacheBackend]:
    """Makes attention in torch."""
    blocks, slots, dtype = plan.cache_blocks, state_slots(plan), plan.precision.activations

    return lambda spec, layers: torch_attention(spec, layers, blocks, slots, dtype, device)


def state_slots(plan: EnginePlan) -> StateSlots:
    return StateSlots(plan.memory.state_slots, plan.memory.num_states, plan.memory.kept_positions)


def ropes(max_len: int, device: torch.device) -> Callable[[Rotation], Rope]:
    """The tables of a rotation, made once."""

    @cache
    def rope(rotation: Rotation) -> Rope:
        return Rope(rotation, max_len, device)

    return rope


def native_experts(plan: EnginePlan, pool: _native.WorkerPool, cache: PackCache | None) -> NativeExperts:
    """As the plan has them, without layers. `cache`: of packed weights."""
    return NativeExperts(
        plan.source.config,
        plan.precision.activations,
        pool,
        plain=plan.precision.weights,
        isa=plan.config.isa or "",
        quantise=plan.expert_quantise,
        cache=cache,
        deterministic=plan.config.deterministic,
    )


def pack_cache(
    config: EngineConfig, source: WeightSource, mapped: _native.MappedFiles | None = None
) -> PackCache | None:
    """Where packed weights are kept: in the folder asked for, or beside the model; None: nowhere. `mapped`: as of
    `PackCache`."""
    if config.pack_cache == "off":
        return None
    root, name = cache_root(config.pack_cache, config.model, config.gguf)
    return PackCache(model_folder(root, name, source.identity), source.identity, mapped)
