"""--profile-dir: a line per step and token, true, and never in a step's way."""

from __future__ import annotations

import json
import threading

import pytest

from engine.errors import UserError
from scheduler.plan import Event, EventKind
from scheduler.request import Request, SamplingParams
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from testing.waiting import PATIENCE_S, eventually
from tests.engine.parity import prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(4, mlp_only_layers=[0]), path)
    return path


@pytest.mark.parametrize("rules", ["reference", None])
def test_lines_say_what_happened(folder, tmp_path, rules):
    engine = Harness(folder, rules=rules, profile_dir=str(tmp_path / "p"), max_num_batched_tokens=16, max_num_seqs=4)
    engine.generate(prompts(1, [20, 5]), max_tokens=6)
    source = engine.plan.source
    engine.close()
    steps = [json.loads(line) for line in (tmp_path / "p/steps.jsonl").read_text().splitlines()]
    tokens = [json.loads(line) for line in (tmp_path / "p/tokens.jsonl").read_text().splitlines()]
    assert sum(s["tokens"] for s in steps) == 25 + 2 * 5
    assert [t["index"] for t in tokens if t["request"] == "r0"] == list(range(6))
    assert len(tokens) == 12
    for step in steps:
        assert step["total_s"] >= step["forward_s"] > 0 and step["experts_s"] > 0
        assert len(step["experts_touched"]) == 1 and 1 <= step["experts_touched"][0] <= 8
        assert step["weight_bytes"] <= source.num_bytes and step["kv_bytes"] > 0
    assert steps[-1]["decode_rows"] >= 1 and steps[0]["prefill_rows"] >= 1


def test_a_slow_disk_drops_lines_not_steps(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.diagnostics.profile._QUEUE_LINES", 4)
    engine = Harness(folder, profile_dir=str(tmp_path))
    profiler = engine.core.profiler
    disk, written = threading.Event(), profiler._files["tokens"].write
    monkeypatch.setattr(profiler._files["tokens"], "write", lambda line: disk.wait(PATIENCE_S) and written(line))
    request = Request("r", [1], SamplingParams(), output=list(range(10)))
    profiler.tokens(Event(EventKind.TOKENS, request, list(range(10))), 0)
    assert profiler.dropped in (5, 6)  # the queue holds 4, the thread at most one
    assert engine.generate(prompts(2, [4]), max_tokens=3)[0]
    disk.set()
    eventually(profiler._queue.empty)
    engine.generate(prompts(2, [4]), max_tokens=3)
    engine.close()
    last = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    assert last["dropped_lines"] > 6


@pytest.mark.parametrize("full", [("steps",), ("tokens",), ("steps", "tokens")], ids="+".join)
def test_a_full_disk_ends_the_profile_not_a_step(folder, tmp_path, caplog, full):
    for name in full:
        (tmp_path / f"{name}.jsonl").symlink_to("/dev/full")
    engine = Harness(folder, profile_dir=str(tmp_path))
    profiler = engine.core.profiler
    assert engine.generate(prompts(2, [4]), max_tokens=3)[0]
    eventually(lambda: "--profile-dir: No space left on device; the profile ends here" in caplog.text)
    assert engine.generate(prompts(2, [4]), max_tokens=3)[0]
    eventually(lambda: profiler.dropped)
    engine.close()
    assert caplog.text.count("the profile ends here") == 1


def test_a_folder_that_cannot_be_made_is_said(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="profile-dir"):
        Harness(folder, profile_dir=str(tmp_path / "file" / "sub"))
