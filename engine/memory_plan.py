"""What goes where and whether it fits, before a byte of weights is read. Torch-free.

>>> plan = plan_memory(config, source, expert_backend=lambda layer: "kt", element_bytes=2)
>>> print(plan.render()); plan.check(config.force_memory_plan)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import MemoryPlanError, UserError
from engine.memory_costs import (
    adapter_bytes_per_rank,
    buffer_bytes,
    dense_bytes,
    dequantised_notes,
    expert_bytes,
    file_bytes,
    loading_bytes,
)
from engine.memory_limits import Memory, cpu_memory
from engine.memory_units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from engine.weights.store import WeightSource

BLOCK = 16  # positions in a KV block
_TYPICAL_LEN = 4096  # what one request is assumed to need of the cache, at most
_LEAST_TOKENS = 2048  # an automatic cache is never planned smaller, even if that does not fit
_CPU_KV_SHARE, _GPU_KV_SHARE = 0.5, 0.9  # of what the rest leaves free
_RESERVE, _RESERVE_SHARE = 256 << 20, 0.02
_TYPICAL_RANK = 16
_AGAIN = ("", "as much again", "twice as much again")  # by copies


@dataclass(frozen=True)
class Item:
    device: str
    label: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """`kv_tokens` is a multiple of the block size; `max_model_len` at most `kv_tokens`. `adapter_bytes`
    is what loaded adapters may take on the CPU, those at start included. `notes` should be said aloud;
    `remedies` are settings with which it would fit (empty if it does, or if none would do)."""

    devices: list[Memory]
    items: list[Item]
    kv_tokens: int
    max_model_len: int
    adapter_bytes: int
    notes: list[str]
    remedies: list[str]

    def needed(self, device: Memory) -> int:
        return sum(item.num_bytes for item in self.items if item.device == device.name)

    @property
    def short(self) -> list[Memory]:
        """The devices on which it does not fit."""
        return [device for device in self.devices if self.needed(device) > device.free_bytes]

    def render(self) -> str:
        """A table for a terminal."""
        rows: list[tuple[str, str]] = []
        for device in self.devices:
            free, limit = format_bytes(device.free_bytes), format_bytes(device.limit_bytes)
            rows.append((f"memory plan, {device.name}: {free} free of {limit}", ""))
            rows += [(f"  {i.label}", format_bytes(i.num_bytes)) for i in self.items if i.device == device.name]
            over = self.needed(device) - device.free_bytes
            verdict = f"  needed, {format_bytes(over)} too much" if over > 0 else "  needed"
            rows.append((verdict, format_bytes(self.needed(device))))
        left = max(len(label) for label, size in rows if size)
        right = max(len(size) for _, size in rows)
        lines = [f"{label:<{left}}  {size:>{right}}" if size else label for label, size in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def check(self, force: bool) -> None:
        """Raise MemoryPlanError if a device is short, unless `force`."""
        if force or not self.short:
            return
        lines = []
        for device in self.short:
            need, free = format_bytes(self.needed(device)), format_bytes(device.free_bytes)
            largest = sorted((i for i in self.items if i.device == device.name), key=lambda i: -i.num_bytes)[:3]
            what = ", ".join(f"{item.label} {format_bytes(item.num_bytes)}" for item in largest)
            lines.append(f"{device.name}: {need} needed, {free} free ({what})")
        advice = "would fit: " + "; or ".join(self.remedies) if self.remedies else "no setting makes it fit"
        raise MemoryPlanError(
            f"the model does not fit. {'; '.join(lines)}. {advice}. "
            "--force-memory-plan starts anyway (where memory grows with use, for instance).",
            "force_memory_plan",
        )


def plan_memory(
    config: EngineConfig,
    source: WeightSource,
    expert_backend: Callable[[int], str],
    element_bytes: int,
    *,
    activation_bytes: int | None = None,
    kv_element_bytes: int | None = None,
    linear_backend: str = "reference",
    cpu: Memory | None = None,
    gpu: Memory | None = None,
    extra: Sequence[Item] = (),
    adapter_copies: Mapping[str, int] | None = None,
    scratch: Callable[[EngineConfig], int] | None = None,
) -> MemoryPlan:
    """`expert_backend` names a sparse layer's backend, `element_bytes` is the size of an unquantised weight,
    `activation_bytes` and `kv_element_bytes` (default: the same) that of an activation and of an element of the KV
    cache.

    With `gpu`, dense weights, KV cache and step buffers lie there, and the experts of layers on "gpu"; all else is
    on the CPU (its memory is looked up unless given). `extra` are what a backend needs besides, `adapter_copies` says
    how often an adapter in a slot is held on which device beside what was read of it (default: once on the CPU),
    `scratch` what native experts take in a step of a config's most tokens (default: estimated with the step's buffers).
    Raises UserError for settings that contradict one another.
    """
    cpu = cpu or cpu_memory()
    inputs = _Inputs(
        config,
        source,
        expert_backend,
        element_bytes,
        linear_backend,
        cpu,
        gpu,
        tuple(extra),
        scratch,
        activation_bytes or element_bytes,
        source.config.kv_bytes_per_token(kv_element_bytes or element_bytes),
        {cpu.name: 1} if adapter_copies is None else adapter_copies,
    )
    plan = _draw(inputs)
    return replace(plan, remedies=_remedies(inputs, plan)) if plan.short else plan


@dataclass(frozen=True)
class _Inputs:
    config: EngineConfig
    source: WeightSource
    expert_backend: Callable[[int], str]
    element_bytes: int
    linear_backend: str
    cpu: Memory
    gpu: Memory | None
    extra: tuple[Item, ...]
    scratch: Callable[[EngineConfig], int] | None
    activation_bytes: int
    kv_token_bytes: int
    adapter_copies: Mapping[str, int]

    @property
    def main(self) -> Memory:
        """Where everything but CPU experts lies."""
        return self.gpu or self.cpu


def _draw(inputs: _Inputs) -> MemoryPlan:
    config, source, main, cpu = inputs.config, inputs.source, inputs.main, inputs.cpu
    items = [*_expert_items(inputs), *inputs.extra]
    dense = dense_bytes(source, inputs.linear_backend, inputs.element_bytes, inputs.activation_bytes, config.quantise)
    items.append(Item(main.name, "dense weights", dense))
    adapters = _adapter_items(inputs)
    items += adapters
    rows = config.batched_tokens
    kinds = {inputs.expert_backend(layer) for layer in source.config.sparse_layers}
    stated = inputs.scratch is not None and bool(kinds & {"native", "hybrid"})
    inside = not (stated and kinds == {"native"} and inputs.gpu is None)
    buffers = buffer_bytes(source.config, rows, config.max_num_seqs, experts=inside)
    items.append(Item(main.name, f"step buffers, {rows} tokens", buffers))
    if stated and inputs.scratch is not None:
        items.append(Item(cpu.name, f"expert scratch, {rows} tokens", inputs.scratch(config)))
    items.append(Item(cpu.name, "while loading, one layer", loading_bytes(source.config)))
    devices = [cpu] if inputs.gpu is None else [inputs.gpu, cpu]
    items += [Item(d.name, "reserve", max(_RESERVE, int(_RESERVE_SHARE * d.limit_bytes))) for d in devices]
    used = sum(item.num_bytes for item in items if item.device == main.name)
    share = _CPU_KV_SHARE if inputs.gpu is None else _GPU_KV_SHARE
    per_token = inputs.kv_token_bytes
    tokens, length, notes = _cache(inputs, int(share * max(main.free_bytes - used, 0)) // per_token)
    items.append(Item(main.name, f"KV cache, {tokens} tokens", tokens * per_token))
    left = cpu.free_bytes - sum(item.num_bytes for item in items if item.device == cpu.name)
    room = sum(item.num_bytes for item in adapters if item.device == cpu.name)
    room += max(left, 0) if config.adapter_memory is None else 0
    each = format_bytes(_TYPICAL_RANK * adapter_bytes_per_rank(source.config))
    again = [
        _AGAIN[min(n, 2)] + (f" on {device}" if inputs.gpu else "") for device, n in inputs.adapter_copies.items() if n
    ]
    notes += dequantised_notes(
        source, inputs.expert_backend, inputs.linear_backend, inputs.element_bytes, config.quantise
    )
    notes.append(
        f"loaded adapters may take {format_bytes(room)}; one of rank {_TYPICAL_RANK} on all projections takes {each}, "
        f"and {' and '.join(again)} in a slot"
    )
    return MemoryPlan(devices, items, tokens, length, room, notes, [])


def _adapter_items(inputs: _Inputs) -> list[Item]:
    """What was asked for on the CPU, or the adapters at start: as they are read, and again in slots. On a GPU, those in
    slots of experts that lie there."""
    config, cpu, gpu = inputs.config, inputs.cpu, inputs.gpu
    files = sorted((file_bytes(text.partition("=")[2]) for text in config.adapters), reverse=True)
    label, in_slots = f"adapters at start, {len(files)}", sum(files[: config.max_adapter_slots])
    there = 0 if gpu is None else inputs.adapter_copies.get(gpu.name, 0) * in_slots
    items = [Item(gpu.name, label, there)] if gpu is not None and there else []
    if config.adapter_memory is not None:
        return [*items, Item(cpu.name, "adapters", parse_bytes(config.adapter_memory, "adapter_memory"))]
    held = sum(files) + inputs.adapter_copies.get(cpu.name, 0) * in_slots
    return [*items, Item(cpu.name, label, held)] if files else items


def _expert_items(inputs: _Inputs) -> list[Item]:
    """One item per backend; its layers need not be neighbours."""
    sizes: dict[str, list[int]] = {}
    for layer in inputs.source.config.sparse_layers:
        backend = inputs.expert_backend(layer)
        settings = (inputs.element_bytes, inputs.config.kt_method, inputs.config.quantise)
        size = expert_bytes(inputs.source.experts(layer), backend, *settings)
        sizes.setdefault(backend, []).append(size)
    items = []
    for backend, layers in sizes.items():
        device = inputs.main if backend == "gpu" else inputs.cpu
        items.append(Item(device.name, f"experts, {len(layers)} layers on {backend}", sum(layers)))
    return items


def _cache(inputs: _Inputs, affordable: int) -> tuple[int, int, list[str]]:
    """(tokens of the cache, max_model_len, notes). `affordable` tokens fit."""
    config, model = inputs.config, inputs.source.config
    longest = model.max_position_embeddings
    length = config.max_model_len or longest
    if not 1 <= length <= max(longest, model.stretched_positions):
        raise UserError(f"max_model_len is {length}; this model allows 1 to {longest}", "max_model_len")
    asked = _asked_tokens(inputs)
    if asked is not None:
        if config.max_model_len is not None and asked < length:
            raise UserError(f"max_model_len is {length}, but the KV cache is set to {asked} tokens", "max_model_len")
        tokens = asked
    else:
        wanted = max(config.max_num_seqs * min(length, _TYPICAL_LEN), length)
        tokens = _blocks(max(min(wanted, affordable), min(wanted, _LEAST_TOKENS)))
        if config.max_model_len is not None:
            tokens = max(tokens, _blocks(length))
    if tokens >= length:
        return tokens, length, []
    return tokens, tokens, [f"max_model_len is {tokens} instead of the model's {length}: the KV cache holds no more"]


def _asked_tokens(inputs: _Inputs) -> int | None:
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
    per_block = BLOCK * inputs.kv_token_bytes
    size = parse_bytes(config.kv_cache_memory, "kv_cache_memory")
    if size < per_block:
        raise UserError(
            f"kv_cache_memory is {config.kv_cache_memory}; one block of {BLOCK} tokens takes {per_block} bytes",
            "kv_cache_memory",
        )
    return size // per_block * BLOCK


def _blocks(tokens: int) -> int:
    """Rounded up to whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


