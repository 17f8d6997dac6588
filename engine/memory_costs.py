"""What each part of the engine takes in memory, in bytes. Torch-free."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.model_config import ModelConfig

if TYPE_CHECKING:
    from engine.weights.store import ExpertStore, WeightSource

_BF16, _F32 = 2, 4
_NATIVE_REPACK = 1.05  # the native pool's packed blocks against GGUF's
_KT_BYTES = {"AMXBF16": 2.0, "AMXInt8": 1.01, "AMXInt4": 0.51}  # per weight, row scales included
_FLOATS = ("F32", "F16", "BF16")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt")


def expert_bytes(store: ExpertStore, backend: str, element_bytes: int, kt_method: str) -> int:
    """One layer's routed experts as `backend` holds them."""
    total = 0.0
    for projection in ("gate", "up", "down"):
        tensor = store.expert(projection, 0)
        weights = store.num_experts * tensor.shape[0] * tensor.shape[1]
        stored = store.num_experts * tensor.num_bytes
        quantised = tensor.type not in _FLOATS
        if backend == "reference":
            total += weights * element_bytes
        elif backend == "kt" and kt_method in _KT_BYTES:
            total += weights * _KT_BYTES[kt_method]
        elif backend in ("kt", "native", "hybrid") and quantised:
            total += stored * (1.0 if backend == "kt" else _NATIVE_REPACK)
        else:
            total += weights * _BF16
    return int(total)


def dense_bytes(source: WeightSource, linear_backend: str, element_bytes: int) -> int:
    """Everything but routed experts: embedding and norms in the activations' type, routers in float32, projections
    as the linear backend holds them. A tied head is a projection of its own beside the embedding."""
    config = source.config
    total = 0
    for name in source.names():
        tensor = source.tensor(name)
        count = prod(tensor.shape)
        if name.endswith("mlp.gate.weight"):
            total += count * _F32
        elif tensor.quantised and linear_backend != "reference" and len(tensor.shape) == 2 and "embed" not in name:
            total += int(tensor.num_bytes * _NATIVE_REPACK)
        else:
            total += count * element_bytes
    if config.tie_word_embeddings:
        total += config.vocab_size * config.hidden_size * element_bytes
    return total


def buffer_bytes(config: ModelConfig, rows: int, sequences: int) -> int:
    """A step's activations and logits, float32, a few copies of each alive at a time."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    inner = max(
        config.intermediate_size, config.num_experts_per_tok * (config.moe_intermediate_size + config.hidden_size)
    )
    per_row = 6 * config.hidden_size + 2 * heads * config.head_dim + 2 * inner
    return _F32 * (rows * per_row + 3 * sequences * config.vocab_size)


def loading_bytes(config: ModelConfig) -> int:
    """The largest stage between file and backend: one layer's experts in bf16, or the embedding in float32."""
    experts = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size * _BF16
    return max(experts if config.sparse_layers else 0, config.vocab_size * config.hidden_size * _F32)


def adapter_bytes_per_rank(config: ModelConfig) -> int:
    """A bf16 adapter on attention and every expert, per unit of rank."""
    hidden, head = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    attention = 2 * (hidden + q) + 2 * (hidden + kv)
    experts = config.num_experts * 3 * (hidden + config.moe_intermediate_size)
    return _BF16 * (config.num_hidden_layers * attention + len(config.sparse_layers) * experts)


def file_bytes(path: str) -> int:
    """Weight files of an adapter's folder, or a file's size; 0 if there is nothing (loading it says why)."""
    place = Path(path).expanduser()
    if place.is_file():
        return place.stat().st_size
    if not place.is_dir():
        return 0
    return sum(p.stat().st_size for p in place.iterdir() if p.suffix in _WEIGHT_FILES and p.is_file())
