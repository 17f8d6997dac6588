"""Tiny models as GGUF files: llama.cpp's names, metadata and order of rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from testing.models.block_types import encode
from testing.models.delta import GGUF_PARTS, GGUF_VECTORS, Change, by_kind, changes
from testing.models.tiny import STATEFUL, WIDE_EXPERTS, stored_parameters

GGUF_NAMES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "mixtral": "llama",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
}


def gguf_tensors(model: PreTrainedModel) -> dict[str, str]:
    """{parameter of the transformers model or `<layer>.<projection>` of fused experts: name in a GGUF file}."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not model.config.tie_word_embeddings:
        names["lm_head.weight"] = "output.weight"
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.router": "ffn_gate_inp",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    } | GGUF_PARTS
    if model.config.model_type in ("glm4_moe", "gpt_oss", *STATEFUL):
        parts["post_attention_layernorm"] = "post_attention_norm"
    for name in stored_parameters(model):
        fields = name.split(".", 3)
        if len(fields) < 4:
            continue
        layer, rest = fields[2], fields[3]
        if rest == "mlp.experts.gate_up_proj":
            names[f"{layer}.gate"] = f"blk.{layer}.ffn_gate_exps.weight"
            names[f"{layer}.up"] = f"blk.{layer}.ffn_up_exps.weight"
        elif rest == "mlp.experts.down_proj":
            names[f"{layer}.down"] = f"blk.{layer}.ffn_down_exps.weight"
        elif rest in GGUF_VECTORS:
            names[name] = f"blk.{layer}.{GGUF_VECTORS[rest]}"
        elif rest == "linear_attn.in_proj_qkvz.weight":
            names[name] = f"blk.{layer}.attn_qkv.weight"
        elif rest == "self_attn.sinks":
            names[name] = f"blk.{layer}.attn_sinks.weight"
        elif rest.endswith("proj_bias"):
            for part in ("down",) if "down" in rest else ("gate", "up"):
                names[f"{layer}.{part}_bias"] = f"blk.{layer}.ffn_{part}_exps.bias"
        else:
            part, suffix = rest.rsplit(".", 1)
            if suffix == "e_score_correction_bias":
                names[name] = f"blk.{layer}.exp_probs_b.bias"
                continue
            names[name] = f"blk.{layer}.{parts[part]}.{suffix}"
    return names


