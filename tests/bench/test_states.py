"""The benchmark of states plays a trace on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import snapshots
from benchmarks.serving.states import main
from testing.models.tiny import save_hf, tiny_model

SHAPE = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3_next", "qwen3_moe"):
        save_hf(tiny_model(family=family, **SHAPE), root / family)
    return str(root / "qwen3_next"), str(root / "qwen3_moe")


def test_the_same_turns_are_played_with_and_without_states(models, tmp_path: Path, capsys) -> None:
    settings = ["--seconds", "6", "--rate", "1", "--seed", "3"]
    assert main([*models, *settings, "--out", str(tmp_path / "counts.json")]) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    ours, twin = counts["states"], counts["attention"]
    assert ours["turns"] == twin["turns"] > 4 and ours["prompt_tokens"] == twin["prompt_tokens"]
    assert twin["computed_tokens"] <= ours["computed_tokens"] < 0.8 * ours["prompt_tokens"]
    assert 0 < ours["snapshots"] <= 1 and twin["snapshots"] == 0
    assert "computed with states: +" in capsys.readouterr().out
    limited = [*models, *settings, "--snapshot-share", "0.02", "--out", str(tmp_path / "limited.json")]
    assert main(limited) == 0
    least = json.loads((tmp_path / "limited.json").read_text())["states"]
    assert 0 < least["snapshots"] < 0.02 < ours["snapshots"] and least["computed_tokens"] > ours["computed_tokens"]
    with pytest.raises(SystemExit):
        main([*reversed(models), *settings])


def test_the_scheduler_alone_computes_more_the_less_snapshots_may_take(capsys) -> None:
    settings = ["chat", "--seconds", "10", "--seeds", "1", "--kv-cache-tokens", "131072", "--shares", "1", "0.03", "0"]
    assert snapshots.main(settings) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    computed = [int(row[2].replace(",", "")) for row in rows]
    alone = int(rows[0][3].replace(",", ""))
    assert alone <= computed[0] < computed[1] < computed[2]
