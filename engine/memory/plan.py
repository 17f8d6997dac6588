"""What goes where and whether it fits, before a byte of weights is read. Torch-free.

>>> plan = plan_memory(Inputs(config, source, statements, ...))
>>> print(plan.render()); plan.check(config.force_memory_plan)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.config import KV_BLOCK_TOKENS, EngineConfig
from engine.errors import MemoryPlanError, UserError
from engine.memory.costs import (
    TYPICAL_RANK,
    adapter_bytes_per_rank,
    buffer_row_bytes,
    expert_adapter_bytes_per_rank,
    file_bytes,
    kept_bytes,
    loading_bytes,
    logits_bytes,
    training_bytes,
    training_expert_bytes,
    training_run_bytes,
    training_run_expert_bytes,
)
from engine.memory.items import DevicePlan, Item, Kind
from engine.memory.limits import Memory
from engine.memory.states import StateSizes
from engine.units import format_bytes, parse_bytes
from scheduler.drafts.gain import MOST_DRAFTS

if TYPE_CHECKING:
    from engine.architectures.config import ModelConfig
    from engine.weights.store import WeightSource

_TYPICAL_LEN = 4096  # what one request is assumed to need of the cache, at most
_LEAST_TOKENS = 2048  # an automatic cache is never planned smaller, even if that does not fit
CPU_KV_SHARE, GPU_KV_SHARE = 0.5, 0.9  # of what the rest leaves free
_RESERVE, _RESERVE_SHARE = 256 << 20, 0.02
_AGAIN = ("", "once more", "twice more")  # by copies


@dataclass(frozen=True)
class MemoryPlan(DevicePlan):
    """`kv_tokens` is a multiple of the block size; `max_model_len` at most `kv_tokens`. `adapter_bytes`
    is what loaded adapters may take on the CPU, those at start included; `gpu_adapter_bytes` what those in slots may
    take on the GPU, beside the tables of their projections (None: no experts are computed there), for one of which the
    cache leaves out `kv_left_out` tokens. `num_states`:
    sequences that may run at once in a model whose layers keep states (0: they keep none), `num_snapshots`: copies of
    states that the prefix cache has beside them at most, each in the memory of `snapshot_blocks` blocks (0: its own);
    `kept_positions` of a running sequence may be kept beside its state. `notes` are printed; `remedies` are settings
    with which it would fit (empty if it does, or if none would do)."""

    devices: list[Memory]
    items: list[Item]
    kv_tokens: int
    max_model_len: int
    adapter_bytes: int
    notes: list[str]
    remedies: list[str]
    gpu_adapter_bytes: int | None = None
    num_states: int = 0
    num_snapshots: int = 0
    snapshot_blocks: int = 0
    kept_positions: int = 0
    kv_left_out: int = 0

    @property
    def state_slots(self) -> int:
        """Of running sequences, and of snapshots."""
        return self.num_states + self.num_snapshots

    def step_bytes(self, device: Memory) -> int:
        """What is needed there in proportion to the tokens of a step."""
        return sum(item.step_bytes for item in self.items if item.device == device.name)

    def check(self, force: bool) -> None:
        """Raise MemoryPlanError if a device is short, unless `force`."""
        if force or not self.short:
            return
        advice = "would fit: " + "; or ".join(self.remedies) if self.remedies else "no setting makes it fit"
        raise MemoryPlanError(
            f"the model does not fit. {self.shortage()}. {advice}. "
            "--force-memory-plan starts anyway (where memory grows with use, for instance).",
            "force_memory_plan",
        )


@dataclass(frozen=True)
class Statements:
    """What the backends state (engine/memory/stated.py), for inputs that a remedy may have changed."""

    expert_bytes: Callable[[Inputs, int], int]  # a layer's routed experts
    weight_bytes: Callable[[Inputs], int]  # all other weights
    notes: Callable[[Inputs], list[str]]


@dataclass(frozen=True)
class Inputs:
    """With `gpu`, dense weights, KV cache and step buffers lie there, and the experts of layers on "gpu"; all else is
    on the CPU."""

    config: EngineConfig
    source: WeightSource
    stated: Statements
    expert_backend: Callable[[int], str]  # by sparse layer
    linear_backend: str
    element_bytes: int  # of an unquantised weight
    activation_bytes: int
    kv_token_bytes: int  # of a position in the KV cache
    token_budget: int  # of a step
    cpu: Memory
    gpu: Memory | None
    adapter_copies: Mapping[str, int]  # of an adapter in a slot by device, beside what was read of it
    kt_method: str
    expert_quantise: str | None  # what native experts make of unquantised weights
    extra: tuple[Item, ...] = ()  # what backends need besides
    scratch: Callable[[int], int] | None = None  # of native experts by rows; None: estimated with the step's buffers
    gpu_packs: bool = False  # whether experts on "gpu" are held as the file has them
    native: bool = True  # whether the native backends can serve the model here
    kept_positions: int = 0  # of a sequence with drafts, where layers keep states
    gpu_adapter_share: float = 0  # of an adapter's expert part that a slot holds on the GPU, beside hot experts

    @property
    def main(self) -> Memory:
        """Where everything but CPU experts lies."""
        return self.gpu or self.cpu

    @property
    def states(self) -> StateSizes:
        return StateSizes(self.config, self.source.config, self.kept_positions, self.gpu is not None)


def plan_memory(inputs: Inputs) -> MemoryPlan:
    """UserError for settings that contradict one another."""
    plan = _plan(inputs)
    return replace(plan, remedies=_remedies(inputs, plan)) if plan.short else plan


def _training_items(inputs: Inputs) -> Iterator[Item]:
    """What is trained is where it is served."""
    model, tokens = inputs.source.config, inputs.config.training_tokens
    of_batch, of_run = f"training micro-batch, {tokens} tokens", f"a training run of rank {TYPICAL_RANK}"
    run, kept = training_run_bytes(model, TYPICAL_RANK), kept_bytes(inputs.main.limit_bytes)
    yield Item(inputs.main.name, Kind.STEP, of_batch, training_bytes(model, tokens, kept))
    if inputs.gpu is not None:
        yield Item(inputs.cpu.name, Kind.STEP, f"{of_batch}, experts", training_expert_bytes(model, tokens, kept))
        experts = training_run_expert_bytes(model, TYPICAL_RANK)
        yield Item(inputs.cpu.name, Kind.ADAPTERS, f"{of_run}, experts", experts)
        run -= experts
    yield Item(inputs.main.name, Kind.ADAPTERS, of_run, run)


def sampled_rows(config: EngineConfig) -> int:
    """Rows of logits of a step, at most."""
    return config.max_num_seqs + (MOST_DRAFTS if config.speculate else 0)


def _plan(inputs: Inputs) -> MemoryPlan:
    config, source, main, cpu = inputs.config, inputs.source, inputs.main, inputs.cpu
    items = [*_expert_items(inputs), *inputs.extra]
    items.append(Item(main.name, Kind.WEIGHTS, "dense weights", inputs.stated.weight_bytes(inputs)))
    adapters = _adapter_items(inputs)
    items += adapters
    rows = inputs.token_budget
    backends = {inputs.expert_backend(layer) for layer in source.config.sparse_layers}
    stated = inputs.scratch is not None and bool(backends & {"native", "hybrid"})
    inside = not (stated and backends == {"native"} and inputs.gpu is None)
    step = rows * buffer_row_bytes(source.config, experts=inside)
    buffers = step + logits_bytes(source.config, sampled_rows(config))
    items.append(Item(main.name, Kind.STEP, f"step buffers, {rows} tokens", buffers, step))
    if stated and inputs.scratch is not None:
        items.append(Item(cpu.name, Kind.STEP, f"expert scratch, {rows} tokens", inputs.scratch(rows)))
    if config.fine_tuning:
        items += _training_items(inputs)
    items.append(Item(cpu.name, Kind.OTHER, "while loading, one layer", loading_bytes(source.config)))
    devices = [cpu] if inputs.gpu is None else [inputs.gpu, cpu]
    items += [Item(d.name, Kind.OTHER, "reserve", reserve_bytes(d)) for d in devices]
    used = sum(item.num_bytes for item in items if item.device == main.name)
    share = CPU_KV_SHARE if inputs.gpu is None else GPU_KV_SHARE
    per_token, left = inputs.kv_token_bytes, max(main.free_bytes - used, 0)
    affordable = max(min(int(share * left), left - _run_time_adapter(inputs)), 0)
    room = int(share * left) - affordable
    sizes = inputs.states
    states = sizes.running(affordable)
    running = states * sizes.running_bytes + sizes.scratch_bytes
    affordable = max(affordable - running, 0)
    apart = sizes.apart_bytes(affordable) if asked_tokens(inputs) is None else 0
    tokens, length, notes = _cache(inputs, (affordable - apart) // per_token)
    left_out = 0
    if asked_tokens(inputs) is None:
        left_out = max(0, min(wanted_tokens(config, source.config), tokens + room // per_token) - tokens)
    snapshots, snapshot_blocks = sizes.snapshots(tokens, per_token, affordable)
    if states:
        items.append(Item(main.name, Kind.KV_CACHE, f"states, {states} sequences", running))
    if snapshots and inputs.gpu is not None:
        items.append(Item(main.name, Kind.KV_CACHE, f"snapshots of states, {snapshots}", snapshots * sizes.each))
    notes += sizes.notes(states, snapshots, snapshot_blocks)
    items.append(Item(main.name, Kind.KV_CACHE, f"KV cache, {tokens} tokens", tokens * per_token))
    notes.append(f"a position takes {per_token} bytes of the KV cache")
    left = cpu.free_bytes - sum(item.num_bytes for item in items if item.device == cpu.name)
    on_cpu = sum(item.num_bytes for item in adapters if item.device == cpu.name)
    on_cpu += max(left, 0) if config.adapter_memory is None else 0
    each = format_bytes(TYPICAL_RANK * adapter_bytes_per_rank(source.whole))
    again = [
        _AGAIN[min(n, 2)] + (f" on {device}" if inputs.gpu else "") for device, n in inputs.adapter_copies.items() if n
    ]
    notes += inputs.stated.notes(inputs)
    notes.append(
        f"loaded adapters may take {format_bytes(on_cpu)}; one of rank {TYPICAL_RANK} on all projections takes {each}, "
        f"and {' and '.join(again)} in a slot"
    )
    on_gpu = None
    if inputs.gpu is not None and inputs.gpu_adapter_share and config.max_adapter_slots:
        planned = sum(i.num_bytes for i in items if i.device == main.name and i.kind is Kind.ADAPTERS)
        used = sum(item.num_bytes for item in items if item.device == main.name)
        on_gpu = planned + max(main.free_bytes - used, 0)
        takes = format_bytes(_typical_slot_bytes(inputs))
        notes.append(
            f"adapters in slots may take {format_bytes(on_gpu)} on {main.name}; one of rank {TYPICAL_RANK} on every "
            f"expert takes {takes}, and a load beyond that is refused"
        )
        if left_out:
            notes.append(
                f"the KV cache leaves room for one that is loaded at run time, {left_out} tokens; with "
                "--max-adapter-slots 0, or as many --adapters as slots, it has them too"
            )
    return MemoryPlan(
        devices,
        items,
        tokens,
        length,
        on_cpu,
        notes,
        [],
        on_gpu,
        states,
        snapshots,
        snapshot_blocks,
        inputs.kept_positions if states else 0,
        left_out,
    )


def reserve_bytes(device: Memory) -> int:
    """What nothing is planned for."""
    return max(_RESERVE, int(_RESERVE_SHARE * device.limit_bytes))


def _typical_slot_bytes(inputs: Inputs) -> int:
    """Of an adapter on every expert in a slot of the GPU's experts."""
    per_rank = expert_adapter_bytes_per_rank(inputs.source.config, inputs.element_bytes)
    return int(inputs.gpu_adapter_share * TYPICAL_RANK * per_rank)


