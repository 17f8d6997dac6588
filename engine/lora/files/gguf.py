"""An adapter as one GGUF file, which llama.cpp loads beside a GGUF of its base (`--lora`).

`NAME.lora_a` [r, in] and `NAME.lora_b` [out, r], of experts [E, r, in] and [E, out, r], float32, where NAME is what the
base's GGUF calls the weight. All have one rank and `adapter.lora.alpha`, by which llama.cpp scales: alpha / r.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.base import Module
from engine.architectures.registry import architecture_of
from engine.errors import UserError
from engine.lora.adapter import AdapterWeights, LoraPair
from engine.lora.files.writer import Experts, one_rank
from engine.lora.order import in_order
from engine.weights.gguf import gguf_rows
from engine.weights.layout import gguf_expert_name, tensors


def write_gguf(weights: AdapterWeights, path: Path, config: ModelConfig, *, base: str | None = None) -> None:
    """Writes `path`, whole or not at all. UserError for what llama.cpp applies nothing to: extra MLPs, and LoRA on
    projections that its files hold in two halves (`kv_b_proj` of latent attention); for a file that is there already or
    cannot be written."""
    if weights.extra_mlps:
        raise UserError(f"{weights.path or weights.name}: extra MLPs beside the experts cannot be converted", "path")
    if path.suffix != ".gguf" or path.exists():
        raise UserError(f"{path}: give the name of a new .gguf file", "out")
    config = config.of_gguf
    rank, scale, linears, experts = one_rank(replace(weights, linears=in_order(weights.linears, config)))
    staged = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(staged, architecture_of(config).gguf)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, scale * rank)
        writer.add_name(weights.name)
        if base:
            writer.add_string("general.base_model.0.name", base)
        found = [*_linears(config, linears), *_experts(experts)]
        for name, values in found:
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        raise UserError(f"the adapter cannot be written to {path}: {error.strerror or error}", "out") from error
    finally:
        with suppress(OSError):
            staged.unlink(missing_ok=True)


def _linears(config: ModelConfig, linears: dict[str, LoraPair]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    known = tensors(config)
    for module, pair in linears.items():
        tensor = known[f"{module}.weight"]
        held: Module | None = tensor.module
        if held is not None and held.halves is not None:
            raise UserError(f"{module}: GGUF holds it in halves, to which llama.cpp applies no LoRA", "path")
        yield f"{tensor.gguf}.lora_a", _values(pair.a)
        rows = _values(pair.b)
        yield f"{tensor.gguf}.lora_b", rows if held is None or not held.rows else rows[gguf_rows(held)]


def _experts(experts: Experts) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for layer, projections in experts.items():
        for projection, pair in projections.items():
            name = gguf_expert_name(layer, projection)
            yield f"{name}.lora_a", _values(pair.a)
            yield f"{name}.lora_b", _values(pair.b)


def _values(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = tensor.detach().float().contiguous().numpy()
    return values
