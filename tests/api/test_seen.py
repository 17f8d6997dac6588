"""What an operator sees: metrics and the dashboard over them, the usage log, structured logs. Never prompts or keys."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from api.http.answers.meter import Meter
from api.http.metrics import UNLOADED, Histogram, Metrics
from api.tenants.usage import UsageLog
from scheduler.scheduler import Scheduler
from testing.waiting import eventually
from tests.api.conftest import ROOT, serving
from tests.scheduler.harness import config


def names(metrics: Metrics) -> set[str]:
    """Of all samples there can be."""
    for counter in (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens):
        counter("t", "m").inc()
    metrics.requests("stop", "t", "m").inc()
    metrics.limited("t").inc()
    for histogram in (metrics.ttft, metrics.itl, metrics.queue, metrics.total):
        histogram.labels("t").observe(1)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    metrics = Metrics()
    adapters = {"adapter_reads_again": 0, "adapter_evictions": 0, "adapter_load_s": 0.0, "adapters_known": 1}
    adapters |= {"adapters_in_host_memory": 1, "running_adapters": ["a"], "waiting_adapters": []}
    experts = {"experts_touched": 1, "expert_layers": 1, "expert_read_bytes": 1, "memory_read_bandwidth": 1.0}
    disk = {"disk_read_bytes": 0, "disk_written_bytes": 0}
    scheduler = Scheduler(config(disk_bytes=1, disk_block_bytes=1))
    metrics.stats = {**scheduler.stats(), **adapters, **experts, **disk}
    known = names(metrics)
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    asked = {name for panel in panels for t in panel["targets"] for name in re.findall(r"ktserve_\w+", t["expr"])}
    assert len(asked) > 15 and asked <= known, asked - known
    reported = {name for name in known if not name.startswith("ktserve_engine_")}
    unseen = {re.sub("_(bucket|sum|count|created)$", "", name) for name in reported - asked}
    assert unseen <= {re.sub("_(bucket|total)$", "", name) for name in asked}, "a metric that no panel shows"


@settings(deadline=None, max_examples=50)
@given(
    seen=st.lists(st.tuples(st.sampled_from('ab"'), st.sampled_from([0.0, 0.01, 0.02, 1.0, 7.0]), st.integers(1, 3)))
)
def test_many_observations_at_a_time_are_what_they_are_one_by_one(seen: list[tuple[str, float, int]]) -> None:
    """The library's own histogram is the reference."""
    ours, theirs, bounds = CollectorRegistry(), CollectorRegistry(), (0.01, 1.0, 5)
    histogram = Histogram("x_seconds", "help", bounds)
    ours.register(histogram)
    reference = prometheus_client.Histogram("x_seconds", "help", ["tenant"], buckets=bounds, registry=theirs)
    for tenant, value, count in seen:
        histogram.labels(tenant).observe(value, count)
        for _ in range(count):
            reference.labels(tenant).observe(value)

    def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        found = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
        return {(s.name, *map(str, sorted(s.labels.items()))): s.value for s in found}

    assert samples(ours) == pytest.approx(samples(theirs))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["load", "unload", "ask", "end"]), st.sampled_from("abc")), max_size=40))
def test_adapters_that_were_unloaded_leave_their_counts_and_no_labels(seen: list[tuple[str, str]]) -> None:
    """Answers end after their adapter was unloaded, too; no sum over models ever falls."""
    metrics, loaded, open_answers = Metrics(), {"base"}, list[Meter]()
    metrics.serves = loaded.__contains__
    ended = 0
    for what, name in seen:
        if what == "load":
            loaded.add(name)
        elif what == "unload":
            loaded.discard(name)
            metrics.unloaded(name)
        elif what == "ask":
            open_answers += [Meter(metrics, model=model) for model in sorted(loaded)]
        else:
            for meter in open_answers:
                meter.ended("stop", prompt_tokens=3, cached_tokens=1, output_tokens=2)
            ended += len(open_answers)
            open_answers.clear()
        families = text_string_to_metric_families(metrics.render().decode())
        samples = [sample for family in families for sample in family.samples if "model_name" in sample.labels]
        assert {sample.labels["model_name"] for sample in samples} <= loaded | {UNLOADED}
        found = {metric: sum(s.value for s in samples if s.name == metric) for metric in {s.name for s in samples}}
        per_answer = {"requests": 1, "prompt_tokens": 3, "prompt_tokens_cached": 1, "generation_tokens": 2}
        assert found == ({f"ktserve_{metric}_total": n * ended for metric, n in per_answer.items()} if ended else {})


