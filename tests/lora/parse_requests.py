"""What the tests of reader processes share."""

from __future__ import annotations

from pathlib import Path

from engine.lora.adapter import AdapterWeights
from engine.lora.reader_process import Limits, ParseRequest, ReaderProcesses
from testing.waiting import PATIENCE_S
from tests.lora import make

CONFIG = make.model_config()
WEIGHTS = make.random_adapter(CONFIG, extra=1)
QUICK = Limits(wall_s=PATIENCE_S, cpu_s=1.0, memory_bytes=256 << 20)
Q = f"{make.PREFIX}model.layers.0.self_attn.q_proj"
CONFIG_FILE, MODEL_FILE = "adapter_config.json", "adapter_model.safetensors"


def good(path: Path) -> Path:
    tensors = make.linear_keys(WEIGHTS) | make.per_expert_keys(WEIGHTS) | make.extra_keys(WEIGHTS)
    return make.write(path, tensors, make.lora_config())


def request(path: Path | str, **options) -> ParseRequest:
    return ParseRequest(str(path), "x", CONFIG, **options)


def read(reader: ReaderProcesses, asked: ParseRequest) -> AdapterWeights:
    return reader.parse(asked).take()
