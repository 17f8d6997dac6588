"""Rules for each family: KTransformers' own files for it load, and classes of another family are refused."""

from __future__ import annotations

import pytest

from engine.architectures.mixtral import MIXTRAL
from engine.architectures.qwen2_moe import QWEN2_MOE
from engine.architectures.registry import architecture_of, architectures, config_from_hf
from rules import Machine, RulesError, parse_rule_set, place
from rules.operators import operators_of
from testing.models.shapes import config
from testing.models.tiny import tiny_model

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


# The shape of KTransformers' file for Mixtral: what it says of modules under the names of the model's files
MIXTRAL_FILE = r"""
- match: {class: ktransformers.models.modeling_mixtral.MixtralRotaryEmbedding}
  replace:
    class: ktransformers.operators.RoPE.RotaryEmbedding
    kwargs: {generate_device: DEVICE, prefill_device: DEVICE}
- match: {name: '^model\.layers\.(?!.*block_sparse_moe\.gate).*$', class: torch.nn.Linear}
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: {generate_device: DEVICE, prefill_device: DEVICE, generate_op: KLinearTorch, prefill_op: KLinearTorch}
- match:
    name: '^model\.layers\..*\.block_sparse_moe$'
    class: ktransformers.models.modeling_mixtral.MixtralSparseMoeBlock
  replace:
    class: ktransformers.operators.experts.KMistralSparseMoEBlock
    kwargs: {generate_device: DEVICE, prefill_device: DEVICE}
- match: {name: '^model\.layers\..*\.block_sparse_moe\.experts$'}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {generate_device: cpu, generate_op: KExpertsCPU, prefill_device: DEVICE, prefill_op: KExpertsTorch,
             out_device: DEVICE}
  recursive: false
- match: {name: '^model.embed_tokens'}
  replace: {class: default, kwargs: {generate_device: cpu, prefill_device: cpu}}
- match: {name: '^model\.layers\..*\.'}
  replace: {class: default, kwargs: {generate_device: DEVICE, prefill_device: DEVICE}}
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ours", [False, True], ids=["stored names", "our names"])
def test_a_file_of_ktransformers_for_mixtral(device: str, ours: bool) -> None:
    """A file that says `mlp` means the same."""
    text = MIXTRAL_FILE.replace("DEVICE", device).replace("block_sparse_moe", "mlp" if ours else "block_sparse_moe")
    rule_set = parse_rule_set(text.encode(), "x.yaml", MIXTRAL.rules)
    machine = Machine(gpu=device == "cuda", native=True, flashinfer=True)
    modules = MIXTRAL.module_classes(config(architecture="mixtral", qk_norm=False))
    choices = place(rule_set, modules, machine)
    rules = {name.removeprefix("model.layers.1."): choice.rule_index for name, choice in choices.items()}
    wanted = {"model.rotary_emb": 0, "self_attn.q_proj": 1, "mlp": 2, "mlp.experts": 3, "model.embed_tokens": 4}
    wanted |= {"mlp.gate": 5, "self_attn": 5, "input_layernorm": 5, "lm_head": -1, "model.layers.1": -1}
    assert {name: rules[name] for name in wanted} == wanted
    experts = choices["model.layers.0.mlp.experts"]
    assert (experts.backend, experts.device, experts.prefill_device) == ("native", "cpu", "cpu")
    assert choices["model.layers.0.self_attn.q_proj"].backend == ("gpu" if device == "cuda" else "reference")


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r"\.mlp\.experts$", ["mlp.experts"]),
        (r"\.block_sparse_moe\.experts$", ["mlp.experts"]),
        (r"\b(mlp|block_sparse_moe)$", ["mlp"]),
        (r"_moe\b.gate$", ["mlp.gate"]),
        (r"layers.0.(?!.*mlp)(?!.*norm)", ["self_attn"]),
        (r"layers.0.(?!.*block_sparse_moe)(?!.*norm)", ["self_attn"]),
        (r"layers.0.(?!.*sparse)(?!.*norm)", ["self_attn"]),
        (r"layers.0.(?!(mlp|block_sparse_moe|self_attn))", ["input_layernorm", "post_attention_layernorm"]),
    ],
)
def test_a_rule_speaks_of_one_of_a_modules_names(pattern: str, matched: list[str]) -> None:
    text = f"- {{match: {{name: '{pattern}'}}, replace: {{class: default}}}}"
    rule_set = parse_rule_set(text.encode(), "x.yaml", MIXTRAL.rules)
    modules = MIXTRAL.module_classes(config(architecture="mixtral", qk_norm=False))
    found = [
        name.removeprefix("model.layers.0.")
        for name, kind in modules
        if name.startswith("model.layers.0.") and not name.endswith("_proj") and rule_set.find(name, kind)
    ]
    assert found == matched


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


# DeepSeek-V3-Chat.yaml of KTransformers
DEEPSEEK = """
- match:
    class: ktransformers.models.modeling_deepseek_v3.DeepseekV3RotaryEmbedding
  replace:
    class: ktransformers.operators.RoPE.YarnRotaryEmbeddingV3
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
- match:
    name: "^lm_head$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
      generate_op: "KLinearMarlin"
      prefill_op: "KLinearTorch"
