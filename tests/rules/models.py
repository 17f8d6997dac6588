"""The module classes of a model to place, and rules read for its family."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from engine.architectures.qwen3_moe import QWEN3_MOE
from rules.operators import operators_of
from rules.rule_set import load_rules as load_for
from rules.rule_set import parse_rule_set as parse_for
from testing.models.shapes import config

load_rules = partial(load_for, family=QWEN3_MOE.rules)
parse_rule_set = partial(parse_for, family=QWEN3_MOE.rules)
OPERATORS = operators_of(QWEN3_MOE.rules)


def modules(num_layers: int, sparse: Iterable[int]) -> list[tuple[str, str]]:
    """(name, class) of a model whose other layers are dense."""
    dense = tuple(sorted(set(range(num_layers)) - set(sparse)))
    return QWEN3_MOE.module_classes(config(num_hidden_layers=num_layers, mlp_only_layers=dense))
