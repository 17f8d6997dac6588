"""Models with gated delta nets on a GPU: transformers' tokens however a prompt is cut; graphs as plain launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.accuracy.table import MIXES, Files, measure
from engine.architectures.parts.delta import DeltaNet
from engine.attention import latent
from engine.attention.delta import StateSlots
from engine.attention.gpu_delta import GpuDeltaNet
from engine.planning import plan as planning
from scheduler.drafts import Drafter
from scheduler.plan import StepPlan
from testing.harness import Harness, greedy
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import STATEFUL, save_hf, tiny_model
from tests.engine.parity import CLEAR, prompts
from tests.engine.test_state_logits import Knowing
from tests.engine.test_states import ATTENTION, DELTA, EXPERTS, SHARED, trained
from tests.gpu.test_serving import agree

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 256, "hidden_size": 128, "shared_expert_intermediate_size": 64}
# Every expert of every token: a random router's choice would flip between bf16 and float32, and tokens with it.
SHAPE |= {"num_experts": 4, "num_experts_per_tok": 4}
GPU: dict[str, Any] = {
    "device": "cuda", "rules": None, "dtype": "bfloat16", "expert_backend": "native", "max_num_seqs": 4,
}  # fmt: skip


@pytest.fixture(scope="module", params=STATEFUL)
def model_folder(request, tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    model, folder = tiny_model(3, family=request.param, **SHAPE), tmp_path_factory.mktemp("model")
    save_hf(model, folder)
    return model, folder


class OnAnyDevice(GpuDeltaNet):
    """Where the reference would be, beside everything else of the reference."""

    def __init__(self, spec: DeltaNet, layers: Sequence[int], slots: StateSlots, device: torch.device) -> None:
        super().__init__(spec, layers, slots, device, 8)

    def host_planes(self) -> list[NDArray[np.uint8]]:
        held = [part for each in self.slots.values() for part in (each.states, each.past)]
        return [each.flatten(1).numpy().view(np.uint8)[None] for each in held]


def know(engine: Harness, model: torch.nn.Module, asked: list[list[int]], tokens: int) -> None:
    """Drafts are right now and then."""
    texts = [[*prompt, *greedy(model, prompt, tokens)[0]] for prompt in asked]
    engine.core.scheduler._core.drafter = Drafter(Knowing(texts, 2), 3, always=True)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 23, "cuda_graphs": "off"},
        {"max_num_batched_tokens": 256, "cuda_graphs": "padded", "overlap": True},
        {"max_num_batched_tokens": 64, "cuda_graphs": "padded", "speculate": "ngram:3:always"},
    ],
    ids=["chunks", "padded", "drafts"],
)
@pytest.mark.parametrize("family", STATEFUL)
def test_kernels_give_the_tokens_of_transformers(kernel_device, tmp_path, monkeypatch, family, config):
    """In float32: prompts in parts, decode rows beside them, padded ones, drafts; then from snapshots."""
    monkeypatch.setattr(latent, "ReferenceDeltaNet", OnAnyDevice)
    monkeypatch.setattr(planning, "check_states", lambda *_: None)
    model = tiny_model(3, family=family)
    save_hf(model, tmp_path)
    engine = Harness(tmp_path, device=kernel_device.type, max_num_seqs=4, **config)
    assert any(isinstance(each, OnAnyDevice) for each in engine.runner.model.attention_backends)
    asked = prompts(5, [3, 40, 70, 36])
    if "speculate" in config:
        know(engine, model, asked, 18)
    got = engine.generate(asked, max_tokens=18)
    asked += [[*prompt, *tokens, *prompt[:5]] for prompt, tokens in zip(asked, got, strict=True)]
    engine.core.scheduler._core.drafter = None
    got += engine.generate(asked[4:], max_tokens=4)
    assert engine.core.scheduler.stats()["blocks_cached"] and engine.results["r6"].end.cached_tokens >= 64
    stats = engine.core.stats()
    assert bool(stats["accepted_tokens"] < stats["drafted_tokens"]) == ("speculate" in config)
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        expected, gap = greedy(model, prompt, len(tokens), tokens)
        assert tokens == expected or gap < CLEAR


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("config", [{}, {"kv_cache_tokens": 96, "max_model_len": 80}], ids=["", "preempted"])
def test_torch_on_a_gpu_gives_the_tokens_of_transformers(model_folder, config):
    model, folder = model_folder
    engine = Harness(folder, device="cuda", max_num_batched_tokens=8, max_num_seqs=4, **config)
    asked = prompts(3, [30, 30, 30, 30])
    got = engine.generate(asked, max_tokens=20)
    assert bool(engine.core.scheduler.stats()["preemptions"]) == bool(config)
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        expected, gap = greedy(model, prompt, 20, tokens)
        assert tokens == expected or gap < CLEAR


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", STATEFUL)
def test_bf16_error_is_bounded(tmp_path_factory, name, mix, graphs):
    folder = tmp_path_factory.mktemp("files")
    settings = {**GPU, "max_num_seqs": 8, "cuda_graphs": graphs}
    runs = [
        measure(Files(folder, "BF16", seed, family=name, head_dim=256), mix, seed, **settings) for seed in (0, 1, 2)
    ]
    error, theirs = sum(r.error for r in runs), sum(r.transformers for r in runs)
    assert error <= 1.25 * theirs, f"{error / theirs:.2f} times transformers' error"


@pytest.mark.parametrize("budget", [4, 23, 256])
@pytest.mark.parametrize("overlap", [False, True])
def test_however_prompts_are_cut(model_folder, budget, overlap):
    """In one chunk, in chunks, token by token; preempted and recomputed; from snapshots."""
    model, folder = model_folder
    engine = Harness(folder, **GPU, max_num_batched_tokens=budget, overlap=overlap)
    assert any("CUDA graphs: 3 sizes up to 4 rows" in note for note in engine.runner.notes), engine.runner.notes
    assert any("delta nets: Triton kernels" in note for note in engine.runner.notes)
    asked = prompts(5, [3, 40, 70, 130])
    got = engine.generate(asked, max_tokens=18)
    asked += [[*prompt, *tokens, *prompt[:5]] for prompt, tokens in zip(asked, got, strict=True)]
    got += engine.generate(asked[4:], max_tokens=4)
    assert engine.results["r7"].end.cached_tokens >= 128
    engine.core.scheduler.check_integrity()
    engine.close()
    tight = Harness(folder, **GPU, kv_cache_tokens=96, max_model_len=80, max_num_batched_tokens=budget, overlap=overlap)
    asked += (again := prompts(3, [30] * 4))
    got += tight.generate(again, max_tokens=20)
    assert tight.core.scheduler.stats()["preemptions"] > 0
    tight.close()
    for prompt, tokens in zip(asked, got, strict=True):
        assert agree(model, prompt, greedy(model, prompt, len(tokens))[0], tokens)


@pytest.mark.parametrize("experts", ["native", "gpu", "hybrid"])
def test_graphs_equal_plain_launches(model_folder, experts):
    model, folder = model_folder
    asked, runs = prompts(1, [3, 9, 20, 31]), []
    config = {"expert_backend": experts} | ({"gpu_expert_memory": str(5 << 16)} if experts == "hybrid" else {})
    for graphs in ("auto", "padded"):
        engine = Harness(folder, **(GPU | config), cuda_graphs=graphs, overlap=False)
        runs.append(engine.generate(asked, max_tokens=24))
        engine.close()
    for prompt, one, other in zip(asked, *runs, strict=True):
        assert one == other or (experts == "hybrid" and agree(model, prompt, one, other))
        assert agree(model, prompt, greedy(model, prompt, 24)[0], one)


def test_a_decode_step_with_copies_is_one_graph_launch(model_folder, monkeypatch):
    """Rows at the ends of blocks save their states inside the graph."""
    engine = Harness(model_folder[1], **GPU)
    padded, plain = engine.runner.padded, []
    assert padded is not None
    original = engine.runner.executor.forward
    monkeypatch.setattr(engine.runner.executor, "forward", lambda step: (plain.append(step), original(step))[1])
    takes: list[bool] = []
    taken = padded.takes

    def note(plan: StepPlan) -> bool:
        takes.append(taken(plan))
        return takes[-1]

    monkeypatch.setattr(padded, "takes", note)
    engine.generate(prompts(2, [10, 12]), max_tokens=40)
    assert engine.core.scheduler.stats()["snapshots_saved"] >= 4
    assert takes.count(False) == len(plain) <= 2 and takes.count(True) >= 38
    engine.close()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize("budget", [8, 256])
def test_adapters_in_one_batch_are_as_alone(tmp_path, budget):
    base = tiny_model(3, family="qwen3_next", **SHAPE)
    save_hf(base, tmp_path / "base")
    targets = {
        "delta": {"target_modules": DELTA},
        "all": {"target_modules": [*DELTA, *ATTENTION, *SHARED], "target_parameters": EXPERTS},
    }
    models = {None: base} | {name: trained(base, tmp_path / name, 5, **each) for name, each in targets.items()}
    engine = Harness(tmp_path / "base", **GPU, max_num_batched_tokens=budget)
    for name in targets:
        engine.adapter(name, tmp_path / name)
    asked = prompts(8, [20, 20, 30])
    mixed = engine.generate(asked, list(models), max_tokens=10)
    alone = [engine.generate([prompt], [name], max_tokens=10)[0] for prompt, name in zip(asked, models, strict=True)]
    engine.close()
    for (_, model), prompt, tokens, others in zip(models.items(), asked, mixed, alone, strict=True):
        assert agree(model, prompt, others, tokens)
        assert agree(model, prompt, greedy(model, prompt, 10)[0], tokens)


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("early", [False, True])
def test_gguf(tmp_path, family, early):
    """llama.cpp's order of heads; early files have all projections in one."""
    if early and family != "qwen3_next":
        pytest.skip("only the first files of Qwen3-Next are so")
    model = tiny_model(4, family=family, **SHAPE)
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32", early=early)
    engine, asked = Harness(tmp_path / "m.gguf", **GPU), prompts(4, [5, 70])
    got = engine.generate(asked, max_tokens=12)
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        assert agree(model, prompt, greedy(model, prompt, 12)[0], tokens)


def test_drafts(model_folder):
    model, folder = model_folder
    engine = Harness(folder, **GPU, speculate="ngram:3:always")
    asked = prompts(4, [25, 40])
    know(engine, model, asked, 24)
    got = engine.generate(asked, max_tokens=24)
    assert engine.core.stats()["accepted_tokens"] > 0
    engine.close()
    for prompt, tokens in zip(asked, got, strict=True):
        assert agree(model, prompt, greedy(model, prompt, 24)[0], tokens)
