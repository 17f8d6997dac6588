"""Rules for each family: KTransformers' own files for it load, and classes of another family are refused."""

from __future__ import annotations

import pytest

from engine.architectures.qwen2_moe import QWEN2_MOE
from engine.architectures.registry import architectures
from rules import Machine, RulesError, parse_rule_set, place
from rules.operators import operators_of
from testing.models.shapes import config

QWEN2_FILE = b"""
- match:
    class: ktransformers.models.modeling_qwen2_moe.Qwen2MoeRotaryEmbedding
  replace:
    class: ktransformers.operators.RoPE.RotaryEmbedding
    kwargs: {generate_device: cpu, prefill_device: cpu}
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp$"
    class: ktransformers.models.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock
  replace:
    class: ktransformers.operators.experts.KQwen2MoeSparseMoeBlock
    kwargs: {generate_device: cpu, prefill_device: cpu}
- match:
    name: "^model\\\\.layers\\\\..*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: {generate_device: cpu, prefill_device: cpu, generate_op: KLinearCPUInfer, prefill_op: KLinearCPUInfer}
- match:
    name: "^model$"
  replace:
    class: ktransformers.operators.models.KQwen2MoeModel
    kwargs: {device: cpu, per_layer_prefill_intput_threshold: 0}
"""


def test_a_file_of_ktransformers_for_qwen2_moe() -> None:
    model = config(architecture="qwen2_moe", qk_norm=False, shared_expert_intermediate_size=64, mlp_only_layers=(1,))
    choices = place(
        parse_rule_set(QWEN2_FILE, "x.yaml", QWEN2_MOE.rules), QWEN2_MOE.module_classes(model), Machine(native=True)
    )
    assert choices["model.rotary_emb"].rule_index == 0
    assert (choices["model.layers.0.mlp"].rule_index, choices["model.layers.1.mlp"].rule_index) == (1, -1)
    for module in ("mlp.shared_expert.up_proj", "mlp.shared_expert_gate", "self_attn.q_proj"):
        assert choices[f"model.layers.0.{module}"].backend == "native"
    assert choices["model"].rule_index == 3


@pytest.mark.parametrize("family", architectures(), ids=lambda family: family.name)
def test_classes_of_other_families_are_refused(family) -> None:  # type: ignore[no-untyped-def]
    for other in architectures():
        for name in set(other.rules.classes) - set(family.rules.classes) - set(family.rules.aliases):
            text = f"- {{match: {{class: {other.rules.packages[0]}.{name}}}, replace: {{class: default}}}}"
            with pytest.raises(RulesError, match="is no module class of this model"):
                parse_rule_set(text.encode(), "x.yaml", family.rules)
        for operator in operators_of(other.rules).keys() - operators_of(family.rules).keys():
            text = f"- {{match: {{name: x}}, replace: {{class: {operator}}}}}"
            with pytest.raises(RulesError, match="unknown class"):
                parse_rule_set(text.encode(), "x.yaml", family.rules)
