"""Matching, shipped files, defaults, our own classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rules import (
    DEFAULT_CHOICE,
    NO_RULE,
    Choice,
    Machine,
    RulesError,
    builtin_names,
    default_rules,
    place,
)
from tests.rules.models import load_rules, modules, parse_rule_set

MODULES = modules(3, [0, 2])
EVERYTHING = Machine(gpu=True, native=True, kt=True, flashinfer=True)
MACHINES = [
    Machine(),
    Machine(kt=True),
    Machine(native=True),
    Machine(native=True, kt=True),
    Machine(gpu=True),
    Machine(gpu=True, native=True),
    Machine(gpu=True, flashinfer=True),
    EVERYTHING,
]


def rules_of(text: str):  # type: ignore[no-untyped-def]
    return parse_rule_set(text.encode(), "x.yaml")


@pytest.mark.parametrize("name", builtin_names())
def test_shipped_rules_place_every_module_and_need_no_note(name: str) -> None:
    rule_set = load_rules(name)
    choices = place(rule_set, MODULES, EVERYTHING)
    assert all(choice.rule_index != NO_RULE for choice in choices.values())
    assert not any("auto" in (c.device, c.prefill_device) for c in choices.values())
    assert rule_set.notes == ()


def test_shipped_names() -> None:
    assert {"reference", "cpu", "gpu-cpu-experts", "hybrid", "gpu"} <= set(builtin_names())


@pytest.mark.parametrize(
    ("name", "backend", "device"),
    [
        ("reference", "reference", "cuda"),
        ("cpu", "native", "cpu"),
        ("cpu-kt", "kt", "cpu"),
        ("gpu-cpu-experts", "native", "cpu"),
        ("hybrid", "hybrid", "cuda"),
        ("gpu", "gpu", "cuda"),
    ],
)
def test_shipped_experts(name: str, backend: str, device: str) -> None:
    experts = place(load_rules(name), MODULES, EVERYTHING)["model.layers.2.mlp.experts"]
    assert (experts.backend, experts.device) == (backend, device)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_default_suits_its_machine(machine: Machine) -> None:
    place(load_rules(default_rules(machine)), MODULES, machine)


def test_defaults() -> None:
    names = [default_rules(machine) for machine in MACHINES]
    assert names == [
        "reference", "reference", "cpu", "cpu", "reference", "cpu", "reference",
        "gpu-cpu-experts",
    ]  # fmt: skip


def test_first_match_wins_and_regex_searches_anywhere() -> None:
    rule_set = rules_of(
        """
- match: {name: "layers\\\\.1\\\\..*q_proj", class: torch.nn.Linear}
  replace: {class: ktserve.linear.reference, kwargs: {device: cuda:1}}
- match: {class: torch.nn.Linear}
  replace: {class: ktserve.linear.native}
"""
    )
    assert rule_set.resolve("model.layers.1.self_attn.q_proj", "torch.nn.Linear") == Choice(
        "reference", "cuda:1", "cuda:1", {}, 0, 2
    )
    second = rule_set.resolve("model.layers.0.self_attn.q_proj", "Linear")
    assert second is not None and (second.backend, second.rule_index, second.line) == ("native", 1, 4)
    assert rule_set.resolve("model.layers.1.self_attn.q_norm", "Qwen3MoeRMSNorm") is None
    with pytest.raises(RulesError, match="unknown class Conv2d"):
        rule_set.resolve("model.conv", "Conv2d")


def test_recursive_false_closes_what_is_below() -> None:
    text = """
- match: {name: '\\.self_attn$'}
  replace: {class: ktserve.attention.native}
  recursive: %s
- match: {class: torch.nn.Linear}
  replace: {class: ktserve.linear.native}
