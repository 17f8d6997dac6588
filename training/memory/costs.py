"""Bytes of a training run's parts, from the model's sizes and the settings. Torch-free.

Per token, layer and part; n heads of d, q = n d, kv likewise, e bytes an element (2 with bf16, else 4):

    norms                  8 H + 8                      the float32 input of each, and its scale
    norms of heads         4 (q + kv) + 4 heads
    attention, sdpa        e (2 q + 2 kv') + 4 n        kv' = kv, or q where a mask makes transformers repeat the heads
    attention, eager       3 e q + n S (4, or 6 if e = 2)   S: tokens of a row
    a mask, sdpa           e S, which each layer makes of the one that it gets
    sinks, sdpa            16 e (n + n')                n' heads of kv'; 8 values more of each vector
    sinks, eager           n (12 + e (S + 1)) instead
    its gated output       2 e q
    gated delta net        c (4 e + 2) + n (d_k (3 e + 18) + 20 d_v + 1408)   as torch computes it, c channels; in
                           chunks of 64 positions, to which a row is filled up; measured
    LoRA of a projection   4 in + 4 r, its float32 input; in float32 projections of one input share it
    dropout                4 in, its noise; nothing is shared then
    router                 4 E + 12 k + 4
    dense or shared MLP    3 e I, and e H + 2 e for a shared one's gate
    routed experts         e H + 2 k (I + r) e (not with recompute) + 12 k + 4
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.architectures.config import ModelConfig
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.mlp import Dense
from training.config import TrainConfig
from training.config.fields import ATTENTION_TARGETS, EXPERT_TARGETS
from training.names import transformers_name

MASTER_BYTES = 4  # of a LoRA parameter: float32
STATE_BYTES = 16  # of a trained one: master, gradient, AdamW's two moments
LOCKED_BYTES = 4  # more at most, of a gradient in page-locked memory, which is handed out in powers of two
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_TARGETS = (*ATTENTION_TARGETS, *EXPERT_TARGETS)
SINK_VALUES = 8  # more of each vector of a head with a sink: one, and as many as GPU kernels count in
_DELTA_CHUNK = 64  # positions that transformers computes at once
_CHUNK_ROWS = 4096  # rows that the experts' backward pass computes at a time


@dataclass(frozen=True)
class Run:
    """A run as the formulas need it: `rows` of `length` tokens in a micro-batch."""

    model: ModelConfig
    config: TrainConfig
    rows: int
    length: int

    @classmethod
    def of(cls, model: ModelConfig, config: TrainConfig) -> Run:
        """The largest micro-batch of training."""
        return cls(model, config, _rows(config), config.cutoff_len)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def element(self) -> int:
        return 2 if self.config.bf16 else 4

    @property
    def rank(self) -> int:
        """The largest."""
        return max(run.lora_rank for run in self.config.runs())

    @property
    def masked(self) -> bool:
        """Whether attention gets an explicit mask."""
        return self.config.packing or self.config.stage == "dpo"


def _rows(config: TrainConfig) -> int:
    """Of cutoff_len tokens, of all adapters; of a preference both answers."""
    return sum(run.per_device_train_batch_size for run in config.runs()) * (2 if config.stage == "dpo" else 1)


def largest_micro_batch(config: TrainConfig) -> int:
    """Tokens of it, in training or evaluation."""
    evaluated = 0
    if config.eval_strategy != "no":
        evaluated = config.per_device_eval_batch_size * (2 if config.stage == "dpo" else 1)
    return max(_rows(config), evaluated) * config.cutoff_len


def is_target(config: TrainConfig, name: str) -> bool:
    """Whether a projection (the last part of its name) has LoRA."""
    return config.lora_target == ("all",) or name in config.lora_target


def dense_lora(model: ModelConfig, config: TrainConfig, layer: int) -> list[tuple[str, int, int]]:
    """(name, in, out) of the layer's projections with LoRA beside the routed experts."""
    found = []
    for module in model.modules(layer):
        last = transformers_name(module.name).rpartition(".")[2]
        if module.kind == "linear" and last in _TARGETS and is_target(config, last):
            found.append((module.name, module.shape[1], module.shape[0]))
    return found


