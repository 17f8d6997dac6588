"""Long prompts beside decode rows on a GPU: experts streamed there meanwhile, equal to merged models."""

from __future__ import annotations

from pathlib import Path

import pytest

import rules as rules_folder
from engine.experts.streamed.backend import StreamedExperts
from engine.messages import Finished
from testing.harness import greedy
from tests.engine.family import Family
from tests.engine.parity import prompts
from tests.gpu.test_serving import GPU, SHAPE, agree

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), **SHAPE)


def rules(folder: Path, experts: str) -> str:
    """The shipped ones, where a step of the lane takes 24 tokens at least."""
    path = folder / f"{experts}.yaml"
    shipped = Path(rules_folder.__file__).parent / f"{experts}.yaml"
    path.write_text(shipped.read_text().replace("prefill_threshold: auto", "prefill_threshold: 24"))
    return str(path)


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("experts", ["gpu-cpu-experts", "hybrid"])
def test_streams_and_long_prompts_of_any_adapter(family, tmp_path, graphs, experts):
    """Streams begin and end while prompts of all lengths are computed; some of these begin alike."""
    names = [None, "adapter-0", "adapter-1", "adapter-2", None, "adapter-0"]
    asked = prompts(1, [40, 30, 3, 50, 9, 60]) + [prompts(2, [70])[0]] * 2 + prompts(3, [45, 25])
    names = (names * 2)[: len(asked)]
    config = {key: value for key, value in GPU.items() if key != "expert_backend"} | {"rules": rules(tmp_path, experts)}
    if experts == "hybrid":
        config["gpu_expert_memory"] = str(5 * 3 * 128 * 64 * 2)
    engine = family.engine(**config, cuda_graphs=graphs, max_num_seqs=6, max_num_batched_tokens=64)
    backend = engine.core.runner.model.expert_backends[0]
    assert isinstance(backend, StreamedExperts) and backend.prompts is not None
    assert engine.core.prompts is not None
    rids, lane_steps = [], 0
    for prompt, name in zip(asked, names, strict=True):
        rids.append(engine.submit(prompt, name, max_tokens=24))
        for _ in range(3):
            engine.core.step()
            lane_steps += engine.core.prompts.plan is not None
    engine.run()
    engine.close()
    assert lane_steps > 0
    for rid, name, prompt in zip(rids, names, asked, strict=True):
        assert isinstance(engine.results[rid].end, Finished), engine.results[rid].end
        expected = greedy(family.merged[name], prompt, 24)[0]
        assert agree(family.merged[name], prompt, expected, engine.results[rid].tokens)


def test_off_is_one_step_after_the_other(family):
    engine = family.engine(**GPU, prompt_lane="off", max_num_seqs=2, max_num_batched_tokens=64)
    assert engine.core.prompts is None
    engine.close()
