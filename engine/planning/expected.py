"""Tokens a second that a model may be expected to reach on a CPU, before it is loaded: what a step reads and computes,
the machine's measured rates, and the shares of them that were recorded for the format and instruction set."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.weights.store import WeightSource

_FILE = Path(__file__).with_name("efficiency.json")
_PLAIN = ("F32", "F16", "BF16")
_EMBEDDINGS = "model.embed_tokens.weight"  # of which a step reads a row a token


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
    operations: float  # a token

    def step_bytes(self, sequences: int) -> float:
        """Bytes of weights that one token of each of `sequences` reads, where each chooses its experts by itself."""
        chosen = 1 - (1 - self.top_k / self.experts) ** sequences if self.experts else 0.0
        return self.dense_bytes + chosen * self.expert_bytes


@dataclass(frozen=True)
class Expected:
    """Tokens a second, (lowest, highest); None where nothing was recorded for the format."""

    decode_1: tuple[float, float] | None
    decode_8: tuple[float, float] | None
    prefill: tuple[float, float] | None


def work_of(source: WeightSource) -> Work:
    """From the headers."""
    config = source.config
    dense_bytes, weights = 0, 0.0
    for name in source.names():
        if name == _EMBEDDINGS and not config.tie_word_embeddings:
            continue
        tensor = source.tensor(name)
        dense_bytes += tensor.num_bytes
        weights += math.prod(tensor.shape)
    expert_bytes, types = 0, Counter[str]()
    share = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    for layer in config.sparse_layers:
        store = source.experts(layer)
        weights += store.num_weights * share
        for projection, _ in store.projections():
            one = store.expert(projection, 0)
            expert_bytes += one.num_bytes * store.num_experts
            types[one.type] += one.num_bytes
    kind = types.most_common(1)[0][0] if types else "F32"
    return Work(kind, dense_bytes, expert_bytes, config.num_experts, config.num_experts_per_tok, 2 * weights)


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
        if computed is not None:
            low, high = min(low, computed[0]), min(high, computed[1])
        return low, high

    return Expected(rate(1), rate(8), None if computed is None else (computed[0], computed[1]))
