"""What an engine will be, decided before a byte of weights is read: backends, precision, step sizes, memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.attention.base import BLOCK_SIZE, kv_scale_bytes
from engine.config import (
    CPU_BATCHED_TOKENS,
    GPU_BATCHED_TOKENS,
    NATIVE_BATCHED_TOKENS,
    STREAMED_BATCHED_TOKENS,
    EngineConfig,
    check_settings,
    startup_adapters,
)
from engine.errors import AdapterError, UserError
from engine.experts.gpu.layout import expert_bytes
from engine.experts.native import scratch_bytes
from engine.linear.gpu_weights import TABLE_BYTES
from engine.lora.budget import AdapterBudget
from engine.lora.files.folder import check_folder
from engine.memory.costs import buffer_row_bytes, logits_bytes
from engine.memory.items import Item, Kind
from engine.memory.limits import cpu_memory
from engine.memory.plan import (
    GPU_KV_SHARE,
    Inputs,
    MemoryPlan,
    asked_tokens,
    plan_memory,
    reserve_bytes,
    sampled_rows,
    wanted_tokens,
)
from engine.memory.stated import STATED, tiled_projections
from engine.planning.drafts import check_mtp, kept_positions, make_drafter, mtp_drafts
from engine.planning.gpu_experts import gpu_share, share_lines, suits
from engine.planning.gpu_memory import (
    adapter_copies,
    expert_items,
    gpu_adapter_share,
    gpu_items,
    gpu_memory,
    hot_expert_bytes,
)
from engine.planning.kv_disk import KvDiskPlan, plan_kv_disk
from engine.planning.lane import lane_blocker, lane_items, tokens_beside
from engine.planning.placement import Placement, check_training, choose, find_machine, kt_method, native_limits
from engine.planning.precision import Precision, choose_precision
from engine.planning.ranks import divide, rank_lines, ranks_cpu, ranks_gpu, ranks_threads
from engine.planning.states import check_states
from engine.planning.unused import unused_files, unused_settings
from engine.ranks.shard import WHOLE, Shard
from engine.units import parse_bytes
from engine.weights.open import open_model
from engine.weights.store import WeightSource
from native import available as native_available

_F32 = 4
_STEP_SHARE = 0.125  # of a device's free memory, that steps longer than GPU_BATCHED_TOKENS may take


@dataclass(frozen=True)
class EnginePlan:
    """`config` is what was asked for; everything computed from it stands here."""

    config: EngineConfig
    source: WeightSource
    placement: Placement
    precision: Precision
    memory: MemoryPlan
    token_budget: int  # tokens of a step at most, and so its rows
    threads: int | None = None  # of the CPU pool, as asked for; None: it chooses
    hot_expert_bytes: int = 0  # GPU memory for the experts of a hybrid backend
    mixed_chunk: int | None = None  # prefill tokens beside decode rows at most; None: the token budget alone decides
    shard: Shard = WHOLE  # what `source` is of the model
    kv_disk: KvDiskPlan | None = None

    @property
    def lane_blocker(self) -> str | None:
        """Why long prompts have no steps beside those of decode rows; None: they have."""
        return lane_blocker(self.config, self.placement, self.source.config)

    @property
    def budgets(self) -> tuple[int, int | None]:
        """Tokens of a step at most, and of one of long prompts beside it (None: there is none)."""
        if self.lane_blocker is not None:
            return self.token_budget, None
        return tokens_beside(self.config, self.token_budget), self.token_budget

    @property
    def max_model_len(self) -> int:
        return self.memory.max_model_len

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that requests may have."""
        return self.memory.kv_tokens // BLOCK_SIZE

    @property
    def cache_blocks(self) -> int:
        """All blocks of the KV cache: padding rows write to one more, and drafts by a layer of the model to those of
        theirs behind it."""
        return self.draft_blocks.stop

    @property
    def draft_blocks(self) -> range:
        """Blocks of the cache for drafts of drafts, beyond the blocks of their sequences."""
        return range(self.num_blocks + 1, self.num_blocks + 1 + _draft_blocks(self.config))

    @property
    def mtp_drafts(self) -> int:
        """Of a row, by the model's layer of multi-token prediction, at most; 0: it is not used."""
        return mtp_drafts(self.config)

    @property
    def torch_threads(self) -> int:
        """Threads for torch where it computes on the CPU."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def gpu_expert_bytes(self) -> int:
        """The largest expert in GPU memory, as the file has it."""
        return _expert_bytes(self.config, self.source, self.placement, self.precision)

    @property
    def expert_quantise(self) -> str | None:
        """What unquantised experts are held as on the native kernels: the flag, or what the rules say."""
        return self.config.quantise or self.placement.quantise

    @property
    def lines(self) -> list[str]:
        unused = [f"note: {line}" for line in self.source.left_out]
        unused += unused_files(self.config)
        unused += unused_settings(self.config, self.source, self.placement)
        ranks = rank_lines(self.shard, self.placement)
        disk = self.kv_disk.lines if self.kv_disk is not None else []
        return [*self.placement.lines, *ranks, *self._share_lines, *unused, *self.memory.render().splitlines(), *disk]

    @property
    def _share_lines(self) -> list[str]:
        model = self.source.config
        if self.placement.device == "cpu" or not set(self.placement.used(".mlp.experts")) <= {
            "gpu",
            "hybrid",
            "native",
        }:
            return []
        return share_lines(self.placement, model, self.hot_expert_bytes, self.gpu_expert_bytes)

    @property
    def adapter_budget(self) -> AdapterBudget:
        """A plan that is forced limits nothing that was not asked for."""
        config, forced = self.config, self.config.force_memory_plan and self.memory.short
        limit = None if forced and config.adapter_memory is None else self.memory.adapter_bytes
        narrow = set(self.placement.used("_proj")) <= {"native", "gpu"}
        element = self.precision.weights.itemsize if narrow else _F32
        copies = _slot_copies(self.placement).get("CPU", 0)
        share = _gpu_adapter_share(self.source, self.placement)
        on_gpu = None if forced else self.memory.gpu_adapter_bytes
        return AdapterBudget(limit, config.max_adapter_slots, element, copies, on_gpu, share)

    def without_streaming(self) -> EnginePlan:
        """The same, but no experts are streamed to the GPU for long prefill chunks."""
        choices = {
            name: replace(choice, options={**choice.options, "prefill_threshold": 0})
            for name, choice in self.placement.choices.items()
        }
        return replace(self, placement=replace(self.placement, choices=choices))


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Open the files, choose the backends, plan the memory. Reads headers only, of adapters none. UserError for
    settings that cannot be."""
    make_drafter(config)
    check_mtp(config)
    check_settings(config)
    _check_isa(config)
    if config.adapters and not config.max_adapter_slots:
        raise UserError("--adapters with --max-adapter-slots 0: allowed is 1 or more", "max_adapter_slots")
    for name, path in startup_adapters(config):
        try:
            check_folder(path)
        except AdapterError as error:
            raise UserError(f"adapter {name!r}: {error}", "adapters") from error
    source = open_model(config.model, config.gguf, mtp=mtp_drafts(config) > 0)
    model, machine = source.config, find_machine(config, source.config)
    placement = choose(config, model, machine)
    check_states(config, model, placement)
    precision = choose_precision(config, placement)
    share = gpu_share(config, model, placement, lambda: _expert_bytes(config, source, placement, precision))
    for backend in share.backends:
        chosen = placement if backend is None else choose(replace(config, expert_backend=backend), model, machine)
        part, shard = divide(config, source, chosen, machine)
        plan = replace(_within_memory(config, part, chosen, share.asked_bytes), shard=shard)
        each = plan.gpu_expert_bytes if plan.hot_expert_bytes else 0
        if backend == share.backends[-1] or suits(backend, config, model, plan.memory, plan.hot_expert_bytes, each):
            break
    return plan


