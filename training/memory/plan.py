"""The memory plan of a training run.

>>> plan = plan_training(config); print(plan.render()); plan.check(config.force_memory_plan)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import FLOAT32_MODULES
from engine.errors import MemoryPlanError, UserError
from engine.experts.native import layer_bytes as expert_layer_bytes
from engine.memory.costs import loading_bytes
from engine.memory.items import DevicePlan, Item, Kind
from engine.memory.limits import Memory, cpu_memory
from engine.units import format_bytes
from engine.weights.open import open_model
from engine.weights.store import WeightSource
from training.config import TrainConfig
from training.data.info import find_sources
from training.delta import refuse_delta
from training.memory import costs, streaming
from training.memory.costs import Run

_RUNTIME = 512 << 20  # torch, transformers and PEFT themselves
_RESERVE, _RESERVE_SHARE = 256 << 20, 0.02
_FLOAT32_WEIGHTS = tuple(f"{name}.weight" for name in FLOAT32_MODULES)
_TOKEN_BYTES = 2  # of a data file's byte: an id and a label of 4 bytes each, for about 4 bytes of text


@dataclass(frozen=True)
class TrainingPlan(DevicePlan):
    """`remedies`: overrides with which it would fit, each alone or, as the last resort, together."""

    devices: list[Memory]
    items: list[Item]
    notes: list[str]
    remedies: list[str]

    def check(self, force: bool) -> None:
        """MemoryPlanError if a device is short, unless `force`."""
        if force or not self.short:
            return
        advice = "would fit: " + "; or ".join(self.remedies) if self.remedies else "no setting makes it fit"
        raise MemoryPlanError(
            f"the training run does not fit. {self.shortage()}. {advice}. force_memory_plan=true starts anyway (where "
            "memory grows with use, for instance).",
            "force_memory_plan",
        )


def plan_training(config: TrainConfig, cpu: Memory | None = None, gpu: Memory | None = None) -> TrainingPlan:
    """Reads headers and sizes of files only. `cpu`, `gpu`: what there is; default: this machine's. UserError for files
    that cannot be opened, and for a GPU that is not there."""
    source = open_model(config.model_name_or_path)
    _refuse(source.config, config)
    refuse_delta(source, config.model_name_or_path, any(run.packing for run in config.runs()))
    experts = source if config.kt_weight_path is None else open_model(config.kt_weight_path)
    files = sum(
        _size(found.path) for run in config.runs() for found in find_sources(run, run.dataset + run.eval_dataset)
    )
    inputs = _Inputs(config, source, experts, files, cpu or cpu_memory(), gpu or _gpu(config))
    plan = inputs.plan()
    return replace(plan, remedies=_remedies(inputs)) if plan.short else plan


def _refuse(model: ModelConfig, config: TrainConfig) -> None:
    """UserError for settings that this model's experts do not allow."""
    if model.experts is None:
        return
    if model.experts.interleaved and config.adapter_format == "kt-fused":
        raise UserError(
            f"adapter_format: kt-fused has no form for {model.architecture}, whose experts hold gate and up by turns: "
            "set it to peft",
            "adapter_format",
        )
    if not model.experts.plain and config.stream_min_tokens:
        raise UserError(
            f"stream_min_tokens is {config.stream_min_tokens}, but experts with biases are computed on the CPU alone: "
            "leave it out",
            "stream_min_tokens",
        )


