"""Engines that find prefixes on disk: the same tokens, whatever they hold KV in and whatever happened meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine.planning.plan as build
from engine.config import EngineConfig
from engine.errors import UserError
from engine.kv_disk import files as module
from engine.kv_disk.disk import disk_threads
from engine.memory.limits import Memory
from engine.messages import Abort, Failed, Finished
from engine.planning.plan import plan_engine
from native import available
from rules import Machine
from scheduler.memory.disk import DiskBlocks
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from testing.waiting import eventually
from tests.engine.parity import BACKENDS, prompts
from tests.engine.test_row_faults import BAD, poison

needs_native = pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")
KINDS = {
    "bfloat16": {"rules": None, "dtype": "auto"},
    "int8": {"rules": None, "dtype": "auto", "kv_cache_dtype": "int8"},
    "float32": {"rules": None},
    "reference": {},
}
SYSTEM = prompts(1, [150])[0]
ASKED = [SYSTEM + tail for tail in prompts(2, [5, 17])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(4, num_hidden_layers=2, head_dim=64).bfloat16(), folder)
    return folder


def started(model: Path, folder: Path | None, **settings) -> Harness:
    """With KV for 16 blocks, of which a prompt of ASKED takes 10 or 11; `folder` None: without a disk."""
    disk = {} if folder is None else {"kv_disk": "64MiB", "kv_disk_dir": str(folder)}
    return Harness(model, **{"pack_cache": "off", "kv_cache_tokens": 256} | disk | settings)


def answers(engine: Harness) -> list[list[int]]:
    """One after the other, with a prompt between them that takes the blocks away."""
    found = []
    for prompt in ASKED:
        found += engine.generate([prompt])
        settle(engine)  # what is not written yet when its memory is wanted is lost to the disk
        engine.generate([prompts(3, [200])[0]])
    return found


def stats(engine: Harness) -> dict[str, float]:
    return engine.core.stats()


def settle(engine: Harness) -> None:
    engine.until(lambda: not engine.core.waiting_for_threads)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_without_a_disk(model: Path, tmp_path: Path, kind: str) -> None:
    plain = started(model, None, **KINDS[kind])
    expected = answers(plain)
    plain.close()
    for process in range(2):
        engine = started(model, tmp_path, **KINDS[kind])
        assert answers(engine) == expected
        # what was evicted meanwhile; in the second process all of the first prompt too
        assert stats(engine)["disk_hit_tokens"] > (0 if process == 0 else 144)
        settle(engine)
        assert stats(engine)["disk_read_bytes"] > 0 and stats(engine)["blocks_used"] == 0
        engine.close()
    kept = sorted(tmp_path.glob("*.kv"))
    assert sum(module.size_on_disk(file.stat().st_size - 64) for file in kept) <= 64 << 20


@needs_native
def test_nothing_is_shared_by_what_computes_other_kv(model: Path, tmp_path: Path) -> None:
    """Another dtype, other weights, another way to compute: none of them reads the first one's blocks."""
    other = tmp_path / "other"
    other.mkdir()
    save_hf(tiny_model(5, num_hidden_layers=2, head_dim=64).bfloat16(), other)
    folder = tmp_path / "kv"
    for path, settings in (
        (model, KINDS["bfloat16"]),
        (model, KINDS["int8"]),
        (model, KINDS["reference"]),
        (model, {**KINDS["bfloat16"], "quantise": "int8"}),
        (other, KINDS["bfloat16"]),
    ):
        engine = started(path, folder, **settings)
        engine.generate(ASKED[:1])
        assert stats(engine)["disk_hit_tokens"] == 0
        engine.close()
    engine = started(model, folder, **KINDS["bfloat16"])
    engine.generate(ASKED[:1])
    assert stats(engine)["disk_hit_tokens"] == 160 - 16, "which are there all the same"
    engine.close()