- match:
    name: "^model\\\\.layers\\\\.(?!.*self_attn\\\\.kv_b_proj).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
      generate_op: "KLinearMarlin"
      prefill_op: "KLinearTorch"
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp$"
    class: ktransformers.models.modeling_deepseek_v3.DeepseekV3MoE
  replace:
    class: ktransformers.operators.experts.KDeepseekV3MoE
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
- match:
    class: ktransformers.models.modeling_deepseek_v3.MoEGate
  replace:
    class: ktransformers.operators.gate.KMoEGate
    kwargs:
      generate_device: "cuda:0"
      prefill_device: "cuda:0"
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      prefill_device: "cuda"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda"
  recursive: False
- match:
    name: "^model\\\\.layers\\\\..*\\\\.self_attn$"
  replace:
    class: ktransformers.operators.attention.KDeepseekV2Attention
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
      absorb_for_prefill: False
- match:
    name: "^model$"
  replace:
    class: "ktransformers.operators.models.KDeepseekV2Model"
    kwargs:
      per_layer_prefill_intput_threshold: 0
- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs:
        generate_device: "cpu"
        prefill_device: "cpu"
"""


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_ktransformers_rules_for_deepseek(family: str) -> None:
    """Routers have a class of their own there, which a rule for projections does not meet."""
    text = DEEPSEEK
    if family == "deepseek_v2":
        text = text.replace("modeling_deepseek_v3", "modeling_deepseek").replace("DeepseekV3MoE", "DeepseekV2MoE")
        text = text.replace("DeepseekV3RotaryEmbedding", "DeepseekV2YarnRotaryEmbedding")
        text = text.replace("YarnRotaryEmbeddingV3", "YarnRotaryEmbedding")
    model = config_from_hf(tiny_model(family=family).config.to_dict())
    rules = architecture_of(model).rules
    rule_set = parse_rule_set(text.encode(), "x.yaml", rules)
    assert any("absorb_for_prefill" in str(note) for note in rule_set.notes)
    machine = Machine(gpu=True, native=True, kt=False, flashinfer=True, gpu_count=1)
    placed = place(rule_set, architecture_of(model).module_classes(model), machine)
    at = "model.layers.1"
    rule_of = {name: placed[f"{at}.{name}"].rule_index for name in ("mlp", "mlp.gate", "mlp.experts", "self_attn")}
    assert rule_of == {"mlp": 3, "mlp.gate": 4, "mlp.experts": 5, "self_attn": 6}
    assert placed[f"{at}.mlp.experts"].backend == "native"
    assert placed[f"{at}.self_attn.kv_a_proj_with_mqa"].backend == "gpu" == placed["lm_head"].backend
