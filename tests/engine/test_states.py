"""Layers that keep states: the same tokens however a prompt is cut, and clear refusals of what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from testing.harness import Harness, greedy
from testing.models.tiny import save_hf, tiny_model
from tests.engine.test_parity import BACKENDS, CLEAR, prompts


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model, folder = tiny_model(3, family="qwen3_next"), tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    return model, folder


@BACKENDS
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [4, 7, 70, 256])
def test_any_chunks_preempted_or_not_give_the_tokens_of_transformers(model_folder, backend, overlap, budget):
    model, folder = model_folder
    asked = prompts(3, [20, 25, 30, 70])
    engine = Harness(
        folder, kv_cache_tokens=160, max_model_len=112, max_num_batched_tokens=budget, max_num_seqs=4,
        overlap=overlap, **backend,
    )  # fmt: skip
    got = engine.generate(asked, max_tokens=24) + engine.generate(asked[:1], max_tokens=24)
    engine.close()
    for prompt, tokens in zip([*asked, asked[0]], got, strict=True):
        expected, gap = greedy(model, prompt, 24)
        assert tokens == expected or gap < CLEAR


@pytest.mark.parametrize("setting", [{"speculate": "ngram:2"}, {"kv_disk": "1GiB"}, {"cuda_graphs": "padded"}])
def test_what_states_do_not_allow_is_refused(model_folder, setting):
    with pytest.raises(UserError, match="keep a state of each sequence") as caught:
        Harness(model_folder[1], **setting)
    assert caught.value.field == next(iter(setting))
