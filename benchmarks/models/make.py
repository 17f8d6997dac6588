"""Random models of the shapes of `benchmarks.models.shapes` with fewer layers, and random adapters for Qwen3-30B-A3B's,
as two servers read them.

    python -m benchmarks.models.make --out DIR --layers 8 --type Q8_0
    python -m benchmarks.models.make --out DIR --layers 8 --type MXFP4 --shape gpt-oss-20b
    python -m benchmarks.models.make --out DIR --layers 8 --adapters 4

A model is one GGUF file. Weights are drawn as valid blocks of the stored type, uniform around zero with a standard
deviation of 1 / sqrt(inputs): activations stay near 1 through all layers, so attention, routing and sampling are those
of a model and not of zeros or infinities. As many tensors as threads are in memory. Q4_K_M is llama.cpp's mix of Q4_K
and Q6_K; gpt-oss' MXFP4 is of its experts, all other matrices are Q8_0 then.

An adapter is written twice: NAME/ (fused expert tensors, as ktserve reads them) and NAME.gguf (as llama-server does:
`--lora NAME.gguf --lora-init-without-apply`; a request chooses with `"lora": [{"id": 0, "scale": 1.0}]`).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGML
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from benchmarks.models.shapes import SHAPES, Shape, tensor_types
from engine.weights.threads import in_order, loading_threads
from testing.models.block_types import encode
from testing.models.gguf_writer import gguf_metadata

Bytes = NDArray[np.uint8]
TYPES = ("Q8_0", "Q4_K_M", "BF16")
_FILE_TYPES = {"Q8_0": 7, "Q4_K_M": 15, "BF16": 32, "MXFP4": 38}  # general.file_type, as llama.cpp numbers them
_OTHER_FILE_TYPE = 1024  # its number for files that say nothing
_PATTERN_ROWS = 256  # drawn of a matrix whose type has no fill of its own, and repeated
_PIECE = 1 << 24  # blocks are drawn for so many bytes at a time


def write_model(path: Path, shape: Shape, mix: str, seed: int = 0) -> None:
    """One GGUF file, tensor by tensor. ValueError if a row does not divide into the type's blocks."""
    writer = gguf.GGUFWriter(path, shape.family)
    _describe(writer, shape, mix)
    tensors = list(tensor_types(shape, mix))
    for name, dims, type in tensors:
        block, size = gguf.GGML_QUANT_SIZES[type]
        if dims[-1] % block:
            raise ValueError(f"{name}: rows of {dims[-1]} do not divide into {type.name} blocks of {block}")
        stored = (*dims[:-1], dims[-1] // block * size)
        if type is GGML.F32:
            writer.add_tensor_info(name, dims, np.dtype(np.float32), math.prod(dims) * 4)
        else:
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rngs = np.random.default_rng(seed).spawn(len(tensors))
    draws = (partial(_tensor, rng, *tensor) for rng, tensor in zip(rngs, tensors, strict=True))
    for drawn in in_order(draws, loading_threads() + 1):
        writer.write_tensor_data(drawn)
    writer.close()


def _tensor(rng: np.random.Generator, name: str, dims: tuple[int, ...], type: GGML) -> NDArray[np.generic]:
    if name.endswith("norm.weight"):
        return np.ones(dims, np.float32)
    drawn = _draw(rng, dims, type, 1.0 if name == "token_embd.weight" else dims[-1] ** -0.5)
    return -np.abs(drawn) if name.endswith("ssm_a") else drawn  # states shrink


def _draw(rng: np.random.Generator, dims: tuple[int, ...], type: GGML, deviation: float) -> NDArray[np.generic]:
    if type is GGML.F32:
        return (rng.standard_normal(dims, np.float32) * deviation).astype(np.float32)
    block, size = gguf.GGML_QUANT_SIZES[type]
    if type not in _FILL:
        values = torch.randn(_PATTERN_ROWS, dims[-1]).mul_(deviation)
        data, _ = encode(values, type.name, seed=int(rng.integers(1 << 30)))
        return np.resize(data.view(np.uint8), (*dims[:-1], dims[-1] // block * size))
    out = np.empty(math.prod(dims) // block * size, np.uint8)
    step = _PIECE // size * size
    for at in range(0, out.size, step):
        part = out[at : at + step]
        part[:] = rng.integers(0, 1 << 64, -(-part.size // 8), np.uint64).view(np.uint8)[: part.size]
        _FILL[type](part.reshape(-1, size), deviation)
    return out.reshape(*dims[:-1], dims[-1] // block * size)


def _halves(value: float) -> Bytes:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _fill_bf16(blocks: Bytes, deviation: float) -> None:
    """Random sign and mantissa, one exponent: +-2^e [1, 2), of which the root mean square is 1.53 * 2^e."""
    exponent = round(math.log2(deviation / 1.53)) + 127
    words = blocks.view(np.uint16)
    np.bitwise_and(words, 0x807F, out=words)
    np.bitwise_or(words, exponent << 7, out=words)


def _fill_q8_0(blocks: Bytes, deviation: float) -> None:
    """d (half), 32 int8: w = d q."""
    blocks[:, :2] = _halves(deviation / (256 / math.sqrt(12)))


def _fill_q4_k(blocks: Bytes, deviation: float) -> None:
    """d, dmin (half), 8 scales and minima of 6 bits in 12 bytes, 256 nibbles: w = d s q - dmin m.

    Minima equal the scales and dmin = 7.5 d, so w = d s (q - 7.5) lies around zero. Scales are 32 ... 63.
    """
    spread = math.sqrt((16**2 - 1) / 12)
    d = deviation / (48 * spread)
    blocks[:, 0:2] = _halves(d)
    blocks[:, 2:4] = _halves(7.5 * float(np.float16(d)))
    first = (blocks[:, 4:8] & 31) | 32  # scales 0-3; bits 6-7 are the high bits of 4-7: 0b10 or 0b11
    high = (blocks[:, 8:12] & 0x40) | 0x80
    low = blocks[:, 12:16] & 15
    blocks[:, 4:8] = first | high
    blocks[:, 8:12] = first | high
    blocks[:, 12:16] = low | (low << 4)


def _fill_q6_k(blocks: Bytes, deviation: float) -> None:
    """128 low nibbles, 64 bytes of high pairs, 16 int8 scales, d (half): w = d s (q - 32). Scales: +-(64 ... 127)."""
    scales = blocks[:, 192:208].view(np.int8)
    sign = np.where(scales < 0, -1, 1).astype(np.int8)
    scales[:] = ((scales & 63) | 64) * sign
    blocks[:, 208:210] = _halves(deviation / (97.2 * 18.5))


def _fill_mxfp4(blocks: Bytes, deviation: float) -> None:
    """An exponent e, 32 codes of 4 bits: w = 2^(e - 127) c. The root mean square of all codes c is 2.93."""
    blocks[:, 0] = 127 + round(math.log2(deviation / 2.93))


_FILL = {
    GGML.BF16: _fill_bf16, GGML.Q8_0: _fill_q8_0, GGML.Q4_K: _fill_q4_k, GGML.Q6_K: _fill_q6_k,
    GGML.MXFP4: _fill_mxfp4,
}  # fmt: skip


def _describe(writer: gguf.GGUFWriter, shape: Shape, mix: str) -> None:
    writer.add_name(f"random-{shape.layers}L-{mix}")
    writer.add_file_type(_FILE_TYPES.get(mix, _OTHER_FILE_TYPE))
    if shape.described:
        described = CONFIG_MAPPING[shape.config["model_type"]](**shape.config)
        described.bos_token_id = described.eos_token_id = None  # of the vocabulary below
        gguf_metadata(writer, described)
    else:
        _describe_qwen3(writer, shape)
    writer.add_vocab_size(shape.vocabulary)
    tokens, merges = _vocabulary(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * (len(tokens) - 1) + [int(gguf.TokenType.CONTROL)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)


def _describe_qwen3(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(3 * shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.intermediate)


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Byte-level BPE: the 256 bytes, then pairs and triples of printable ASCII with their merges, then the end."""
    if not 257 <= size <= 257 + 94**2 + 94**3:
        raise ValueError(f"vocabulary {size}: 257 to {257 + 94**2 + 94**3}")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    tokens = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]
    ascii = [chr(b) for b in range(33, 127)]
    merges = []
    for longer in range(1, 3):
        for left in [t for t in tokens if len(t) == longer and all(c in ascii for c in t)]:
            for right in ascii:
                if len(tokens) == size - 1:
                    break
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    return [*tokens, "<|endoftext|>"], merges


# ---- adapters


def write_adapter(folder: Path, shape: Shape, rank: int = 16, seed: int = 1) -> None:
    """FOLDER/ and FOLDER.gguf with the same bf16 deltas on gate, up and down of every expert; alpha = rank."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    fused: dict[str, torch.Tensor] = {}
    writer = gguf.GGUFWriter(folder.parent / f"{folder.name}.gguf", shape.family)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    e, h, i = shape.experts, shape.hidden, shape.intermediate
    for layer in range(shape.layers):
        for name, out, inner in (("gate", i, h), ("up", i, h), ("down", h, i)):
            a = torch.randn(e, rank, inner, generator=generator).mul_(inner**-0.5).bfloat16()
            b = torch.randn(e, out, rank, generator=generator).mul_(0.1 * rank**-0.5).bfloat16()
            for side, tensor in (("a", a), ("b", b)):
                fused[f"layers.{layer}.experts.{name}_lora_{side}"] = tensor
                raw = tensor.view(torch.uint8).numpy()
                writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight.lora_{side}", raw, raw_dtype=GGML.BF16)
    save_file(fused, folder / "fused_expert_lora.safetensors")
    save_file({}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_path(out: Path, layers: int, mix: str, family: str = "qwen3moe") -> Path:
    return out / f"{'random' if family == 'qwen3moe' else family}-{layers}L-{mix}.gguf"


def adapter_path(out: Path, layers: int, index: int) -> Path:
    return out / f"lora-{layers}L-{index}"


def made_model(folder: Path, shape: Shape, mix: str) -> Path:
    """The file of `model_path`, which is written if it is not there."""
    path = model_path(folder, shape.layers, mix, shape.family)
    if not path.exists():
        print(f"writing {path.name} ...", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, shape, mix)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shape", choices=SHAPES, default=next(iter(SHAPES)))
    parser.add_argument("--type", choices=(*TYPES, "MXFP4"), action="append", default=[], help="may be repeated")
    parser.add_argument("--adapters", type=int, default=0, help="write so many adapters for this shape")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = replace(SHAPES[args.shape], layers=args.layers)
    args.out.mkdir(parents=True, exist_ok=True)
    for mix in args.type:
        path = model_path(args.out, args.layers, mix, shape.family)
        write_model(path, shape, mix, args.seed)
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")
    for index in range(args.adapters):
        folder = adapter_path(args.out, args.layers, index)
        write_adapter(folder, shape, args.rank, args.seed + 1 + index)
        print(f"{folder}, {folder}.gguf")


if __name__ == "__main__":
    main()
