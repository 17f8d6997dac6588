"""An adapter merged into its base: a Hugging Face folder with the same files, tensor by tensor, so that a base of any
size takes the memory of one tensor.

Each file keeps its header: names, types and shapes stay, and what the adapter changes is rounded to the stored type.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from engine.architectures.registry import architecture_of
from engine.errors import UserError
from engine.files.model_file import FileTensor
from engine.files.safetensors import FLOATS, SafetensorsFile
from engine.lora.adapter import AdapterWeights, ExpertLora
from engine.lora.files.detect import GATE_UP, PROJECTIONS
from engine.lora.files.folder import finite, shown
from engine.lora.files.whole import base_tables
from engine.lora.reader_process import ParseRequest, ReaderProcesses
from engine.units import format_bytes
from engine.weights.open import open_model
from engine.weights.safetensors.source import SafetensorsSource

_PIECE = 64 << 20  # bytes that are copied at once
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")  # what is not copied
_CONFIG = "config.json"

Deltas = list[Callable[[], torch.Tensor]]  # of the slices of a tensor's first axis, or of the whole of it, float32


def merge(
    model: str, path: str, out: str, *, expert_scaling: str | None = None, expert_b_layout: str | None = None
) -> str:
    """Writes the model of folder `model` with the adapter of folder `path` to folder `out`; the lines that say so.
    config.json comes last: what was not finished cannot be opened. UserError for a base that is not plain safetensors
    where the adapter changes it, and for an adapter that is more than LoRA. UserError too for a folder that is not
    empty or has no room."""
    target = Path(os.path.expanduser(out))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{out}: is not an empty folder; give a new one", "out")
    source = open_model(model)
    if not isinstance(source, SafetensorsSource):
        raise UserError(f"{model}: only a folder with safetensors can be merged into", "model")
    weights = _read(source, model, path, expert_scaling, expert_b_layout)
    if weights.extra_mlps:
        raise UserError(f"{path}: extra MLPs beside the experts cannot be merged", "path")
    merged = _Merged(source, weights)
    try:
        target.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target).free
        if free < (size := sum(file.size for file in source.files)):
            raise UserError(f"{out}: the model takes {format_bytes(size)}, {format_bytes(free)} are free", "out")
        for shard in source.shards:
            merged.write(shard, target / shard.path.name)
        source.check_unchanged()
        _copy_others(source.folder, target)
    except OSError as error:
        raise UserError(f"the model cannot be written to {out}: {error.strerror or error}", "out") from error
    lines = [f"warning: {text}" for text in weights.warnings]
    return "\n".join([*lines, f"{model} + {path} ({weights.format}) -> {out}, {format_bytes(size)}"])


def _read(
    source: SafetensorsSource, model: str, path: str, expert_scaling: str | None, expert_b_layout: str | None
) -> AdapterWeights:
    """By a process with limits, since what follows takes as long as the base is large."""
    reader = ReaderProcesses()
    try:
        request = ParseRequest(
            path=os.path.abspath(os.path.expanduser(path)),
            name=Path(path).name,
            config=source.config,
            expert_scaling=expert_scaling,
            expert_b_layout=expert_b_layout,
            base=model,
            tables=base_tables(source),
        )
        return reader.parse(request).take()
    finally:
        reader.close()


class _Merged:
    def __init__(self, source: SafetensorsSource, weights: AdapterWeights) -> None:
        """UserError if a tensor that the adapter changes is quantised."""
        self._source, self._weights = source, weights
        config = source.config
        self._interleaved = config.experts is not None and config.experts.interleaved
        self._canonical = architecture_of(config).canonical
        self._deltas: dict[str, Deltas] = {}
        changed: set[str] = set()
        for name, tensor in (item for shard in source.shards for item in shard.tensors.items()):
            found = self._of(self._canonical(name))
            if found is not None and tensor.type in FLOATS:
                changed |= found[0]
                self._deltas[name] = found[1]
        wanted = {*weights.linears, *(_experts(layer, part) for layer in weights.experts for part in PROJECTIONS)}
        if missing := sorted(wanted - changed):
            raise UserError(f"{source.folder}: quantised weights cannot be merged into: {shown(missing)}", "model")

    def write(self, shard: SafetensorsFile, path: Path) -> None:
        tensors = sorted(shard.tensors.values(), key=lambda tensor: tensor.start)
        with path.open("wb") as file:
            self._copy(shard, 0, tensors[0].start if tensors else shard.file.size, file)
            for tensor in tensors:
                if tensor.name in self._deltas:
                    for piece in self._changed(shard, tensor):
                        file.write(piece)
                else:
                    self._copy(shard, tensor.start, tensor.num_bytes, file)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _copy(shard: SafetensorsFile, start: int, num_bytes: int, file: BinaryIO) -> None:
        for at in range(0, num_bytes, _PIECE):
            file.write(shard.file.read(start + at, min(_PIECE, num_bytes - at)).data)

    def _changed(self, shard: SafetensorsFile, tensor: FileTensor) -> Iterator[bytes]:
        deltas, dtype = self._deltas[tensor.name], _TYPES[tensor.type]
        each = tensor.num_bytes // len(deltas)
        for index, delta in enumerate(deltas):
            stored = torch.from_numpy(shard.file.read(tensor.start + index * each, each)).view(dtype)
            change = delta()
            values = (stored.float() + change.reshape(-1)).to(dtype)
            if not finite(values):
                raise UserError(f"{shard.path}: {tensor.name} is not finite, merged, in {tensor.type}", "path")
            yield values.view(torch.uint8).numpy().tobytes()

    def _of(self, name: str) -> tuple[set[str], Deltas] | None:
        """What of the adapter is in a tensor, by its name here, and the deltas of its slices; None: nothing."""
        module = name.removesuffix(".weight")
        if module in self._weights.linears:
            pair = self._weights.linears[module]
            return {module}, [lambda: pair.scale * (pair.b.float() @ pair.a.float())]
        words = name.split(".")
        if words[:2] != ["model", "layers"] or words[3:5] != ["mlp", "experts"]:
            return None
        layer = int(words[2])
        lora = self._weights.experts.get(layer)
        if lora is None:
            return None
        if len(words) == 8 and words[5].isdigit():
            projection, expert = words[6].removesuffix("_proj"), int(words[5])
            return {_experts(layer, projection)}, [lambda: expert_delta(lora, projection, expert)]
        if len(words) == 6 and words[5] in (f"{GATE_UP}_proj", "down_proj"):
            parts = ("down",) if words[5] == "down_proj" else ("gate", "up")
            return {_experts(layer, part) for part in parts}, [
                self._slice(lora, parts, expert) for expert in range(lora.gate_a.shape[0])
            ]
        return None

    def _slice(self, lora: ExpertLora, parts: tuple[str, ...], expert: int) -> Callable[[], torch.Tensor]:
        """Gate's rows, then up's; or inputs before outputs, gate and up by turns."""

        def delta() -> torch.Tensor:
            found = [expert_delta(lora, part, expert) for part in parts]
            if not self._interleaved:
                return torch.cat(found)
            return torch.stack(found, dim=1).flatten(0, 1).T.contiguous()

        return delta


def _experts(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.*.{projection}_proj"


def expert_delta(lora: ExpertLora, projection: str, expert: int) -> torch.Tensor:
    """[out, in] float32 of one expert."""
    a, b = getattr(lora, f"{projection}_a")[expert], getattr(lora, f"{projection}_b")[expert]
    scale: float = getattr(lora, f"{projection}_scale")
    delta: torch.Tensor = scale * (b.float() @ a.float())
    return delta


def _copy_others(folder: Path, target: Path) -> None:
    """Configuration, tokenizer, index, licence; config.json last."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.suffix not in _WEIGHTS)
    for name in sorted(names, key=lambda name: name == _CONFIG):
        shutil.copyfile(folder / name, target / name)