def _latent_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig, expanded: bool) -> None:
    rope, sigmoid = config.rope_parameters, config.model_type in ("deepseek_v3", "glm4_moe_lite")
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    if expanded:
        writer.add_key_length(head)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config.v_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if sigmoid:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if rope.get("mscale_all_dim") is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def gguf_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig, expanded: bool = False) -> None:
    """The keys that llama.cpp's converter writes for the family, without the tokenizer. `expanded`: those that it wrote
    for latent attention at first."""
    rope = config.rope_parameters
    extra = config.num_nextn_predict_layers if config.model_type == "glm4_moe" else 0  # others' are not converted
    writer.add_block_count(config.num_hidden_layers + extra)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if (inner := getattr(config, "intermediate_size", None)) is not None:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    latent = getattr(config, "kv_lora_rank", None) is not None
    writer.add_head_count_kv(1 if latent and not expanded else config.num_key_value_heads)
    if latent:
        _latent_metadata(writer, config, expanded)
    elif (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(getattr(config, "n_routed_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        wide = config.model_type in WIDE_EXPERTS
        writer.add_expert_feed_forward_length(config.intermediate_size if wide else config.moe_intermediate_size)
    if (partial := rope.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int(config.head_dim * partial))
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if extra:
            writer.add_nextn_predict_layers(extra)
    if config.model_type in STATEFUL:
        if config.model_type != "qwen3_next":
            writer.add_rope_dimension_sections([*rope.get("mrope_section", (11, 11, 10)), 0])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
        writer.add_full_attention_interval(4)  # whatever the layers are; the array goes before it
    if (shared := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(shared)
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    eos = config.eos_token_id
    if eos is not None:
        writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)


def tokenizer_metadata(size: int) -> dict[str, Any]:
    """For `save_gguf`: what llama.cpp asks of a vocabulary of so many tokens before it reads a model."""
    kinds = [int(gguf.TokenType.NORMAL)] * (size - 1) + [int(gguf.TokenType.CONTROL)]
    own = {"model": "gpt2", "pre": "qwen2", "tokens": [f"t{i}" for i in range(size)], "token_type": kinds}
    own |= {"merges": ["t 0"]}
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def in_pairs(weight: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Rows of q or k [heads x dim, in] as llama.cpp has them for `llama`: values that are rotated together are
    neighbours."""
    dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
    return weight.reshape(-1, 2, dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def in_halves(weight: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """The inverse of `in_pairs`."""
    dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
    return weight.reshape(-1, dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _changes(name: str, config: PreTrainedConfig) -> tuple[Change, Change]:
    """How a parameter becomes what the file has, and back."""
    if config.model_type in STATEFUL and not name[0].isdigit():
        return changes(name, config)
    if config.model_type == "mixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        return lambda weight: in_pairs(weight, config), lambda weight: in_halves(weight, config)
    return lambda weight: weight, lambda weight: weight


def _add_halves(
    writer: gguf.GGUFWriter, stored: str, weight: torch.Tensor, config: PreTrainedConfig, kind: str, seed: int
) -> None:
    """Latent keys, transposed, and values by heads; `weight` gets what the file holds."""
    heads = weight.data.view(config.num_attention_heads, -1, weight.shape[1])
    keys, values = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
    for name, part, across in (("attn_k_b", keys, True), ("attn_v_b", values, False)):
        data, held = encode(part.transpose(1, 2) if across else part, kind, seed)
        part.copy_(held.transpose(1, 2) if across else held)
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(stored.replace("attn_kv_b", name), data, raw_dtype=raw)


def _add_by_kind(
    writer: gguf.GGUFWriter, stored: str, weight: torch.Tensor, config: PreTrainedConfig, kind: str, seed: int
) -> None:
    """Queries, keys and values of a delta net, and z apart; `weight` gets what the file holds."""
    parts = by_kind(weight.data, config)
    for name, held in ((stored, parts[:3]), (stored.replace("attn_qkv", "attn_gate"), parts[3:])):
        data, values = encode(torch.cat([part.flatten(0, 1) for part in held]), kind, seed)
        found_parts = torch.split(values, [part.shape[0] * part.shape[1] for part in held])
        for part, found in zip(held, found_parts, strict=True):
            part.copy_(found.view(part.shape))
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])


def _expert_part(state: dict[str, torch.Tensor], at: str, name: str, family: str) -> torch.Tensor:
    """A view of what a GGUF tensor of experts holds: a projection [E, out, in] or its bias [E, out].
    `name`: gate, up, both of them, or down."""
    projection, _, bias = name.partition("_")
    fused = state[f"{at}.{'down_proj' if projection == 'down' else 'gate_up_proj'}{'_bias' if bias else ''}"]
    if family == "gpt_oss":  # gate and up by turns, inputs before outputs
        fused = fused if bias else fused.transpose(1, 2)
        return {"gate": fused[:, ::2], "up": fused[:, 1::2], "down": fused}[projection]
    half = fused.shape[1] // 2
    return {"gate": fused[:, :half], "up": fused[:, half:]}.get(projection, fused)


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    expert_type: str | dict[str, str] = "Q8_0",
    dense_type: str = "Q8_0",
    split: int | None = None,
    types: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    vectors: bool = False,
    expanded: bool = False,
    early: bool = False,
    fused: bool = False,
    more: dict[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """Write the model as llama.cpp's converter would (norms, biases, routers F32) and return, in float32, the model
    that the file holds: `model` up to quantisation, or random in tensors of types that only exist as blocks.

    `expert_type` is one type or {"gate": ..., "up": ..., "down": ...}; `types` sets single tensors by GGUF name;
    `split` is the most tensors per file (the files are then named `<stem>-00001-of-0000N.gguf`); `metadata` adds
    or replaces string, number, bool or list values; `vectors`: a projection to one value is stored as a vector;
    `expanded`: latent keys and values have one tensor, as llama.cpp wrote them at first; `early`: so have all wide
    projections of Qwen3-Next's delta nets; `fused`: gate and up of experts have one tensor;
    `more`: tensors by GGUF name, written as they are.
    """
    held = copy.deepcopy(model).float()
    state = stored_parameters(held)
    writer = gguf.GGUFWriter(path, GGUF_NAMES[model.config.model_type], split_max_tensors=split or 0)
    gguf_metadata(writer, model.config, expanded)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for seed, (name, stored) in enumerate(gguf_tensors(model).items()):
        layer, _, projection = name.partition(".")
        if fused and layer.isdigit() and projection in ("gate", "up"):
            if projection == "up":
                continue
            projection, stored = "both", stored.replace("ffn_gate", "ffn_gate_up")
        if layer.isdigit():
            part = _expert_part(state, f"model.layers.{layer}.mlp.experts", projection, model.config.model_type)
            kind = expert_type if isinstance(expert_type, str) else expert_type.get(projection, "F32")
            kind = "F32" if projection.endswith("_bias") else kind
        else:
            part = state[name]
            kind = "F32" if part.ndim != 2 or name.endswith(("gate.weight", "router.weight")) else dense_type
        kind = (types or {}).get(stored, kind)
        if stored.endswith("attn_kv_b.weight") and not expanded:
            _add_halves(writer, stored, part, model.config, kind, seed)
            continue
        if name.endswith("in_proj_qkvz.weight") and early:
            stored = stored.replace("attn_qkv", "ssm_in")
        elif name.endswith("in_proj_qkvz.weight"):
            _add_by_kind(writer, stored, part, model.config, kind, seed)
            continue
        there, back = _changes(name, model.config)
        data, values = encode(there(part), kind, seed)
        with torch.no_grad():
            part.copy_(back(values))
        if vectors and part.ndim == 2 and part.shape[0] == 1:
            data = data[0]
        writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    for stored, values in (more or {}).items():
        writer.add_tensor(stored, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
