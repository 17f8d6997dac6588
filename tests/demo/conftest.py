"""One small tokenizer for all tests here."""

from __future__ import annotations

import sys

import pytest
from tokenizers import Tokenizer

from demo.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(seed=0, texts=3000)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
