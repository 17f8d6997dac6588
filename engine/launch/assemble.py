"""From a plan to a running engine: load the weights, put the parts together."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.base import BLOCK_SIZE, AttentionBackend, CacheBackend
from engine.attention.delta import DeltaBackend
from engine.config import (
    CPU_BATCHED_TOKENS,
    GPU_ITL_DECODE_STEPS,
    GPU_ITL_TARGET_S,
    EngineConfig,
)
from engine.core import EngineCore
from engine.diagnostics.profile import Profiler
from engine.errors import EngineError
from engine.experts.capabilities import needed
from engine.experts.kt.backend import NO_EXPERT_LORA
from engine.experts.streamed.streaming import StreamedPrompts
from engine.kv_disk.files import Bytes
from engine.launch.backends import make_backends
from engine.launch.kv_store import KvStore
from engine.launch.leader import Leader
from engine.launch.warm import first_figures, warm_up
from engine.lora.adapters import Adapters
from engine.lora.files.whole import base_tables
from engine.lora.fork_server import ForkServer
from engine.lora.loader import AdapterReader
from engine.lora.reader_process import ReaderProcesses
from engine.memory.idle import IdleMemory
from engine.memory.limits import cpu_memory
from engine.messages import ATTENTION_STAGE, FromEngine, Planned, Ready
from engine.model.beside import model_beside
from engine.model.load import Backends, Loader, Progress
from engine.planning.drafts import make_drafter, mtp_drafts, padded_rows
from engine.planning.expected import MachineRates, expected_of, measure
from engine.planning.plan import EnginePlan, computes_chunks, plan_engine
from engine.ranks.group import ALONE, Group
from engine.steps.graphs.padded import graph_blocker
from engine.steps.lane import PromptLane
from engine.steps.proposals import Proposals
from engine.steps.runner import ModelRunner
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from native import _native

_EAGER_MLPS = (
    "it has dense MLPs of its own, which no CUDA graph holds: steps with a row of it are launched kernel by kernel"
)


def assemble(
    plan: EnginePlan,
    send: Callable[[FromEngine], None],
    progress: Progress,
    reader: AdapterReader | None = None,
    mapped: _native.MappedFiles | None = None,
) -> EngineCore:
    """Load the weights and put the parts together. `reader`: of adapters; None: one whose processes are this engine's
    own. `mapped`: as of `make_backends`."""
    reader = reader or ReaderProcesses()
    if plan.shard.size == 1:
        return _assemble(plan, send, progress, reader, None, mapped)
    leader = Leader(plan, torch.device("cuda", 0) if plan.placement.device != "cpu" else torch.device("cpu"))
    try:
        return _assemble(plan, send, progress, reader, leader, mapped)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # graphs that were captured go before the group that is in them
        leader.close()
        raise


def _assemble(
    plan: EnginePlan,
    send: Callable[[FromEngine], None],
    progress: Progress,
    reader: AdapterReader,
    leader: Leader | None,
    mapped: _native.MappedFiles | None,
) -> EngineCore:
    config, source, model_config = plan.config, plan.source, plan.source.config
    backends = make_backends(plan, mapped)
    store = KvStore(plan.kv_disk) if plan.kv_disk is not None else None
    if "flashinfer" in plan.placement.used(".self_attn"):
        progress(ATTENTION_STAGE, 0, 1)
        for layer in range(len(model_config.layers)):
            backends.attention(layer)
        progress(ATTENTION_STAGE, 1, 1)
    runner = load_runner(plan, backends, leader or ALONE, progress)
    model, runner.leader = runner.model, leader
    if leader is not None:
        leader.meet()
    if backends.cache is not None:
        runner.notes += backends.cache.report()
    runner.notes += [note for attention in model.attention_backends for note in attention.notes]
    if backends.device.type == "cuda":
        runner.notes.append(f"steps of at most {plan.token_budget} tokens (--max-num-batched-tokens)")
    lane = make_lane(plan, runner)
    decode = _decode_steps(runner, plan)
    if leader is not None:
        leader.begin(decode)
    pad_decode(runner, plan, decode, progress)
    warm_up(runner, plan, progress, long=lane is None)
    if lane is not None:
        warm_up(lane.runner, plan, progress, short=False)
    if leader is not None:
        leader.all_prepared()
    rates = _measured(plan, backends.pool, progress)
    if backends.cache is not None:
        backends.cache.own()
    expected = None if rates is None else expected_of(plan, rates)
    if rates is not None:
        runner.notes.append(f"memory is read at {rates.read / 1e9:.1f} GB/s (--measure-bandwidth)")
    if expected is not None and (line := expected.line()):
        runner.notes.append(f"{line} (ktserve bench --quick URL measures them)")
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=plan.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=plan.budgets[0],
            max_model_len=plan.max_model_len,
            max_queue=config.max_queue,
            num_adapter_slots=config.max_adapter_slots,
            eos_token_ids=model_config.eos_token_ids,
            prefix_caching=config.prefix_caching,
            mixed_chunk=plan.mixed_chunk,
            disk_bytes=store.plan.budget_bytes if store else 0,
            disk_block_bytes=store.plan.block_bytes if store else 0,
            disk_state_bytes=store.plan.state_bytes if store else 0,
            num_states=plan.memory.num_states,
            num_snapshots=plan.memory.num_snapshots,
            snapshot_blocks=plan.memory.snapshot_blocks,
            lane_tokens=None if lane is None else lane_tokens(lane),
            lane_budget=None if lane is None else plan.budgets[1],
            **pace(plan),
        ),
        make_drafter(config),
        store.stored if store else (),
    )
    for tried, seconds, experts in first_figures(runner, plan):
        scheduler.learn(tried, seconds, experts)
    disk = None
    if store is not None and scheduler.disk is not None:
        disk = store.serve(plan, scheduler.disk, runner.arrival, model.attention_backends)
    profiler = None
    if config.profile_dir:
        kv_bytes = sum(b.kv_bytes_per_token for b in model.attention_backends)
        profiler = Profiler(config.profile_dir, source, kv_bytes)
    return EngineCore(
        scheduler,
        runner,
        Adapters(
            source.whole.without_mtp,
            model_name(config),
            reader,
            model.set_adapter if leader is None else partial(leader.set_adapter, model.set_adapter),
            max_rank=config.max_adapter_rank,
            base_path=config.model if Path(config.model).is_dir() else None,  # a .gguf file's name says too little
            tables=base_tables(source),
            budget=plan.adapter_budget,
            wanted=scheduler.waits_for,
            extra_mlps_note=_EAGER_MLPS if runner.padded is not None and config.cuda_graphs == "auto" else "",
            no_expert_lora=NO_EXPERT_LORA if "kt" in plan.placement.used(".mlp.experts") else "",
        ),
        send,
        overlap=_overlaps(config, backends),
        check_integrity=config.check_integrity,
        profiler=profiler,
        read_bandwidth=None if rates is None else rates.read,
        expected={} if expected is None else expected.figures(),
        disk=disk,
        training_share=config.training_share,
        prompts=lane,
    )


def make_lane(plan: EnginePlan, runner: ModelRunner) -> PromptLane | None:
    """What runs steps of long prompts beside the runner's."""
    if plan.lane_blocker is not None:
        if plan.lane_blocker:
            runner.notes.append(f"long prompts are computed between decode steps: {plan.lane_blocker}")
        return None
    experts = needed(runner.model.expert_backends[0], StreamedPrompts)
    model = model_beside(runner.model, experts, plan.token_budget)
    config = plan.config
    beside = ModelRunner(model, runner.device, config.seed, bool(config.profile_dir), max_rows=config.max_num_seqs)
    return PromptLane(beside, runner)