def _remedies(inputs: _Inputs, plan: MemoryPlan) -> list[str]:
    """Each setting that alone would make it fit, by drawing the plan with it."""
    config = inputs.config
    trials: list[tuple[str, _Inputs]] = []

    def trial(text: str, inputs: _Inputs = inputs, **settings: object) -> None:
        changed = replace(inputs, config=replace(config, **settings))  # type: ignore[arg-type]
        backend = settings.get("expert_backend")
        trials.append((text, replace(changed, expert_backend=lambda _: str(backend)) if backend else changed))

    over = plan.needed(inputs.main) - inputs.main.free_bytes
    per_token = inputs.kv_token_bytes
    tokens = (plan.kv_tokens - -(-over // per_token)) // BLOCK * BLOCK
    if tokens >= BLOCK:
        trial(f"--kv-cache-tokens {tokens}", kv_cache_tokens=tokens, kv_cache_memory=None, max_model_len=None)
    if inputs.activation_bytes > 2:
        kv = inputs.source.config.kv_bytes_per_token(2) if config.kv_cache_dtype == "auto" else inputs.kv_token_bytes
        half = replace(inputs, element_bytes=2, activation_bytes=2, kv_token_bytes=kv)
        if config.kv_cache_dtype != "float32":  # which takes float32 rows
            trial("--dtype bfloat16", half, dtype="bfloat16")
    if config.batched_tokens > 128:
        trial("--max-num-batched-tokens 128", max_num_batched_tokens=128)
    if config.adapters:
        trial("fewer --adapters", adapters=[])
    if config.adapter_memory is not None:
        trial("a smaller --adapter-memory", adapter_memory=None)
    trial("--expert-backend native", expert_backend="native")
    if inputs.gpu is None:
        both = replace(inputs, linear_backend="native")
        trial("--expert-backend native --linear-backend native", both, expert_backend="native", linear_backend="native")
    for method in ("AMXInt8", "AMXInt4"):
        trial(f"--expert-backend kt --kt-method {method}", expert_backend="kt", kt_method=method)
    return [text for text, changed in trials if not _draw(changed).short]
