"""What was given and changes nothing here, settings and files: each is a line at start-up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from engine.config import EngineConfig
from engine.planning.placement import Placement
from engine.planning.ranks import divides_experts
from engine.weights.latent import held_apart
from engine.weights.open import has_safetensors
from engine.weights.packed import repacks
from engine.weights.store import WeightSource, WeightTensor

_Rule = Callable[[EngineConfig, WeightSource, Placement], str]  # why a setting changes nothing, "" if it does


def unused_settings(config: EngineConfig, source: WeightSource, placement: Placement) -> list[str]:
    given = {f.name for f in fields(config) if f.name in _RULES and getattr(config, f.name) != f.default}
    found = {name: reason for name in sorted(given) if (reason := _RULES[name](config, source, placement))}
    return [f"note: --{name.replace('_', '-')} changes nothing: {reason}" for name, reason in found.items()]


def unused_files(config: EngineConfig) -> list[str]:
    """Of a folder with safetensors, GGUF models beside them."""
    folder = Path(os.path.expanduser(config.model))
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if config.gguf is not None or not names or not has_safetensors(folder):
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"note: the folder's safetensors are served, not {names[0]}{more}; --model {folder / names[0]} serves that"]


def _quantised(placement: Placement) -> set[str]:
    """What is held in packed formats."""
    kinds = {"experts": ".mlp.experts", "projections": "_proj"}
    return {kind for kind, suffix in kinds.items() if {"native", "hybrid", "gpu"} & set(placement.used(suffix))}


def _native(placement: Placement) -> set[str]:
    """What the native kernels compute."""
    kinds = {"experts": ".mlp.experts", "projections": "_proj", "attention": ".self_attn"}
    return {kind for kind, suffix in kinds.items() if {"native", "hybrid"} & set(placement.used(suffix))}


def _packed(source: WeightSource, placement: Placement) -> Iterator[WeightTensor]:
    """The tensors that are repacked (of a layer's experts, the first)."""
    native = _quantised(placement)
    if "experts" in native:
        for layer in source.config.sparse_layers:
            yield from (source.experts(layer).expert(name, 0) for name in ("gate", "up", "down"))
    if "projections" in native:
        projections = (source.tensor(name) for name in source.names() if name.endswith("_proj.weight"))
        yield from (held for tensor in projections for held in held_apart(source.config, tensor))


def _quantise(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    if not _quantised(placement):
        return "neither experts nor projections are held in packed formats here"
    plain = any(not repacks(tensor.type) for tensor in _packed(source, placement))
    return "" if plain else "every weight is quantised already, and stays as the file has it"


def _pack_cache(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    wanted = config.pack_cache != "off" and not _native(placement) & {"experts", "projections"}
    return "nothing is repacked, the native kernels compute neither experts nor projections here" if wanted else ""


def _isa(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if _native(placement) else "the native kernels compute nothing here"


def _prompt_lane(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if placement.streams_prefill else "no long chunks' experts are streamed to a GPU here"


def _only_for(backend: str) -> _Rule:
    def rule(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
        return "" if backend in placement.used(".mlp.experts") else f"no experts are on the {backend} backend"

    return rule


def _gpu_experts(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if placement.device != "cpu" else "no GPU is used"


def _threads(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    places = {choice.device for name, choice in placement.choices.items() if name.endswith(".mlp.experts")}
    pooled = {"native", "hybrid", "kt"} & set(placement.used(".mlp.experts"))
    return "" if placement.device == "cpu" or pooled or "cpu" in places else "the GPU computes everything"


def _kv_disk(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if config.kv_disk is not None else "no --kv-disk is given"


def _snapshots(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    if not source.config.state_bytes:
        return "no layer of this model keeps states"
    return "" if config.prefix_caching else "there is no prefix cache (--no-prefix-caching)"


def _graphs(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "no GPU is used" if placement.device == "cpu" and config.cuda_graphs == "off" else ""


def _scaling(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if config.adapters else "no --adapters are given, and it is for them alone"


def _slots(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if config.max_adapter_slots else "with --max-adapter-slots 0 no adapter is served"


def _expert_backend(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if source.config.sparse_layers else "no layer of this model has routed experts"


def _expert_parallel(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    divided = config.tensor_parallel > 1 and divides_experts(placement) and source.config.experts is not None
    return "" if divided else "no experts are divided (--tensor-parallel)"


def _bandwidth(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    counted = "experts" in _native(placement)
    return "" if counted else "the native kernels, whose reads are counted, compute no experts here"


def _training(config: EngineConfig, source: WeightSource, placement: Placement) -> str:
    return "" if config.fine_tuning else "nothing is trained without --fine-tuning"


_RULES: dict[str, _Rule] = {
    "measure_bandwidth": _bandwidth,
    "quantise": _quantise,
    "pack_cache": _pack_cache,
    "isa": _isa,
    "kt_method": _only_for("kt"),
    "gpu_expert_memory": _only_for("hybrid"),
    "gpu_experts": _gpu_experts,
    "expert_profile": _only_for("hybrid"),
    "cpu_threads": _threads,
    "cuda_graphs": _graphs,
    "kv_disk_dir": _kv_disk,
    "prompt_lane": _prompt_lane,
    "snapshot_share": _snapshots,
    "expert_scaling": _scaling,
    "expert_b_layout": _scaling,
    "adapter_memory": _slots,
    "max_adapter_rank": _slots,
    "expert_backend": _expert_backend,
    "expert_parallel": _expert_parallel,
    "training_share": _training,
    "training_tokens": _training,
}
