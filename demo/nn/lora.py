"""The adapters: LoRA on attention and inside every expert; written in two of the forms that KT training leaves on disk.

In training a LoRA is a flat dict: `model.layers.N.self_attn.q_proj.lora_A` [r, in], `.lora_B` [out, r], and stacked
over the experts `model.layers.N.mlp.experts.{gate,up,down}.lora_A` [E, r, in], `.lora_B` [E, out, r].
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from demo.nn.network import LORA_ALPHA, Shape, State, linear_shapes

RANK: Final = 8
FUSED_FILE: Final = "fused_expert_lora.safetensors"
MANIFEST_FILE: Final = "kt_adapter_manifest.json"
_PREFIX: Final = "base_model.model."


def init_lora(shape: Shape, device: str, seed: int, rank: int = RANK) -> State:
    """A normal with deviation 1/sqrt(in), B zero: the adapter starts as the base model."""
    generator = torch.Generator().manual_seed(seed)
    e, h, i = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
    lora: State = {}
    for layer in range(shape.num_hidden_layers):
        for name, (out, inp) in linear_shapes(shape).items():
            at = f"model.layers.{layer}.{name}"
            lora[f"{at}.lora_A"] = torch.randn(rank, inp, generator=generator) * inp**-0.5
            lora[f"{at}.lora_B"] = torch.zeros(out, rank)
        for name, (out, inp) in {"gate": (i, h), "up": (i, h), "down": (h, i)}.items():
            at = f"model.layers.{layer}.mlp.experts.{name}"
            lora[f"{at}.lora_A"] = torch.randn(e, rank, inp, generator=generator) * inp**-0.5
            lora[f"{at}.lora_B"] = torch.zeros(e, out, rank)
    return {name: tensor.to(device) for name, tensor in lora.items()}


def merge(state: State, lora: State, alpha: float = LORA_ALPHA) -> State:
    """The base parameters with every delta added: what the adapter means."""
    out = dict(state)
    for name, a in lora.items():
        if not name.endswith(".lora_A"):
            continue
        module = name.removesuffix(".lora_A")
        delta = (lora[f"{module}.lora_B"].float() @ a.float()) * (alpha / a.shape[-2])
        experts, _, part = module.rpartition(".")
        if not experts.endswith(".experts"):
            out[f"{module}.weight"] = out[f"{module}.weight"] + delta
        elif part == "down":
            out[f"{experts}.down_proj"] = out[f"{experts}.down_proj"] + delta
        else:
            rows = out[f"{experts}.gate_up_proj"].chunk(2, dim=1)
            gate, up = (rows[0] + delta, rows[1]) if part == "gate" else (rows[0], rows[1] + delta)
            out[f"{experts}.gate_up_proj"] = torch.cat((gate, up), dim=1)
    return out


def _config(base: str, targets: list[str], rank: int) -> dict[str, Any]:
    """adapter_config.json with the fields that PEFT writes."""
    none = (
        "alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules",
        "layer_replication", "layers_pattern", "layers_to_transform", "megatron_config", "modules_to_save", "revision",
        "target_parameters", "trainable_token_indices",
    )  # fmt: skip
    config: dict[str, Any] = dict.fromkeys(none)
    config |= {
        "alpha_pattern": {}, "base_model_name_or_path": base, "bias": "none", "ensure_weight_tying": False,
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "loftq_config": {},
        "lora_alpha": int(LORA_ALPHA), "lora_bias": False, "lora_dropout": 0.0, "megatron_core": "megatron.core",
        "peft_type": "LORA", "peft_version": "0.18.1", "qalora_group_size": 16, "r": rank, "rank_pattern": {},
        "target_modules": targets, "task_type": "CAUSAL_LM", "use_dora": False, "use_qalora": False,
        "use_rslora": False,
    }  # fmt: skip
    return dict(sorted(config.items()))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _attention_tensors(lora: State) -> State:
    return {
        f"{_PREFIX}{name}.weight": tensor.detach().float().cpu().contiguous()
        for name, tensor in lora.items()
        if ".experts." not in name
    }


def save_per_expert(lora: State, folder: Path, base: str) -> None:
    """PEFT's keys with one pair per expert and projection: attention in float32, experts in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _attention_tensors(lora)
    rank = 0
    for name, tensor in lora.items():
        if ".experts." in name:
            module, part, which = name.rsplit(".", 2)
            rank = tensor.shape[1] if which == "lora_A" else rank
            for k in range(tensor.shape[0]):
                key = f"{_PREFIX}{module}.{k}.{part}_proj.{which}.weight"
                tensors[key] = tensor[k].detach().to("cpu", torch.bfloat16).contiguous().clone()
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    _write_json(folder / "adapter_config.json", _config(base, targets, rank))


def save_fused(lora: State, folder: Path, base: str) -> None:
    """KT's fused files: attention under PEFT's keys, the experts stacked by layer in bfloat16, and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    fused: State = {}
    for name, tensor in lora.items():
        if ".experts." in name:
            module, part, which = name.rsplit(".", 2)
            key = f"{module.removeprefix('model.').replace('.mlp.', '.')}.{part}_{which.lower()}"
            fused[key] = tensor.detach().to("cpu", torch.bfloat16).contiguous()
    rank = next(tensor.shape[1] for key, tensor in fused.items() if key.endswith("gate_lora_a"))
    save_file(_attention_tensors(lora), str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    save_file(fused, str(folder / FUSED_FILE))
    _write_json(folder / "adapter_config.json", _config(base, ["q_proj", "k_proj", "v_proj", "o_proj"], rank))
    artifacts: dict[str, Any] = {}
    for file in ("adapter_config.json", "adapter_model.safetensors", FUSED_FILE):
        data = (folder / file).read_bytes()
        artifacts[file] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    artifacts[FUSED_FILE] |= {
        "tensor_count": len(fused),
        "tensors": {key: {"dtype": "BF16", "shape": list(t.shape)} for key, t in sorted(fused.items())},
    }
    manifest = {
        "artifacts": artifacts,
        "base": {"model_name_or_path": base},
        "expert_weight_format": "bf16",
        "lora": {"alpha": LORA_ALPHA, "rank": rank},
        "status": "ready",
        "version": 1,
    }
    _write_json(folder / MANIFEST_FILE, manifest)


def load_lora(folder: Path, shape: Shape) -> State:
    """What save_per_expert or save_fused wrote, as stored (rounded to bfloat16 where the file is), in float32."""
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    lora = {
        name.removeprefix(_PREFIX).removesuffix(".weight"): tensor.float()
        for name, tensor in tensors.items()
        if ".experts." not in name
    }
    fused = load_file(str(folder / FUSED_FILE)) if (folder / FUSED_FILE).is_file() else None
    for layer in range(shape.num_hidden_layers):
        for part in ("gate", "up", "down"):
            for which in ("lora_A", "lora_B"):
                at = f"model.layers.{layer}.mlp.experts"
                if fused is not None:
                    stacked = fused[f"layers.{layer}.experts.{part}_{which.lower()}"]
                else:
                    keys = [f"{_PREFIX}{at}.{k}.{part}_proj.{which}.weight" for k in range(shape.num_experts)]
                    stacked = torch.stack([tensors[key] for key in keys])
                lora[f"{at}.{part}.{which}"] = stacked.float()
    return lora
