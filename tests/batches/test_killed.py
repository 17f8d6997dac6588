"""kill -9 at any moment, then a restart: each line is answered exactly once, and nothing half-written is left."""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx
import psutil
import pytest

from testing.processes import kill_all
from testing.waiting import eventually
from tests.api.conftest import serving
from tests.batches.conftest import ADAPTERS, ENDED, answers, ended, ids, jsonl, line, start, upload


@pytest.mark.parametrize("seed", range(2))
def test_a_server_killed_again_and_again_answers_each_line_once(model_dir: Path, tmp_path: Path, seed: int) -> None:
    """The kills fall into validation, answers, assembly and what comes after, wherever this machine's speed has it."""
    rng, data = random.Random(seed), tmp_path / "data"
    flags = ["--data-dir", str(data), "--max-num-seqs", "4", *ADAPTERS]
    count = 150
    lines = [line(f"r{n}", text=f"text {n}", model=rng.choice(["tiny", "reverse", "nobody"])) for n in range(count)]
    batch_id = None
    while True:
        with serving(model_dir, tmp_path, *flags) as running:
            client = running.openai
            if batch_id is None:
                batch_id = start(client, jsonl(*lines))
            counts = client.batches.retrieve(batch_id).request_counts
            goal = min(count, counts.completed + counts.failed + rng.randint(0, 80))

            def far_enough(client=client, goal=goal, batch_id=batch_id) -> bool:
                batch = client.batches.retrieve(batch_id)
                return batch.status in ENDED or batch.request_counts.completed + batch.request_counts.failed >= goal

            eventually(far_enough)
            time.sleep(rng.random() * 0.02)  # anywhere between two events
            over = client.batches.retrieve(batch_id).status in ENDED
            kill_all(running.process)
        if over:
            break
    with serving(model_dir, tmp_path, *flags) as running:
        batch = ended(running.openai, batch_id)
        output, errors = answers(running.openai, batch)
        assert batch.status == "completed"
        assert sorted(ids(output) + ids(errors)) == sorted(ids(lines))
        assert ids(errors) == [each["custom_id"] for each in lines if each["body"]["model"] == "nobody"]
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
        known = {file.id for file in running.openai.files.list()}
        assert {path.name for path in (data / "files").iterdir()} == known
        assert not list((data / "incoming").iterdir())


def test_an_upload_cut_off_leaves_nothing(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(model_dir, tmp_path, "--data-dir", str(data)) as running:
        kept = upload(running.openai, b"whole")

        def endless():
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            while running.process.poll() is None:
                yield b"x" * 2**20
                if sum(path.stat().st_size for path in (data / "incoming").iterdir()) > 2**21:
                    kill_all(running.process)

        with pytest.raises(httpx.TransportError):
            running.http.post(
                "/v1/files", content=endless(), headers={"content-type": "multipart/form-data; boundary=b"}
            )
    with serving(model_dir, tmp_path, "--data-dir", str(data)) as running:
        assert [file.id for file in running.openai.files.list()] == [kept]
        assert not list((data / "incoming").iterdir())


def test_lines_in_flight_at_an_engines_death_are_answered_by_the_next(model_dir: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    flags = ["--data-dir", str(tmp_path / "data"), "--max-num-seqs", "4", *ADAPTERS]
    with serving(model_dir, tmp_path, *flags, gate=str(gate)) as running:
        lines = [line(f"r{n}", model="gated") for n in range(12)]
        batch_id = start(running.openai, jsonl(*lines))
        running.wait_for("Submit", 4)
        psutil.Process(running.received("Submit")[0]["pid"]).kill()
        gate.touch()
        batch = ended(running.openai, batch_id)
        output, errors = answers(running.openai, batch)
        assert batch.status == "completed" and ids(output) == ids(lines) and not errors


def test_a_line_that_ends_every_engine_is_given_up(model_dir: Path, tmp_path: Path) -> None:
    flags = ["--data-dir", str(tmp_path / "data"), "--max-num-seqs", "2", *ADAPTERS]
    with serving(model_dir, tmp_path, *flags) as running:
        batch_id = start(running.openai, jsonl(line("good"), line("bad", model="die")))
        output, errors = answers(running.openai, ended(running.openai, batch_id))
        assert ids(output) == ["good"] and ids(errors) == ["bad"]
        assert errors[0]["error"]["code"] == "engine_ended"


def test_a_server_that_is_to_end_leaves_lines_for_the_next(model_dir: Path, tmp_path: Path) -> None:
    flags = ["--data-dir", str(tmp_path / "data"), *ADAPTERS]
    with serving(model_dir, tmp_path, *flags) as running:
        batch_id = start(running.openai, jsonl(line("a", model="silent"), line("b")))
        running.wait_for("Submit", 2)
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 30, "a batch held up the end of the server"
        assert running.received("Abort")
    with serving(model_dir, tmp_path, *flags) as running:
        assert running.openai.batches.retrieve(batch_id).status == "in_progress"
        running.openai.batches.cancel(batch_id)
        assert ended(running.openai, batch_id).status == "cancelled"
