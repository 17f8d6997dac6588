"""Files in KTransformers' schema mean here what they mean there, or say in which line they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rules import Machine, RulesError, place
from tests.rules.models import load_rules, modules, parse_rule_set

FIXTURES = Path(__file__).parent / "fixtures"
MODULES = modules(4, [0, 2, 3])  # layer 1 is dense
GPU = Machine(gpu=True, native=True, kt=True, flashinfer=True, gpu_count=2)


def test_serve_file_places_every_module() -> None:
    rule_set = load_rules(FIXTURES / "kt-serve-int8.yaml")
    choices = place(rule_set, MODULES, GPU)
    assert set(choices) == {name for name, _ in MODULES}

    experts = choices["model.layers.0.mlp.experts"]
    assert (experts.backend, experts.device, experts.prefill_device) == ("native", "cpu", "cuda")
    assert experts.options == {"method": "AMXInt8", "quantise": "int8", "prefill_threshold": 4096}
    assert (experts.rule_index, experts.line) == (4, 37)

    assert choices["model.layers.0.self_attn"].backend == "flashinfer"
    assert choices["model.embed_tokens"].device == "cpu"
    assert choices["lm_head"].rule_index == 1
    assert choices["model.layers.0.mlp.gate"].rule_index == 2  # the router is a Linear like any other
    assert choices["model.layers.1.mlp"].rule_index == 9  # the dense layer's MLP
    assert choices["model.rotary_emb"].rule_index == 0  # Qwen3MoE borrows Qwen2MoE's class there
    assert choices["model.norm"].device == "cuda"
    notes = [str(note) for note in rule_set.notes]
    assert [n.split(":")[0] for n in notes] == ["line 16", "line 17", "line 40", "line 46"]
    assert "VLinearMarlin" in notes[0] and "native here, in int8" in notes[2] and "out_device" in notes[3]


def test_layers_over_two_gpus() -> None:
    rule_set = load_rules(FIXTURES / "kt-two-gpus.yaml")
    choices = place(rule_set, MODULES, GPU)
    first, last = choices["model.layers.0.mlp.experts"], choices["model.layers.3.mlp.experts"]
    assert (first.backend, first.prefill_device, first.options) == ("native", "cpu", {"method": "GGUF"})
    assert (last.backend, last.device) == ("gpu", "cuda:1")
    assert choices["model"].options == {"prefill_threshold": 0, "transfer_map": {2: "cuda:1"}}
    assert choices["model.layers.1.mlp.up_proj"].device == "cuda:0"
    assert choices["lm_head"].device == "cuda:1"
    texts = "\n".join(str(note) for note in rule_set.notes)
    assert "line 7: rule 1: replace.kwargs.prefill_device: not used" in texts
    assert "KExpertsMarlin" not in texts.split("line 21")[0] and "bf16 here" in texts


def test_devices_that_are_not_there_are_refused_with_the_line() -> None:
    rule_set = load_rules(FIXTURES / "kt-two-gpus.yaml")
    with pytest.raises(RulesError, match=r"line 30: rule 4: .*cuda:1: this machine has 1 GPUs"):
        place(rule_set, MODULES, Machine(gpu=True, native=True, flashinfer=True))
    with pytest.raises(RulesError, match="no GPU"):
        place(rule_set, MODULES, Machine(native=True))
    with pytest.raises(RulesError, match=r"rule 1.*not an x86"):
        place(rule_set, MODULES, Machine(gpu=True, gpu_count=2, flashinfer=True, reasons={"native": "not an x86"}))


def test_transfer_map_must_agree_with_the_layers() -> None:
    text = (FIXTURES / "kt-two-gpus.yaml").read_text().replace('2: "cuda:1"', '1: "cuda:1"')
    with pytest.raises(RulesError, match=r"says cuda:1 for layer 1, but model.layers.1.self_attn is on cuda:0") as e:
        place(parse_rule_set(text.encode(), "x.yaml"), MODULES, GPU)
    assert e.value.line == 41


@pytest.mark.parametrize(
    ("old", "new", "key", "allowed"),
    [
        ("KTransformersExpertsV2", "KTransformersExpertsV9", "replace.class", "ktserve.experts.native"),
        ('"KExpertsCPU"', '"KExpertsTPU"', "replace.kwargs.generate_op", "KExpertsCPU"),
        ('"AMXInt8"', '"AMXInt9"', "replace.kwargs.backend", "AMXInt8"),
        (
            'generate_device: "cpu"\n      generate_op',
            'generate_device: "npu"\n      generate_op',
            "generate_device",
            "cuda:N",
        ),
        (
            'generate_device: "cpu"\n      generate_op',
            'generate_device: "cuda"\n      generate_op',
            "generate_op",
            "Marlin",
        ),
        ("out_device", "out_devise", "replace.kwargs.out_devise", "out_device"),
        ("threshold: 4096", "threshold: many", "threshold", "a whole number"),
        ("threshold: 4096", "threshold: -1", "threshold", "a whole number"),
        ("threshold: 4096", "threshold: true", "threshold", "a whole number"),
        ("modeling_qwen3_moe.Qwen3MoeMLP", "modeling_qwen3_moe.Qwen3MoePLM", "match.class", "torch.nn.Linear"),
        ("modeling_qwen3_moe.Qwen3MoeMLP", "modeling_mixtral.MixtralMLP", "match.class", "Qwen3MoeMLP"),
        ('"^lm_head$"', '"^lm_head($"', "match.name", ""),
        ("recursive: False", "recursive: 0", "recursive", ""),
        ("recursive: False", "recursively: False", "recursively", "recursive"),
    ],
)
def test_what_has_no_meaning_is_refused_by_line_and_key(old: str, new: str, key: str, allowed: str) -> None:
    original = (FIXTURES / "kt-serve-int8.yaml").read_text()
    text = original.replace(old, new)
    assert text != original
    with pytest.raises(RulesError) as e:
        parse_rule_set(text.encode(), "mine.yaml")
    line = next(n for n, (a, b) in enumerate(zip(original.split("\n"), text.split("\n")), 1) if a != b)  # noqa: B905
    assert e.value.file == "mine.yaml" and e.value.rule is not None
    assert e.value.line in (line, line + 1)
    assert key in str(e.value) and allowed in str(e.value)


def test_an_operator_on_the_wrong_kind_of_module_is_refused() -> None:
    text = b"- match: {name: self_attn$}\n  replace: {class: ktransformers.operators.experts.KTransformersExperts}\n"
    rule_set = parse_rule_set(text, "x.yaml")
    with pytest.raises(RulesError, match=r"line 2: rule 1: replace.class: .*cannot replace model.layers.0.self_attn"):
        place(rule_set, MODULES)


def test_decode_and_prefill_apart_only_for_experts() -> None:
    text = b"""
