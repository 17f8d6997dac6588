"""What the backends state that weights take, each by its name in a placement; before anything is loaded."""

from __future__ import annotations

from math import prod

from engine.architectures.parts.mlp import FLOAT32_MODULES
from engine.experts.gpu.layout import expert_layout
from engine.experts.kt import guard as kt
from engine.experts.native import layer_bytes as native_layer_bytes
from engine.linear import native as native_linear
from engine.linear.gpu import embedding_matrix
from engine.memory.plan import Inputs, Statements
from engine.units import format_bytes
from engine.weights.latent import LATENT_UP, held_apart
from engine.weights.layout import EMBED
from engine.weights.packed import packed_bytes, plain_format, repacks
from engine.weights.store import WeightTensor
from engine.weights.tiled.layout import matrix_of

_BF16, _F32 = 2, 4
_FLOAT32_WEIGHTS = tuple(f"{name}.weight" for name in FLOAT32_MODULES)
_ON_NATIVE = ("native", "hybrid")
_EXPERT_BIASES = tuple(f".mlp.experts.{part}_bias" for part in ("gate", "up", "down"))


def expert_bytes(inputs: Inputs, layer: int) -> int:
    """A layer's routed experts, with their biases."""
    store, backend = inputs.source.experts(layer), inputs.expert_backend(layer)
    if backend == "kt":
        return kt.layer_bytes(store, inputs.source.config, inputs.kt_method)
    if backend in _ON_NATIVE:
        return native_layer_bytes(store, inputs.element_bytes, inputs.expert_quantise)
    biases = _F32 * sum(prod(bias.shape) for bias in store.biases.values())
    if inputs.gpu_packs:
        expert = expert_layout(store, inputs.activation_bytes, inputs.expert_quantise)
        return store.num_experts * expert.num_bytes + biases
    return store.num_weights * inputs.element_bytes + biases


def weight_bytes(inputs: Inputs) -> int:
    """Everything but routed experts: norms as activations, routers in float32 (beside bf16 activations on a GPU in bf16
    too, for many rows), projections as the linear backend holds them. The embedding is a table as wide as activations
    (a bf16 one as weights), unless it is held as in the file. A tied head is a projection of its own, which may serve
    as the embedding."""
    source, total = inputs.source, 0
    router = _F32 + (_BF16 if inputs.gpu is not None and inputs.activation_bytes == _BF16 else 0)
    for name in source.names():
        tensor = source.tensor(name)
        if name.endswith(_FLOAT32_WEIGHTS):
            total += prod(tensor.shape) * router
        elif name == EMBED:
            total += _embedding_bytes(inputs, tensor)
        elif name.endswith(LATENT_UP):
            total += _latent_up_bytes(inputs, tensor)
        elif name.endswith(_EXPERT_BIASES):
            continue
        elif len(tensor.shape) == 2:
            total += _linear_bytes(inputs, tensor)
        else:
            total += prod(tensor.shape) * inputs.activation_bytes
    return total + (_linear_bytes(inputs, source.tensor(EMBED)) if source.config.tie_word_embeddings else 0)


def _linear_bytes(inputs: Inputs, tensor: WeightTensor) -> int:
    if inputs.linear_backend == "native":
        return native_linear.weight_bytes(tensor, inputs.element_bytes, inputs.config.quantise)
    if inputs.linear_backend == "gpu":
        return matrix_of(tensor, inputs.activation_bytes, inputs.config.quantise).num_bytes
    return prod(tensor.shape) * inputs.element_bytes


def _latent_up_bytes(inputs: Inputs, tensor: WeightTensor) -> int:
    if inputs.linear_backend == "native":
        return sum(_linear_bytes(inputs, half) for half in held_apart(inputs.source.config, tensor))
    return prod(tensor.shape) * inputs.element_bytes


def tiled_projections(inputs: Inputs) -> bool:
    """Whether a GPU holds some projection quantised."""
    source = inputs.source
    names = [name for name in source.names() if name.endswith("_proj.weight")]
    matrices = (matrix_of(source.tensor(name), inputs.activation_bytes, inputs.config.quantise) for name in names)
    return any(not matrix.plain for matrix in matrices)


def _embedding_bytes(inputs: Inputs, tensor: WeightTensor) -> int:
    if inputs.linear_backend == "native":
        tied, quantise = inputs.source.config.tie_word_embeddings, inputs.config.quantise
        form = native_linear.embedding_bytes(tensor, inputs.element_bytes, quantise, tied)
        if form is not None:
            return form
    if inputs.linear_backend == "gpu" and (matrix := embedding_matrix(tensor, inputs.activation_bytes)):
        return 0 if inputs.source.config.tie_word_embeddings else matrix.num_bytes
    return prod(tensor.shape) * (inputs.element_bytes if tensor.type == "BF16" else inputs.activation_bytes)


def dequantised_notes(inputs: Inputs) -> list[str]:
    """Per type that the native kernels have no packed format for: how many tensors of it they hold dequantised, and
    what that costs."""
    tensors: dict[str, int] = {}
    more: dict[str, int] = {}

    def add(tensor: WeightTensor, count: int, extra: int) -> None:
        tensors[tensor.type] = tensors.get(tensor.type, 0) + count
        more[tensor.type] = more.get(tensor.type, 0) + extra

    source = inputs.source
    for layer in source.config.sparse_layers:
        if inputs.expert_backend(layer) in _ON_NATIVE:
            store = source.experts(layer)
            for projection, held in store.projections():
                tensor = store.expert(projection, 0)
                if tensor.quantised and not repacks(tensor.type):
                    packed = packed_bytes(tensor, plain_format(inputs.element_bytes, inputs.expert_quantise))
                    count = len(held) if isinstance(held, list) else 1
                    add(tensor, count, store.num_experts * (packed - tensor.num_bytes))
    if inputs.linear_backend == "native":
        names = [n for n in source.names() if n != EMBED and not n.endswith(_FLOAT32_WEIGHTS)]
        names += [EMBED] if source.config.tie_word_embeddings else []
        for tensor in (held for name in names for held in held_apart(source.config, source.tensor(name))):
            if len(tensor.shape) == 2 and tensor.quantised and not repacks(tensor.type):
                packed = packed_bytes(tensor, plain_format(inputs.element_bytes, inputs.config.quantise))
                add(tensor, 1, packed - tensor.num_bytes)
    return [
        f"{count} tensors of type {type} are dequantised when loading, there is no packed format for it: "
        f"{format_bytes(more[type])} more than in the file"
        for type, count in sorted(tensors.items())
    ]


STATED = Statements(expert_bytes, weight_bytes, dequantised_notes)