"""
    name = "model.layers.0.self_attn.q_proj"
    assert place(rules_of(text % "true"), MODULES)[name].backend == "native"
    closed = place(rules_of(text % "false"), MODULES)
    assert closed[name] == DEFAULT_CHOICE
    assert closed["model.layers.0.mlp.gate"].backend == "native"


def test_auto_becomes_the_machine_s_device() -> None:
    rule_set = load_rules("reference")
    assert place(rule_set, MODULES)["lm_head"].device == "auto"
    assert place(rule_set, MODULES, Machine())["lm_head"].device == "cpu"
    assert place(rule_set, MODULES, Machine(gpu=True))["lm_head"].device == "cuda"


@pytest.mark.parametrize(
    ("name", "machine", "reason"),
    [
        ("cpu", Machine(), "native: the extension"),
        ("cpu-kt", Machine(native=True, reasons={"kt": "glibc is older than 2.35"}), "glibc is older"),
        ("gpu", Machine(native=True), "no GPU"),
        ("gpu-cpu-experts", Machine(gpu=True, native=True), "flashinfer is not installed"),
        ("hybrid", Machine(gpu=True, flashinfer=True), "native: the extension"),
    ],
)
def test_backends_that_the_machine_lacks_are_refused(name: str, machine: Machine, reason: str) -> None:
    with pytest.raises(RulesError, match=reason) as e:
        place(load_rules(name), MODULES, machine)
    assert e.value.rule is not None and e.value.line is not None


@pytest.mark.parametrize(
    ("kwargs", "options", "prefill"),
    [
        ("class: ktserve.experts.kt, kwargs: {method: AMXInt4}", {"method": "AMXInt4"}, "cpu"),
        ("class: ktserve.experts.kt", {"method": "auto"}, "cpu"),
        ("class: ktserve.experts.native, kwargs: {quantise: int8}", {"quantise": "int8"}, "cpu"),
        (
            "class: ktserve.experts.native, kwargs: {prefill_device: cuda, prefill_threshold: 1024}",
            {"prefill_threshold": 1024},
            "cuda",
        ),
        ("class: ktserve.experts.native, kwargs: {prefill_device: cuda}", {"prefill_threshold": "auto"}, "cuda"),
        (
            "class: ktserve.experts.hybrid, kwargs: {cpu: native, gpu_memory: 8GiB}",
            {"cpu": "native", "gpu_memory": "8GiB"},
            "cuda",
        ),
        (
            "class: ktserve.experts.hybrid, kwargs: {prefill_threshold: 1024}",
            {"cpu": "native", "gpu_memory": "auto", "prefill_threshold": 1024},
            "cuda",
        ),
    ],
)
def test_options_of_our_expert_classes(kwargs: str, options: dict[str, object], prefill: str) -> None:
    rule_set = rules_of("- match: {name: experts$}\n  replace: {" + kwargs + "}\n")
    choice = rule_set.resolve("model.layers.0.mlp.experts", "Qwen3MoeExperts")
    assert choice is not None and choice.options == options and choice.prefill_device == prefill


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("class: ktserve.experts.kt, kwargs: {method: AMX}", "method: unknown value 'AMX'; allowed: auto, AMXBF16"),
        ("class: ktserve.experts.kt, kwargs: {device: cuda}", "kt runs on the CPU, not on cuda; allowed: cpu"),
        ("class: ktserve.experts.gpu, kwargs: {device: cpu}", "gpu runs on a GPU; allowed: cuda, cuda:N"),
        ("class: ktserve.experts.gpu, kwargs: {threads: 3}", "unknown key for ktserve.experts.gpu; allowed: device"),
        ("class: ktserve.experts.native, kwargs: {prefill_threshold: 7}", "needs a prefill_device"),
        ("class: ktserve.experts.hybrid, kwargs: {gpu_memory: lots}", "'lots'; allowed: auto, a size such as 8GiB"),
        ("class: ktserve.experts.hybrid, kwargs: {prefill_device: cpu}", "is a GPU, or left out"),
        ("class: ktserve.experts.native, kwargs: {prefill_device: tpu}", "'tpu' is not a device"),
        ("class: ktserve.experts.native, kwargs: {device: [cpu]}", "a list has no place here"),
        ("class: ktserve.experts.native, kwargs: {device: {a: b}}", "a mapping is not a device"),
    ],
)
def test_wrong_options_are_refused(kwargs: str, message: str) -> None:
    with pytest.raises(RulesError) as e:
        rules_of("- match: {name: experts$}\n  replace: {" + kwargs + "}\n")
    assert message in str(e.value) and "line 2: rule 1" in str(e.value)


def test_the_prefill_kernel_of_flashinfer() -> None:
    text = "- match: {name: self_attn$}\n  replace: {class: ktserve.attention.flashinfer, kwargs: {%s}}\n"
    for kwargs, expected in (("", "auto"), ("prefill: fa2", "fa2"), ("prefill: fa3, device: cuda", "fa3")):
        choice = rules_of(text % kwargs).resolve("model.layers.0.self_attn", "Qwen3MoeAttention")
        assert choice is not None and choice.options == {"prefill": expected}
    with pytest.raises(RulesError, match="unknown value 'fa4'; allowed: auto, fa2, fa3"):
        rules_of(text % "prefill: fa4")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match=r"no\.yaml: cannot be read .*cpu"):
        load_rules(tmp_path / "no.yaml")
    with pytest.raises(RulesError, match="cannot be read"):
        load_rules(tmp_path)
    with pytest.raises(RulesError, match="cannot be read"):
        load_rules("a\0b")


def test_importing_rules_imports_neither_torch_nor_the_engine() -> None:
    code = "import rules, sys; print({'torch', 'engine', 'scheduler', 'native', 'api'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("class: ktserve.experts.hybrid, kwargs: {cpu: kt}", r"kwargs\.cpu: unknown value 'kt'; allowed: native"),
        ("class: ktserve.experts.hybrid, kwargs: {cpu: reference}", r"'reference'; allowed: native"),
        ("class: ktserve.experts.kt, kwargs: {prefill_device: cuda}", r"prefill_device: unknown key .* device, method"),
        ("class: ktserve.experts.kt, kwargs: {prefill_threshold: 9}", r"prefill_threshold: unknown key .* method"),
        ("class: ktserve.experts.kt, kwargs: {quantise: int8}", r"quantise: unknown key .* method"),
        ("class: ktserve.experts.native, kwargs: {quantise: int3}", r"'int3'; allowed: int8, int4"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_by_the_rule(rule: str, message: str) -> None:
    with pytest.raises(RulesError, match=message):
        rules_of("- match: {name: experts$}\n  replace: {" + rule + "}\n")