def _run_time_adapter(inputs: Inputs) -> int:
    """Bytes on the GPU that the cache, which has whole blocks, leaves for a first adapter beside those at start, unless
    slots for streamed experts have room for it, which are planned for."""
    config, main = inputs.config, inputs.main
    if inputs.gpu is None or len(config.adapters) >= config.max_adapter_slots:
        return 0
    planned = sum(i.num_bytes for i in inputs.extra if i.device == main.name and i.kind is Kind.ADAPTERS)
    lacking = _typical_slot_bytes(inputs) - planned
    return lacking + KV_BLOCK_TOKENS * inputs.kv_token_bytes if lacking > 0 else 0


def _adapter_items(inputs: Inputs) -> list[Item]:
    """What was asked for on the CPU, or the adapters at start: as they are read, and again in slots. On a GPU, those in
    slots of experts that lie there."""
    config, cpu, gpu = inputs.config, inputs.cpu, inputs.gpu
    files = sorted((file_bytes(text.partition("=")[2]) for text in config.adapters), reverse=True)
    label, in_slots = f"adapters at start, {len(files)}", sum(files[: config.max_adapter_slots])
    there = 0 if gpu is None else inputs.adapter_copies.get(gpu.name, 0) * in_slots
    items = [Item(gpu.name, Kind.ADAPTERS, label, there)] if gpu is not None and there else []
    if config.adapter_memory is not None:
        asked = parse_bytes(config.adapter_memory, "adapter_memory")
        return [*items, Item(cpu.name, Kind.ADAPTERS, "adapters", asked)]
    held = sum(files) + inputs.adapter_copies.get(cpu.name, 0) * in_slots
    return [*items, Item(cpu.name, Kind.ADAPTERS, label, held)] if files else items


