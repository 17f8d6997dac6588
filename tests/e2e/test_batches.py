"""A batch of the demo model: killed in the middle, it ends with the answers that live requests get."""

from __future__ import annotations

import contextlib
import json

import psutil

from testing.waiting import eventually
from tests.e2e.conftest import serving


def test_a_killed_batch_ends_with_the_answers_of_live_requests(tmp_path) -> None:
    flags = ("--data-dir", str(tmp_path / "data"), "--pack-cache", "off", "--check-integrity")
    bodies = [
        {
            "model": ("demo", "pirate")[number % 2],
            "messages": [{"role": "user", "content": f"What is {number} + 8?"}],
            "temperature": 0,
            "max_tokens": 24,
        }
        for number in range(24)
    ]
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    killed = False
    # the fixture insists on a clean end
    with contextlib.suppress(AssertionError), serving(tmp_path, *flags) as server:
        file = server.client.files.create(file=("in.jsonl", data), purpose="batch")
        batch_id = server.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        eventually(lambda: server.client.batches.retrieve(batch_id).request_counts.completed >= 3)
        family = [*psutil.Process(server.process.pid).children(recursive=True), psutil.Process(server.process.pid)]
        for each in family:
            each.kill()
        server.process.wait()
        killed = True
    assert killed
    with serving(tmp_path, *flags) as server:
        eventually(lambda: server.client.batches.retrieve(batch_id).status == "completed")
        batch = server.client.batches.retrieve(batch_id)
        answers = [json.loads(line) for line in server.client.files.content(batch.output_file_id).text.split("\n")[:-1]]
        assert [answer["custom_id"] for answer in answers] == [f"r{number}" for number in range(24)]
        for body, answer in zip(bodies[:6], answers, strict=False):
            live = server.client.chat.completions.create(**body).choices[0].message.content
            assert answer["response"]["body"]["choices"][0]["message"]["content"] == live
