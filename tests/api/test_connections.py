"""Half-open, slow and silent connections, and floods of them: others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import Running, serving

BODY = b'{"model":"tiny","prompt":"ab"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LIMITS = ("--max-connections", "40", "--max-connections-per-address", "30", "--header-timeout-s", "2")
LIMITS += ("--body-timeout-s", "2", "--send-timeout-s", "2")


@pytest.fixture(scope="module")
def strict(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    adapters = ("--adapters", "slow=/x", "--adapters", "burst=/y")
    with serving(model_dir, tmp_path_factory.mktemp("strict"), *LIMITS, *adapters) as running:
        yield running


def connect(server: Running, source: str = "127.0.0.2") -> socket.socket:
    port = httpx.URL(server.url).port
    assert port is not None
    return socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0))


def served(server: Running) -> None:
    """From another address, and at once: it need not wait until the attacker's time is up. On a busy machine a request
    may take longer than the server's short limits here: it is cut off, and a client asks again."""
    for last in (False, False, True):
        try:
            response = httpx.post(f"{server.url}/v1/completions", content=BODY, timeout=PATIENCE_S)
            break
        except httpx.ReadError:
            if last:
                raise
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == "ab"


def closed(connection: socket.socket) -> bytes:
    """What came until the server closed the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def half_open(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")


def silent(connection: socket.socket) -> None:
    pass


def one_byte_short(connection: socket.socket) -> None:
    connection.sendall(HEAD % len(BODY) + BODY[:-1])


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"\x16\x03\x01\x00\xff\r\n\r\n")


def body_never_read(connection: socket.socket) -> None:
    connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")


def pipelined(connection: socket.socket) -> None:
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 50 + b"GET /ver")


def hung_up(connection: socket.socket) -> None:
    connection.sendall(HEAD % 1000 + BODY)
    connection.close()


ATTACKS: list[Callable[[socket.socket], None]] = [
    half_open, silent, one_byte_short, garbage, body_never_read, pipelined, hung_up,
]  # fmt: skip


def descriptors(server: Running) -> int:
    return psutil.Process(server.process.pid).num_fds()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_flood_from_one_address(strict: Running, attack: Callable[[socket.socket], None]) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(120):
            connection = stack.enter_context(connect(strict))
            with contextlib.suppress(ConnectionError):  # it had to make room, or was refused
                attack(connection)
            if number % 30 == 29:
                served(strict)
        assert descriptors(strict) < 120
    served(strict)


def test_a_mixed_flood_from_many_addresses(strict: Running) -> None:
    draw = random.Random(1)
    with contextlib.ExitStack() as stack:
        for number in range(300):
            connection = stack.enter_context(connect(strict, f"127.0.0.{draw.randint(2, 9)}"))
            with contextlib.suppress(ConnectionError):
                draw.choice([half_open, silent, garbage, pipelined])(connection)
            if number % 50 == 49:
                served(strict)
    served(strict)
    assert "Traceback" not in strict.stderr


def test_each_connection_ends(strict: Running) -> None:
    ends = {half_open: b"408", silent: b"", one_byte_short: b"408", body_never_read: b"404", pipelined: b"200"}
    with contextlib.ExitStack() as stack:
        connections = {attack: stack.enter_context(connect(strict)) for attack in ends}
        for attack, connection in connections.items():
            attack(connection)
        for attack, connection in connections.items():
            assert ends[attack] in closed(connection), attack


def test_a_trickle_is_cut_off(strict: Running) -> None:
    with contextlib.ExitStack() as stack:
        began, trickles = time.monotonic(), []
        for start in (b"GET /health HTTP/1.1\r\nX-Slow: ", HEAD % 10_000):
            trickles.append(stack.enter_context(connect(strict)))
            trickles[-1].sendall(start)
        while trickles:
            for connection in list(trickles):
                try:
                    connection.sendall(b"a")
                except ConnectionError:
                    trickles.remove(connection)
                    assert time.monotonic() - began > 1
            time.sleep(0.05)


NO_HTTP = {  # what is no request -> the status of its answer
    b"GET /health HTTP/1.1\r\n\r\n": 400,
    b"\x16\x03\x01\x00\xff\r\n\r\n": 400,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n": 400,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n": 400,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n": 501,
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000: 431,
    b"GET /health HTTP/1.1\r\nHost: x\r\n": 408,
}


@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize(("data", "status"), NO_HTTP.items(), ids=range(len(NO_HTTP)))
def test_what_is_no_request_is_answered_as_other_errors(
    strict: Running, before: bytes, data: bytes, status: int
) -> None:
    with connect(strict) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(before + data)
        answers = closed(connection).split(b"HTTP/1.1 ")[1:]
    assert len(answers) == 1 + bool(before)
    head, _, body = answers[-1].partition(b"\r\n\r\n")
    assert head.startswith(b"%d " % status) and b"x-request-id: " in head
    assert json.loads(body)["error"]["message"]


def test_a_body_that_breaks_after_its_answer_ends_the_connection_alone(strict: Running) -> None:
    with connect(strict) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}}"):
            data = connection.recv(65536)
            assert data, answer
            answer += data
        connection.sendall(b"ZZ\r\n")
        assert answer.startswith(b"HTTP/1.1 404") and closed(connection) == b""
    served(strict)
    assert "Traceback" not in strict.stderr


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_offers_to_change_the_protocol_are_passed_over(strict: Running, upgrade: str) -> None:
    headers = {"connection": "Upgrade", "upgrade": upgrade}
    assert httpx.get(f"{strict.url}/version", headers=headers).status_code == 200
    assert "pgrade" not in strict.stderr and "WebSocket" not in strict.stderr


@pytest.mark.parametrize("target", ["/version", "http://any:1/version", "HTTP://any/version?x=1"])
def test_a_target_may_name_the_server(strict: Running, target: str) -> None:
    with connect(strict) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert closed(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut_off(strict: Running) -> None:
    body = b'{"model":"burst","prompt":[%s],"max_tokens":1500,"n":16,"logprobs":20,"ignore_eos":true,"stream":true}'
    body %= b",".join([b"104"] * 100)
    before = len(strict.received("Submit"))
    with connect(strict) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(HEAD % len(body) + body)
        strict.wait_for("Submit", before + 16)
        served(strict)
        peer = connection.getsockname()[1]

        def gone() -> bool:
            held = psutil.Process(strict.process.pid).net_connections()
            return not any(each.raddr and each.raddr.port == peer for each in held)

        eventually(gone, "the connection that nobody reads is still open")


def test_busy_connections_are_left_alone(strict: Running) -> None:
    """A flood of half-open ones takes nobody's answer away, not even from its own address."""
    body = b'{"model":"slow","prompt":"' + b"a" * 60 + b'","max_tokens":60}'
    with connect(strict) as busy, contextlib.ExitStack() as stack:
        before = len(strict.received("Submit"))
        busy.sendall(HEAD % len(body) + body)
        strict.wait_for("Submit", before + 1)
        for _ in range(100):
            half_open(stack.enter_context(connect(strict)))
        answer = b""
        while b"finish_reason" not in answer:
            data = busy.recv(65536)
            assert data, answer
            answer += data
        assert answer.startswith(b"HTTP/1.1 200")


