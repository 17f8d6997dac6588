"""Tiny models in the quantised forms of safetensors: FP8 in blocks, GPTQ, AWQ. Written from the formats' descriptions,
by other means than the readers use, with the values that they stand for."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.architectures.registry import architecture_of, config_from_hf
from engine.weights.scaled_blocks import F8, f8_blocks, int4_blocks
from testing.models.tiny import save_hf

FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def float_quantised_config(strategy: str) -> dict[str, Any]:
    """As compressed-tensors writes it of e4m3 weights whose scales are those of each "channel", "tensor" or "block"."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    weights |= {"block_structure": [128, 128]} if strategy == "block" else {}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignored = ["lm_head", "re:.*mlp.gate$"]
    named = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return named | {"config_groups": {"group_0": group}, "ignore": ignored, "kv_cache_scheme": None}


_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose value nibble i of a word holds


# of projections that vendors quantise; of a delta net not those to one value a head
_QUANTISED = (
    *("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"),
    *(f".in_proj_{part}.weight" for part in ("qkvz", "qkv", "z")),
)


def int4_config(method: str, group: int, **more: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"zero_point": True, "version": "gemm"} if method == "awq" else {"desc_act": False}
    return {"quant_method": method, "bits": 4, "group_size": group, **own, **more}


def fp8(values: torch.Tensor, rows: int = 128, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, k] -> (float8 [n, k], float32 scales of blocks of rows x columns, the float32 values they stand for)."""
    n, k = values.shape
    scales = torch.zeros(-(-n // rows), -(-k // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = values[rows * i : rows * i + rows, columns * j : columns * j + columns].abs().max() / 448
    each = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    stored = (values / each).to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * each


def int4(values: torch.Tensor, group: int, sym: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, k] -> (quants 0 to 15 [n, k], zero points and float16 scales [n, k / group], the float32 values)."""
    n, k = values.shape
    parts = values.float().reshape(n, k // group, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    span = torch.maximum(low.abs(), high.abs()) / 7.5 if sym else (high - low) / 15
    scales = span.to(torch.float16)
    each = scales.float()[..., None]
    zeros = torch.full_like(low, 8) if sym else (-low / scales.float()).round().clamp(0, 15)
    quants = ((parts / each).round() + zeros[..., None]).clamp(0, 15)
    return quants.reshape(n, k).int(), zeros.int(), scales, ((quants - zeros[..., None]) * each).reshape(n, k)


def gptq_tensors(quants: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, minus_one: bool) -> dict[str, Any]:
    group = quants.shape[1] // zeros.shape[1]
    stored = (zeros - 1) % 16 if minus_one else zeros
    return {
        "qweight": _words(quants.T.reshape(-1, 8, quants.shape[0]).transpose(1, 2), range(8)),
        "qzeros": _words(stored.T.reshape(zeros.shape[1], -1, 8), range(8)),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(quants.shape[1], dtype=torch.int32) // group,
    }


def awq_tensors(quants: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
    return {
        "qweight": _words(quants.T.reshape(quants.shape[1], -1, 8), _AWQ_OUTPUTS),
        "qzeros": _words(zeros.T.reshape(zeros.shape[1], -1, 8), _AWQ_OUTPUTS),
        "scales": scales.T.contiguous(),
    }


def _words(nibbles: torch.Tensor, order: Any) -> torch.Tensor:
    """[..., 8] -> int32 [...]: nibble i of a word is value order[i]."""
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int64)
    for i, value in enumerate(order):
        words |= nibbles[..., value].long() << 4 * i
    return (words - (words >> 31 << 32)).int().contiguous()


def made_blocks(values: torch.Tensor, type: str) -> tuple[npt.NDArray[np.uint8], torch.Tensor]:
    """[n, k] as blocks of F8_E4M3, INT4_G32 or INT4_G128, and the values that they stand for."""
    if type == F8:
        stored, scales, exact = fp8(values)
        return f8_blocks(stored.view(torch.uint8).numpy(), scales.numpy(), 128, 128), exact
    group = int(type.removeprefix("INT4_G"))
    quants, zeros, halves, exact = int4(values, group, False)
    parts = (quants.to(torch.uint8).numpy(), zeros.to(torch.uint8).numpy(), halves.numpy())
    return int4_blocks(*parts, group), exact


def save_quantised(
    model: PreTrainedModel, folder: Path, config: dict[str, Any], sym: bool = False
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The folder with every projection, expert and dense MLP as `config` (its quantization_config) says. Returns the
    model of the values that are stored then, and those values by the names of plain weights."""
    save_hf(model, folder)
    path = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    canonical = architecture_of(config_from_hf(model.config.to_dict())).canonical
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        if not name.endswith(_QUANTISED):
            stored[name] = tensor
        elif config["quant_method"] == "fp8":
            stored[name], scales, exact[canonical(name)] = fp8(tensor.float())
            stored[f"{name}_scale_inv"] = scales
        elif config["quant_method"] == "compressed-tensors":
            strategy = config["config_groups"]["group_0"]["weights"]["strategy"]
            blocks = {"channel": (1, tensor.shape[1]), "tensor": tuple(tensor.shape), "block": (128, 128)}
            stored[name], scales, exact[canonical(name)] = fp8(tensor.float(), *blocks[strategy])
            stored[f"{name}_scale"] = scales.reshape(1) if strategy == "tensor" else scales
        else:
            quants, zeros, scales, exact[canonical(name)] = int4(tensor, config["group_size"], sym)
            minus_one = config.get("checkpoint_format", "gptq") == "gptq"
            awq = config["quant_method"] == "awq"
            made = awq_tensors(quants, zeros, scales) if awq else gptq_tensors(quants, zeros, scales, minus_one)
            stored |= {f"{module}.{part}": value for part, value in made.items()}
    save_file(stored, path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return _with_values(model, exact), exact


def _with_values(model: PreTrainedModel, exact: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A float32 copy of the model with these values, experts as transformers holds them: gate and up in one."""
    made = copy.deepcopy(model).float()
    canonical = architecture_of(config_from_hf(model.config.to_dict())).canonical
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if (here := canonical(name)) in exact:
                parameter.copy_(exact[here])
            elif ".experts." in name:
                at, projection = name.rsplit(".", 1)
                for expert in range(parameter.shape[0]):
                    parts = ("gate", "up") if projection == "gate_up_proj" else ("down",)
                    rows = [exact[f"{at}.{expert}.{part}_proj.weight"] for part in parts]
                    parameter[expert].copy_(torch.cat(rows))
    return made