def lane_tokens(lane: PromptLane) -> int:
    """From how many tokens on a step of the lane takes less than the CPU would."""
    threshold = needed(lane.runner.model.expert_backends[0], StreamedPrompts).threshold
    if threshold is None:
        raise EngineError("the lane of long prompts: no step has been tried")
    return max(threshold, 2)


def _overlaps(config: EngineConfig, backends: Backends) -> bool:
    return backends.device.type == "cuda" and not mtp_drafts(config) if config.overlap is None else config.overlap


def load_runner(plan: EnginePlan, backends: Backends, group: Group, progress: Progress) -> ModelRunner:
    """The model, or a rank's part of it, and what runs its steps."""
    config = plan.config
    model = Loader(plan.source, backends, plan.token_budget, group).model(progress)
    tracing = bool(config.profile_dir)
    urgent = plan.lane_blocker is None
    rows = padded_rows(config, model.config)
    runner = ModelRunner(model, backends.device, config.seed, tracing, backends.pool, max_rows=rows, urgent=urgent)
    runner.spare_cpus = backends.spare_cpus
    if plan.mtp_drafts:
        runner.proposals = Proposals(model, plan.mtp_drafts, config.max_num_seqs, plan.draft_blocks)
    if plan.memory.num_snapshots and plan.memory.snapshot_blocks:
        runner.idle_memory = IdleMemory(*_planes(model.attention_backends))
    return runner