def test_hang_ups_are_no_tracebacks_and_few_lines(strict: Running) -> None:
    stream = b'{"model":"slow","prompt":"abcdefgh","stream":true}'
    for number in range(200):
        with connect(strict) as connection:
            if number % 4 == 0:
                connection.sendall(HEAD % len(stream) + stream)
                assert connection.recv(10)
            elif number % 4 == 1:
                connection.sendall(HEAD % len(stream) + stream[:10])
            elif number % 4 == 2:
                garbage(connection)
            else:
                connection.sendall(b"GET /hea")
    served(strict)
    text = strict.stderr
    assert "Traceback" not in text
    assert len(re.findall("Invalid HTTP request", text)) <= 100


def test_bodies_that_are_held_are_bounded(model_dir: Path, tmp_path: Path) -> None:
    """Large bodies one byte short: beyond the bound they are refused, and small requests are served."""
    limit = 2**20
    with serving(model_dir, tmp_path, "--max-body-bytes", str(limit), "--body-timeout-s", "20") as server:
        before = psutil.Process(server.process.pid).memory_info().rss
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connect(server)) for _ in range(40)]
            for connection in connections:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(HEAD % limit + b"a" * (limit - 1))
            served(server)
            assert psutil.Process(server.process.pid).memory_info().rss - before < 40 * limit
            refused = 0
            for connection in connections:
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    refused += b"503" in connection.recv(4096)
            assert refused
        served(server)
