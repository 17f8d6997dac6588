"""A gpt-oss model as OpenAI's files hold it: experts in MXFP4, all else plain."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf


def save_mxfp4(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Writes the folder; the model of the values that it holds. Values that MXFP4 has are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    held = save_gguf(model, folder / "m.gguf", "MXFP4", "F32")
    (folder / "m.gguf").unlink()
    save_hf(model, folder)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in held.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name:
            rows = parameter.detach().transpose(1, 2).contiguous()
            blocks = torch.from_numpy(gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4))
            blocks = blocks.reshape(*rows.shape[:2], -1, 17)
            quants = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
            quants = quants.reshape(*rows.shape[:2], -1, 16, 2)
            del stored[name]
            stored[f"{name}_scales"] = blocks[..., 0].clone()
            stored[f"{name}_blocks"] = quants[..., 0] | quants[..., 1] << 4
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return held