@dataclass(frozen=True)
class _Inputs:
    config: TrainConfig
    source: WeightSource
    experts: WeightSource
    data_bytes: int
    cpu: Memory
    gpu: Memory | None

    def having(self, settings: dict[str, Any]) -> _Inputs:
        """The same with other settings, for every adapter."""
        runs = tuple(replace(run, **settings) for run in self.config.adapters)
        return replace(self, config=replace(self.config, **{**settings, "adapters": runs}))

    def excess(self) -> int:
        """Bytes that are missing on all devices."""
        plan = self.plan()
        return sum(plan.needed(device) - device.free_bytes for device in plan.short)

    @property
    def streams(self) -> bool | None:
        """Whether the largest micro-batch's experts are streamed to the GPU; None: either way, both are counted."""
        experts = self.source.config.experts
        return streaming.streams(self.config) if self.gpu and experts is not None and experts.plain else False

    def plan(self) -> TrainingPlan:
        devices = [self.cpu] if self.gpu is None else [self.gpu, self.cpu]
        return TrainingPlan(devices, [item for item in self._items() if item.num_bytes], self._notes(), [])

    def _items(self) -> Iterator[Item]:
        run, main, cpu = Run.of(self.source.config, self.config), (self.gpu or self.cpu).name, self.cpu.name
        layers = self.source.config.sparse_layers
        yield Item(cpu, Kind.EXPERTS, f"experts, {len(layers)} layers", self._expert_bytes(run))
        yield Item(main, Kind.WEIGHTS, "other weights", self._weight_bytes(run))
        yield Item(cpu, Kind.OTHER, "while loading, one layer", loading_bytes(self.source.config))
        yield from self._lora_items(main, cpu)
        yield from self._activation_items(run, main, cpu)
        if self.streams is not False:
            yield Item(main, Kind.OTHER, "expert streaming, 2 layers", streaming.buffer_bytes(run, self.experts))
            yield Item(main, Kind.STEP, "expert scratch, streamed", streaming.scratch_bytes(run))
        yield Item(main, Kind.STEP, f"logits, {run.tokens} tokens", costs.logits_bytes(run))
        yield Item(main, Kind.STEP, "attention mask", costs.mask_bytes(run))
        yield Item(main, Kind.STEP, "step buffers", costs.buffer_bytes(run))
        yield Item(cpu, Kind.STEP, "expert scratch", costs.scratch_bytes(run) if layers else 0)
        yield Item(cpu, Kind.OTHER, "data", _TOKEN_BYTES * self.data_bytes)
        yield Item(cpu, Kind.OTHER, "torch and transformers", _RUNTIME)
        for device in [self.cpu] if self.gpu is None else [self.gpu, self.cpu]:
            yield Item(device.name, Kind.OTHER, "reserve", max(_RESERVE, int(_RESERVE_SHARE * device.limit_bytes)))

    def _expert_bytes(self, run: Run) -> int:
        quantise = "int8" if self.config.kt_backend == "AMXInt8" else None
        sparse = self.source.config.sparse_layers
        element = 2 if self.config.kt_backend == "AMXBF16" else run.element
        return sum(expert_layer_bytes(self.experts.experts(layer), element, quantise) for layer in sparse)

    def _weight_bytes(self, run: Run) -> int:
        """As transformers holds them: routers in float32, all else as wide as activations; a tied head is the
        embedding."""
        total = 0
        for name in self.source.names():
            total += prod(self.source.tensor(name).shape) * (4 if name.endswith(_FLOAT32_WEIGHTS) else run.element)
        return total

    def _lora_items(self, main: str, cpu: str) -> Iterator[Item]:
        runs = self.config.runs()
        label = f"LoRA, {len(runs)} adapters" if len(runs) > 1 else f"LoRA, rank {runs[0].lora_rank}"
        counts = [costs.lora_parameters(self.source.config, run) for run in runs]
        dense, trained, frozen = (sum(part) for part in zip(*counts, strict=True))
        state = costs.STATE_BYTES
        if main == cpu:
            yield Item(cpu, Kind.ADAPTERS, label, state * (dense + trained) + costs.MASTER_BYTES * frozen)
        else:
            yield Item(main, Kind.ADAPTERS, f"{label}, attention", state * dense)
            experts = state * trained + costs.MASTER_BYTES * frozen
            if self.streams is not False:
                yield Item(main, Kind.ADAPTERS, f"{label}, experts", experts)
            if self.streams is not True:
                yield Item(cpu, Kind.ADAPTERS, f"{label}, experts", experts + costs.LOCKED_BYTES * trained)
        saving = costs.MASTER_BYTES * (dense + trained + frozen) // len(runs)
        yield Item(cpu, Kind.ADAPTERS, "while saving, a copy of LoRA", saving)

    def _activation_items(self, run: Run, main: str, cpu: str) -> Iterator[Item]:
        model = self.source.config
        dense = [costs.layer_bytes(run, layer) for layer in range(model.num_hidden_layers)]
        sparse = [model.is_sparse(layer) for layer in range(model.num_hidden_layers)]
        routed = [costs.expert_bytes(run) * each for each in sparse]
        streamed = [streaming.kept_bytes(run) * each for each in sparse]
        if self.config.gradient_checkpointing:
            inputs = model.num_hidden_layers * model.hidden_size * run.element
            yield Item(main, Kind.STEP, f"layers' inputs, {run.tokens} tokens", run.tokens * inputs)
            dense, routed, streamed = [max(dense)], [max(routed)], [max(streamed)]
        label = "one layer's activations" if self.config.gradient_checkpointing else f"activations, {run.tokens} tokens"
        if main == cpu:
            yield Item(cpu, Kind.STEP, label, run.tokens * (sum(dense) + sum(routed)))
        else:
            yield Item(main, Kind.STEP, label, run.tokens * sum(dense))
            locked = costs.locked_expert_bytes(run, streaming.tokens_on_cpu(run))
            yield Item(cpu, Kind.STEP, f"{label}, experts", locked * sum(map(bool, routed)))
            if self.streams is not False:
                yield Item(main, Kind.STEP, f"{label}, experts", run.tokens * sum(streamed))

    def _notes(self) -> list[str]:
        run = Run.of(self.source.config, self.config)
        counts = [costs.lora_parameters(self.source.config, each) for each in self.config.runs()]
        trained = sum(dense + experts for dense, experts, _ in counts)
        layer = next(iter(self.source.config.sparse_layers), 0)
        saved = format_bytes(costs.expert_bytes(run)), format_bytes(costs.layer_bytes(run, layer))
        both = ["stream_min_tokens is measured as the run begins: experts count on the GPU and on the CPU"]
        return [
            *(both if self.streams is None else []),
            f"{trained:,} parameters are trained",
            f"a token keeps {saved[0]} of a layer's experts and {saved[1]} of the rest of it",
            f"a micro-batch is {run.rows} rows of at most cutoff_len {run.length} tokens",
        ]