def lora_parameters(model: ModelConfig, config: TrainConfig) -> tuple[int, int, int]:
    """Of one adapter: (beside the experts, trained in experts, in experts for projections without LoRA, whose matrices
    are there but never change)."""
    dense = sum(size_in + size_out for layer in range(model.num_hidden_layers)
                for _, size_in, size_out in dense_lora(model, config, layer))  # fmt: skip
    trained = sum(is_target(config, name) for name in _EXPERT_PROJECTIONS)
    one = len(model.sparse_layers) * model.num_experts * (model.hidden_size + model.moe_intermediate_size)
    frozen = len(_EXPERT_PROJECTIONS) - trained if trained else 0
    return config.lora_rank * dense, config.lora_rank * one * trained, config.lora_rank * one * frozen


def layer_bytes(run: Run, layer: int) -> int:
    """What a token keeps of a layer for the backward pass, beside its routed experts."""
    model, e = run.model, run.element
    attention, mlp = model.layers[layer].attention, model.layers[layer].mlp
    total = 8 * model.hidden_size + 8
    if isinstance(attention, DeltaNet):
        total += _delta_bytes(run, attention)
    else:
        total += _latent_bytes(run, attention) if isinstance(attention, Latent) else _grouped_bytes(run, attention)
    total += _lora_bytes(run, layer)
    if isinstance(mlp, Dense):
        return total + 3 * e * mlp.intermediate
    total += 4 * mlp.experts + 12 * mlp.top_k + 4
    if mlp.shared is not None:
        total += e * (3 * mlp.shared.mlp.intermediate + model.hidden_size + 2)
    return total


def _grouped_bytes(run: Run, attention: GroupedQuery) -> int:
    heads, q, kv, e = attention.heads, attention.q_width, attention.kv_width, run.element
    total = 0 if attention.qk_norm == "none" else 4 * (q + kv) + 4 * (heads + attention.kv_heads)
    if attention.gated:
        total += 2 * e * q
    if run.config.flash_attn == "disabled":
        scores = heads * ((run.length + 1) * e + 12) if attention.sinks else _score_bytes(run, heads)
        return total + 3 * e * q + scores
    masked = run.masked or (attention.window is not None and run.length >= attention.window)
    kv_heads, width = heads if masked else attention.kv_heads, attention.head_dim
    if attention.sinks:
        width += SINK_VALUES
    return total + _mask_row_bytes(run, masked) + e * width * 2 * (heads + kv_heads) + 4 * heads


def _mask_row_bytes(run: Run, masked: bool) -> int:
    """A token's row of the mask that fused attention makes of bools, in each layer."""
    return run.length * run.element if masked else 0


