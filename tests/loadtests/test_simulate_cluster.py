"""Replicas in simulated time: one is what the simulator alone is, and affinity keeps adapters in their slots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.simulate.cluster import main, router, run
from loadtests.simulate.cost import StepCost
from loadtests.simulate.report import Limits, summary
from loadtests.simulate.run import Simulation
from loadtests.simulate.traces import adapters
from scheduler.config import SchedulerConfig

COST = StepCost((0.006, 0.0007, 3.4e-5, 2.6e-7), ((0.0, 64.0), (5.0, 900.0), (9.0, 1024.0)))
CONFIG = SchedulerConfig(
    num_blocks=2048, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=32768, max_queue=4096,
    num_adapter_slots=4, eos_token_ids=(),
)  # fmt: skip


def test_one_replica_is_the_simulator() -> None:
    trace = adapters(5, 5, 2.0)
    alone = Simulation(CONFIG, COST, 0.05).run(trace)
    for policy in ("affinity", "least", "random"):
        found = run(trace, 1, CONFIG, COST, 0.05, router(policy, 4, 8, 0))
        assert summary(found, Limits()) == summary(alone, Limits())


def test_affinity_keeps_adapters_in_their_slots() -> None:
    trace = adapters(1, 8, 6.0, 60)
    hits = {}
    for policy in ("affinity", "least", "random"):
        found = summary(run(trace, 4, CONFIG, COST, 0.05, router(policy, 4, 8, 0)), Limits())
        assert found["requests"] == len(trace) and found["refused"] == 0
        hits[policy] = found["slot_hits"]
    assert hits["affinity"] > 1.4 * max(hits["least"], hits["random"]), hits


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--replicas", "2", "--adapters", "4", "--seconds", "2", "--policy", "affinity")
    assert main([*small, "--rate", "2,3", "--plot", str(tmp_path / "x.svg")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["policy"], line["rate"]) for line in lines] == [("affinity", 2), ("affinity", 3)]
    assert (tmp_path / "x.svg").read_text().count("<circle") == 2
    for wrong in (["--replicas", "0"], ["--rate", "x"], ["--rate", "1,0"]):
        with pytest.raises(SystemExit):
            main(wrong)