def _check_isa(config: EngineConfig) -> None:
    if config.isa is None or not native_available()[0]:
        return
    from native import _native

    known = ("avx2", "avx512", "amx")
    best = _native.best_isa()
    if best in known and known.index(config.isa) > known.index(best):
        raise UserError(f"--isa {config.isa}: this CPU has {best} at most; what it has, and why: ktserve doctor", "isa")


def _within_memory(config: EngineConfig, source: WeightSource, placement: Placement, hot: int | None) -> EnginePlan:
    """With the first token budget that fits."""
    budgets, mixed = _token_budgets(config, placement)
    for tokens in budgets:
        plan = _plan(config, source, placement, tokens, hot)
        if not plan.memory.short and (tokens == config.max_num_batched_tokens or _affordable(plan)):
            break
    return replace(plan, mixed_chunk=mixed)


def _affordable(plan: EnginePlan) -> bool:
    """Whether what steps of so many tokens take leaves nearly all memory to weights and KV."""
    if plan.token_budget <= GPU_BATCHED_TOKENS:
        return True
    memory = plan.memory
    return all(memory.step_bytes(device) <= _STEP_SHARE * device.free_bytes for device in memory.devices)


def _token_budgets(config: EngineConfig, placement: Placement) -> tuple[list[int], int | None]:
    """(token budgets of a step, of which the first that fits is taken; prefill tokens beside decode rows)."""
    asked, seqs = config.max_num_batched_tokens, config.max_num_seqs
    if asked is not None:
        if asked < seqs:
            raise UserError(
                f"max_num_batched_tokens is {asked}, must be at least max_num_seqs ({seqs}): every running request "
                "needs room for one token in a step",
                field="max_num_batched_tokens",
            )
        return [asked], None
    least = max(CPU_BATCHED_TOKENS, seqs)
    if computes_chunks(placement):
        long = STREAMED_BATCHED_TOKENS if placement.streams_prefill else ()
        return [max(tokens, seqs) for tokens in (*long, GPU_BATCHED_TOKENS)] + [least], None
    if placement.device == "cpu" and placement.used(".mlp.experts") == ["native"]:
        return [max(NATIVE_BATCHED_TOKENS, seqs), least], CPU_BATCHED_TOKENS
    return [least], None


