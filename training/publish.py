"""Loads a finished adapter into a running server, which goes on serving an older version's requests to their end."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import UserError
from ktserve.openai_client import AnswerError, Server

if TYPE_CHECKING:
    from training.config import TrainConfig

_TIMEOUT_S = 600.0  # a load is answered when the adapter has been read
_PROBE = ".publish-check"


def check_server(url: str, key: str | None) -> None:
    """Before hours of training: the server answers, and the key may load adapters. UserError if not."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--publish {url}: write http://HOST:PORT", "publish")
    _call(url, "/lora-adapters", key, None)


def check_publish(url: str, key: str | None, config: TrainConfig) -> list[str]:
    """Whether the server will take what a run is going to write: adapters of its ranks and names, for its base, from
    its folders. It is asked to load an adapter of one matrix pair that changes nothing from there, which is unloaded at
    once; the server's warnings. UserError with the server's reason if it refuses."""
    from training.loop.load import started
    from training.loop.output import output_folder

    check_server(url, key)
    models = {entry["id"]: entry for entry in _call(url, "/v1/models", key, None)["data"]}
    warnings: dict[str, None] = {}
    for run in config.runs():
        entry = models.get(run.adapter_name)
        if entry is not None and entry.get("parent") is None:
            message = f"adapter_name: {run.adapter_name} is the name of the base model at {url}: give another"
            raise UserError(message, "adapter_name")
        with output_folder(config.output):
            folder = (config.output / run.adapter_name if config.adapters else config.output) / _PROBE
            try:
                _write_probe(folder, started(run)[0])
                name = f"{run.adapter_name}{_PROBE}-{os.getpid()}"
                body = {"lora_name": name, "lora_path": str(folder.resolve())}
                answer = _call(url, "/v1/load_lora_adapter", key, body)
                warnings |= dict.fromkeys(answer.get("warnings") or [])
                _call(url, "/v1/unload_lora_adapter", key, {"lora_name": name})
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                if config.adapters and folder.parent.is_dir() and not any(folder.parent.iterdir()):
                    folder.parent.rmdir()
    return list(warnings)


def _write_probe(folder: Path, run: TrainConfig) -> None:
    """An adapter of the run's rank on the last layer's q_proj, whose B is zero."""
    import torch

    from engine.lora.adapter import AdapterWeights, LoraPair
    from engine.lora.files.writer import write_adapter
    from engine.weights.open import open_model

    source = open_model(run.model_name_or_path)
    module = f"model.layers.{source.config.num_hidden_layers - 1}.self_attn.q_proj"
    size_out, size_in = source.tensor(f"{module}.weight").shape
    weights = AdapterWeights(run.adapter_name, "peft-attention")
    a, b = torch.zeros(run.lora_rank, size_in), torch.zeros(size_out, run.lora_rank)
    weights.linears[module] = LoraPair(a, b, run.scaling)
    write_adapter(weights, folder, "peft", base=run.model_name_or_path)


def publish(url: str, key: str | None, name: str, folder: Path) -> str:
    """Loads `folder` as the adapter `name`, in place of one of that name; a line about it. UserError with the server's
    reason if it refuses."""
    body = {"lora_name": name, "lora_path": str(folder.resolve()), "replace": True}
    answer = _call(url, "/v1/load_lora_adapter", key, body)
    warnings = answer.get("warnings") or []
    return "\n".join([f"published: {name} at {url}", *(f"warning: {text}" for text in warnings)])


def _call(url: str, path: str, key: str | None, body: dict[str, Any] | None) -> Any:
    server = Server(url, key or "", _TIMEOUT_S)
    try:
        return json.loads(server.get(path) if body is None else server.post(path, body))
    except (AnswerError, OSError, ValueError) as error:
        started = "; is a server there? start one: ktserve serve" if isinstance(error, ConnectionError) else ""
        raise UserError(f"{url}: {path}: {error}{started}", "publish") from None