def test_usage_and_logs(model_dir: Path, tmp_path: Path) -> None:
    usage, key, secret = tmp_path / "usage.jsonl", "sk-very-secret", "my-secret-prompt"
    flags = ["--usage-log", str(usage), "--log-format", "json", "--access-log", "--api-key", f"{key}=red"]
    flags += ["--adapters", "fail=/x", "--adapters", "reverse=/y", "--log-level", "debug", "--admin-key", "admin-key"]
    flags += ["--data-dir", str(tmp_path / "data")]

    def lines() -> list[dict[str, object]]:
        return [json.loads(line) for line in usage.read_text().splitlines()]

    with serving(model_dir, tmp_path, *flags, key=key) as server:
        body = {"model": "reverse", "prompt": secret, "n": 2, "best_of": 2}
        done = server.http.post("/v1/completions", json=body, headers={"x-request-id": "one"})
        assert done.status_code == 200
        eventually(lambda: len(lines()) == 2)
        first, second = sorted(lines(), key=lambda line: -int(str(line["prompt_tokens"])))
        assert (first["request_id"], first["tenant"], first["model"]) == ("one", "red", "reverse")
        counted = done.json()["usage"]
        assert first["prompt_tokens"] == counted["prompt_tokens"] and second["prompt_tokens"] == 0
        assert sum(int(str(line["output_tokens"])) for line in lines()) == counted["completion_tokens"]
        moved = tmp_path / "usage.1"
        usage.rename(moved)
        os.kill(server.process.pid, signal.SIGHUP)
        eventually(usage.exists)
        failed = {"model": "fail", "prompt": secret}
        assert server.http.post("/v1/completions", json=failed, headers={"x-request-id": "two"}).status_code == 500
        eventually(lambda: len(lines()) == 1)
        assert lines()[0]["outcome"] == "failed" and len(moved.read_text().splitlines()) == 2
        wrong = server.http.get("/v1/models", headers={"Authorization": "Bearer sk-wrong-secret"})
        assert wrong.status_code == 401
        form = {"Content-Type": "multipart/form-data; boundary=b"}
        broken = server.http.post("/v1/files", content=b"\0" * 100, headers=form)
        assert broken.status_code == 400 and "the form is broken" in broken.text
        metrics = server.http.get("/metrics", headers={"Authorization": "Bearer admin-key"}).text
        assert 'ktserve_requests_total{model_name="reverse",outcome="length",tenant="red"} 2.0' in metrics
    logged = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    assert any(line.get("request_id") == "two" for line in logged), logged
    assert "multipart" not in server.stderr
    for text in (server.stderr, usage.read_text(), moved.read_text(), metrics):
        assert not any(word in text for word in (secret, key, "sk-wrong-secret", "admin-key=", "Bearer admin"))


def test_a_full_disk_costs_no_line_and_breaks_none(tmp_path: Path) -> None:
    """A limit of the file's size stands for it: it cuts lines too. (In a child: the limit is the process'.)"""
    path = tmp_path / "usage"
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            log = UsageLog(str(path))
            for number in range(100):
                log.write({"number": number, "padding": "x" * 30})
            eventually(lambda: path.stat().st_size > 900)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            log.close(60)
            os._exit(log.dropped)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == list(range(100))


def test_lines_beyond_what_may_wait_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.tenants.usage._MOST_WAITING", 10)
    monkeypatch.setattr(UsageLog, "_append", lambda self, line: False)
    log = UsageLog(str(tmp_path / "usage"))
    for number in range(15):
        log.write({"number": number})
    assert log.dropped == 5
    monkeypatch.undo()
    log.close()
    lines = (tmp_path / "usage").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(5, 15))


def test_traces(model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra ktserve[otel]")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        try:
            with serving(model_dir, tmp_path, "--otlp-endpoint", url) as server:
                trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
                body = {"model": "tiny", "prompt": "my-secret-prompt"}
                server.http.post("/v1/completions", json=body, headers={"traceparent": trace})
                assert server.stop() == 0
        finally:
            collector.shutdown()
            thread.join()
    (span,) = [
        span
        for data in bodies
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert span.trace_id.hex() == "ab" * 16 and span.parent_span_id.hex() == "cd" * 8
    found = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
    assert found["gen_ai.usage.input_tokens"] == 16 and found["ktserve.tenant"] == "default"
    assert not any(b"my-secret" in data for data in bodies)
