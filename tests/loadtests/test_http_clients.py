"""Both HTTP clients against servers that end answers in the middle."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from ktserve.openai_client import AnswerError, Server
from loadtests import http
from loadtests.bench.client import Server as BenchServer
from testing.waiting import PATIENCE_S

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(PATIENCE_S)
        yield found


def url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_hanging_up_ends_an_answer_whose_connection_the_server_will_close(listener):
    exchange, began, ended = Server(url(listener)).stream("/v1/completions", {}), threading.Event(), threading.Event()

    def read() -> None:
        with pytest.raises((AnswerError, OSError)):
            for _ in exchange.events():
                began.set()
        ended.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(PATIENCE_S)
        request = b""
        while not request.endswith(b"\r\n\r\n{}"):
            request += connection.recv(65536)
        connection.sendall(HEAD + b'data: {"choices": []}\n\n')
        assert began.wait(PATIENCE_S)
        exchange.hang_up()
        assert connection.recv(65536) == b""
    assert ended.wait(PATIENCE_S)


def test_a_connection_closed_before_an_answer_is_said(listener):
    def close() -> None:
        listener.accept()[0].close()

    closer = threading.Thread(target=close)
    closer.start()
    result = asyncio.run(BenchServer(url(listener), "", PATIENCE_S).stream("/v1/completions", {}))
    closer.join()
    assert "closed before an answer came" in result.error or "Connection" in result.error, result.error


@pytest.mark.parametrize("trailer", [b"", b"x: y\r\n"])
def test_a_last_chunk_is_whole_with_its_last_byte(trailer):
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n" + trailer + b"\r\n"
    answer = http.Answer(0.0)
    for i in range(len(data)):
        assert answer.take(data[i : i + 1]) is (i + 1 == len(data)), data[: i + 1]
    assert answer.body == b"abc"
