"""`--kv-disk` over HTTP: the server after a killed one goes on from what that has written."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testing.processes import engine_of
from testing.waiting import PATIENCE_S, eventually
from tests.e2e.conftest import Server, serving

LONG = "Tell me about the cat, the dog and the pirate who sailed with both of them over the sea. " * 8
MODELS = ("demo", "pirate")


def ask(server: Server, model: str, **settings) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not computed."""
    reply = server.client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": LONG}], temperature=0, max_tokens=24, **settings
    )
    return reply.choices[0].message.content, reply.usage.prompt_tokens_details.cached_tokens


def metric(server: Server, name: str) -> float:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return next(s.value for family in families for s in family.samples if s.name == f"ktserve_{name}")


def on_disk(server: Server) -> None:
    """Until all that is complete is written."""
    eventually(lambda: metric(server, "engine_disk_saved_blocks") and not metric(server, "engine_disk_unsaved_blocks"))


@pytest.fixture(scope="module")
def told(demo: Server) -> dict[str, str]:
    """What a server without a disk answers."""
    return {model: ask(demo, model)[0] for model in MODELS}


def test_killed_and_started_again(tmp_path: Path, told: dict[str, str]) -> None:
    flags = [
        "--device",
        "cpu",
        "--pack-cache",
        "off",
        "--kv-disk",
        "1GiB",
        "--kv-disk-dir",
        str(tmp_path / "kv"),
        "--check-integrity",
    ]
    with contextlib.suppress(AssertionError), serving(tmp_path, *flags) as server:
        for model in MODELS:
            found = ask(server, model)
            if found != (told[model], 0):
                raise RuntimeError(f"an adapter's KV is not the base's: {found}")
        on_disk(server)
        engine = engine_of(server.process.pid)
        server.process.kill()
        engine.wait(PATIENCE_S)
    with serving(tmp_path, *flags) as server:
        for model in MODELS:
            answer, cached = ask(server, model)
            assert answer == told[model] and cached > 100
        assert metric(server, "kv_disk_hits_total") >= 2 * 96
        assert metric(server, "kv_disk_read_bytes_total") > 0
        assert 0 < metric(server, "kv_disk_usage_perc") < 1
        assert ask(server, "demo", extra_body={"cache_salt": "other"}) == (told["demo"], 0)
        assert metric(server, "kv_disk_damaged_blocks_total") == 0
