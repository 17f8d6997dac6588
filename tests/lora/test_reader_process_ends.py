"""Reads that are cut off, processes that die, files that change: each ends alone, and the next load works."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from engine.errors import AdapterError, EngineError
from engine.lora.files.parse import parse_adapter
from engine.lora.fork_server import ForkServer
from engine.lora.reader_process import Limits, ParsedAdapter, ParseRequest, ReaderLostError, ReaderProcesses
from testing.waiting import eventually
from tests.lora import make
from tests.lora.book import Book
from tests.lora.forms import assert_same
from tests.lora.parse_requests import CONFIG, CONFIG_FILE, MODEL_FILE, WEIGHTS, good, read, request


def job_of(reader: ReaderProcesses) -> psutil.Process:
    """What reads now, once it does."""
    found: list[psutil.Process] = []

    def running() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            server = reader._fork_server._process
            found[:] = [] if server is None else psutil.Process(server.pid).children(recursive=True)
        return len(found) == 2  # a keeper and its job

    eventually(running)
    return found[1]


class Lent:
    """An `AdapterReader` of processes that stay. Calls one of `after_parse` after each folder, while there is one."""

    def __init__(self, processes: ReaderProcesses, after_parse: Sequence[Callable[[], None]]) -> None:
        self._processes, self._after_parse = processes, iter(after_parse)

    def parse(self, asked: ParseRequest) -> ParsedAdapter:
        parsed = self._processes.parse(asked)
        next(self._after_parse, lambda: None)()
        return parsed

    def close(self) -> None:
        """They are the other tests' too."""


@contextlib.contextmanager
def loading(processes: ReaderProcesses, after_parse: Sequence[Callable[[], None]] = ()) -> Iterator[Book]:
    book = Book(reader=Lent(processes, after_parse))
    yield book
    book.close()


def test_time_is_bounded(reader: ReaderProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_limits", Limits(wall_s=0.0))
    with pytest.raises(AdapterError, match="took longer than 0 s"):
        read(reader, request(folder))


@pytest.mark.parametrize("ahead", [False, True])
def test_close_ends_a_read_and_leaves_nothing(folder: Path, ahead: bool) -> None:
    """No process, of reads that were given up neither, and no descriptor; and none is made later."""
    before, errors = psutil.Process().num_fds(), []
    reader = ReaderProcesses(Limits(cpu_s=600), fork_server := ForkServer())
    if ahead:
        fork_server.start()
    first = fork_server._process
    assert (first is not None) == ahead
    assert_same(read(reader, request(folder)), WEIGHTS)
    assert not ahead or fork_server._process is first
    reader.parse(request(folder)).close()
    assert reader._fork_server._process is not None
    server = psutil.Process(reader._fork_server._process.pid)
    eventually(lambda: not server.children(recursive=True), "jobs end, keepers are reaped")
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))

    def parse() -> None:
        try:
            reader.parse(request(folder))
        except (AdapterError, EngineError) as error:
            errors.append(error)

    thread = threading.Thread(target=parse)
    thread.start()
    job = job_of(reader)
    reader.close()
    thread.join(30)
    eventually(lambda: not job.is_running())
    with pytest.raises(ReaderLostError, match="adapter 'x': no process to read it can be started"):
        reader.parse(request(folder))
    assert [type(error) for error in errors] == [ReaderLostError] and not server.is_running()
    assert reader._fork_server._process is None and psutil.Process().num_fds() == before


def test_a_reader_that_is_killed_is_replaced(
    reader: ReaderProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_limits", Limits(cpu_s=600))
    (folder / CONFIG_FILE).write_text(json.dumps(make.lora_config() | {"rank_pattern": {"(.|.)*(.|.)*(.|.)*!": 3}}))
    killer = threading.Thread(target=lambda: job_of(reader).kill())
    killer.start()
    with pytest.raises(AdapterError, match="was killed"):
        read(reader, request(folder))
    killer.join()
    assert_same(read(reader, request(good(folder.parent / "next"))), WEIGHTS)


@pytest.mark.parametrize("which", ["server", "keeper"])
def test_processes_that_are_killed_beside_a_read_are_no_fault_of_the_folder(
    reader: ReaderProcesses, folder: Path, which: str
) -> None:
    """It is read again, once: by the loader, for which the folder is as good as before."""

    def kill() -> None:
        job = job_of(reader)
        keeper = job.parent()
        assert keeper is not None
        victim = keeper if which == "keeper" else keeper.parent()
        assert victim is not None
        victim.kill()
        eventually(lambda: not job.is_running())

    with loading(reader, after_parse=[kill]) as book:
        assert_same(book.weights(book.loaded("x", folder)), WEIGHTS)
    if which == "keeper":  # what it costs is small
        with loading(reader, after_parse=[kill, kill]) as book:
            error = book.fails("x", folder)
            assert isinstance(error, EngineError) and "no process to read it can be started, or stays" in str(error)
            assert_same(book.weights(book.loaded("x", folder)), WEIGHTS)


def test_a_server_that_has_just_died_is_replaced(
    reader: ReaderProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(reader, request(folder))
    server = reader._fork_server._process
    assert server is not None
    psutil.Process(server.pid).kill()
    eventually(lambda: psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE)
    monkeypatch.setattr(server, "poll", lambda: None)  # it was alive when it was looked at
    with loading(reader) as book:
        assert_same(book.weights(book.loaded("x", folder)), WEIGHTS)


@pytest.mark.parametrize("name", [MODEL_FILE, CONFIG_FILE])
def test_truncation_while_loading(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    """At every read that the reader makes, the file is cut off first."""
    import engine.files.regular as regular

    whole, preadv, at = (folder / name).read_bytes(), os.preadv, 0
    while True:
        calls = 0

        def cut(fd: int, buffers: list, offset: int, at: int = at) -> int:
            nonlocal calls
            calls += 1
            if calls == at:
                os.truncate(folder / name, len(whole) // 3)
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(regular.os, "preadv", cut)
        try:
            parse_adapter(folder, CONFIG, name="x")
        except AdapterError as error:
            assert "became shorter" in str(error) or "JSON" in str(error)
        (folder / name).write_bytes(whole)
        if calls < at:
            break
        at += 1
    assert at > 3


def test_loads_beside_truncation(reader: ReaderProcesses, folder: Path, tmp_path: Path) -> None:
    """A file that shrinks and grows all the time: read or refused, and nobody dies of it."""
    path, whole = folder / MODEL_FILE, (folder / MODEL_FILE).read_bytes()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            os.truncate(path, len(whole) // 2)
            path.write_bytes(whole)

    thread = threading.Thread(target=churn)
    thread.start()
    ends = {True: 0, False: 0}
    try:
        for _ in range(12):
            try:
                read(reader, request(folder))
                ends[True] += 1
            except AdapterError as error:
                assert "killed" not in str(error) and "ended" not in str(error)
                ends[False] += 1
    finally:
        stop.set()
        thread.join()
    assert sum(ends.values()) == 12
    assert_same(read(reader, request(good(tmp_path / "next"))), WEIGHTS)
