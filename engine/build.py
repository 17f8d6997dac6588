"""From settings to a running engine: open, plan, place, load, and what to tell people about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.attention.base import BLOCK_SIZE
from engine.backends import cpu_threads, make_backends
from engine.config import CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS, NATIVE_BATCHED_TOKENS, EngineConfig
from engine.core import EngineCore
from engine.errors import UserError
from engine.experts.native import scratch_bytes
from engine.lora.budget import AdapterBudget
from engine.lora.registry import AdapterRegistry
from engine.memory_gpu import adapter_copies, expert_items, gpu_items, gpu_memory, halves_items, hot_expert_bytes
from engine.memory_plan import Item, MemoryPlan, plan_memory
from engine.messages import AdapterInfo, FromEngine, Ready
from engine.model.load import Backends, Loader, Progress
from engine.obstacles import graph_obstacle
from engine.ping_pong_measure import enable
from engine.placement import Placement, choose, find_machine
from engine.precision import Precision, choose_precision
from engine.profile import Profiler
from engine.runner import ModelRunner
from engine.weights.open import open_model
from engine.weights.store import WeightSource
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler

_F32 = 4
_EAGER_MLPS = (
    "it has dense MLPs of its own, which no CUDA graph holds: steps with a row of it are launched kernel by kernel"
)


@dataclass(frozen=True)
class Blueprint:
    """Everything decided before a byte of weights is read."""

    config: EngineConfig
    source: WeightSource
    placement: Placement
    memory: MemoryPlan
    max_model_len: int
    num_blocks: int
    mixed_chunk: int | None = None  # prefill tokens beside decode rows at most; None: the token budget alone decides

    @property
    def lines(self) -> list[str]:
        return [*self.placement.lines, *self.memory.render().splitlines()]

    @property
    def adapter_budget(self) -> AdapterBudget:
        """A plan that is forced limits nothing that was not asked for."""
        config, forced = self.config, self.config.force_memory_plan and self.memory.short
        limit = None if forced and config.adapter_memory is None else self.memory.adapter_bytes
        narrow = set(self.placement.used("_proj")) <= {"native", "gpu"}
        element = choose_precision(config, self.placement).weights.itemsize if narrow else _F32
        return AdapterBudget(limit, config.max_adapter_slots, element, _slot_copies(self.placement).get("CPU", 0))

    def backends(self) -> Backends:
        rows = max(self.config.batched_tokens, self.config.max_num_seqs)
        blocks = self.num_blocks + 1  # the last is nobody's: padding rows write there
        return make_backends(self.config, self.source, self.placement, blocks, self.max_model_len, rows)


def draw(config: EngineConfig) -> Blueprint:
    """Open the files, choose the backends, plan the memory. Reads headers only."""
    source = open_model(config.model, config.gguf)
    placement = choose(config, source.config, find_machine(config))
    if config.max_num_batched_tokens is not None:
        return _plan(config, source, placement)
    budgets, mixed = [CPU_BATCHED_TOKENS], None
    if computes_chunks(placement):
        budgets.insert(0, GPU_BATCHED_TOKENS)
    elif placement.device == "cpu" and placement.used(".mlp.experts") == ["native"]:
        budgets.insert(0, NATIVE_BATCHED_TOKENS)
        mixed = CPU_BATCHED_TOKENS
    for tokens in budgets:
        blueprint = _plan(replace(config, max_num_batched_tokens=max(tokens, config.max_num_seqs)), source, placement)
        if not blueprint.memory.short:
            break
    return replace(blueprint, mixed_chunk=mixed)


def computes_chunks(placement: Placement) -> bool:
    """Whether a GPU computes long prefill chunks' experts, so that steps of many tokens are worth their memory."""
    return placement.device != "cpu" and (placement.streams_prefill or "gpu" in placement.used(".mlp.experts"))