def _expert_items(inputs: Inputs) -> list[Item]:
    """One item per backend; its layers need not be neighbours."""
    sizes: dict[str, list[int]] = {}
    for layer in inputs.source.config.sparse_layers:
        backend = inputs.expert_backend(layer)
        size = inputs.stated.expert_bytes(inputs, layer)
        sizes.setdefault(backend, []).append(size)
    items = []
    for backend, layers in sizes.items():
        device = inputs.main if backend == "gpu" else inputs.cpu
        items.append(Item(device.name, Kind.EXPERTS, f"experts, {len(layers)} layers on {backend}", sum(layers)))
    return items


def _cache(inputs: Inputs, affordable: int) -> tuple[int, int, list[str]]:
    """(tokens of the cache, max_model_len, notes). `affordable` tokens fit."""
    config, model = inputs.config, inputs.source.config
    longest = model.max_position_embeddings
    length = config.max_model_len or longest
    if not 1 <= length <= max(longest, model.stretched_positions):
        raise UserError(f"max_model_len is {length}; this model allows 1 to {longest}", "max_model_len")
    asked = asked_tokens(inputs)
    if asked is not None:
        if config.max_model_len is not None and asked < length:
            raise UserError(f"max_model_len is {length}, but the KV cache is set to {asked} tokens", "max_model_len")
        tokens = asked
    else:
        wanted = wanted_tokens(config, model)
        tokens = _blocks(max(min(wanted, affordable), min(wanted, _LEAST_TOKENS)))
        if config.max_model_len is not None:
            tokens = max(tokens, _blocks(length))
    if tokens >= length:
        return tokens, length, []
    return tokens, tokens, [f"max_model_len is {tokens} instead of the model's {length}: the KV cache holds no more"]


