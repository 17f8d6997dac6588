"""What a model's steps, its loading and its adapters take, whatever the backends. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import ROUTERS

_BF16, _F32 = 2, 4
_KEPT_BYTES, _KEPT_PART = 1 << 30, 32  # of a training micro-batch's layers: at least, and of a device's memory
TARGETS = ("attention", "mlp")  # of a run that trains an adapter
TYPICAL_RANK = 16  # of an adapter, where none is known
LOGIT_ROWS = 128  # that training makes at a time
_WEIGHT_FILES = (".safetensors", ".bin", ".pt")


def buffer_row_bytes(config: ModelConfig, *, experts: bool = True) -> int:
    """A step's activations for each token, float32, a few copies of each alive at a time. `experts`: those inside the
    experts too; the native backend states its own."""
    return _row_bytes(config, max(layer.attention.row_values(config.hidden_size) for layer in config.layers), experts)


def _row_bytes(config: ModelConfig, attention: int, experts: bool) -> int:
    """`attention`: values of that of a layer."""
    hidden = config.hidden_size
    mlp = max(
        layer.mlp.row_values(hidden) - (0 if experts else layer.mlp.expert_values(hidden)) for layer in config.layers
    )
    kept = 3 if config.predicts else 0  # the hidden states, and they beside the next tokens' embeddings
    return _F32 * ((6 + kept) * hidden + attention + mlp)


def logits_bytes(config: ModelConfig, sequences: int) -> int:
    """Of a step that samples for so many sequences, float32, a few copies."""
    return _F32 * 3 * sequences * config.vocab_size


def loading_bytes(config: ModelConfig) -> int:
    """The largest stage between file and backend: one layer's experts in bf16, or the embedding in float32."""
    experts = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size * _BF16
    return max(experts if config.sparse_layers else 0, config.vocab_size * config.hidden_size * _F32)


def adapter_bytes_per_rank(config: ModelConfig) -> int:
    """A bf16 adapter on attention and every expert, the shared one too, per unit of rank."""
    values = sum(sum(_linear_values(config, attention=attention)) for attention in (True, False))
    return _BF16 * values + expert_adapter_bytes_per_rank(config)


def _linear_values(config: ModelConfig, *, attention: bool) -> Iterator[int]:
    """Of A and B per unit of rank, of the projections of attention, or of all others."""
    for index in range(config.num_hidden_layers):
        for module in config.modules(index):
            adapted = module.kind == "linear" and module.name not in ROUTERS
            if adapted and module.name.startswith("self_attn.") is attention:
                yield sum(module.shape)


def expert_adapter_bytes_per_rank(config: ModelConfig, element_bytes: int = _BF16) -> int:
    """Its part in routed experts, in all layers."""
    experts = len(config.without_mtp.sparse_layers) * config.num_experts
    return element_bytes * 3 * experts * (config.hidden_size + config.moe_intermediate_size)


def training_row_bytes(config: ModelConfig) -> int:
    """`buffer_row_bytes` of training beside serving: what a layer's backward needs of each token."""
    return _row_bytes(config, max(layer.attention.trained_values(config.hidden_size) for layer in config.layers), True)


def kept_bytes(limit_bytes: int) -> int:
    """For what layers of a training micro-batch keep for their backward, on a device with so much memory."""
    return max(_KEPT_BYTES, limit_bytes // _KEPT_PART)


def layers_kept(config: ModelConfig, tokens: int, kept: int) -> int:
    """How many layers of a micro-batch keep what their backward needs, in `kept` bytes; the others are computed again.
    A smaller micro-batch may keep more of them, in the same memory."""
    return min(config.num_hidden_layers, kept // (tokens * training_row_bytes(config)))


def training_bytes(config: ModelConfig, tokens: int, kept: int) -> int:
    """Of a micro-batch beside serving (`training/service`): each layer's input, what the forward of some layers keeps
    for their backward, of one more, and the gradients of that, and the logits of `LOGIT_ROWS` rows, a few
    copies; float32."""
    inputs, row = config.num_hidden_layers * config.hidden_size * _F32, training_row_bytes(config)
    kept = min(config.num_hidden_layers * tokens * row, kept)
    return kept + tokens * (inputs + 2 * row) + logits_bytes(config, LOGIT_ROWS)


def training_expert_bytes(config: ModelConfig, tokens: int, kept: int) -> int:
    """Of `training_bytes` what is the experts', which are on the CPU where the rest is on a GPU."""
    row = _F32 * max(layer.mlp.expert_values(config.hidden_size) for layer in config.layers)
    return (layers_kept(config, tokens, kept) + 2) * tokens * row


def training_run_bytes(config: ModelConfig, rank: int, targets: Collection[str] = TARGETS) -> int:
    """A run on attention, on every expert, or on both: masters, gradients and two moments, float32."""
    stored = config.of_safetensors  # an adapter in training has the modules of its file
    values = sum(_linear_values(stored, attention=True)) if "attention" in targets else 0
    if "mlp" in targets:
        values += sum(_linear_values(stored, attention=False))
    return 4 * _F32 * rank * values + training_run_expert_bytes(config, rank, targets)


def training_run_expert_bytes(config: ModelConfig, rank: int, targets: Collection[str] = TARGETS) -> int:
    """Its part in routed experts."""
    values = expert_adapter_bytes_per_rank(config.of_safetensors) // _BF16 if "mlp" in targets else 0
    return 4 * _F32 * rank * values


def file_bytes(path: str) -> int:
    """Weight files of an adapter's folder, or a file's size; 0 if there is nothing (loading it says why)."""
    try:
        place = Path(os.path.expanduser(path))
        if not place.is_dir():
            return place.stat().st_size if place.is_file() else 0
        return sum(p.stat().st_size for p in place.iterdir() if p.suffix in _WEIGHT_FILES and p.is_file())
    except (OSError, RuntimeError, ValueError):  # no home, too long, a NUL, vanished meanwhile
        return 0
