"""gpt-oss on a GPU: windows and sinks by flashinfer, experts with biases wherever they are placed, adapters, graphs.
All experts are chosen for every token, so that bf16 flips none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rules as rules_folder
from engine.config import EngineConfig
from engine.diagnostics.check import check_model
from engine.experts.streamed.backend import StreamedExperts
from engine.launch.backends import make_backends
from engine.planning.plan import plan_engine
from testing.harness import Harness, greedy
from testing.models.mxfp4 import save_mxfp4
from testing.models.tiny import save_hf, tiny_model
from tests.engine.family import Family
from tests.engine.parity import prompts
from tests.gpu.test_serving import GPU, agree, serve

pytestmark = pytest.mark.gpu
SHAPE = {
    "family": "gpt_oss", "head_dim": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 4, "sliding_window": 16, "swiglu_limit": 1.5,
}  # fmt: skip
LENGTHS = [3, 9, 20, 31, 60]  # within the window, and beyond it
HOT = {"gpu_expert_memory": str(5 * 3 * 128 * 64 * 2)}  # five of twelve experts in bf16


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), **SHAPE, mlp_only_layers=[])


def with_experts(backend: str) -> dict[str, str]:
    return {"expert_backend": backend} | (HOT if backend == "hybrid" else {})


def expect(model: torch.nn.Module, asked: list[list[int]], got: list[list[int]], where: str) -> None:
    for prompt, tokens in zip(asked, got, strict=True):
        wanted = greedy(model, prompt, len(tokens))[0]
        assert agree(model, prompt, wanted, tokens), f"{where}, prompt of {len(prompt)}: {tokens}, wanted {wanted}"


@pytest.mark.parametrize("form", ["hf", "mxfp4"])
@pytest.mark.parametrize("experts", ["native", "gpu", "hybrid"])
def test_tokens_are_those_of_transformers(tmp_path: Path, experts: str, form: str) -> None:
    """In chunks and at once, by graphs and without; twice, the second time behind the cached prompt."""
    model = tiny_model(4, **SHAPE)
    if form == "mxfp4":
        model = save_mxfp4(model, tmp_path)
    else:
        save_hf(model, tmp_path)
    asked = prompts(4, LENGTHS)
    for budget, graphs in ((64, "auto"), (16, "auto"), (256, "off")):
        config = GPU | with_experts(experts) | {"max_num_batched_tokens": budget, "cuda_graphs": graphs}
        engine = Harness(tmp_path, **config, max_num_seqs=6)
        assert engine.plan.placement.used(".self_attn") == ["flashinfer"]
        assert engine.plan.placement.used(".mlp.experts") == [experts]
        for turn in range(2):
            where = f"experts {experts} of {form}, budget {budget}, graphs {graphs}, turn {turn}"
            expect(model, asked, engine.generate(asked, max_tokens=24), where)
        engine.close()


@pytest.mark.parametrize("names", [[None] * 5, [None, "adapter-0", "adapter-2", None, "adapter-0"]], ids=str)
@pytest.mark.parametrize("experts", ["native", "gpu", "hybrid"])
def test_graphs_and_adapters(family: Family, names: list[str | None], experts: str) -> None:
    """Graphs exactly as plain launches, where experts stay where they are."""
    runs = [serve(family, names, cuda_graphs=graphs, **with_experts(experts)) for graphs in ("auto", "padded")]
    assert experts == "hybrid" or runs[0] == runs[1]
    for name, prompt, tokens in zip(names, prompts(1, [3, 9, 20, 31, 14]), runs[0], strict=True):
        expect(family.merged[name], [prompt], [tokens], f"experts {experts}, {name}")


def test_streamed_prefill(family: Family, tmp_path: Path) -> None:
    """Chunks of 16 rows and more by experts brought to the GPU, with adapters."""
    path = tmp_path / "streamed.yaml"
    shipped = Path(rules_folder.__file__).parent / "gpu-cpu-experts.yaml"
    path.write_text(shipped.read_text().replace("prefill_threshold: auto", "prefill_threshold: 16"))
    names, asked = [None, "adapter-0", "adapter-1", "adapter-2", None], prompts(1, [40, 30, 20, 50, 3])
    engine = family.engine(**(GPU | {"rules": str(path)}), max_num_seqs=6, max_num_batched_tokens=64)
    backend = engine.core.runner.model.expert_backends[0]
    assert isinstance(backend, StreamedExperts) and backend.threshold == 16
    got = engine.generate(asked, names, max_tokens=12)
    engine.close()
    for name, prompt, tokens in zip(names, asked, got, strict=True):
        expect(family.merged[name], [prompt], [tokens], f"streamed, {name}")


@pytest.mark.parametrize("experts", ["native", "gpu"])
def test_check_agrees(tmp_path: Path, experts: str) -> None:
    save_mxfp4(tiny_model(1, **SHAPE), tmp_path)
    settings = {"kv_cache_tokens": 64, "max_num_seqs": 1, "max_num_batched_tokens": 32, "expert_backend": experts}
    plan = plan_engine(EngineConfig(model=str(tmp_path), **settings)).without_streaming()
    assert plan.placement.device == "cuda"
    lines: list[str] = []
    assert check_model(plan.source, make_backends(plan), prompts(1, [32])[0], lines.append) is None, lines


def test_what_is_chosen_by_default(tmp_path: Path) -> None:
    """Where all experts fit, they are on the GPU; nothing is computed in torch."""
    model = tiny_model(2, **SHAPE)
    save_hf(model, tmp_path)
    engine = Harness(tmp_path, device="auto", rules=None, dtype="auto", max_num_seqs=4)
    placement = engine.plan.placement
    assert placement.used(".self_attn") == ["flashinfer"] and placement.used(".mlp.experts") == ["gpu"]
    assert not any("in torch" in line for line in engine.plan.lines)
    asked = prompts(2, [5, 40])
    expect(model, asked, engine.generate(asked, max_tokens=12), "by default")
    engine.close()