def _plan(config: EngineConfig, source: WeightSource, placement: Placement) -> Blueprint:
    precision = choose_precision(config, placement)
    experts, gpu, extra = placement.used(".mlp.experts"), None, []
    if placement.device != "cpu":
        where = (precision.activations.itemsize, placement.device)
        gpu, attention = gpu_memory(placement.device), placement.used(".self_attn")[0]
        extra = gpu_items(config, source.config, *where, attention)
        extra += expert_items(config, source.config, *where, experts, placement.streams_prefill)
        if not {"native", "hybrid"}.isdisjoint(experts):
            extra += halves_items(config, placement.device)
        if "hybrid" in experts:
            asked = placement.expert_option("gpu_memory", "auto")
            if config.gpu_expert_memory is None and asked != "auto":
                config = replace(config, gpu_expert_memory=str(asked))
            hot = hot_expert_bytes(config, source, gpu, extra)
            config = replace(config, gpu_expert_memory=str(hot))
            extra.append(Item(gpu.name, "hot experts", hot))
    memory = plan_memory(
        config,
        source,
        lambda layer: _planned_backend(placement, layer),
        precision.weights.itemsize,
        activation_bytes=precision.activations.itemsize,
        kv_element_bytes=precision.kv.itemsize,
        linear_backend=placement.used("_proj")[0],
        gpu=gpu,
        extra=extra,
        adapter_copies=_slot_copies(placement),
        scratch=lambda config: _scratch_bytes(config, source, precision),
    )
    return Blueprint(config, source, placement, memory, memory.max_model_len, memory.kv_tokens // BLOCK_SIZE)


def _slot_copies(placement: Placement) -> dict[str, int]:
    if placement.device == "cpu":
        return {"CPU": 1}
    return adapter_copies(placement.used(".mlp.experts"), placement.streams_prefill, placement.device)


def _scratch_bytes(config: EngineConfig, source: WeightSource, precision: Precision) -> int:
    """Of the layer whose experts' formats take most."""
    return max(
        scratch_bytes(
            source.experts(layer),
            source.config,
            max(config.batched_tokens, config.max_num_seqs),
            plain=precision.weights,
            quantise=config.quantise,
            rank=config.max_adapter_rank if config.max_adapter_slots else 0,
            isa=config.isa or "",
            deterministic=config.deterministic,
            threads=None if config.cpu_threads is None else cpu_threads(config),
        )
        for layer in source.config.sparse_layers
    )


def _planned_backend(placement: Placement, layer: int) -> str:
    """The backend of a layer's experts as the memory plan knows it: "gpu" is whatever holds them all there."""
    choice = placement.choices[f"model.layers.{layer}.mlp.experts"]
    return "gpu" if choice.backend == "reference" and choice.device != "cpu" else choice.backend


def assemble(blueprint: Blueprint, send: Callable[[FromEngine], None], progress: Progress) -> EngineCore:
    """Load the weights and put the parts together."""
    config, source, model_config = blueprint.config, blueprint.source, blueprint.source.config
    backends = blueprint.backends()
    if "flashinfer" in blueprint.placement.used(".self_attn"):
        stage = "Attention kernels (compiled at the first start, a few minutes)"
        progress(stage, 0, 1)
        for layer in range(model_config.num_hidden_layers):
            backends.attention(layer)
        progress(stage, 1, 1)
    model = Loader(source, backends, max(config.batched_tokens, config.max_num_seqs)).model(progress)
    tracing = bool(config.profile_dir)
    runner = ModelRunner(model, backends.device, config.seed, tracing, backends.pool, max_rows=config.max_num_seqs)
    runner.spare_cpus = backends.spare_cpus
    if backends.cache is not None:
        runner.notes += backends.cache.report()
    runner.notes += [note for attention in model.attention_backends for note in attention.notes]
    if backends.device.type == "cuda":
        runner.notes.append(f"steps of at most {config.batched_tokens} tokens (--max-num-batched-tokens)")
    _pad_decode(runner, blueprint, progress)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=blueprint.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.batched_tokens,
            max_model_len=blueprint.max_model_len,
            max_queue=config.max_queue,
            num_adapter_slots=config.max_adapter_slots,
            eos_token_ids=model_config.eos_token_ids,
            prefix_caching=config.prefix_caching,
            itl_target_s=None if config.itl_target_ms is None else config.itl_target_ms / 1000,
            mixed_chunk=blueprint.mixed_chunk,
        )
    )
    profiler = None
    if config.profile_dir:
        kv_bytes = sum(b.kv_bytes_per_token for b in model.attention_backends)
        profiler = Profiler(config.profile_dir, source, kv_bytes)
    return EngineCore(
        scheduler,
        runner,
        AdapterRegistry(
            model_config,
            base_name=model_name(config),
            max_rank=config.max_adapter_rank,
            base_path=config.model if Path(config.model).is_dir() else None,  # a .gguf file's name says too little
            budget=blueprint.adapter_budget,
            extra_mlps_note=_EAGER_MLPS if runner.padded is not None and config.cuda_graphs == "auto" else "",
        ),
        send,
        overlap=backends.device.type == "cuda" if config.overlap is None else config.overlap,
        check_integrity=config.check_integrity,
        profiler=profiler,
    )


