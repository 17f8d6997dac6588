"""Several GPUs answer as one does, decode graphs and adapters included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import rules as rules_folder
from engine.messages import Finished
from testing.harness import Harness, Result
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import STATEFUL, save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.parity import prompts
from tests.engine.test_states import ATTENTION, DELTA, SEPARATE, SHARED, trained
from tests.gpu.test_delta import know

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one rank on each of two GPUs"),
]
SHAPE = {
    "head_dim": 128, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
    "num_experts": 8,
}  # fmt: skip
GPU = {"device": "cuda", "dtype": "bfloat16"}
NAMES = [None, "adapter-0", "adapter-1", None]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), 2, **SHAPE)


@pytest.fixture(autouse=True)
def no_multicast(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # not every host that lends GPUs lets NVLink use it


def answers(family: Family, **config) -> list[Result]:
    """Greedy rows of base and adapters, a drawn one, and a prompt's log-probabilities."""
    engine = family.engine(max_num_batched_tokens=24, max_num_seqs=6, **config)
    graphs = config.get("cuda_graphs", "auto") == "auto" and config["device"] == "cuda"
    assert (engine.core.runner.padded is not None) == (graphs and config["dtype"] == "bfloat16")
    asked = prompts(1, [3, 9, 40, 14])
    ids = [engine.submit(p, n, logprobs=3, max_tokens=12) for p, n in zip(asked, NAMES, strict=True)]
    ids.append(engine.submit(prompts(1, [12])[0], NAMES[1], temperature=1.0, seed=5, prompt_logprobs=2))
    results = engine.run()
    engine.close()
    return [results[i] for i in ids]


def errors(got: list[Result], exact: list[Result]) -> list[float]:
    """Of log-probabilities of equal tokens behind equal tokens."""
    found = []
    for mine, theirs in zip(got, exact, strict=True):
        for a, b in zip(mine.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True):
            found += [] if a is None or b is None else [abs(a.chosen.logprob - b.chosen.logprob)]
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            if a.chosen.token != b.chosen.token:
                break
            found.append(abs(a.chosen.logprob - b.chosen.logprob))
    return found


def quick_rules(folder: Path, name: str) -> str:
    """A file of shipped rules whose attention is quick to compile."""
    file, shipped = folder / "rules.yaml", (Path(rules_folder.__file__).parent / f"{name}.yaml").read_text()
    attention = "class: ktserve.attention.flashinfer\n    kwargs:\n"
    assert attention in shipped
    file.write_text(shipped.replace(attention, f"{attention}      prefill: fa2\n"))  # fa3 takes minutes
    return str(file)


on_gpus = pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"{n} GPUs")) for n in (2, 4)],
)


@on_gpus
@pytest.mark.parametrize(
    ("rules", "config"), [("gpu", {}), ("gpu", {"expert_parallel": True}), ("gpu-cpu-experts", {})]
)
def test_several_gpus_differ_from_one_by_rounding(family, tmp_path, rules, config, ranks):
    file = quick_rules(tmp_path, rules)
    exact = answers(family, device="cpu", dtype="float32")
    one = errors(answers(family, **GPU, rules=file), exact)
    several = errors(answers(family, **GPU, rules=file, tensor_parallel=ranks, **config), exact)
    assert len(several) > len(NAMES) + 11, "no decode step was compared"
    assert np.mean(several) < 2 * np.mean(one) + 0.02


@on_gpus
@pytest.mark.parametrize("config", [{}, {"expert_parallel": True}], ids=["divided", "whole experts"])
def test_sinks_and_biases_of_experts_are_divided(tmp_path, config, ranks):
    """gpt-oss, of which every token has all experts, so that rounding flips none."""
    shape = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    shape |= {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "sliding_window": 16}
    family = Family(tmp_path, 2, family="gpt_oss", mlp_only_layers=[], **shape)
    file, exact = quick_rules(tmp_path, "gpu"), answers(family, device="cpu", dtype="float32")
    one = errors(answers(family, **GPU, rules=file), exact)
    several = errors(answers(family, **GPU, rules=file, tensor_parallel=ranks, **config), exact)
    assert len(several) > len(NAMES) + 11, "no decode step was compared"
    assert np.mean(several) < 2 * np.mean(one) + 0.02, f"{np.mean(several):.4f}, of one GPU {np.mean(one):.4f}"