def wanted_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Positions that the cache has if memory allows: some of each request's, and those of the longest one."""
    length = config.max_model_len or model.max_position_embeddings
    return max(config.max_num_seqs * min(length, _TYPICAL_LEN), length)


def asked_tokens(inputs: Inputs) -> int | None:
    """The cache's size if it was set, in whole blocks."""
    config = inputs.config
    if config.kv_cache_tokens is not None and config.kv_cache_memory is not None:
        raise UserError("kv_cache_tokens and kv_cache_memory are both given; one sets the size", "kv_cache_memory")
    if config.kv_cache_tokens is not None:
        if config.kv_cache_tokens < 1:
            raise UserError(f"kv_cache_tokens is {config.kv_cache_tokens}; allowed is 1 or more", "kv_cache_tokens")
        return _blocks(config.kv_cache_tokens)
    if config.kv_cache_memory is None:
        return None
    per_block = KV_BLOCK_TOKENS * inputs.kv_token_bytes
    size = parse_bytes(config.kv_cache_memory, "kv_cache_memory")
    if size < per_block:
        raise UserError(
            f"kv_cache_memory is {config.kv_cache_memory}; one block of {KV_BLOCK_TOKENS} tokens takes "
            f"{per_block} bytes",
            "kv_cache_memory",
        )
    return size // per_block * KV_BLOCK_TOKENS