def _size(path: Path) -> int:
    return sum(map(_size, path.iterdir())) if path.is_dir() else path.stat().st_size


def _gpu(config: TrainConfig) -> Memory | None:
    if config.device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        if config.device == "cuda":
            raise UserError("device: cuda, but torch finds no GPU here; allowed is cpu", "device")
        return None
    free, total = torch.cuda.mem_get_info(0)
    return Memory("GPU 0", free, total)


def _remedies(inputs: _Inputs) -> list[str]:
    """Each setting that alone would make it fit, by planning with it; if none does, the first few together that do."""
    trials = _trials(inputs.config, streams=inputs.streams is not False)
    alone = [settings for settings in trials if not inputs.having(settings).plan().short]
    if alone:
        shorter = [settings for settings in alone if "cutoff_len" in settings]
        return [_text(settings) for settings in alone if settings not in shorter[1:]]
    together: dict[str, Any] = {}
    for settings in trials:
        more = {**together, **settings}
        if inputs.having(more).excess() < inputs.having(together).excess():
            together = more
        if not inputs.having(together).plan().short:
            return [_text(together)]
    return []


def _trials(config: TrainConfig, *, streams: bool) -> list[dict[str, Any]]:
    """What costs least comes first."""
    trials: list[dict[str, Any]] = []
    if config.per_device_train_batch_size > 1:
        steps = config.per_device_train_batch_size * config.gradient_accumulation_steps
        trials.append({"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps})
    if config.kt_cpu_activation == "retain" and not config.gradient_checkpointing:
        trials.append({"kt_cpu_activation": "recompute"})
    if not config.gradient_checkpointing:
        trials.append({"gradient_checkpointing": True})
    if streams:
        trials.append({"stream_min_tokens": 0})
    if not config.bf16:
        trials.append({"bf16": True})
    if config.kt_backend != "AMXInt8":
        trials.append({"kt_backend": "AMXInt8"})
    if config.lora_rank > 8:
        trials.append({"lora_rank": 8, "lora_alpha": 8 * config.scaling})
    if config.packing:
        trials.append({"packing": False})
    trials += [{"cutoff_len": length} for length in (8192, 4096, 2048, 1024, 512) if length < config.cutoff_len]
    return trials


def _text(settings: dict[str, Any]) -> str:
    shown = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in settings.items()}
    return " ".join(f"{key}={value.lower() if value == 'True' else value}" for key, value in shown.items())
