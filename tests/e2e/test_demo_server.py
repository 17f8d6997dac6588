"""The `openai` client against the running demo server: answers, styles, streams, parameters, adapters."""

from __future__ import annotations

import asyncio
import json
import os

import openai
import pytest

from demo.evaluate import MEASURED, is_json, is_pirate, questions, styled
from demo.paths import demo_adapters
from testing.waiting import eventually

STYLE = {"demo": "plain", "pirate": "pirate", "json": "json"}


def test_a_refused_load_names_its_field(demo, tmp_path):
    """Whatever is wrong with the folder it is `lora_path`, whatever is wrong with the name it is `lora_name`."""
    good, empty, fifo = demo_adapters()["pirate"], tmp_path / "empty", tmp_path / "fifo"
    empty.mkdir()
    fifo.mkdir()
    (fifo / "adapter_config.json").write_bytes((good / "adapter_config.json").read_bytes())
    os.mkfifo(fifo / "adapter_model.safetensors")
    folders = [empty, fifo, tmp_path / "nowhere", "~nouser", "x/" * 2048, "\0", "/dev/zero"]
    cases = [("hostile", str(folder), "lora_path") for folder in folders]
    cases += [(name, str(good), "lora_name") for name in ("pirate", "demo", "")]
    for name, folder, field in cases:
        answer = demo.http.post(
            "/v1/load_lora_adapter",
            json={"lora_name": name, "lora_path": folder},
            headers={"Authorization": "Bearer admin"},
        )
        assert answer.status_code in (400, 409), answer.text
        assert answer.json()["error"]["param"] == field, answer.text
        assert len(answer.json()["error"]["message"]) > 10
    assert demo.ask("What is 2 + 3?", "pirate") == "ARR! 2 + 3 = 5, MATEY!"


def test_a_concurrent_burst_in_three_styles(demo):
    """Base and adapters in one batch: right answers, each in its own style, none in another's."""
    asked = [q for kind in MEASURED for q in questions(kind, True, 20, seed=3)] + questions("facts", False, 20, seed=3)

    async def burst() -> list[tuple[str, str, str]]:
        gate = asyncio.Semaphore(48)

        async def one(client, model: str, question) -> tuple[str, str, str]:
            async with gate:
                reply = await client.chat.completions.create(
                    model=model, messages=question.messages, temperature=0, max_tokens=120
                )
            return model, styled(question, STYLE[model]), reply.choices[0].message.content.strip()

        async with demo.async_client() as client:
            return await asyncio.gather(*(one(client, model, q) for q in asked for model in STYLE))

    done = asyncio.run(burst())
    for model in STYLE:
        mine = [(want, got) for name, want, got in done if name == model]
        assert sum(want == got for want, got in mine) >= 0.95 * len(mine)
        pirates, jsons = (sum(f(got) for _, got in mine) / len(mine) for f in (is_pirate, is_json))
        assert (pirates >= 0.95) if model == "pirate" else (pirates <= 0.01)
        assert (jsons >= 0.95) if model == "json" else (jsons <= 0.01)


def test_streams_say_what_answers_say(demo):
    for model in STYLE:
        # Without --deterministic a prompt of many rows is rounded otherwise than the rest behind a cached prefix.
        demo.ask("Tell me a story about a fox.", model)
        whole = demo.ask("Tell me a story about a fox.", model)
        stream = demo.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me a story about a fox."}],
            temperature=0,
            max_tokens=120,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole
        assert chunks[-1].usage.completion_tokens > 10
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_sampled_answers_stay_in_style(demo):
    """At temperature 1 the adapters still speak their own way."""
    for model, judge in (("pirate", is_pirate), ("json", is_json)):
        answers = [demo.ask("Hello!", model, temperature=1.0, seed=s) for s in range(10)]
        assert sum(map(judge, answers)) >= 9


def test_models(demo):
    models = {m.id: m for m in demo.client.models.list().data}
    assert set(models) >= {"demo", "pirate", "json"}
    assert models["pirate"].parent == "demo" and models["demo"].parent is None
    with pytest.raises(openai.NotFoundError, match="pirate"):
        demo.ask("Hello!", "nobody")


def test_completions_echo_and_logprobs(demo):
    reply = demo.client.completions.create(
        model="demo", prompt=["Once upon a time", "A banana"], echo=True, logprobs=3, max_tokens=5, temperature=0
    )
    assert [c.text[:8] for c in reply.choices] == ["Once upo", "A banana"]
    for choice in reply.choices:
        logprobs = choice.logprobs
        assert logprobs.token_logprobs[0] is None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
        assert all(len(t) >= 3 for t in logprobs.top_logprobs[1:])
        assert "".join(logprobs.tokens) == choice.text


