"""128K positions on a GPU: what an engine says behind such a prompt is as near to float32 as transformers in bf16."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import rules as rules_folder
from engine.experts.streamed.backend import StreamedExperts
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model

pytestmark = pytest.mark.gpu
PROMPT, BEHIND = 131_000, 4
CHUNK = 2048
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
TOP = 16


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Its attention looks at few positions, wherever they are: the sum over many of them would say nothing."""
    shape = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = tiny_model(7, num_hidden_layers=3, max_position_embeddings=131_072, rope_parameters=YARN, **shape)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.mul_(4)
    return made


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    numbers: list[int] = torch.randint(2, 128, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    return numbers


@torch.inference_mode()
def logprobs_behind(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), V] of transformers: what it says before each of the tokens. Computed some positions at a
    time: scores of all by all would not fit a GPU."""
    ids, cache = torch.tensor([prompt + tokens[:-1]], device=model.device), DynamicCache(config=model.config)
    *before, last = ids[:, : len(prompt)].split(CHUNK, 1)
    for chunk in before:
        model(chunk, past_key_values=cache, logits_to_keep=1)
    last = torch.cat((last, ids[:, len(prompt) :]), 1)
    logits: torch.Tensor = model(last, past_key_values=cache, logits_to_keep=len(tokens)).logits[0]
    return logits.float().log_softmax(-1).cpu()


@pytest.mark.parametrize("experts", ["gpu", "streamed"])
def test_behind_128k_positions(model, prompt, tmp_path, experts):
    save_hf(model, tmp_path / "model")
    whole, rounded = (copy.deepcopy(model).to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
    settings: dict[str, str | None] = {"rules": None, "expert_backend": "gpu"}
    if experts == "streamed":
        shipped = Path(rules_folder.__file__).parent / "gpu-cpu-experts.yaml"
        (tmp_path / "rules.yaml").write_text(shipped.read_text().replace("threshold: auto", "threshold: 64"))
        settings = {"rules": str(tmp_path / "rules.yaml"), "expert_backend": "native"}
    engine = Harness(
        tmp_path / "model", device="cuda", dtype="bfloat16", kv_cache_tokens=131_072, max_num_seqs=2, **settings
    )
    assert isinstance(engine.core.runner.model.expert_backends[0], StreamedExperts) == (experts == "streamed")
    rid = engine.submit(prompt, max_tokens=BEHIND, logprobs=TOP)
    engine.run()
    result = engine.results[rid]
    engine.close()
    assert len(result.tokens) == BEHIND
    error = theirs = 0.0
    exacts, roundeds = (logprobs_behind(model, prompt, result.tokens) for model in (whole, rounded))
    for number, (seen, exact, bf16) in enumerate(zip(result.logprobs, exacts, roundeds, strict=True)):
        for entry in seen.top:
            error += abs(entry.logprob - float(exact[entry.token]))
            theirs += abs(float(bf16[entry.token]) - float(exact[entry.token]))
        assert float(exact.max() - exact[result.tokens[number]]) < 0.5
    count = BEHIND * TOP
    print(f"{experts}: mean error {error / count:.4f}, transformers in bf16 {theirs / count:.4f}")
    assert error <= 1.5 * theirs
