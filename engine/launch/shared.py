"""What the backends of a CPU and those beside a GPU are made from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from engine.config import EngineConfig
from engine.errors import UserError
from engine.experts.native import NativeExperts
from engine.planning.plan import EnginePlan
from engine.weights.pack_cache import CACHE_FOLDER, PackCache, model_folder
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


def pack_cache(config: EngineConfig, source: WeightSource) -> PackCache | None:
    """Where packed weights are kept: in the folder asked for, or beside the model; None: nowhere."""
    if config.pack_cache == "off":
        return None
    files = Path(os.path.expanduser(config.gguf or config.model)).absolute()
    name = files.stem if files.suffix == ".gguf" else files.name
    if config.pack_cache != "auto":
        root = Path(os.path.expanduser(config.pack_cache))
    else:
        root = (files if files.is_dir() else files.parent) / CACHE_FOLDER
    return PackCache(model_folder(root, name, source.identity), source.identity)
