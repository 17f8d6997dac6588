"""Seats and queue between tenants, over HTTP."""

from __future__ import annotations

import asyncio
import re

import openai
import pytest

from testing.waiting import PATIENCE_S
from tests.e2e.conftest import Server, serving

SEATS, QUEUE = 4, 16


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = ["--api-key", "key-a=a", "--api-key", "key-b=b"]
    keys += ["--admin-key", "admin"]
    limits = ["--max-num-seqs", str(SEATS), "--max-queue", str(QUEUE)]
    with serving(tmp_path_factory.mktemp("fair"), *keys, *limits, "--pack-cache", "off") as server:
        yield server


def metric(server: Server, name: str) -> float:
    text = server.http.get("/metrics", headers={"Authorization": "Bearer admin"}).text
    found = re.search(rf"^ktserve_engine_{name} (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_a_flood_keeps_nobody_else_out(server):
    """All running slots and the whole queue are one tenant's: another gets a slot at once, and no 429."""

    async def scenario() -> None:
        flood, other = (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=f"key-{k}", max_retries=0) for k in "ab"
        )
        running = refused = 0
        changed = asyncio.Event()

        async def long() -> None:
            nonlocal running, refused
            try:
                stream = await flood.completions.create(
                    model="demo", prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
                )
                first = True
                async for _ in stream:
                    running += first
                    first = False
                    changed.set()
            except openai.RateLimitError:
                refused += 1
                changed.set()

        tasks = [asyncio.create_task(long()) for _ in range(3 * (SEATS + QUEUE))]
        while running < SEATS or refused < len(tasks) - SEATS - QUEUE:
            await changed.wait()
            changed.clear()
        asked = [
            other.completions.create(model="demo", prompt=f"{i}", max_tokens=2, extra_body={"ignore_eos": True})
            for i in range(QUEUE // 2)
        ]
        answers = await asyncio.gather(*asked)
        assert [answer.usage.completion_tokens for answer in answers] == [2] * len(asked)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(flood.close(), other.close())

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert metric(server, "preemptions") >= 1  # it did not wait for one of the flood to end
