"""From rules to a whole model: one Choice per module, checked against the machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rules.choice import DEFAULT_CHOICE, Choice
from rules.errors import RulesError
from rules.machine import Machine
from rules.rule_set import Rule, RuleSet

_LAYER = re.compile(r"^model\.layers\.(\d+)(\.|$)")


def place(rule_set: RuleSet, modules: Sequence[tuple[str, str]], machine: Machine | None = None) -> dict[str, Choice]:
    """A Choice for every module (name, class); parents come before their children.

    A module that no rule matches, or that stands below one matched by a rule with `recursive: false`, gets
    DEFAULT_CHOICE (plain torch). With a machine, "auto" becomes its device, and a backend or device that it does not
    have is a RulesError with the rule's line.
    """
    found: dict[str, Rule | None] = {}
    closed: set[str] = set()
    for name, module_class in modules:
        if any(parent in closed for parent in _parents(name)):
            found[name] = None
            continue
        rule = rule_set.find(name, module_class)
        found[name] = rule
        if rule is not None and not rule.recursive:
            closed.add(name)
    choices = {name: rule.choice if rule else DEFAULT_CHOICE for name, rule in found.items()}
    experts = {name for name, c in modules if rule_set.family.kind(rule_set.family.canonical(c) or c) == "experts"}
    _apply_prefill_threshold(choices, found, experts)
    _check_transfer_map(choices, found)
    if machine is not None:
        choices = {name: _on(machine, choice, found[name], rule_set) for name, choice in choices.items()}
    return choices


def _parents(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:n]) for n in range(1, len(words))]


def _apply_prefill_threshold(choices: dict[str, Choice], found: dict[str, Rule | None], experts: set[str]) -> None:
    """KTransformers writes the threshold of GPU prefill on the model; it is the experts that need it."""
    threshold = choices["model"].options.get("prefill_threshold", 0) if "model" in choices else 0
    for name, choice in choices.items():
        rule = found[name]
        if name not in experts or rule is None or not rule.raw.replace_class.value.startswith("ktransformers."):
            continue
        if choice.prefill_device == choice.device:
            continue
        if threshold:
            choices[name] = replace(choice, options={**choice.options, "prefill_threshold": threshold})
        else:
            options = {k: v for k, v in choice.options.items() if k != "prefill_threshold"}
            choices[name] = replace(choice, prefill_device=choice.device, options=options)


def _check_transfer_map(choices: dict[str, Choice], found: dict[str, Rule | None]) -> None:
    """Where hidden states move between devices is known from the layers' own rules: the map must say the same."""
    model, rule = choices.get("model"), found.get("model")
    layers: dict[int, str] = model.options.get("transfer_map", {}) if model else {}
    if not layers or rule is None:
        return
    for name, choice in choices.items():
        match = _LAYER.match(name)
        if not match or not name.endswith(".self_attn"):
            continue
        starts = [start for start in layers if start <= int(match[1])]
        if starts and layers[max(starts)] != choice.device:
            item = rule.raw.kwargs["transfer_map"]
            raise rule.raw.error(
                f"says {layers[max(starts)]} for layer {match[1]}, but {name} is on {choice.device}",
                "replace.kwargs.transfer_map",
                item.line,
                (choice.device,),
            )


def _on(machine: Machine, choice: Choice, rule: Rule | None, rule_set: RuleSet) -> Choice:
    auto = "cuda" if machine.gpu else "cpu"
    choice = replace(
        choice,
        device=auto if choice.device == "auto" else choice.device,
        prefill_device=auto if choice.prefill_device == "auto" else choice.prefill_device,
    )
    for backend in (choice.backend, choice.options.get("cpu")):
        reason = machine.missing(backend) if backend else None
        if reason:
            raise _error(rule, rule_set, "replace.class", f"backend {backend}: {reason}")
    for device in (choice.device, choice.prefill_device):
        if device == "cpu":
            continue
        if not machine.gpu:
            raise _error(rule, rule_set, "replace.kwargs", f"device {device}: {machine.missing('gpu')}")
        index = int(device.partition(":")[2] or 0)
        if index >= machine.gpu_count:
            raise _error(
                rule, rule_set, "replace.kwargs", f"device {device}: this machine has {machine.gpu_count} GPUs"
            )
    return choice


def _error(rule: Rule | None, rule_set: RuleSet, key: str, message: str) -> RulesError:
    return rule.raw.error(message, key) if rule else RulesError(message, file=rule_set.file, key=key)
