"""The real trainer's adapters served: base and both adapters in one batch give the recorded logits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.messages import Finished
from testing.harness import Harness
from tests.lora.make import SAMPLES

NAMES = ("base-model", "kt_fused_all", "kt_peft_perexpert")
TOLERANCE = 2e-5  # of log-probabilities; measured 2e-6


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    harness = Harness(SAMPLES / "base-model")
    for name in NAMES[1:]:
        harness.adapter(name, SAMPLES / name)
    yield harness
    harness.close()


def reference(name: str, index: int) -> torch.Tensor:
    return torch.from_numpy(np.load(SAMPLES / name / "reference" / f"logits_{index}.npy")).log_softmax(-1)


def test_recorded_logits_in_one_batch(harness: Harness) -> None:
    prompts = json.loads((SAMPLES / "base-model/reference/meta.json").read_text())["prompts"]
    requests = {
        harness.submit(prompt, None if name == "base-model" else name, max_tokens=1, prompt_logprobs=5): (name, index)
        for index, prompt in enumerate(prompts)
        for name in NAMES
    }
    harness.run()
    for request_id, (name, index) in requests.items():
        result, want = harness.results[request_id], reference(name, index)
        assert isinstance(result.end, Finished), result.end
        assert result.tokens == [int(want[-1].argmax())]
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        for position, found in enumerate(result.prompt_logprobs[1:]):
            assert found is not None
            for token in (found.chosen, *found.top):
                assert abs(token.logprob - float(want[position, token.token])) < TOLERANCE
            assert [token.token for token in found.top] == want[position].topk(5).indices.tolist()
