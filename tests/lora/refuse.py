"""What the tests of refusals share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import AdapterError
from engine.lora.files.parse import parse_adapter
from tests.lora import make

CONFIG = make.model_config()
WEIGHTS = make.random_adapter(CONFIG)


def peft_tensors() -> dict[str, torch.Tensor]:
    return make.linear_keys(WEIGHTS) | make.per_expert_keys(WEIGHTS)


def write_fused(folder: Path) -> Path:
    """A good adapter with a manifest."""
    make.write(folder, make.linear_keys(WEIGHTS), make.lora_config(), fused=make.fused_keys(WEIGHTS))
    make.write_manifest(folder)
    parse_adapter(folder, CONFIG, name="good")
    return folder


def refused(path: Path, match: str, **kwargs: Any) -> AdapterError:
    """The error, after checking that there is one that says `match` and which adapter it is about."""
    with pytest.raises(AdapterError, match=match) as caught:
        parse_adapter(path, CONFIG, name="bad", **kwargs)
    assert str(caught.value).startswith("adapter 'bad'")
    return caught.value