- match: {class: torch.nn.Linear}
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: {generate_device: cuda, prefill_device: cpu}
"""
    with pytest.raises(RulesError, match=r"line 5: rule 1: replace.kwargs.prefill_device: cpu, but decode is on cuda"):
        parse_rule_set(text, "x.yaml")


@pytest.mark.parametrize(
    ("backend", "quantise", "method"),
    [
        ("AMXInt8", "int8", "AMXInt8"),
        ("AMXInt4", "int4", "AMXInt4"),
        ("AMXBF16", None, "AMXBF16"),
        ("llamafile", None, "GGUF"),
        (None, None, "auto"),
    ],
)
@pytest.mark.parametrize("op", ["KExpertsCPU", "KSFTExpertsCPU"])
def test_experts_on_the_cpu_are_native_at_the_same_precision(
    op: str, backend: str | None, quantise: str | None, method: str
) -> None:
    asked = f", backend: {backend}" if backend else ""
    text = f"""
- match: {{name: experts$}}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {{generate_op: {op}, prefill_op: {op}, generate_device: cpu, prefill_device: cpu{asked}}}
"""
    rule_set = parse_rule_set(text.encode(), "x.yaml")
    choice = rule_set.resolve("model.layers.0.mlp.experts", "Qwen3MoeExperts")
    assert choice is not None and (choice.backend, choice.options.get("quantise")) == ("native", quantise)
    assert choice.options["method"] == method  # what --expert-backend kt computes them with
    (note,) = (note for note in rule_set.notes if note.key == "replace.class")
    assert (quantise or "file's own types") in note.text and "--expert-backend kt" in note.text
