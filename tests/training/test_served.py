"""What is trained is what is served: the trainer's evaluation logits are the server's."""

from __future__ import annotations

import pytest
import torch

from engine.messages import Finished
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.training.models import draw_b, ours
from training.config import TrainConfig
from training.kernels import expert_maker
from training.loop.save import save_adapter

CONFIG = TrainConfig(kt_num_threads=1)
IDS = torch.randint(2, 128, (1, 21), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("form", ["peft", "kt-fused"])
@torch.no_grad()
def test_evaluation_logits_are_those_of_the_server(tmp_path, form):
    """Base and adapter in one batch, float32."""
    save_hf(tiny_model(), tmp_path / "model")
    model = draw_b(ours(tmp_path / "model", expert_maker(CONFIG)))
    save_adapter(model, tmp_path / "adapter", form)
    want = {"a": model(IDS).logits[0].log_softmax(-1)}
    with model.disable_adapter():
        want[None] = model(IDS).logits[0].log_softmax(-1)
    assert (want["a"] - want[None]).abs().mean() > 0.05
    harness = Harness(tmp_path / "model")
    harness.adapter("a", tmp_path / "adapter")
    requests = {name: harness.submit(IDS[0].tolist(), name, max_tokens=1, prompt_logprobs=5) for name in (None, "a")}
    harness.run()
    for name, request in requests.items():
        result = harness.results[request]
        assert isinstance(result.end, Finished), result.end
        for position, found in enumerate(result.prompt_logprobs[1:]):
            for token in (found.chosen, *found.top):
                assert abs(token.logprob - float(want[name][position, token.token])) < 2e-5
    harness.close()