@on_gpus
def test_float32_tokens_are_those_of_one(family, ranks):
    """However experts are divided."""
    config = {"device": "cuda", "rules": "reference", "dtype": "float32", "expert_backend": "gpu"}
    config |= {"linear_backend": "gpu"}
    one = answers(family, **config)
    for way in ({}, {"expert_parallel": True}):
        several = answers(family, **config, tensor_parallel=ranks, **way)
        assert [r.tokens for r in several] == [r.tokens for r in one]
        assert max(errors(several, one)) < 1e-3


# ---- layers that keep states


@pytest.fixture(scope="module", params=STATEFUL)
def delta(request, tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """A model whose rows take all experts, as safetensors (`hf`) and GGUF (`m.gguf`), and `x`, an adapter of it."""
    shape = {
        "head_dim": 256, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4,
        "num_experts_per_tok": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    }  # fmt: skip
    model, folder = tiny_model(3, family=request.param, **shape), tmp_path_factory.mktemp("delta")
    save_hf(model, folder / "hf")
    save_gguf(model, folder / "m.gguf", "BF16", "BF16")
    nets = DELTA if request.param == "qwen3_next" else SEPARATE
    trained(model, folder / "x", 5, target_modules=[*nets, *ATTENTION, *SHARED])
    return model, folder


def with_states(model: torch.nn.Module, folder: Path, file: str, **config) -> list[Result]:
    """Prompts in parts beside decode rows, of the base and of an adapter; then two that begin from snapshots."""
    engine = Harness(folder / file, max_num_batched_tokens=24, max_num_seqs=4, **config)
    engine.adapter("x", folder / "x")
    asked, names = prompts(5, [3, 40, 70, 36]), [None, "x", None, "x"]
    if "speculate" in config:
        know(engine, model, asked, 18)
    ids = [engine.submit(p, n, logprobs=3, max_tokens=18) for p, n in zip(asked, names, strict=True)]
    engine.run()
    if "speculate" in config:
        stats = engine.core.stats()
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"], "no draft was right, or all were"
    later = [[*asked[i], *prompts(6, [9])[0]] for i in (1, 2)]
    ids += [engine.submit(p, names[i], logprobs=3, max_tokens=6) for i, p in zip((1, 2), later, strict=True)]
    results = engine.run()
    engine.core.scheduler.check_integrity()
    for rid in ids[-2:]:
        end = results[rid].end
        assert isinstance(end, Finished) and end.cached_tokens >= 16, "it did not begin from a snapshot"
    engine.close()
    return [results[i] for i in ids]


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@on_gpus
@pytest.mark.parametrize("file", ["hf", "m.gguf"])
@pytest.mark.parametrize("config", [{}, {"speculate": "ngram:3:always"}], ids=["graphs", "drafts"])
def test_delta_nets_on_several_gpus_differ_from_one_by_rounding(delta, tmp_path, file, config, ranks):
    """By the kernels, states and snapshots of each rank's heads, in graphs and with drafts."""
    gpu = GPU | {"rules": quick_rules(tmp_path, "gpu")}
    exact = with_states(*delta, file, device="cpu", dtype="float32")
    one = errors(with_states(*delta, file, **gpu, **config), exact)
    several = errors(with_states(*delta, file, **gpu, tensor_parallel=ranks, **config), exact)
    assert len(several) > 30, "hardly a decode step was compared"
    assert np.mean(several) < 2 * np.mean(one) + 0.02


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@on_gpus
def test_delta_nets_in_float32_give_the_tokens_of_one(delta, ranks):
    """In torch, and with every product in float32."""
    config = {"device": "cuda", "rules": "reference", "dtype": "float32", "expert_backend": "gpu"}
    config |= {"linear_backend": "gpu"}
    one = with_states(*delta, "hf", **config)
    ways: list[dict[str, object]] = [{}, {"speculate": "ngram:3:always"}, {"expert_parallel": True}]
    for way in ways:
        several = with_states(*delta, "hf", **config, tensor_parallel=ranks, **way)
        assert [r.tokens for r in several] == [r.tokens for r in one], way
        assert max(errors(several, one)) < 1e-3, way
