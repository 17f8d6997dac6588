"""Half-batches as `--ping-pong` asks for them; what their cost model starts from, measured in a second or so."""

from __future__ import annotations

import torch

from engine.attention.base import BLOCK_SIZE
from engine.graphs import PaddedDecode, Progress
from engine.model.layers import SparseMlp
from engine.model.qwen3_moe import Qwen3Moe
from engine.obstacles import halving_obstacle
from engine.ping_pong import Always, Costs, Line, Measured
from engine.transfer import Stopwatch

_MOST_LAYERS = 12  # that the pool is measured on: many enough that no cache holds their experts
_READ_ROWS = 8  # of the steps over long contexts


def enable(
    padded: PaddedDecode, mode: str, captured: bool, kv_blocks: int, max_model_len: int, progress: Progress
) -> list[str]:
    """`mode`: "on" or "auto"; `captured`: steps are CUDA graphs. Returns what people should be told."""
    sizes = [size for size in padded.buckets if size > 1]
    why = halving_obstacle(padded.model) if sizes else "steps have one row"
    if mode == "on":
        if why:
            return [f"ping-pong: off, {why}"]
        padded.chooser = Always()
    else:
        if why or not captured or any(e.beside_stream != "all" for e in padded.model.expert_backends):
            return []  # nobody asked for it, and what would be measured is not what steps are made of
        progress("Measuring half-batches", 0, 1)
        costs = measure(padded, kv_blocks, max_model_len)
        before = [0, *padded.buckets]
        sizes = [
            size
            for size in sizes
            if any(
                costs.can_pay(rows, min(rows * max_model_len, kv_blocks * BLOCK_SIZE))
                for rows in range(max(before[before.index(size) - 1] + 1, 2), size + 1)
            )
        ]
        progress("Measuring half-batches", 1, 1)
        if not sizes:
            return ["ping-pong: none, two half-batches would not be faster here"]
        padded.chooser = Measured(costs)
    padded.halve(sizes)
    if captured:
        padded.capture(progress, halves=True)
    when = "" if mode == "on" else ", where it is faster"
    return [f"ping-pong: two half-batches for steps of {', '.join(map(str, sizes))} rows{when}"]


@torch.inference_mode()
def measure(padded: PaddedDecode, kv_blocks: int, max_model_len: int) -> Costs:
    """Needs the graphs of whole steps; no step may be in flight."""
    model, layers = padded.model, len(padded.model.layers)
    fixed = {
        lora: Line({bucket: padded.idle_s(bucket, lora) / layers for bucket in padded.buckets})
        for lora in padded.lora_families
    }
    bucket = max(size for size in padded.buckets if size <= _READ_ROWS)
    contexts = min(max_model_len, max(kv_blocks // bucket, 1) * BLOCK_SIZE)
    longer_s = padded.idle_s(bucket, False, contexts) / layers - fixed[False].at(bucket)
    pool = _pool_s(model, padded.buckets)
    config = model.config
    read_s = max(longer_s, 0.0) / (bucket * contexts)
    return Costs(layers, config.num_experts, config.num_experts_per_tok, fixed, read_s, Line(pool))


def _pool_s(model: Qwen3Moe, rows: list[int]) -> dict[float, float]:
    """Seconds of a layer's experts by the number of distinct ones, for evenly spread rows of 1, 2, 4, ..."""
    sparse = [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMlp)]
    some = sparse[:: -(-len(sparse) // _MOST_LAYERS)]
    found: dict[float, float] = {}
    generator = torch.Generator().manual_seed(0)
    for count in (size for size in rows if size & (size - 1) == 0 or size == rows[-1]):
        times = []
        for _ in range(2):  # with ids of its own each, so that the second finds nothing in a cache
            ids = torch.rand(count, model.config.num_experts, generator=generator)
            ids = ids.topk(model.config.num_experts_per_tok).indices
            times.append(_pass_s(model, some, ids))
        distinct = float(torch.unique(ids).numel())
        found[distinct] = min([*times, found.get(distinct, times[0])]) / len(some)
    return found


def _pass_s(model: Qwen3Moe, mlps: list[SparseMlp], ids: torch.Tensor) -> float:
    count = ids.shape[0]
    model.begin(count, None)
    for b in model.expert_buffers:
        b.ids[:count].copy_(ids)
        b.weights[:count].fill_(1 / ids.shape[1])
        b.hidden[:count].normal_()
    stream = torch.cuda.current_stream(model.device).cuda_stream if model.device.type == "cuda" else None
    model.begin_step(count, lora=False, eager=False)
    watch = Stopwatch(model.device)
    for mlp in mlps:
        mlp.backend.post(mlp.task, stream)
        mlp.backend.wait(mlp.task, stream)
    watch.stop()
    seconds = watch.seconds
    model.check()
    return seconds
