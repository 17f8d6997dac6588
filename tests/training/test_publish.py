"""Loading a result into a server: the two calls, the key, and the server's own words when it refuses."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.errors import UserError
from training.main import ADMIN_KEY, main
from training.publish import check_publish, check_server, publish
from training.run import train


@pytest.fixture
def server():
    """Knows the key `admin`; refuses an adapter named `broken`. `seen`: what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = [{"id": "base", "parent": None}, {"id": "law", "parent": "base"}]
            self.answer({"data": models} if self.path == "/v1/models" else [])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.seen.append((self.path, body))
            refused = body["lora_name"] == "broken"
            if self.path == "/v1/load_lora_adapter" and (Path(body["lora_path"]) / "adapter_config.json").exists():
                made.ranks.append(json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())["r"])
                refused |= made.ranks[-1] > 64
            self.answer({"id": body["lora_name"], "warnings": ["rank 64 is large"]}, refused)

        def answer(self, content: object, refused: bool = False) -> None:
            allowed = self.headers.get("Authorization") == "Bearer admin"
            status = 400 if refused else 200 if allowed else 403
            if status != 200:
                content = {"error": {"message": "no tensor q_proj" if refused else "the admin key is needed"}}
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.ranks = [], []
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def test_the_result_replaces_what_has_its_name(server, tmp_path):
    check_server(server.url, "admin")
    line = publish(f"{server.url}/", "admin", "law", tmp_path)
    assert line == f"published: law at {server.url}/\nwarning: rank 64 is large"
    body = {"lora_name": "law", "lora_path": str(tmp_path), "replace": True}
    assert server.seen == [("/v1/load_lora_adapter", body)]


def test_what_cannot_be_published_is_said(server, tmp_path):
    with pytest.raises(UserError, match="403: the admin key is needed"):
        check_server(server.url, "other")
    with pytest.raises(UserError, match="400: no tensor q_proj"):
        publish(server.url, "admin", "broken", tmp_path)
    with pytest.raises(UserError, match="write http://HOST:PORT"):
        check_server("localhost:8000", None)
    with pytest.raises(UserError, match="refused"):
        check_server("http://127.0.0.1:9", None)


def test_a_run_asks_first_whether_its_result_will_be_taken(server, config):
    """By an adapter of its rank from its folder, which is unloaded at once; nothing of it is left."""
    config = replace(config, adapter_name="law")
    assert check_publish(server.url, "admin", config) == ["rank 64 is large"]
    (load, body), (unload, unloaded) = server.seen
    assert (load, unload) == ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    assert body["lora_name"] == unloaded["lora_name"] != "law" and server.ranks == [config.lora_rank]
    assert Path(body["lora_path"]).parent == config.output.resolve() and not config.output.exists()
    with pytest.raises(UserError, match="base is the name of the base model"):
        check_publish(server.url, "admin", replace(config, adapter_name="base"))
    runs = tuple(replace(config, adapter_name=f"a{rank}", lora_rank=rank) for rank in (8, 128))
    with pytest.raises(UserError, match="400: no tensor q_proj"):
        check_publish(server.url, "admin", replace(config, adapters=runs))
    assert server.ranks[1:] == [8, 128] and not config.output.exists()


def test_a_finished_adapter_is_published(server, config, monkeypatch):
    train(replace(config, max_steps=1, save_strategy="no"))
    monkeypatch.setenv(ADMIN_KEY, "admin")
    assert main([str(config.output), "--finished=law", f"--publish={server.url}"]) == 0
    assert server.seen == [
        ("/v1/load_lora_adapter", {"lora_name": "law", "lora_path": str(config.output.resolve()), "replace": True})
    ]
    assert main([str(config.output.parent), "--finished=law", f"--publish={server.url}"]) == 1
