"""`--deterministic`: where it holds, and that it reaches the kernels; the experts' scratch in the memory plan."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import UserError
from engine.launch.backends import make_backends
from engine.planning.plan import plan_engine
from native import available
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model

pytestmark = pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "m.gguf"
    save_gguf(tiny_model(4, num_hidden_layers=2), file, expert_type="Q8_0", dense_type="Q8_0")
    return file


@pytest.mark.parametrize("deterministic", [False, True])
def test_it_reaches_the_kernels(path, deterministic):
    engine = Harness(path, rules="cpu", deterministic=deterministic, pack_cache="off")
    backends = make_backends(engine.plan)
    experts, linear = backends.experts(0), backends.linear("model.layers.0.self_attn.q_proj")
    assert experts._runner.deterministic is deterministic
    assert linear._runner.deterministic is deterministic


def test_a_prompt_in_chunks_is_the_prompt_at_once(path):
    """Bit for bit: the log-probabilities too."""
    prompt = [i * 7 % 90 for i in range(100)]
    seen = []
    for tokens in (256, 17):
        engine = Harness(
            path, rules="cpu", deterministic=True, pack_cache="off", max_num_batched_tokens=tokens,
            max_num_seqs=4,
        )  # fmt: skip
        rid = engine.submit(prompt, logprobs=3)
        result = engine.run()[rid]
        seen.append((result.tokens, result.logprobs))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"rules": "reference"},
        {"rules": "cpu", "expert_backend": "reference"},
        {"rules": "cpu", "attention_backend": "reference"},
        {"rules": "cpu", "linear_backend": "reference"},
    ],
    ids=str,
)
def test_refused_where_it_would_not_hold(path, settings):
    with pytest.raises(UserError, match=r"deterministic is true; allowed only .* reference on cpu") as caught:
        plan_engine(EngineConfig(model=str(path), device="cpu", deterministic=True, **settings))
    assert caught.value.field == "deterministic"


def test_scratch_of_the_experts_is_planned(path):
    def scratch(**settings):
        config = EngineConfig(model=str(path), device="cpu", kv_cache_tokens=256, max_adapter_slots=0, **settings)
        return [i.num_bytes for i in plan_engine(config).memory.items if i.label.startswith("expert scratch")]

    few, many = (scratch(rules="cpu", max_num_batched_tokens=n, cpu_threads=1)[0] for n in (64, 128))
    assert 0 < few < many < 3 * few
    assert scratch(rules="cpu", max_num_batched_tokens=64, cpu_threads=2)[0] > few
    assert scratch(rules="reference") == []
