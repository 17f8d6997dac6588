"""`ktserve bench` against a server of the test's own: however its stream is cut, whatever it does wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtests.bench import quick
from loadtests.bench.client import Result, Server
from loadtests.bench.main import main
from loadtests.bench.report import compared, page
from loadtests.bench.sweep import Limits, summary
from loadtests.bench.work import Scale, Work
from loadtests.child import ServerError

METRICS = (
    b"ktserve_expert_read_bytes_total %d\nktserve_memory_read_bandwidth_bytes_per_second 1e9\n"
    b"ktserve_experts_touched_total %d\nktserve_expert_layers_total %d\n"
)


class Fake:
    """An OpenAI server of one model: a token a word, `fixed` more for each prompt."""

    def __init__(self, cuts: Sequence[int] = (10_000,), fixed: int = 3, fault: str = "", tells: bool = True) -> None:
        self.cuts, self.fixed, self.fault, self.tells = cuts, fixed, fault, tells
        self.counts = False  # it has /tokenize
        self.expected = b""  # lines of /metrics
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = self.read = 0

    @contextlib.asynccontextmanager
    async def at(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-L")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if "/tokenize" in head:
            data = json.dumps({"count": self.tokens_of(body)} if self.counts else {}).encode()
        elif "/v1/models" in head:
            data = json.dumps({"data": [{"id": "law", "parent": "base"}, {"id": "base"}]}).encode()
        elif "/metrics" in head:
            self.read += 10**6
            data = METRICS % (self.read, 5 * self.read, 2 * self.read) + self.expected if self.tells else b""
        else:
            self.bodies.append(body)
            data = self._stream(body)
        if self.fault == "400" and body:
            writer.write(b"HTTP/1.1 400 Bad\r\n\r\n" + b'{"error": "too long"}')
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            at = 0
            for i in range(len(data)):
                size = self.cuts[i % len(self.cuts)]
                if part := data[at : at + size]:
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                    at += size
            await asyncio.sleep(0)  # others get their turn
            writer.write(b"0\r\n\r\n")
        self.open -= 1
        writer.close()

    def tokens_of(self, body: dict[str, Any]) -> int:
        """A word of n characters has one token for each three."""
        said = body["prompt"] if "prompt" in body else " ".join(each["content"] for each in body["messages"])
        return self.fixed + sum(-(-len(word) // 3) if self.counts else 1 for word in said.split())

    def _stream(self, body: dict[str, Any]) -> bytes:
        count = body["max_tokens"]
        events: list[Any] = [{"choices": [{"text": "wörd "}]} for _ in range(count)]
        if self.fault == "error":
            events.append({"error": {"message": "a fault"}})
        if self.tells:
            usage = {"prompt_tokens": self.tokens_of(body), "completion_tokens": count}
            events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
        return "".join([": hello\n\n", *lines, "" if self.fault == "cut" else "data: [DONE]\n\n"]).encode()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=10)
@given(cuts=st.lists(st.integers(1, 60), min_size=1, max_size=5), tokens=st.integers(1, 8), tells=st.booleans())
def test_a_stream_may_be_cut_anywhere(cuts: list[int], tokens: int, tells: bool) -> None:
    async def run() -> Result:
        async with Fake(cuts, tells=tells).at() as url:
            work = Work(("base",), 8, tokens)
            return await Server(url).stream("/v1/completions", work.body(0, Scale(3.0, 1.0)))

    result = asyncio.run(run())
    assert result.error == "" and result.tokens == tokens and len(result.gaps_s) == tokens - 1
    assert result.prompt_tokens == (8 if tells else 0)
    assert result.ttft_s + sum(result.gaps_s) <= result.total_s


@pytest.mark.parametrize(("fault", "said"), [("400", "too long"), ("error", "a fault"), ("cut", "without [DONE]")])
def test_what_fails_is_told_apart(fault: str, said: str) -> None:
    async def run() -> Result:
        async with Fake(fault=fault).at() as url:
            return await Server(url).stream("/v1/completions", Work(("m",), 8, 2).body(0, Scale(0.0, 1.0)))

    assert said in asyncio.run(run()).error


def bench(fake: Fake, *flags: str) -> tuple[int, str]:
    async def run() -> tuple[int, str]:
        async with fake.at() as url:
            return await asyncio.to_thread(main, [url, *flags]), url

    return asyncio.run(run())


def test_a_sweep_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    lengths = ("--input-tokens", "60", "--prefix-tokens", "20", "--output-tokens", "4")
    fake = Fake()
    flags = ("--concurrency", "1,4", "--rate", "500", "--requests", "8", *lengths)
    assert bench(fake, *flags, "--json", str(files[0]), "--plot", str(tmp_path / "a.html"))[0] == 0
    run = json.loads(files[0].read_text())
    assert [(p["kind"], p["level"], p["failed"]) for p in run["points"]] == [
        ("concurrency", 1, 0), ("concurrency", 4, 0), ("rate", 500, 0),
    ]  # fmt: skip
    sent = fake.bodies[2:]
    assert len(sent) == 24 and len({body["prompt"] for body in sent}) == 24 and fake.most_open <= 8
    assert len({" ".join(body["prompt"].split()[:17]) for body in sent}) == 1
    assert all(body["ignore_eos"] and body["model"] == "base" for body in sent)
    for found in run["points"]:
        assert found["input_tokens_mean"] == pytest.approx(60, abs=4) and found["output_tokens_mean"] == 4
        assert found["expert_gb_s"] > 0 and found["roof_share"] == pytest.approx(found["expert_gb_s"], abs=1e-3)
        assert found["goodput_s"] == found["requests_s"]
    shown = (tmp_path / "a.html").read_text()
    assert shown.count("<svg") == 12 and shown.count("<tr>") > 3
    for said in (
        run["url"],
        run["when"],
        run["machine"],
        "out tok/s",
        "TTFT p50 ms",
        "input tokens",
        "4 open",
        "500/s",
    ):
        assert said in shown, said

    status, _ = bench(
        Fake(tells=False), *flags[:-6], "--respect-eos", *lengths, "--json", str(files[1]), "--requests", "3"
    )
    other = json.loads(files[1].read_text())
    assert status == 0 and "expert_gb_s" not in other["points"][0]
    assert main(["--compare", *map(str, files), "--plot", str(tmp_path / "both.html")]) == 0
    assert "output_tokens_s" in capsys.readouterr().out and "<svg" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("tokens", [5, 64, 333])
def test_as_many_tokens_are_sent_as_are_asked_for(chat: bool, tokens: int, tmp_path: Path) -> None:
    fake, file = Fake(), tmp_path / "a.json"
    fake.counts = True
    flags = ["--concurrency", "2", "--requests", "6", "--input-tokens", str(tokens), "--output-tokens", "2"]
    assert bench(fake, *flags, "--json", str(file), *(["--chat"] if chat else []))[0] == 0
    assert {fake.tokens_of(body) for body in fake.bodies[2:]} == {tokens}
    assert json.loads(file.read_text())["points"][0]["input_tokens_mean"] == tokens


@pytest.mark.parametrize("chat", [False, True])
def test_a_conversation_goes_on_where_it_was(chat: bool, tmp_path: Path) -> None:
    fake, file = Fake(), tmp_path / "a.json"
    fields = [json.dumps({"lora": [{"id": i, "scale": 1.0}]}) for i in range(2)]
    flags = ["--concurrency", "2", "--requests", "4", "--turns", "3", "--input-tokens", "40", "--prefix-tokens", "10"]
    flags += ["--output-tokens", "2", "--json", str(file), "--fields", fields[0], "--fields", fields[1]]
    assert bench(fake, *flags, *(["--chat"] if chat else []))[0] == 0
    assert json.loads(file.read_text())["points"][0]["requests"] == 12
    talks: dict[str, list[Any]] = {}
    for body in fake.bodies[2:]:
        said = body["messages"] if chat else body["prompt"]
        begun = said[0]["content"] if chat else " ".join(said.split()[:30])
        talks.setdefault(begun, []).append((said, body["lora"][0]["id"]))
    assert sorted(len(turns) for turns in talks.values()) == [3] * 4
    assert sorted(turns[0][1] for turns in talks.values()) == [0, 0, 1, 1]
    for turns in talks.values():
        assert len({adapter for _, adapter in turns}) == 1
        for (before, _), (after, _) in pairwise(turns):
            if chat:
                assert after[: len(before)] == before and [m["role"] for m in after[-2:]] == ["assistant", "user"]
                assert after[-2]["content"] == "wörd wörd "
            else:
                assert after.startswith(f"{before}wörd wörd ") and len(after.split()) > len(before.split()) + 20


@pytest.mark.parametrize("expects", [True, False])
def test_quick_rates_stand_beside_what_is_expected(
    expects: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, file = Fake(), tmp_path / "a.json"
    fake.counts = True
    if expects:
        fake.expected = b"".join(
            b'ktserve_engine_expected_tokens_s{name="%s_%s"} %d\n' % (key, end, rate)
            for key, low in ((b"decode_1", 5), (b"prefill", 1200))
            for end, rate in ((b"low", low), (b"high", 2 * low))
        )
    assert bench(fake, "--quick", "--json", str(file))[0] == 0
    shown, points = capsys.readouterr().out, json.loads(file.read_text())["quick"]
    assert [point["key"] for point in points] == ["decode_1", "decode_8", "prefill"]
    spans = [[5, 10], None, [1200, 2400]] if expects else [None] * 3
    assert [point["expected_tokens_s"] for point in points] == spans
    assert ("1200 to 2400" in shown) == expects and "--measure-bandwidth" in shown
    assert all(point["tokens_s"] > 0 for point in points) and "a prompt of 2048 tokens" in shown
    assert [point["experts"] for point in points] == [2.5] * 3 and "2.5" in shown
    assert len({body["prompt"] for body in fake.bodies if body["max_tokens"] == 48}) == 10


def test_quick_starts_a_server_of_its_own_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    @contextlib.contextmanager
    def own_server(flags: Sequence[str]) -> Iterator[str]:
        started.append(list(flags))
        raise ServerError("the server did not start:\nerror: no such model")
        yield ""

    monkeypatch.setattr(quick, "own_server", own_server)
    assert main(["--quick", "--", "MODEL", "--port", "1"]) == 1 and started == [["MODEL", "--port", "1"]]
    assert "error: no such model" in capsys.readouterr().err


def test_failures_end_with_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(Fake(fault="400"), "--requests", "2")[0] == 1
    assert "too long" in capsys.readouterr().err
    for flags, said in {
        "": "a URL, or --compare, is needed",
        "http://x --concurrency 0": "all must be above 0",
        "http://x --prefix-tokens 128": "0 to --input-tokens - 1 (127)",
        "http://x --spread 2": "--spread 2.0: 0 to 1",
        "http://x --turns 0": "--turns 0: at least 1",
        "http://x --fields [1]": "--fields: each must be a JSON object",
        "http://x --requests 0": "--requests 0: at least 1",
        "--compare /nope /nope": "No such file",
        "--quick --concurrency 2": "--quick takes no --concurrency",
        "--quick http://x -- MODEL": "a URL names one that runs",
        "http://x -- MODEL": "of the server that --quick starts",
    }.items():
        with pytest.raises(SystemExit):
            main(flags.split())
        assert said in capsys.readouterr().err, flags


def test_goodput_counts_what_kept_both_limits() -> None:
    limits = Limits(0.1, 0.05)
    good = Result(0.1, 0.5, [0.05] * 8, 5, 9)
    late, slow = Result(0.11, 0.5, [0.05] * 8, 5, 9), Result(0.1, 0.9, [0.05] * 7 + [0.4], 5, 9)
    found = summary([good, late, slow, Result(error="x")], 2.0, limits)
    assert found["goodput_s"] == 0.5 and found["good_share"] == 0.25 and found["failed"] == 1
    assert found["requests_s"] == 1.5 and found["output_tokens_s"] == 13.5 and found["tpot_p50_ms"] == 50
    nothing = summary([Result(error="x")], 1.0, limits)
    assert nothing["ttft_p50_ms"] is None and nothing["goodput_s"] == 0


def test_files_without_a_common_point_are_not_compared() -> None:
    one = {"name": "a", "work": {}, "points": [{"kind": "rate", "level": 1.0}]}
    with pytest.raises(ValueError, match="no point in common"):
        compared(one, {**one, "points": []})
    assert "<svg" not in page({"a": {"points": []}})
