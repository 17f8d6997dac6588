"""Writes the GGUF Q8_0 file that ships, as llama.cpp's converter lays a qwen3moe out, and measures what it wrote.

    python -m demo.export --hf DIR --out demo/model

DIR is what `python -m demo.train --out DIR` made. The adapters are copied to `adapters` beside the --out folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from demo.evaluate import failures, measure, table
from demo.nn.answer import answerer, hf_model
from demo.nn.lora import load_lora, merge
from demo.nn.network import Shape, State, load_model
from demo.paths import ADAPTERS, MODEL_FILE
from demo.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, SPECIAL, load_tokenizer, token_id

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def gguf_tensors(state: State) -> State:
    """The parameters under GGUF's names; gate and up are two tensors there."""
    out: State = {}
    for name, tensor in state.items():
        stem = name.removesuffix(".weight")
        if stem in _TOP:
            out[f"{_TOP[stem]}.weight"] = tensor
            continue
        _, _, layer, part = stem.split(".", 3)
        if part == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            out[f"blk.{layer}.ffn_gate_exps.weight"], out[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
        else:
            out[f"blk.{layer}.{_LAYER[part]}.weight"] = tensor
    return out


def _is_float(name: str, tensor: torch.Tensor) -> bool:
    """Whether llama.cpp keeps the tensor in float32: norms and the router."""
    return tensor.dim() == 1 or name.endswith("ffn_gate_inp.weight")


def write_gguf(path: Path, shape: Shape, state: State, tokenizer: Tokenizer) -> None:
    """Metadata, vocabulary, template and tensors. `state` is in float32 (see demo.nn.network)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    w = gguf.GGUFWriter(str(path), "qwen3moe")
    w.add_type("model")
    w.add_name("Tiny Kite")
    w.add_license("apache-2.0")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(shape.num_hidden_layers)
    w.add_context_length(shape.max_position_embeddings)
    w.add_embedding_length(shape.hidden_size)
    w.add_feed_forward_length(shape.intermediate_size)
    w.add_head_count(shape.num_attention_heads)
    w.add_head_count_kv(shape.num_key_value_heads)
    w.add_key_length(shape.head_dim)
    w.add_value_length(shape.head_dim)
    w.add_rope_freq_base(shape.rope_theta)
    w.add_layer_norm_rms_eps(shape.rms_norm_eps)
    w.add_expert_count(shape.num_experts)
    w.add_expert_used_count(shape.num_experts_per_tok)
    w.add_expert_feed_forward_length(shape.moe_intermediate_size)
    _add_vocabulary(w, shape, tokenizer)
    for name, tensor in gguf_tensors(state).items():
        data = np.ascontiguousarray(tensor.numpy(), np.float32)
        if _is_float(name, tensor):
            w.add_tensor(name, data)
        else:
            q8 = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(name, gguf.quants.quantize(data, q8), raw_dtype=q8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _add_vocabulary(w: Any, shape: Shape, tokenizer: Tokenizer) -> None:
    spec = json.loads(tokenizer.to_str())
    added = {entry["id"]: entry["content"] for entry in spec["added_tokens"]}
    by_id = {index: token for token, index in spec["model"]["vocab"].items()} | added
    if sorted(by_id) != list(range(shape.vocab_size)):
        raise ValueError(f"the tokenizer has {len(by_id)} tokens; the model needs ids 0 to {shape.vocab_size - 1}")
    kinds = [
        gguf.TokenType.CONTROL
        if by_id[i] in SPECIAL
        else gguf.TokenType.UNUSED
        if i in added
        else gguf.TokenType.NORMAL
        for i in range(shape.vocab_size)
    ]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([by_id[i] for i in range(shape.vocab_size)])
    w.add_token_types(kinds)
    w.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    w.add_eos_token_id(token_id(tokenizer, IM_END))
    w.add_bos_token_id(token_id(tokenizer, END_OF_TEXT))
    w.add_pad_token_id(token_id(tokenizer, END_OF_TEXT))
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)
    if token_id(tokenizer, IM_START) >= shape.vocab_size:
        raise ValueError(f"token {IM_START} lies outside the vocabulary of {shape.vocab_size}")


def read_gguf(path: Path, shape: Shape) -> State:
    """The parameters of a file that write_gguf wrote, dequantised to float32."""
    found = {
        t.name: torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32))
        for t in gguf.GGUFReader(str(path)).tensors
    }
    state: State = {}
    for name, target in _TOP.items():
        state[f"{name}.weight"] = found[f"{target}.weight"]
    for layer in range(shape.num_hidden_layers):
        for part, target in _LAYER.items():
            suffix = "" if part.startswith("mlp.experts") else ".weight"
            state[f"model.layers.{layer}.{part}{suffix}"] = found[f"blk.{layer}.{target}.weight"]
        halves = [found[f"blk.{layer}.ffn_{p}_exps.weight"] for p in ("gate", "up")]
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat(halves, dim=1)
    return state


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo.export", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--hf", type=Path, required=True, help="the folder that demo.train wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the GGUF file")
    parser.add_argument("--questions", type=int, default=200, help="questions of each kind in the measurement")
    args = parser.parse_args(argv)
    shape, state = load_model(args.hf / "base")
    tokenizer = load_tokenizer(args.hf / "base")
    write_gguf(args.out / MODEL_FILE, shape, state, tokenizer)
    served = read_gguf(args.out / MODEL_FILE, shape)
    results: dict[str, dict[str, float]] = {}
    for style in ("plain", *ADAPTERS):
        merged = served
        if style != "plain":
            target = args.out.parent / "adapters" / style
            if target.resolve() != (args.hf / "adapters" / style).resolve():
                shutil.copytree(args.hf / "adapters" / style, target, dirs_exist_ok=True)
            merged = merge(served, load_lora(target, shape))
        results[style] = measure(
            answerer(hf_model(shape, merged, "cpu"), tokenizer, "cpu", batch=100), style, args.questions
        )
        print(table(results), flush=True)
    missed = failures(results)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