@needs_native
def test_damaged_blocks_are_computed_again(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = started(model, tmp_path)
    expected = engine.generate(ASKED)
    engine.close()
    for i, file in enumerate(sorted(tmp_path.glob("*.kv"))):
        content = bytearray(file.read_bytes())
        content[(i * 977) % len(content)] ^= 0x10
        file.write_bytes(content[: len(content) // 2] if i % 3 == 0 else content)
    caplog.clear()
    engine = started(model, tmp_path)
    assert engine.generate(ASKED) == expected
    assert stats(engine)["disk_damaged_blocks"] > 0 and stats(engine)["disk_hit_tokens"] == 0
    assert sum("cannot be used" in message for message in caplog.messages) == 1
    engine.close()
    engine = started(model, tmp_path)
    assert engine.generate(ASKED) == expected
    assert stats(engine)["disk_hit_tokens"] > 0, "and are written again"
    engine.close()


@needs_native
def test_a_full_disk_is_one_line_and_no_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room, writev = [5], os.writev

    def limited(file: int, buffers: list[object]) -> int:
        room[0] -= 1
        return writev(file, buffers) if room[0] >= 0 else os.write(file, b"cut off")

    monkeypatch.setattr(module.os, "writev", limited)
    engine = started(model, tmp_path)
    expected = answers(engine)
    settle(engine)
    assert stats(engine)["disk_blocks"] == 5 == len(list(tmp_path.glob("*.kv")))
    assert sum("no more" in message for message in caplog.messages) == 1
    assert not list(tmp_path.glob("*.partial"))
    engine.close()
    plain = started(model, None)
    assert answers(plain) == expected
    plain.close()


@needs_native
def test_an_abort_while_blocks_are_read(model: Path, tmp_path: Path) -> None:
    engine = started(model, tmp_path)
    engine.generate(ASKED)
    engine.close()
    engine = started(model, tmp_path)
    rid = engine.submit(ASKED[0])
    engine.core.step()
    assert stats(engine)["disk_waiting"] == 1
    engine.core.handle(Abort(request_id=rid))
    settle(engine)
    assert engine.results[rid].end is not None and stats(engine)["blocks_used"] == 0
    engine.close()


def test_what_is_not_finite_is_never_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(model, tmp_path)
    good = engine.generate([SYSTEM])
    settle(engine)
    kept = set(tmp_path.glob("*.kv"))
    poison(engine, monkeypatch)
    bad = engine.submit([*prompts(7, [40])[0], BAD, *prompts(8, [40])[0]])
    engine.run()
    assert isinstance(engine.results[bad].end, Failed)
    settle(engine)
    assert set(tmp_path.glob("*.kv")) == kept
    assert engine.generate([SYSTEM]) == good
    engine.close()


@needs_native
def test_adapters_are_told_apart_by_what_they_compute(model: Path, tmp_path: Path) -> None:
    engine = started(model, tmp_path)
    disk = engine.core.disk
    assert disk is not None
    assert len({disk.digest(each) for each in (None, b"one", b"two")}) == 3
    assert disk.digest(b"") == b"", "nobody knows what it computes: its blocks stay in memory"
    engine.close()


# ---- of models whose layers keep states


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stateful")
    save_hf(tiny_model(4, family="qwen3_next"), folder)
    return folder


def with_states(model: Path, folder: Path | None, **settings) -> Harness:
    """Memory for eight snapshots or so; other prompts take it away."""
    return started(model, folder, kv_cache_tokens=1024, max_num_seqs=2, **settings)


def asked_again(engine: Harness) -> tuple[list[list[int]], list[int]]:
    """Answers, and how many tokens were not computed, of two prompts with one beginning and of a second turn."""
    found, cached, turns = [], [], list(ASKED)
    for prompt in turns:
        rid = engine.submit(prompt, max_tokens=20)
        result = engine.run()[rid]
        assert isinstance(result.end, Finished)
        found.append(result.tokens)
        cached.append(result.end.cached_tokens)
        settle(engine)
        if len(turns) == 2:
            turns.append([*prompt, *result.tokens, *prompts(5, [9])[0]])
    return found, cached


@BACKENDS
def test_snapshots_come_back_with_their_blocks(stateful, tmp_path, backend, monkeypatch) -> None:
    monkeypatch.setattr(DiskBlocks, "observe", lambda self, plan, seconds: None)  # however fast computing is, they wait
    plain = with_states(stateful, None, **backend)
    expected, _ = asked_again(plain)
    plain.close()
    for process in range(2):
        engine = with_states(stateful, tmp_path, **backend)
        found, cached = asked_again(engine)
        assert found == expected
        if process:
            assert cached == [144, 144, 176] and stats(engine)["disk_read_snapshots"] > 0
            assert stats(engine)["disk_read_bytes"] > 0
        for seed in range(20, 24):  # memory is taken by others
            engine.generate([prompts(seed, [300])[0]], max_tokens=1)
        again, cached = asked_again(engine)
        assert again == expected and cached == [144, 144, 176]
        rid = engine.submit(ASKED[0], tenant=f"another {process}", max_tokens=20)
        end = engine.run()[rid].end
        assert isinstance(end, Finished) and end.cached_tokens == 0
        engine.close()
        if process == 1:  # every other file is damaged
            for i, file in enumerate(sorted(tmp_path.glob("*.kv"))):
                content = bytearray(file.read_bytes())
                content[(i * 977) % len(content)] ^= 0x10
                file.write_bytes(content if i % 2 else file.read_bytes())
            engine = with_states(stateful, tmp_path, **backend)
            assert asked_again(engine)[0] == expected and stats(engine)["disk_damaged_blocks"] > 0
            engine.close()


UNTIL_KILLED = """
import sys, itertools, pathlib, torch
from testing.harness import Harness
engine = Harness(pathlib.Path(sys.argv[1]), pack_cache="off", kv_cache_tokens=1024, max_num_seqs=2, kv_disk="64MiB",
                 kv_disk_dir=sys.argv[2])
for seed in itertools.count():
    prompt = torch.randint(2, 128, (100,), generator=torch.Generator().manual_seed(seed))
    engine.generate([prompt.tolist()], max_tokens=20)
"""


def test_a_process_that_is_killed_leaves_nothing_wrong(stateful, tmp_path, monkeypatch) -> None:
    """While it writes blocks and snapshots."""
    monkeypatch.setattr(DiskBlocks, "observe", lambda self, plan, seconds: None)
    command = [sys.executable, "-c", UNTIL_KILLED, str(stateful), str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as child:
        eventually(lambda: len(list(tmp_path.glob("*.kv"))) > 30)
        child.kill()
    plain, engine = with_states(stateful, None), with_states(stateful, tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    for seed in range(3):
        prompt = prompts(seed, [100])[0]
        assert plain.generate([prompt], max_tokens=20) == engine.generate([prompt], max_tokens=20)
    assert stats(engine)["disk_read_snapshots"] > 0 and stats(engine)["disk_damaged_blocks"] == 0
    plain.close()
    engine.close()


def test_a_budget_that_holds_no_snapshot_is_refused(stateful: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"and a snapshot of states [0-9]+ more") as refused:
        with_states(stateful, tmp_path, kv_disk="12KiB")
    assert refused.value.field == "kv_disk"


def test_a_cache_on_a_gpu_is_planned_for(model: Path, stateful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pinned memory for what is on its way."""
    monkeypatch.setattr(build, "find_machine", lambda config, model: Machine(gpu=True, native=True, flashinfer=True))
    monkeypatch.setattr(build, "gpu_memory", lambda device: Memory("GPU 0", 64 << 30, 80 << 30))
    for path, settings in ((model, {}), (stateful, {"rules": "reference", "dtype": "float32", "device": "cuda"})):
        plans = [plan_engine(EngineConfig(model=str(path), kv_disk=size, **settings)) for size in (None, "1GiB")]
        config, disk = plans[1].source.config, plans[1].kv_disk
        assert disk is not None and plans[1].placement.device == "cuda"
        each = 16 * config.kv_bytes_per_token(plans[1].precision.kv.itemsize) + config.state_bytes
        assert disk.unit_bytes == each and bool(disk.state_bytes) == (path == stateful)
        pinned = [sum(i.num_bytes for i in plan.memory.items if i.label.endswith("disk, pinned")) for plan in plans]
        assert pinned == [0, disk_threads() * each]


def test_one_server_at_a_time_and_a_plan_that_says_where(model: Path, tmp_path: Path) -> None:
    plan = plan_engine(EngineConfig(model=str(model), device="cpu", kv_cache_tokens=256, kv_disk="1GiB"))
    assert plan.kv_disk is not None
    assert plan.kv_disk.folder == model / ".ktserve" / f"kv-{model.name}"
    (line,) = [line for line in plan.lines if line.startswith("KV blocks on disk")]
    assert "up to 1.00 GiB" in line and str(plan.kv_disk.folder) in line
    assert not plan.kv_disk.folder.exists(), "planning makes nothing"
    first = started(model, tmp_path)
    with pytest.raises(UserError, match="another server uses it"):
        started(model, tmp_path)
    first.close()
    started(model, tmp_path).close()