def pace(plan: EnginePlan) -> dict[str, Any]:
    """What SchedulerConfig is told of the time that running streams may wait while prompts are read."""
    asked = plan.config.itl_target_ms
    found: dict[str, Any] = {"itl_target_s": None if asked is None else asked / 1000}
    if computes_chunks(plan.placement):
        found["initial_chunk"] = CPU_BATCHED_TOKENS
        if asked is None:
            found |= {"itl_target_s": GPU_ITL_TARGET_S, "itl_decode_steps": GPU_ITL_DECODE_STEPS}
        if plan.placement.streams_prefill and plan.lane_blocker is not None:
            found["long_chunk"] = 2 * CPU_BATCHED_TOKENS
    return found


def _measured(plan: EnginePlan, pool: _native.WorkerPool | None, progress: Progress) -> MachineRates | None:
    """If it is asked for and experts are read by the pool. After loading: while the api process starts, it takes CPU
    time from the pool's threads, and half of the rates would be measured."""
    if (
        not plan.config.measure_bandwidth
        or pool is None
        or not {"native", "hybrid"} & set(plan.placement.used(".mlp.experts"))
    ):
        return None
    progress("Memory bandwidth", 0, 1)
    measured = measure(pool, plan.config.isa or "", cpu_memory().free_bytes)
    progress("Memory bandwidth", 1, 1)
    return measured


def _decode_steps(runner: ModelRunner, plan: EnginePlan) -> str:
    """How decode steps run, as `cuda_graphs` says it: "auto" only where graphs can be had."""
    asked = plan.config.cuda_graphs
    if asked == "auto" and runner.device.type == "cpu":
        return "off"
    if asked == "auto" and (why := graph_blocker(runner.model)):
        runner.notes.append(f"CUDA graphs: none, {why}")
        return "off"
    return asked


def pad_decode(runner: ModelRunner, plan: EnginePlan, decode: str, progress: Progress) -> None:
    """Decode steps in padded sizes: as CUDA graphs ("auto"), one by one ("padded"), or not ("off")."""
    if decode == "off":
        return
    config = plan.config
    padded = runner.pad_decode(padded_rows(config, plan.source.config), config.max_adapter_slots, plan.num_blocks)
    if decode == "auto":
        with runner.computing():
            padded.capture(progress)
    kind = "CUDA graphs" if decode == "auto" else "padded decode steps, without CUDA graphs"
    runner.notes.append(f"{kind}: {len(padded.buckets)} sizes up to {padded.buckets[-1]} rows")


def _planes(backends: list[CacheBackend]) -> tuple[list[Bytes], list[Bytes]]:
    """Of blocks, and of slots of states."""
    blocks = [plane for each in backends if isinstance(each, AttentionBackend) for plane in each.host_planes()]
    slots = [plane for each in backends if isinstance(each, DeltaBackend) for plane in each.host_planes()]
    return blocks, slots


def build(
    config: EngineConfig,
    send: Callable[[FromEngine], None],
    progress: Progress,
    mapped: _native.MappedFiles | None = None,
    fork_server: ForkServer | None = None,
) -> tuple[EngineCore, Ready]:
    """The whole way. Adapters given at start are planned for; the api loads them. `mapped`: as of `make_backends`;
    `fork_server`: as of `ReaderProcesses`."""
    plan = plan_engine(config)
    plan.memory.check(config.force_memory_plan)
    send(Planned(lines=plan.lines))
    core = assemble(plan, send, progress, ReaderProcesses(fork_server=fork_server), mapped)
    model = plan.source.config
    ready = Ready(
        model_name=model_name(config),
        vocab_size=model.vocab_size,
        max_model_len=plan.max_model_len,
        bos_token_id=model.bos_token_id,
        eos_token_ids=list(model.eos_token_ids),
        lines=[*plan.lines, *core.runner.notes],
        memory=plan.memory.message(),
        keeps_states=model.state_bytes > 0,
    )
    return core, ready


def model_name(config: EngineConfig) -> str:
    path = Path(config.model)
    return config.served_model_name or (path.stem if path.suffix == ".gguf" else path.resolve().name)
