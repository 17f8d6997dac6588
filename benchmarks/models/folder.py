"""A random model of Qwen3-30B-A3B's shape with fewer layers as a Hugging Face folder, which `ktserve serve` loads.

    python -m benchmarks.models.folder --out DIR --layers 12

Weights are bf16, drawn with a standard deviation of 1 / sqrt(inputs). All layers hold the same values, drawn once, so
that writing takes as long as the disk does; whoever loads them keeps a copy of its own for each layer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.models.configs import QWEN3_30B_A3B
from engine.architectures.registry import config_from_hf
from engine.weights.layout import expert_shape, tensors

_WRITERS = 8  # threads

Tensors = dict[str, tuple[tuple[int, ...], NDArray[np.uint8]]]


def write_folder(folder: Path, changes: Mapping[str, Any]) -> Path:
    """QWEN3_30B_A3B with `changes`, unless the folder holds that already."""
    return write_described(folder, {**QWEN3_30B_A3B, **changes})


def write_described(folder: Path, described: Mapping[str, Any]) -> Path:
    """The model of a config.json, unless the folder holds that already."""
    text, index = json.dumps(described, indent=1), folder / "model.safetensors.index.json"
    if index.is_file() and (folder / "config.json").read_text() == text:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    index.unlink(missing_ok=True)
    config = config_from_hf(dict(described))
    drawn: dict[tuple[int, ...], NDArray[np.uint8]] = {}

    def draw(*shape: int) -> tuple[tuple[int, ...], NDArray[np.uint8]]:
        if shape not in drawn:
            drawn[shape] = _draw(shape)
        return shape, drawn[shape]

    files: dict[str, Tensors] = {}
    for name, tensor in tensors(config).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(layer, {})[name] = draw(*tensor.shape)
    for number in config.sparse_layers:
        for part in ("gate_up", "down"):
            name = f"model.layers.{number}.mlp.experts.{part}_proj"
            files[str(number)][name] = draw(config.num_experts, *expert_shape(config, part))
    places: dict[str, str] = {}
    with ThreadPoolExecutor(_WRITERS) as writers:
        paths = [folder / f"model-{layer}.safetensors" for layer in files]
        list(writers.map(_write, paths, files.values()))
    for layer, held in files.items():
        places |= dict.fromkeys(held, f"model-{layer}.safetensors")
    (folder / "config.json").write_text(text)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _draw(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.randn(shape, device=device, dtype=torch.bfloat16)
    values = 1 + values / 10 if len(shape) == 1 else values / shape[-1] ** 0.5
    raw: NDArray[np.uint8] = values.cpu().view(torch.uint8).numpy().reshape(-1)
    return raw


def _write(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, (shape, raw) in tensors.items():
        assert raw.size == 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + raw.size]}
        at += raw.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, raw in tensors.values():
            raw.tofile(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    print(write_folder(args.out, {"num_hidden_layers": args.layers}))


if __name__ == "__main__":
    main()