def computes_chunks(placement: Placement) -> bool:
    """Whether a GPU computes long prefill chunks' experts, so that steps of many tokens are worth their memory."""
    return placement.device != "cpu" and (placement.streams_prefill or "gpu" in placement.used(".mlp.experts"))


def _plan(
    config: EngineConfig, source: WeightSource, placement: Placement, token_budget: int, asked_hot: int | None
) -> EnginePlan:
    if config.fine_tuning:
        check_training(config, placement)
    precision, ranks, hot = choose_precision(config, placement), config.tensor_parallel, 0
    threads = ranks_threads(ranks, placement, pool_threads(config))
    quantise = config.quantise or placement.quantise
    inputs = Inputs(
        config,
        source,
        STATED,
        lambda layer: _planned_backend(placement, layer),
        placement.used("_proj")[0],
        element_bytes=precision.weights.itemsize,
        activation_bytes=precision.activations.itemsize,
        kv_token_bytes=source.config.kv_bytes_per_token(precision.kv.itemsize, kv_scale_bytes(precision.kv)),
        token_budget=token_budget,
        cpu=ranks_cpu(ranks, placement, cpu_memory()),
        gpu=ranks_gpu(ranks, placement, gpu_memory),
        adapter_copies=_slot_copies(placement),
        kept_positions=kept_positions(config),
        gpu_adapter_share=_gpu_adapter_share(source, placement),
        kt_method=kt_method(config, placement),
        expert_quantise=quantise,
        scratch=lambda tokens: _scratch_bytes(config, source, precision, tokens, threads, quantise),
        gpu_packs="gpu" in placement.used(".mlp.experts"),
        native=native_available()[0] and not native_limits(source.config),
    )
    extra = []
    if blocks := _draft_blocks(config):
        size = blocks * BLOCK_SIZE * inputs.kv_token_bytes
        extra.append(Item(inputs.main.name, Kind.KV_CACHE, f"KV cache, {blocks} blocks of drafts", size))
    disk = plan_kv_disk(config, placement, inputs.kv_token_bytes, source.config.state_bytes)
    if inputs.gpu is not None:
        experts, element = placement.used(".mlp.experts"), precision.activations.itemsize
        extra += gpu_items(config, source.config, element, placement.device, placement.used(".self_attn")[0])
        extra += expert_items(
            config, source.config, token_budget, element, placement.device, experts, placement.streams_prefill,
            _expert_bytes(config, source, placement, precision),
        )  # fmt: skip
        if lane_blocker(config, placement, source.config) is None:
            largest = _expert_bytes(config, source, placement, precision)
            extra += lane_items(config, placement, source.config, inputs.gpu.name, token_budget, element, largest)
        if "gpu" in placement.used("_proj") and tiled_projections(inputs):
            extra.append(Item(inputs.gpu.name, Kind.STEP, "projections as numbers, long chunks", TABLE_BYTES))
        if disk is not None:
            extra += disk.gpu_items
        if "hybrid" in experts:
            hot = _hot_bytes(inputs, placement, extra, asked_hot)
            extra.append(Item(inputs.gpu.name, Kind.EXPERTS, "hot experts", hot))
    memory = plan_memory(replace(inputs, extra=tuple(extra)))
    return EnginePlan(config, source, placement, precision, memory, token_budget, threads, hot, kv_disk=disk)


