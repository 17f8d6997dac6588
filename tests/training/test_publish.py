"""Loading a result into a server: the two calls, the key, and the server's own words when it refuses."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.errors import UserError
from training.publish import check_server, publish


@pytest.fixture
def server():
    """Knows the key `admin`; refuses an adapter named `broken`. `seen`: what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer([])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.seen.append((self.path, body))
            self.answer({"id": body["lora_name"], "warnings": ["rank 64 is large"]}, body["lora_name"] == "broken")

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
    made.seen = []
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
    with pytest.raises(UserError, match="begins with neither http"):
        check_server("localhost:8000", None)
    with pytest.raises(UserError, match="refused"):
        check_server("http://127.0.0.1:9", None)