def _delta_bytes(run: Run, net: DeltaNet) -> int:
    e, filled = run.element, -(-run.length // _DELTA_CHUNK) * _DELTA_CHUNK
    heads = net.value_heads * (net.key_dim * (3 * e + 18) + 20 * net.value_dim + 22 * _DELTA_CHUNK)
    return net.channels * (4 * e + 2) + heads * filled // run.length


def _latent_bytes(run: Run, attention: Latent) -> int:
    """Expanded, as transformers computes it: of each head queries, keys, and what is made of the latents."""
    heads, e = attention.heads, run.element
    total = 4 * ((attention.q_rank or 0) + attention.kv_rank) + 8
    total += 2 * e * attention.q_width
    if e == 2:  # rotations are in float32
        total += 4 * (heads + 1) * attention.rope_dim
    if run.config.flash_attn == "disabled":
        return total + e * heads * attention.value_dim + _score_bytes(run, heads)
    total += _mask_row_bytes(run, run.masked)
    return total + e * heads * (attention.expanded_dim + attention.value_dim) + 4 * heads


def _score_bytes(run: Run, heads: int) -> int:
    return heads * run.length * (6 if run.element == 2 else 4)


def _lora_bytes(run: Run, layer: int) -> int:
    total, attention = 0, run.model.layers[layer].attention
    sinks = isinstance(attention, GroupedQuery) and attention.sinks  # then the output is a part of what is kept
    keeps_output = run.config.flash_attn != "disabled" and not sinks
    inputs: dict[tuple[str, int], int] = {}  # projections of one input
    for name, size_in, _ in dense_lora(run.model, run.config, layer):
        total += 4 * run.rank
        owner, _, last = name.rpartition(".")
        shared = (owner, size_in) if last not in ("o_proj", "down_proj") else (name, size_in)
        inputs[shared] = inputs.get(shared, 0) + 1
    for (owner, size_in), count in inputs.items():
        if run.config.lora_dropout:
            total += 8 * size_in * count
        elif run.element == 2:
            total += 4 * size_in * count
        elif not (owner.endswith("o_proj") and keeps_output):
            total += 4 * size_in
    return total


def expert_bytes(run: Run) -> int:
    """What a token keeps of a layer's routed experts."""
    model, e = run.model, run.element
    return e * model.hidden_size + _kept_bytes(run) + 12 * model.num_experts_per_tok + 4


def _kept_bytes(run: Run) -> int:
    """Gate and up of a token's choices, and what A of both gives, as the CPU keeps them."""
    if run.config.kt_cpu_activation == "recompute":
        return 0
    return 2 * run.model.num_experts_per_tok * (run.model.moe_intermediate_size + run.rank) * run.element


def locked_expert_bytes(run: Run, tokens: int) -> int:
    """The same of so many tokens beside a GPU, where it is page-locked memory: torch hands it out in powers of two."""
    model, e = run.model, run.element
    k = model.num_experts_per_tok
    sizes = (tokens * each for each in (model.hidden_size * e, _kept_bytes(run), 8 * k, 4 * k))
    return sum(1 << (size - 1).bit_length() for size in sizes if size) + 4 * tokens


def logits_bytes(run: Run) -> int:
    """Logits, their float32 form, its log-softmax, and the gradients of them."""
    per_token = 12 if run.element == 4 else 16
    if run.config.stage == "dpo":  # the reference's, while the policy's are there
        per_token += run.element + 4
    return run.tokens * run.model.vocab_size * per_token


def buffer_bytes(run: Run) -> int:
    """Gradients and intermediate results of the layer that is being computed, a few of each."""
    model = run.model
    hidden = model.hidden_size
    attention = max(layer.attention.row_values(hidden) for layer in model.layers)
    mlp = max(layer.mlp.row_values(hidden) - layer.mlp.expert_values(hidden) for layer in model.layers)
    return run.tokens * 4 * (6 * hidden + attention + mlp)


def scratch_bytes(run: Run) -> int:
    """What the experts' kernels take: inputs, gradients and gated values of each (token, expert) of a chunk of rows."""
    model, e = run.model, run.element
    rows = min(run.tokens, _CHUNK_ROWS)
    per_choice = 3 * model.hidden_size * e + 4 * model.moe_intermediate_size * e + 24 * run.rank
    if run.config.kt_cpu_activation == "recompute":
        per_choice += 2 * model.moe_intermediate_size * e
    return rows * model.num_experts_per_tok * per_choice + (64 << 20)


def mask_bytes(run: Run) -> int:
    """Of packed rows: which tokens see which; another one where there are windows."""
    windows = any(isinstance(a, GroupedQuery) and a.window is not None for a in run.model.paged_attention)
    size = run.element if run.config.flash_attn == "disabled" else 1
    return run.rows * run.length**2 * size * (1 + windows) if run.config.packing else 0