def _blocks(tokens: int) -> int:
    """Rounded up to whole blocks."""
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def _remedies(inputs: Inputs, plan: MemoryPlan) -> list[str]:
    """Each setting that alone would make it fit, by planning with it."""
    config = inputs.config
    trials: list[tuple[str, Inputs]] = []

    def trial(text: str, inputs: Inputs = inputs, **settings: object) -> None:
        trials.append((text, replace(inputs, config=replace(config, **settings))))  # type: ignore[arg-type]

    over = plan.needed(inputs.main) - inputs.main.free_bytes
    per_token = inputs.kv_token_bytes
    tokens = (plan.kv_tokens - -(-over // per_token)) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if tokens >= KV_BLOCK_TOKENS:
        trial(f"--kv-cache-tokens {tokens}", kv_cache_tokens=tokens, kv_cache_memory=None, max_model_len=None)
    if inputs.activation_bytes > 2:
        kv = inputs.source.config.kv_bytes_per_token(2) if config.kv_cache_dtype == "auto" else inputs.kv_token_bytes
        if config.kv_cache_dtype != "float32":  # which takes float32 rows
            bf16 = replace(inputs, element_bytes=2, activation_bytes=2, kv_token_bytes=kv)
            trial("--dtype bfloat16", bf16, dtype="bfloat16")
    if inputs.token_budget > (fewer := max(128, config.max_num_seqs)):
        trial(f"--max-num-batched-tokens {fewer}", replace(inputs, token_budget=fewer))
    if config.adapters:
        trial("fewer --adapters", adapters=[])
        if config.adapter_memory is None:
            files = sorted((file_bytes(text.partition("=")[2]) for text in config.adapters), reverse=True)
            copies = inputs.adapter_copies.get(inputs.cpu.name, 0) * sum(files[: config.max_adapter_slots])
            least = f"{-(-(files[0] + copies) // (1 << 20))}MiB"  # the others are read again when they are wanted
            trial(f"--adapter-memory {least}", adapter_memory=least)
    if config.adapter_memory is not None:
        trial("a smaller --adapter-memory", adapter_memory=None)
    if inputs.native:
        native = replace(inputs, expert_backend=lambda _: "native")
        trial("--expert-backend native", native)
        if inputs.gpu is None:
            trial("--expert-backend native --linear-backend native", replace(native, linear_backend="native"))
    experts = inputs.source.config.experts
    for method in ("AMXInt8", "AMXInt4") if experts is None or experts.plain else ():
        kt = replace(inputs, expert_backend=lambda _: "kt", kt_method=method)
        trial(f"--expert-backend kt --kt-method {method}", kt)
    return [text for text, changed in trials if not _plan(changed).short]