def _pad_decode(runner: ModelRunner, blueprint: Blueprint, progress: Progress) -> None:
    """Decode steps in padded sizes: as CUDA graphs where that is possible, one by one where it is asked for."""
    config = blueprint.config
    why = None
    if config.cuda_graphs == "off" or (config.cuda_graphs == "auto" and runner.device.type == "cpu"):
        why = "decode steps are not padded here"
    elif config.cuda_graphs == "auto" and (why := graph_obstacle(runner.model)):
        runner.notes.append(f"CUDA graphs: none, {why}")
    if why:
        if config.ping_pong == "on":
            runner.notes.append(f"ping-pong: off, {why}")
        return
    padded = runner.pad_decode(config.max_num_seqs, config.max_adapter_slots, blueprint.num_blocks)
    if config.cuda_graphs == "auto":
        with runner.computing():
            padded.capture(progress)
    kind = "CUDA graphs" if config.cuda_graphs == "auto" else "padded decode steps, without CUDA graphs"
    runner.notes.append(f"{kind}: {len(padded.buckets)} sizes up to {padded.buckets[-1]} rows")
    if config.ping_pong != "off":
        with runner.computing():
            captured, blocks = config.cuda_graphs == "auto", blueprint.num_blocks
            runner.notes += enable(padded, config.ping_pong, captured, blocks, blueprint.max_model_len, progress)


def build(config: EngineConfig, send: Callable[[FromEngine], None], progress: Progress) -> tuple[EngineCore, Ready]:
    """The whole way, adapters given at start included; a wrong one is a UserError."""
    blueprint = draw(config)
    blueprint.memory.check(config.force_memory_plan)
    core = assemble(blueprint, send, progress)
    adapters = [load_adapter(core.registry, text, config.expert_scaling) for text in config.adapters]
    model = blueprint.source.config
    ready = Ready(
        model_name=model_name(config),
        vocab_size=model.vocab_size,
        max_model_len=blueprint.max_model_len,
        bos_token_id=model.bos_token_id,
        eos_token_ids=list(model.eos_token_ids),
        adapters=adapters,
        lines=[*blueprint.lines, *core.runner.notes],
    )
    return core, ready


def model_name(config: EngineConfig) -> str:
    path = Path(config.model)
    return config.served_model_name or (path.stem if path.suffix == ".gguf" else path.resolve().name)


def load_adapter(registry: AdapterRegistry, text: str, expert_scaling: str | None) -> AdapterInfo:
    name, _, path = text.partition("=")
    if not name or not path:
        raise UserError(f"--adapters {text!r}: write NAME=PATH", field="adapters")
    registry.load(name, path, expert_scaling=expert_scaling)
    result = registry.wait()[0]
    if result.info is None:
        raise result.error or UserError(f"adapter {name} could not be loaded")
    return result.info
