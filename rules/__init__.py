"""Placement rules: which backend serves which module of the model, in KTransformers' match/replace YAML.

rule_set = load_rules("cpu", family)                       # or a path
choices = place(rule_set, modules, machine)                # (name, class) of the model's modules
"""

from rules.choice import DEFAULT_CHOICE, NO_RULE, Choice, Note
from rules.errors import RulesError
from rules.family import Family, named_after
from rules.machine import Machine, default_rules
from rules.place import place
from rules.rule_set import RuleSet, builtin_names, load_rules, parse_rule_set

__all__ = [
    "DEFAULT_CHOICE",
    "NO_RULE",
    "Choice",
    "Family",
    "Machine",
    "Note",
    "RuleSet",
    "RulesError",
    "builtin_names",
    "default_rules",
    "load_rules",
    "named_after",
    "parse_rule_set",
    "place",
]
