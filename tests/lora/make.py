"""Random adapters and writers of every form on disk: the inverse of the readers, written on its own."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.architectures.config import ModelConfig
from engine.architectures.registry import config_from_hf
from engine.lora.adapter import AdapterWeights, ExpertLora, ExtraMlp, LoraPair
from testing.models.shapes import config

SAMPLES = Path(__file__).parents[1] / "data/samples"
PREFIX = "base_model.model."


def model_config(**fields: Any) -> ModelConfig:
    """A small base: 3 layers of which layer 1 is dense, head_dim * heads != hidden."""
    base: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "mlp_only_layers": (1,),
    }
    return config(**(base | fields))


def config_of(model: Any) -> ModelConfig:
    """The ModelConfig of a transformers model."""
    return config_from_hf(model.config.to_dict())


def sample_config() -> ModelConfig:
    """Of tests/data/samples/base-model."""
    content = json.loads((SAMPLES / "base-model/config.json").read_text())
    return config_from_hf(content)


def linear_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """{module: (in, out)} of everything but routed experts."""
    found = {}
    for module in config.modules(layer):
        if module.kind == "linear":
            out, inner = module.shape
            found[f"model.layers.{layer}.{module.name}"] = (inner, out)
    return found


def random_adapter(
    config: ModelConfig,
    rank: int = 3,
    alpha: float = 6.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    experts: bool = True,
    linears: bool = True,
    extra: int = 0,
    scale: float = 0.05,
) -> AdapterWeights:
    """A random adapter, neither half zero, scaled by alpha / rank. `scale` is the standard deviation of B."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def half_a(*shape: int) -> torch.Tensor:
        return normal(*shape, std=1 / math.sqrt(shape[-1]))

    weights = AdapterWeights("random", "canonical")
    e, h, i, s = config.num_experts, config.hidden_size, config.moe_intermediate_size, alpha / rank
    for layer in range(config.num_hidden_layers):
        for name, (size_in, size_out) in linear_shapes(config, layer).items() if linears else ():
            weights.linears[name] = LoraPair(half_a(rank, size_in), normal(size_out, rank, std=scale), s)
        if not config.is_sparse(layer):
            continue
        if experts:
            gate = half_a(e, rank, h), normal(e, i, rank, std=scale)
            up = half_a(e, rank, h), normal(e, i, rank, std=scale)
            down = half_a(e, rank, i), normal(e, h, rank, std=scale)
            weights.experts[layer] = ExpertLora(*gate, *up, *down, s, s, s)
        for _ in range(extra):
            size = 5 + len(weights.extra_mlps.get(layer, []))
            mlp = ExtraMlp(half_a(size, h), half_a(size, h), normal(h, size, std=scale))
            weights.extra_mlps.setdefault(layer, []).append(mlp)
    return weights


def lora_config(rank: int = 3, alpha: float = 6.0, **fields: Any) -> dict[str, Any]:
    base = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_rslora": False}
    return base | {"base_model_name_or_path": "base", "modules_to_save": None} | fields


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor] | None,
    config: dict[str, Any] | None,
    fused: dict[str, torch.Tensor] | None = None,
    binary: bool = False,
) -> Path:
    """An adapter folder from its parts."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is not None:
        tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        if binary:
            torch.save(tensors, folder / "adapter_model.bin")
        else:
            save_file(tensors, folder / "adapter_model.safetensors")
    if fused is not None:
        save_file({key: t.contiguous().clone() for key, t in fused.items()}, folder / "fused_expert_lora.safetensors")
    return folder


def named(tensors: dict[str, torch.Tensor], name: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """The same tensors under other names."""
    return {name(key): tensor for key, tensor in tensors.items()}


def linear_keys(weights: AdapterWeights, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    tensors = {}
    for module, pair in weights.linears.items():
        tensors[f"{prefix}{module}.lora_A.weight"] = pair.a
        tensors[f"{prefix}{module}.lora_B.weight"] = pair.b
    return tensors


def extra_keys(weights: AdapterWeights, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}model.layers.{layer}.mlp.lora_experts.{index}.le_{name}.weight": getattr(mlp, name)
        for layer, mlps in weights.extra_mlps.items()
        for index, mlp in enumerate(mlps)
        for name in ("gate", "up", "down")
    }


def per_expert_keys(weights: AdapterWeights, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    """Forms B and D."""
    tensors = {}
    for layer, lora in weights.experts.items():
        for projection in ("gate", "up", "down"):
            a, b = getattr(lora, f"{projection}_a"), getattr(lora, f"{projection}_b")
            for expert in range(a.shape[0]):
                key = f"{prefix}model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
                tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a[expert], b[expert]
    return tensors


def fused_keys(weights: AdapterWeights) -> dict[str, torch.Tensor]:
    """Form A's fused_expert_lora.safetensors."""
    return {
        f"layers.{layer}.experts.{projection}_lora_{half}": getattr(lora, f"{projection}_{half}")
        for layer, lora in weights.experts.items()
        for projection in ("gate", "up", "down")
        for half in "ab"
    }


def fused_3d_keys(weights: AdapterWeights, swapped: bool = False, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    """Form E from per-projection experts: gate_up in block-diagonal form at rank 2r, down at rank r."""
    tensors = {}
    for layer, lora in weights.experts.items():
        a = torch.cat([lora.gate_a, lora.up_a], dim=1)
        b = torch.stack([torch.block_diag(gate, up) for gate, up in zip(lora.gate_b, lora.up_b, strict=True)])
        key = f"{prefix}model.layers.{layer}.mlp.experts"
        for name, pair in ((f"{key}.base_layer", (a, b)), (key, (lora.down_a, lora.down_b))):
            half_a, half_b = flatten_3d(*pair, swapped)
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = half_a, half_b
    return tensors


def flatten_3d(a: torch.Tensor, b: torch.Tensor, swapped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """a [E, r, in], b [E, out, r] -> PEFT's A [E r, x], B [y, E r] with the expert fastest in B."""
    if swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    experts, rank, _ = a.shape
    return a.reshape(experts * rank, -1), b.permute(1, 2, 0).reshape(-1, rank * experts)


def write_manifest(folder: Path, rank: int = 3, alpha: float = 6.0, **fields: Any) -> dict[str, Any]:
    """kt_adapter_manifest.json over what lies in the folder; returns its content. `fields` override."""
    from safetensors import safe_open

    artifacts: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        artifacts[file.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with safe_open(folder / "fused_expert_lora.safetensors", "pt") as file:
        listed = {k: {"dtype": s.get_dtype(), "shape": s.get_shape()} for k in file.keys() for s in [file.get_slice(k)]}  # noqa: SIM118
    artifacts["fused_expert_lora.safetensors"] |= {"tensor_count": len(listed), "tensors": listed}
    manifest = {
        "version": 1,
        "status": "ready",
        "base": {"model_name_or_path": "base"},
        "expert_weight_format": "bf16",
        "lora": {"rank": rank, "alpha": alpha},
        "artifacts": artifacts,
    } | fields
    (folder / "kt_adapter_manifest.json").write_text(json.dumps(manifest))
    return manifest
