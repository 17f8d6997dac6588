"""KTransformers' own files serve expert adapters, at the precision that they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.memory.items import Kind
from engine.planning.plan import plan_engine
from native import available
from testing.harness import Harness
from tests.engine.family import Family
from tests.engine.parity import prompts

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1])
RULES = """
- match: {name: "\\\\.mlp\\\\.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExpertsV2
    kwargs: {generate_device: cpu, generate_op: KExpertsCPU, prefill_device: cpu, prefill_op: KExpertsCPU, backend: %s}
"""


def rules(folder: Path, backend: str) -> str:
    path = folder / f"{backend}.yaml"
    path.write_text(RULES % backend)
    return str(path)


def test_adapters_with_lora_in_experts_are_served(tmp_path: Path) -> None:
    family = Family(tmp_path, count=2)
    asked = prompts(1, [5, 9, 12])
    engine = family.engine(rules=rules(tmp_path, "AMXBF16"), dtype="float32")
    names = [None, "adapter-0", "adapter-1"]
    for name, prompt, tokens in zip(names, asked, engine.generate(asked, names), strict=True):
        family.expect(name, prompt, tokens)
    engine.close()


def test_the_precision_is_the_files(tmp_path: Path) -> None:
    model = Family(tmp_path, count=0).model_path

    def experts(**settings: str) -> tuple[int, str | None, str]:
        plan = plan_engine(EngineConfig(model=str(model), device="cpu", kv_cache_tokens=256, **settings))
        planned = sum(item.num_bytes for item in plan.memory.items if item.kind is Kind.EXPERTS)
        return planned, plan.expert_quantise, "\n".join(plan.lines)

    sizes = {}
    for backend, quantise in (("AMXBF16", None), ("AMXInt8", "int8"), ("AMXInt4", "int4")):
        sizes[backend], found, lines = experts(rules=rules(tmp_path, backend))
        assert found == quantise and "native here, in" in lines and "experts: native" in lines
    assert sizes["AMXInt4"] < sizes["AMXInt8"] < sizes["AMXBF16"]
    assert experts(rules=rules(tmp_path, "AMXInt8"), quantise="int4")[:2] == (sizes["AMXInt4"], "int4")
    harness = Harness(model, rules=rules(tmp_path, "AMXInt8"))
    (backend,) = harness.core.runner.model.expert_backends
    assert backend._plain == "i8"
    harness.close()
