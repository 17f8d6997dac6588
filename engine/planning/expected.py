"""Tokens a second that a model may be expected to reach on a CPU, before it is loaded: what a step reads and computes,
the machine's measured rates, and the shares of them that were recorded for the format and instruction set."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.files.gguf.types import GGMLType, by_name
from engine.planning.plan import EnginePlan
from engine.weights.layout import HEAD
from engine.weights.store import WeightSource, WeightTensor

if TYPE_CHECKING:
    from native import _native

_FILE = Path(__file__).with_name("efficiency.json")
_PLAIN = ("F32", "F16", "BF16")
_MADE = {"int8": by_name("Q8_0"), "int4": by_name("Q4_1")}
_EMBEDDINGS = "model.embed_tokens.weight"  # of which a step reads a row a token
_MEASURED_BYTES = 1 << 30  # more than any cache holds
_READS = 5


@dataclass(frozen=True)
class MachineRates:
    """`isa`: of the native kernels. Bytes and operations a second, measured."""

    isa: str
    read: float
    int8: float
    plain: float  # the better of bf16 and float32


@dataclass(frozen=True)
class Work:
    """What a model's steps take. `type`: of most of its experts' weights."""

    type: str
    dense_bytes: int
    expert_bytes: int
    experts: int
    top_k: int
    operations: float  # a token, without the head
    head_operations: float = 0.0  # of a token whose scores are asked for: each in decode, the last of a prompt

    def step_bytes(self, sequences: int, chosen: float | None = None) -> float:
        """Bytes of weights that one token of each of `sequences` reads. `chosen`: distinct experts of a layer; default:
        each sequence chooses its own whatever the others do."""
        if not self.experts:
            return self.dense_bytes
        if chosen is None:
            chosen = self.experts * (1 - (1 - self.top_k / self.experts) ** sequences)
        return self.dense_bytes + chosen / self.experts * self.expert_bytes


@dataclass(frozen=True)
class Expected:
    """Tokens a second, (lowest, highest); None where nothing was recorded for the format."""

    decode_1: tuple[float, float] | None
    decode_8: tuple[float, float] | None
    prefill: tuple[float, float] | None

    def figures(self) -> dict[str, float]:
        """By name and end of the span, as /metrics shows them: "decode_1_low", "decode_1_high", ...; without what is
        None."""
        spans = {"decode_1": self.decode_1, "decode_8": self.decode_8, "prefill": self.prefill}
        return {
            f"{name}_{end}": rate
            for name, span in spans.items()
            if span is not None
            for end, rate in zip(("low", "high"), span, strict=True)
        }

    def line(self) -> str:
        """For people; "" where nothing is expected."""
        spans = (("one sequence", self.decode_1), ("8 together", self.decode_8), ("a prompt of 2048", self.prefill))
        known = [f"{span_text(span)} {what}" for what, span in spans if span is not None]
        return f"expected tokens a second: {', '.join(known)}" if known else ""


def span_text(span: tuple[float, float] | None) -> str:
    """ "8.1 to 12"; "-" for None."""
    if span is None:
        return "-"
    low, high = map(rate_text, span)
    return low if low == high else f"{low} to {high}"


def rate_text(rate: float) -> str:
    return f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"


def measure(pool: _native.WorkerPool, isa: str, free_bytes: int) -> MachineRates:
    """Rates of this machine by the threads of `pool`, in about two seconds. `isa`: of the kernels; "": the best.
    `free_bytes`: of memory, of which a quarter may be read."""
    from native import _native

    isa = _native.choose_isa(isa)
    bf16, f32, int8 = (float(_native.peak_operations(pool, kind, isa=isa)) for kind in ("bf16", "f32", "int8"))
    read = float(_native.read_bandwidth(pool, min(_MEASURED_BYTES, free_bytes // 4), repeats=_READS))
    return MachineRates(isa, read, int8, max(bf16, f32))


def work_of(source: WeightSource, quantise: str | None = None) -> Work:
    """From the headers. `quantise`: what becomes of unquantised weights (`EngineConfig.quantise`)."""
    config = source.config
    made = None if quantise is None else _MADE[quantise]
    head = _EMBEDDINGS if config.tie_word_embeddings else HEAD
    dense_bytes, weights, of_head = 0, 0.0, 0
    for name in source.names():
        if name == _EMBEDDINGS and not config.tie_word_embeddings:
            continue
        tensor = source.tensor(name)
        size = math.prod(tensor.shape)
        matrix = len(tensor.shape) > 1
        dense_bytes += sum(_held(each, math.prod(each.shape), made if matrix else None)[1] for each in tensor.stored)
        if name == head:
            of_head = size
        else:
            weights += size
    expert_bytes, types = 0, Counter[str]()
    share = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    for layer in config.sparse_layers:
        store = source.experts(layer)
        weights += store.num_weights * share
        for projection, _ in store.projections():
            one = store.expert(projection, 0)
            kind, num_bytes = _held(one, math.prod(one.shape), made)
            expert_bytes += num_bytes * store.num_experts
            types[kind] += num_bytes
    kind = types.most_common(1)[0][0] if types else "F32"
    top_k = config.num_experts_per_tok
    return Work(kind, dense_bytes, expert_bytes, config.num_experts, top_k, 2 * weights, 2.0 * of_head)


def _held(tensor: WeightTensor, size: int, made: GGMLType | None) -> tuple[str, int]:
    """Type and bytes of a weight of `size` values on the native kernels."""
    if made is None or tensor.type not in _PLAIN:
        return tensor.type, tensor.num_bytes
    return made.name, size // made.block * made.size


def expect(work: Work, machine: MachineRates) -> Expected:
    """`Expected` of a model whose experts, attention and projections the native kernels compute."""
    recorded = json.loads(_FILE.read_text())["shares"].get(machine.isa, {}).get(work.type, {})
    peak = machine.plain if work.type in _PLAIN else machine.int8
    decode, prefill = recorded.get("decode"), recorded.get("prefill")
    computed = None if prefill is None else [share * peak / work.operations for share in prefill]

    def rate(sequences: int) -> tuple[float, float] | None:
        if decode is None:
            return None
        low, high = (sequences * share * machine.read / work.step_bytes(sequences) for share in decode)
        if prefill is not None:
            low, high = (
                min(rate, share * peak / (work.operations + work.head_operations))
                for rate, share in zip((low, high), prefill, strict=True)
            )
        return low, high

    return Expected(rate(1), rate(8), None if computed is None else (computed[0], computed[1]))


def expected_of(plan: EnginePlan, machine: MachineRates) -> Expected:
    """Nothing where not all of the model is computed by the native kernels, or a cache may hold much of it."""
    small = plan.source.num_bytes < _MEASURED_BYTES
    if small or not plan.placement.native(".mlp.experts", ".self_attn", "_proj"):
        return Expected(None, None, None)
    return expect(work_of(plan.source, plan.expert_quantise), machine)
