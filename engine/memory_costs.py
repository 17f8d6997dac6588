"""What each part of the engine takes in memory, in bytes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.memory_units import format_bytes
from engine.model_config import ModelConfig
from engine.weights.layout import EMBED

if TYPE_CHECKING:
    from engine.weights.store import ExpertStore, WeightSource, WeightTensor

_BF16, _F32 = 2, 4
# Bytes per weight, scales included. Native: the packed formats that hold GGUF's blocks (native/src/core/format.hpp);
# other types are dequantised and held as unquantised weights are.
_NATIVE_BYTES = {"Q8_0": 544, "Q5_0": 352, "Q5_1": 384, "Q4_0": 288, "Q4_1": 320, "Q4_K": 296, "Q5_K": 360, "Q6_K": 420}
_NATIVE_PER = 512  # weights of a panel's block
_QUANTISED_AS = {"int8": "Q8_0", "int4": "Q4_1"}
_PAGE, _HUGE_PAGE = 4096, 2 << 20
_KT_BYTES = {"AMXBF16": 2.0, "AMXInt8": 1.01, "AMXInt4": 0.51}
_KT_BLOCKS = {"F32", "F16", "Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}  # used as they lie
_KT_MULTIPLE = 256
_WEIGHT_FILES = (".safetensors", ".bin", ".pt")


def expert_bytes(
    store: ExpertStore, backend: str, element_bytes: int, kt_method: str, quantise: str | None = None
) -> int:
    """One layer's routed experts as `backend` holds them."""
    tensors = [store.expert(projection, 0) for projection in ("gate", "up", "down")]
    if backend == "kt":
        blocks = kt_method == "GGUF" or (kt_method == "auto" and _kt_takes_blocks(tensors))
        each = [t.num_bytes if blocks else prod(t.shape) * _KT_BYTES.get(kt_method, _BF16) for t in tensors]
    elif backend in ("native", "hybrid"):
        each = [_native_bytes(t, element_bytes, quantise) for t in tensors]
    else:
        each = [prod(t.shape) * (element_bytes if backend == "reference" else _BF16) for t in tensors]
    return int(store.num_experts * sum(each))


def dequantised_notes(
    source: WeightSource,
    expert_backend: Callable[[int], str],
    linear_backend: str,
    element_bytes: int,
    quantise: str | None = None,
) -> list[str]:
    """Per type that the native kernels have no packed format for: how many tensors of it they hold dequantised, and
    what that costs."""
    tensors: dict[str, int] = {}
    more: dict[str, int] = {}

    def add(tensor: WeightTensor, count: int, copies: int) -> None:
        if tensor.quantised and tensor.type not in _NATIVE_BYTES:
            extra = copies * (_native_bytes(tensor, element_bytes, quantise) - tensor.num_bytes)
            tensors[tensor.type] = tensors.get(tensor.type, 0) + count
            more[tensor.type] = more.get(tensor.type, 0) + extra

    for layer in source.config.sparse_layers:
        if expert_backend(layer) in ("native", "hybrid"):
            store = source.experts(layer)
            for projection, held in store.projections():
                count = len(held) if isinstance(held, list) else 1
                add(store.expert(projection, 0), count, store.num_experts)
    if linear_backend == "native":
        for name in source.names():
            tensor = source.tensor(name)
            if len(tensor.shape) == 2 and name != EMBED and not name.endswith("mlp.gate.weight"):
                add(tensor, 1, 1)
        if source.config.tie_word_embeddings:
            add(source.tensor(EMBED), 1, 1)
    return [
        f"{count} tensors of type {type} are dequantised when loading, there is no packed format for it: "
        f"{format_bytes(more[type])} more than in the file"
        for type, count in sorted(tensors.items())
    ]


def _kt_takes_blocks(tensors: list[WeightTensor]) -> bool:
    """Whether "auto" uses the file's own blocks; otherwise it makes bf16."""
    fits = all(size % _KT_MULTIPLE == 0 for size in tensors[0].shape)
    return fits and all(t.type in _KT_BLOCKS for t in tensors) and any(t.quantised for t in tensors)


def _native_bytes(tensor: WeightTensor, element_bytes: int, quantise: str | None = None) -> int:
    packed = _NATIVE_BYTES.get(tensor.type)
    if packed is None and quantise is not None:
        packed = _NATIVE_BYTES[_QUANTISED_AS[quantise]]
    return prod(tensor.shape) * element_bytes if packed is None else prod(tensor.shape) * packed // _NATIVE_PER


def dense_bytes(
    source: WeightSource,
    linear_backend: str,
    element_bytes: int,
    activation_bytes: int | None = None,
    quantise: str | None = None,
) -> int:
    """Everything but routed experts: norms as activations, routers in float32, projections as the linear backend holds
    them. The embedding is a table as wide as activations (a bf16 one as weights), unless the native kernels hold it as
    the file does. A tied head is a projection of its own, which may serve as the embedding."""
    config = source.config
    total = 0

    def linear(tensor: WeightTensor) -> int:
        if linear_backend != "native":
            return prod(tensor.shape) * element_bytes
        return _mapped(_native_bytes(tensor, element_bytes, quantise))

    for name in source.names():
        tensor = source.tensor(name)
        count = prod(tensor.shape)
        if name.endswith("mlp.gate.weight"):
            total += count * _F32
        elif name == EMBED:
            form = _native_embedding(tensor, element_bytes, quantise, config.tie_word_embeddings)
            table = count * (element_bytes if tensor.type == "BF16" else activation_bytes or element_bytes)
            total += form if linear_backend == "native" and form is not None else table
        elif len(tensor.shape) == 2:
            total += linear(tensor)
        else:
            total += count * (activation_bytes or element_bytes)
    if config.tie_word_embeddings:
        total += linear(source.tensor(EMBED))
    return total


def _native_embedding(tensor: WeightTensor, element_bytes: int, quantise: str | None, tied: bool) -> int | None:
    """Bytes beside the head (`NativeLinearBackend.embedding`); None: a table."""
    wide = element_bytes == _F32 and (tensor.quantised or quantise is None)
    if tied and (tensor.type in _NATIVE_BYTES or wide or (tensor.type == "BF16" and quantise is None)):
        return 0
    if not tensor.quantised:
        return None
    packed = tensor.type in _NATIVE_BYTES
    return _mapped(_native_bytes(tensor, element_bytes)) if packed else tensor.num_bytes


def _mapped(num_bytes: int) -> int:
    """Memory from the kernel comes in huge pages where one would be filled."""
    step = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else _PAGE
    return -(-num_bytes // step) * step


def buffer_bytes(config: ModelConfig, rows: int, sequences: int, *, experts: bool = True) -> int:
    """A step's activations and logits, float32, a few copies of each alive at a time. `experts`: those inside the
    experts too; the native backend states its own."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    inner = config.intermediate_size
    if experts:
        inner = max(inner, config.num_experts_per_tok * (config.moe_intermediate_size + config.hidden_size))
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
