"""Placement rules: which backend serves which module of the model, in KTransformers' match/replace YAML.

rule_set = load_rules("qwen3moe-cpu")                      # or a path
choices = place(rule_set, qwen3moe_modules(48, range(48)), machine)
"""

from rules.choice import DEFAULT_CHOICE, NO_RULE, Choice, Note
from rules.errors import RulesError
from rules.machine import Machine, default_rules
from rules.modules import qwen3moe_modules
from rules.place import place
from rules.rule_set import RuleSet, builtin_names, load_rules, parse_rule_set

__all__ = [
    "DEFAULT_CHOICE",
    "NO_RULE",
    "Choice",
    "Machine",
    "Note",
    "RuleSet",
    "RulesError",
    "builtin_names",
    "default_rules",
    "load_rules",
    "parse_rule_set",
    "place",
    "qwen3moe_modules",
]