def _draft_blocks(config: EngineConfig) -> int:
    """Of all rows, for drafts of drafts beyond the blocks of their sequences."""
    drafts = mtp_drafts(config)
    return config.max_num_seqs * -(-(drafts - 1) // BLOCK_SIZE) if drafts else 0


def _expert_bytes(config: EngineConfig, source: WeightSource, placement: Placement, precision: Precision) -> int:
    """The largest expert in GPU memory."""
    return expert_bytes(source, precision.activations.itemsize, config.quantise or placement.quantise)


def _hot_bytes(inputs: Inputs, placement: Placement, items: Sequence[Item], asked: int | None) -> int:
    """What was asked for, by the flags or the rules, or what `items` and a KV cache leave free."""
    config, gpu, model = inputs.config, inputs.main, inputs.source.config
    said = str(placement.expert_option("gpu_memory", "auto"))
    if asked is not None or said != "auto":
        return parse_bytes(said, "rules") if asked is None else asked
    used = inputs.stated.weight_bytes(inputs) + sum(item.num_bytes for item in items if item.device == gpu.name)
    used += inputs.token_budget * buffer_row_bytes(model) + logits_bytes(model, sampled_rows(config))
    used += reserve_bytes(gpu)
    kv_tokens = asked_tokens(inputs)
    kv_bytes = (kv_tokens or int(wanted_tokens(config, model) / GPU_KV_SHARE)) * inputs.kv_token_bytes
    kv_bytes += int(inputs.states.wanted_bytes / GPU_KV_SHARE)
    left = max(gpu.free_bytes - used, 0)
    each = expert_bytes(inputs.source, inputs.activation_bytes, inputs.expert_quantise)
    return hot_expert_bytes(model, left, kv_bytes, each, asked=kv_tokens is not None)


def pool_threads(config: EngineConfig) -> int | None:
    """What was asked for, if it makes sense here."""
    most = 4 * len(os.sched_getaffinity(0))
    if config.cpu_threads is not None and not 1 <= config.cpu_threads <= most:
        raise UserError(f"--cpu-threads {config.cpu_threads}: 1 to {most} on this machine", field="cpu_threads")
    return config.cpu_threads


def _slot_copies(placement: Placement) -> dict[str, int]:
    if placement.device == "cpu":
        return {"CPU": 1}
    return adapter_copies(placement.used(".mlp.experts"), placement.streams_prefill, placement.device)


def _gpu_adapter_share(source: WeightSource, placement: Placement) -> float:
    if placement.device == "cpu":
        return 0
    layers = source.config.sparse_layers
    held = sum(_planned_backend(placement, layer) == "gpu" for layer in layers)
    return gpu_adapter_share(held, placement.streams_prefill, len(layers))


def _scratch_bytes(
    config: EngineConfig,
    source: WeightSource,
    precision: Precision,
    rows: int,
    threads: int | None,
    quantise: str | None,
) -> int:
    """Of the layer whose experts' formats take most."""
    return max(
        scratch_bytes(
            source.experts(layer),
            source.config,
            rows,
            plain=precision.weights,
            quantise=quantise,
            rank=config.max_adapter_rank if config.max_adapter_slots else 0,
            isa=config.isa or "",
            deterministic=config.deterministic,
            threads=threads,
        )
        for layer in source.config.sparse_layers
    )


def _planned_backend(placement: Placement, layer: int) -> str:
    """The backend of a layer's experts as the memory plan knows it: "gpu" is whatever holds them all there."""
    choice = placement.choices[f"model.layers.{layer}.mlp.experts"]
    return "gpu" if choice.backend == "reference" and choice.device != "cpu" else choice.backend
