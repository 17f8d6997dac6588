"""A hub on loopback: the API's list of files, their metadata, redirects of large ones to another address, ranges, and
faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
LARGE = (".gguf", ".safetensors", ".bin")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")


@dataclass
class Hub:
    """`repos`: file name -> content, by repository. `cut`: after how many bytes of a large file the connection ends,
    for the next so many answers; `damage`: what large files really contain; `ranges`: whether they are known."""

    repos: dict[str, dict[str, bytes]]
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    cut: list[int] = field(default_factory=list)
    damage: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    fault: int = 0  # status of every answer, if not 0
    url: str = ""
    sent: dict[str, int] = field(default_factory=dict)  # bytes by file
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)  # method, path, range, authorization


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            headers = self.headers.get("Range", ""), self.headers.get("Authorization", "")
            hub.asked.append((self.command, path, *headers))
            if hub.fault:
                self.refuse(hub.fault, "")
            elif path.startswith("/blob/"):
                self.blob(path.removeprefix("/blob/"))
            elif match := _RESOLVE.fullmatch(path):
                self.resolve(match["repo"], match["revision"], match["file"])
            elif match := _API.fullmatch(path):
                self.listing(match["repo"], match["revision"] or "main")
            else:
                self.refuse(404, "")

        def may(self, repo: str, revision: str) -> bool:
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if repo in hub.gated and not known:
                self.refuse(401, "GatedRepo")
            elif repo not in hub.repos or (repo in hub.private and not known):
                self.refuse(404 if known else 401, "RepoNotFound")
            elif revision not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                return True
            return False

        def listing(self, repo: str, revision: str) -> None:
            if not self.may(repo, revision):
                return
            files = [_sibling(name, content) for name, content in hub.repos[repo].items()]
            body = json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode()
            self.whole(200, body, {"Content-Type": "application/json"})

        def resolve(self, repo: str, revision: str, name: str) -> None:
            if not self.may(repo, revision):
                return
            if name not in hub.repos[repo]:
                self.refuse(404, "EntryNotFound")
                return
            content = hub.repos[repo][name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            if not name.endswith(LARGE):
                self.part(name, content, headers)
                return
            headers |= {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"'}
            headers |= {"X-Linked-Size": str(len(content))}
            other = hub.url.replace("127.0.0.1", "localhost")  # another host: no token may go there
            self.whole(302, b"", {**headers, "Location": f"{other}/blob/{repo}/{name}"})

        def blob(self, where: str) -> None:
            org, repo, name = where.split("/", 2)
            self.part(name, hub.damage.get(name, hub.repos[f"{org}/{repo}"][name]), {})

        def part(self, name: str, content: bytes, headers: dict[str, str]) -> None:
            match = _RANGE.fullmatch(self.headers.get("Range", ""))
            if match is None or not hub.ranges:
                self.send(200, name, content, headers)
                return
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            span = {"Content-Range": f"bytes {start}-{min(end, len(content) - 1)}/{len(content)}"}
            self.send(206, name, content[start : end + 1], {**headers, **span})

        def send(self, status: int, name: str, content: bytes, headers: dict[str, str]) -> None:
            self.head(status, {**headers, "Accept-Ranges": "bytes", "Content-Length": str(len(content))})
            if self.command == "HEAD":
                return
            if name.endswith(LARGE) and hub.cut and hub.cut[0] < len(content):
                content = content[: hub.cut.pop(0)]
                self.close_connection = True
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content)
            hub.sent[name] = hub.sent.get(name, 0) + len(content)

        def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.head(status, {**headers, "Content-Length": str(len(body))})
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.whole(status, b"", {"X-Error-Code": code} if code else {})

        def head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()

    return Handler


def _sibling(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    if name.endswith(LARGE):
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Answer until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