def test_token_ids_in_and_out(demo):
    first = demo.client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    again = demo.client.completions.create(
        model="demo", prompt=first.prompt_token_ids, max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    assert again.token_ids == first.token_ids and again.text == first.text


def test_n_seed_stop_bias_and_penalties(demo):
    ask = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 40}
    several = demo.client.chat.completions.create(**ask, n=4, temperature=1.5, seed=7)
    texts = [c.message.content for c in several.choices]
    assert len(set(texts)) > 1
    assert texts == [
        c.message.content for c in demo.client.chat.completions.create(**ask, n=4, temperature=1.5, seed=7).choices
    ]
    stopped = demo.client.chat.completions.create(**ask, temperature=0, stop=["named"]).choices[0]
    assert "named" not in stopped.message.content and stopped.finish_reason == "stop"
    first = demo.client.completions.create(
        model="demo", prompt="Once", max_tokens=1, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    other = demo.client.completions.create(
        model="demo", prompt="Once", max_tokens=1, temperature=0, logit_bias={str(first.token_ids[0]): -100}
    ).choices[0]
    assert other.text != first.text
    repeated = demo.client.completions.create(
        model="demo",
        prompt="7 7 7 7",
        max_tokens=30,
        temperature=0,
        frequency_penalty=2.0,
        extra_body={"ignore_eos": True},
    )
    assert repeated.usage.completion_tokens == 30


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"top_p": -0.5},
        {"max_tokens": 10**9},
        {"logit_bias": {"no token": 1}},
        {"tools": [{"type": "function", "function": {"name": "not a name"}}]},
        {"n": 0},
        {"stop": ["a"] * 100},
    ],
)
def test_bad_fields_are_400_and_named(demo, bad):
    with pytest.raises(openai.BadRequestError) as caught:
        demo.client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}], **bad)
    field = next(iter(bad.get("extra_body", bad)))
    assert field in str(caught.value)


def test_multi_turn_hits_the_prefix_cache(demo):
    messages = [{"role": "user", "content": "Tell me a story about a cat, please, one that I have not heard before."}]
    first = demo.client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=100)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Thanks!"},
    ]
    second = demo.client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=40)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16


def test_adapters_come_and_go_while_traffic_runs(demo):
    """Load under a new name, use, replace, unload; others keep answering all the while."""
    admin = {"Authorization": "Bearer admin"}

    def call(action: str, **body):
        return demo.http.post(f"/v1/{action}_lora_adapter", json=body, headers=admin)

    async def traffic(stop: asyncio.Event) -> int:
        count = 0
        async with demo.async_client() as client:
            while not stop.is_set():
                reply = await client.chat.completions.create(
                    model="json", messages=[{"role": "user", "content": "Hello!"}], temperature=0, max_tokens=40
                )
                assert is_json(reply.choices[0].message.content)
                count += 1
        return count

    async def both() -> int:
        stop = asyncio.Event()
        running = asyncio.create_task(traffic(stop))
        await asyncio.to_thread(changes)
        stop.set()
        return await running

    def changes() -> None:
        paths = demo_adapters()
        assert call("load", lora_name="extra", lora_path=str(paths["pirate"])).status_code == 200
        assert is_pirate(demo.ask("Hello!", "extra"))
        assert call("load", lora_name="extra", lora_path=str(paths["json"])).status_code == 400
        assert call("load", lora_name="extra", lora_path=str(paths["json"]), replace=True).status_code == 200
        assert is_json(demo.ask("Hello!", "extra"))
        assert call("unload", lora_name="extra").status_code == 200
        with pytest.raises(openai.NotFoundError):
            demo.ask("Hello!", "extra")
        refused = call("load", lora_name="bad", lora_path=str(paths["json"].parent))
        assert refused.status_code == 400 and "holds no adapter" in refused.text

    assert asyncio.run(both()) > 0
    assert demo.http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/"}).status_code in (401, 403)


def test_disconnects_free_the_engine(demo):
    """Ten long streams, all dropped: nothing runs a moment later."""
    streams = [
        demo.client.completions.create(
            model="demo", prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(10)
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    eventually(
        lambda: not metric(demo, "ktserve_engine_running") and not metric(demo, "ktserve_engine_waiting"),
        "dropped requests still run",
    )
    assert metric(demo, "ktserve_engine_failed_steps") == 0


def metric(demo, name: str) -> float:
    for line in demo.http.get("/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def test_health_version_and_what_was_printed(demo):
    assert demo.http.get("/health").status_code == 200
    assert "version" in demo.http.get("/version").json()
    printed = demo.output.read_text()
    for part in ("memory plan", "KV cache", "serving demo", "pirate", "json", "curl "):
        assert part in printed


def test_raw_sse_is_what_openai_sends(demo):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "stream": True, "temperature": 0}
    with demo.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert all(json.loads(e)["object"] == "chat.completion.chunk" for e in events[:-1])
