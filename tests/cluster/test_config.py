"""What a deployment is described by, and what of a request decides where it goes. Nothing here needs Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.app import ClusterConfig
from cluster.call import Call, kept_headers
from cluster.main import main

SERVE = {"model": "null:step_ms=1"}


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ([], "with `serve:` among the names"),
        ({"replicas": 2}, "with `serve:` among the names"),
        ({"serve": SERVE, "replica": 2}, "unknown: replica; there is serve, replicas"),
        ({"serve": SERVE, "replicas": 0}, "replicas is 0, must be a number of at least 1"),
        ({"serve": SERVE, "num_cpus": "many"}, "num_cpus is 'many'"),
        ({"serve": SERVE, "surge_percent": 200}, "surge_percent is 200, must be a whole number of at most 100"),
        ({"serve": SERVE, "fronts_on": "all"}, "fronts_on is 'all', must be head or any"),
        ({"serve": SERVE, "autoscaling": 3}, "autoscaling is 3, must be NAME: VALUE"),
        (
            {"serve": SERVE, "autoscaling": {"ttft_target_s": 0}},
            "ttft_target_s is 0, must be seconds from 0.01 to less",
        ),
        ({"serve": SERVE, "autoscaling": {"ttft_target_s": True}}, "ttft_target_s is True"),
        ({"serve": SERVE, "autoscaling": {"ttft_target_s": 1, "policy": {}}}, "has ttft_target_s and policy: name one"),
        ({"serve": SERVE, "replicas": 2, "autoscaling": {}}, "replicas and autoscaling: name one"),
        ({"serve": {**SERVE, "port": 1}}, "serve has port: each replica chooses its own"),
        ({"serve": SERVE, "routing": {"slot": 2}}, "routing has slot"),
        ({"serve": SERVE, "routing": {"slack": 0}}, "slack is 0"),
    ],
)
def test_what_makes_no_sense_is_said(said: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=line.split(";")[0].replace("(", ".")):
        ClusterConfig.of(said)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(said))
    with pytest.raises(SystemExit):
        main(["deploy", str(path)])
    assert line in capsys.readouterr().err


def test_a_call_has_what_decides() -> None:
    headers = [("Authorization", "Bearer k"), ("Host", "x"), ("X-Request-Id", "7"), ("Connection", "close")]
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": "law", "messages": messages, "max_tokens": 4}).encode()
    call = Call.of("POST", "/v1/chat/completions?a=1", headers, body)
    assert (call.model, call.key, call.body) == ("law", "Bearer k", body) and "Hello" in call.prompt
    assert call.headers == (("Authorization", "Bearer k"), ("X-Request-Id", "7"))
    assert kept_headers([("content-type", "a"), ("Transfer-Encoding", "chunked")]) == [("content-type", "a")]
    for strange in (b"", b"[1]", b"{", b'{"model": 7}', b'{"prompt": [1, 2]}'):
        assert Call.of("POST", "/v1/completions", [], strange).model == ""
    longer = json.dumps({"model": "law", "messages": [*messages, {"role": "assistant", "content": "Hi"}]}).encode()
    assert Call.of("POST", "/", [], longer).prompt.startswith(call.prompt[:-1])
