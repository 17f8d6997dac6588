"""docs/families.md against the registry."""

from __future__ import annotations

from pathlib import Path

from engine.architectures.registry import architectures
from testing.models.tiny import FAMILIES, TRAINED

TABLE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_table_is_the_registry() -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in TABLE.read_text().splitlines()
        if line.startswith("| `") and line.count("|") == 8
    ]
    named = [tuple(cell.strip("`") for cell in row[:3]) for row in rows]
    assert named == [(family.name, family.model_class, family.gguf) for family in architectures()]
    trained = {row[0].strip("`") for row in rows if row[-1] == "yes"}
    assert trained == {*TRAINED, "glm4_moe_lite", "kimi_k25", "qwen3_5_moe"}
    assert {row[0].strip("`") for row in rows} >= set(FAMILIES)
