"""Loading rules, and asking them about modules. The first rule that matches a module decides, as in KTransformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rules.choice import Choice, Note
from rules.document import RawRule, parse_rules
from rules.errors import RulesError
from rules.family import ANY_CLASS, Family
from rules.operators import Operator, operators_of
from rules.reader import Kwargs

_BUILTIN_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Rule:
    """One rule, checked. `kinds` are the module kinds that its operator can replace."""

    raw: RawRule
    name: re.Pattern[str] | None
    module_class: str | None
    kinds: frozenset[str]
    recursive: bool
    choice: Choice

    def matches(self, module_name: str, stored_name: str, module_class: str) -> bool:
        if self.module_class not in (None, ANY_CLASS, module_class):
            return False
        return self.name is None or self.name.search(_meant(self.name.pattern, module_name, stored_name)) is not None


@dataclass(frozen=True)
class RuleSet:
    """The rules of a file in order, and what in it changes nothing here (`notes`, for the server to print)."""

    file: str
    family: Family
    rules: tuple[Rule, ...]
    notes: tuple[Note, ...]

    def find(self, module_name: str, module_class: str) -> Rule | None:
        """The first rule that matches. RulesError if its operator cannot replace such a module, or if the class is
        none of the model's."""
        canonical = self.family.canonical(module_class)
        if canonical is None or canonical == ANY_CLASS:
            allowed = self.family.matchable
            raise RulesError(f"{module_name} is of the unknown class {module_class}", file=self.file, allowed=allowed)
        kind, stored = self.family.kind(canonical), self.family.stored_name(module_name)
        for rule in self.rules:
            if rule.matches(module_name, stored, canonical):
                if kind not in rule.kinds:
                    raise rule.raw.error(
                        f"{rule.raw.replace_class.value} cannot replace {module_name} ({canonical})",
                        "replace.class",
                        rule.raw.replace_class.line,
                        sorted(c for c, op in operators_of(self.family).items() if kind in op.kinds),
                    )
                return rule
        return None

    def resolve(self, module_name: str, module_class: str) -> Choice | None:
        """What the rules say about one module by itself; None if no rule matches. `rules.place` also honours
        `recursive: false` of the modules above it."""
        rule = self.find(module_name, module_class)
        return rule.choice if rule else None


def _meant(pattern: str, name: str, stored: str) -> str:
    """The name that a rule speaks of: a module's name here if the pattern has words of it that the stored one lacks,
    and none of the stored one's own. Matching both would turn exclusions, `(?!.*mlp)`, into matches."""
    if name == stored:
        return name
    here, there = set(name.split(".")), set(stored.split("."))
    words = set(re.findall(r"\w+", re.sub(r"\\.", " ", pattern)))
    return name if words & (here - there) and not words & (there - here) else stored


def builtin_names() -> list[str]:
    return sorted(path.stem for path in _BUILTIN_FOLDER.glob("*.yaml"))


def load_rules(path_or_name: str | Path, family: Family) -> RuleSet:
    """Rules for models of a family, from a YAML file or one of `builtin_names()`. RulesError says what is wrong and
    where."""
    path = Path(path_or_name)
    if str(path_or_name) in builtin_names():
        path = _BUILTIN_FOLDER / f"{path_or_name}.yaml"
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as e:
        reason = (e.strerror if isinstance(e, OSError) else None) or str(e)
        raise RulesError(
            f"cannot be read ({reason})", file=str(path_or_name), allowed=["a YAML file", *builtin_names()]
        ) from None
    return parse_rule_set(data, str(path_or_name), family)


def parse_rule_set(data: bytes, file: str, family: Family) -> RuleSet:
    """Rules from the bytes of a file; `file` names it in messages."""
    rules: list[Rule] = []
    notes: list[Note] = []
    operators = operators_of(family)
    for raw in parse_rules(data, file):
        rule, said = _check(raw, family, operators)
        rules.append(rule)
        notes += said
    notes += _unused_prefill(rules)
    return RuleSet(file, family, tuple(rules), tuple(sorted(notes, key=lambda note: note.line)))


def _unused_prefill(rules: list[Rule]) -> list[Note]:
    """KTransformers' experts name a prefill kernel that runs only if the model's rule sets a threshold."""
    if any("model" in rule.kinds and rule.choice.options.get("prefill_threshold") for rule in rules):
        return []
    return [
        Note(
            rule.raw.index + 1,
            rule.raw.kwargs["prefill_device"].line,
            "replace.kwargs.prefill_device",
            "not used: no rule sets per_layer_prefill_intput_threshold above 0, so these experts prefill on the CPU",
        )
        for rule in rules
        if rule.choice.options.get("prefill_threshold") == 0
        and rule.choice.prefill_device != "cpu"
        and "experts" in rule.kinds
        and "prefill_device" in rule.raw.kwargs
    ]


def _check(raw: RawRule, family: Family, operators: Mapping[str, Operator]) -> tuple[Rule, list[Note]]:
    name = None
    if raw.name is not None:
        try:
            name = re.compile(raw.name.value)
        except (re.error, OverflowError, RecursionError) as e:
            raise raw.error(f"not a regular expression: {e}", "match.name", raw.name.line) from None
    module_class = None
    if raw.match_class is not None:
        module_class = family.canonical(raw.match_class.value)
        if module_class is None:
            raise raw.error(
                f"{raw.match_class.value} is no module class of this model",
                "match.class",
                raw.match_class.line,
                family.matchable,
            )
    operator = operators.get(raw.replace_class.value)
    if operator is None:
        raise raw.error(
            f"unknown class {raw.replace_class.value}", "replace.class", raw.replace_class.line, list(operators)
        )
    kwargs = Kwargs(raw, operator.keys)
    built = operator.build(kwargs)
    choice = Choice(built.backend, built.device, built.prefill_device, built.options, raw.index, raw.line)
    return Rule(raw, name, module_class, operator.kinds, raw.recursive, choice), kwargs.notes
