"""Adapters are parsed in processes of their own: whatever a folder holds, it costs its reader process, not the engine.

    engine ──ParseRequest──> fork server (torch imported once, ahead of a load) ───fork──> limits itself, parses
       <───────────────── _Opened: bytes of the files ────────────────────────────────────────┤
       <───────────────── _Parsed: the adapter's size; or _Refused: the reason ───────────────┤
       ────────────────── _TAKE: there is room for it ─────────────────────────────────────> writes sealed memory
       <───────────────── _Sealed: the places of the tensors, and the file ───────────────────┘

Every folder gets a fresh fork with limits of memory, processor time, descriptors and time, by the size of its files.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import msgspec
import torch

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError, EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget, AdapterSize
from engine.lora.files.folder import NO_MEMORY, out_of_memory
from engine.lora.files.parse import parse_adapter
from engine.lora.files.whole import BaseTable
from engine.lora.fork_server import ForkServer, serve
from engine.lora.order import in_order
from engine.lora.sealed_memory import map_sealed, write_sealed

_DESCRIPTORS = 64
_MAX_MESSAGE = 64 << 20  # a name and a place for each tensor
_MAX_REASON = 4000
_TAKE = b""  # what the engine sends when it has made room
_FILES_PER_BYTE = 4  # of an adapter: files hold headers and stale copies beside; the exact size is checked when known


@dataclass(frozen=True)
class Limits:
    """Of one load; what files of some size may take beside, at speeds that slow disks and processors reach."""

    wall_s: float = 60.0
    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30  # a header of 32 MiB as objects, and room to stack and pad a layer
    wall_bytes_per_s: float = 20e6
    cpu_bytes_per_s: float = 50e6
    memory_per_byte: int = 4


@dataclass(frozen=True)
class ParseRequest:
    """Arguments of `parse_adapter`, and the `budget` that it must fit: `kept` and `others` as `AdapterBudget.check`
    takes them."""

    path: str
    name: str
    config: ModelConfig
    expert_scaling: str | None = None
    expert_b_layout: str | None = None
    max_rank: int | None = None
    base: str | None = None
    tables: Mapping[str, BaseTable] = field(default_factory=dict)
    budget: AdapterBudget = AdapterBudget()  # noqa: RUF009 - it is immutable
    pinned: bool = False
    kept: list[AdapterSize] = field(default_factory=list)
    others: list[AdapterSize] = field(default_factory=list)


class _Opened(msgspec.Struct, tag=True):
    num_bytes: int


class _Parsed(msgspec.Struct, tag=True):
    """All is read and checked. The process waits for `_TAKE` before it takes memory that the engine keeps."""

    size: AdapterSize


class _Refused(msgspec.Struct, tag=True):
    reason: str
    field: str | None


class _Sealed(msgspec.Struct, tag=True):
    """A handle of the tensors' file follows."""

    head: bytes


class _Ended(msgspec.Struct, tag=True):
    """The exit status, negative for a signal's number. Nothing follows."""

    status: int


_ENDS = {
    -signal.SIGXCPU: "reading it took more processor time than files of its size may",
    -signal.SIGKILL: "the process that read it was killed, probably for want of memory",
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Opened | _Parsed | _Refused | _Sealed | _Ended).decode
_T = TypeVar("_T", _Opened, _Parsed, _Sealed)


class ReaderLostError(EngineError):
    """No process to read a folder could be started, or it was lost without a word of why: not the folder's doing."""


class ParsedAdapter(NamedTuple):
    """A folder that was read and checked, and is not in this process's memory yet. `take` brings it there, once, and
    raises what `ReaderProcesses.parse` raises; `close`: it is not wanted any more."""

    size: AdapterSize
    take: Callable[[], AdapterWeights]
    close: Callable[[], None]


class ReaderProcesses:
    """Parses folders, each in a process of its own, which ends with `take` or `close` of what it has parsed. Several
    threads may `parse`; `close` may come from another and ends what is in progress. `fork_server`: one that may have
    been started already; `close` ends it."""

    def __init__(self, limits: Limits = Limits(), fork_server: ForkServer | None = None) -> None:
        self._limits = limits
        self._fork_server = fork_server or ForkServer()

    def parse(self, request: ParseRequest) -> ParsedAdapter:
        """UserError with the reason, whatever went wrong with the folder; ReaderLostError."""
        with _lost(request.name), ExitStack() as on_error:
            process = _Process(self._fork_server.fork(), request.name, self._limits)
            on_error.callback(process.close)
            size = process.parse(request)
            on_error.pop_all()
        return ParsedAdapter(size, process.take, process.close)

    def close(self) -> None:
        self._fork_server.close()


class _Process:
    """The engine's end of one of them."""

    def __init__(self, end: socket.socket, name: str, limits: Limits) -> None:
        self._socket, self._connection, self._name, self._limits = end, Connection(os.dup(end.fileno())), name, limits
        self._allowed_s, self._waited_s = limits.wall_s, 0.0

    def parse(self, request: ParseRequest) -> AdapterSize:
        self._connection.send((request, self._limits))
        self._allowed_s += self._receive(_Opened).num_bytes / self._limits.wall_bytes_per_s
        return self._receive(_Parsed).size

    def take(self) -> AdapterWeights:
        with closing(self), _lost(self._name):
            self._connection.send_bytes(_TAKE)
            head = self._receive(_Sealed).head
            _, files, _, _ = socket.recv_fds(self._socket, 1, 1)
            if not files:
                raise EOFError("it ended before it had sent the tensors")
            try:
                return map_sealed(head, files[0])
            finally:
                os.close(files[0])

    def close(self) -> None:
        self._connection.close()
        self._socket.close()

    def _receive(self, kind: type[_T]) -> _T:
        """The next message. Raises what the process says of the folder, or why it ended."""
        began = time.monotonic()
        if not self._connection.poll(max(self._allowed_s - self._waited_s, 0)):
            raise AdapterError(f"adapter {self._name!r}: reading it took longer than {self._allowed_s:.0f} s")
        self._waited_s += time.monotonic() - began
        match _decode(self._connection.recv_bytes(_MAX_MESSAGE)):
            case _Refused(reason, at):
                raise UserError(reason, at) if at != "lora_path" else AdapterError(reason)
            case _Ended(status):
                why = _ENDS.get(status, f"the process that read it ended (status {status})")
                raise AdapterError(f"adapter {self._name!r}: {why}")
            case message if isinstance(message, kind):
                return message
        raise EngineError(f"adapter {self._name!r}: the process that read it sent no {kind.__name__} when it was due")


@contextmanager
def _lost(name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise ReaderLostError(f"adapter {name!r}: no process to read it can be started, or stays: {error}") from error


def main() -> NoReturn:
    """`ktserve/__main__.py adapter-readers`: started by `ForkServer`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides
    os.nice(10)  # running requests come first
    torch.set_num_threads(1)
    gc.freeze()  # all forks share these pages
    serve(_answer, lambda status: _encode(_Ended(status)))


def _answer(engine: Connection) -> None:
    """The life of a process that parses one folder."""
    request: ParseRequest
    limits: Limits
    request, limits = engine.recv()
    limit_this_process(limits)

    def opened(num_bytes: int) -> None:
        budget, kept, others = request.budget, request.kept, request.others
        budget.check(request.name, kept, others, AdapterSize(num_bytes // _FILES_PER_BYTE, 0), request.pinned)
        _limit_work(limits, num_bytes, budget.room(kept, others))
        engine.send_bytes(_encode(_Opened(num_bytes)))

    answer: _Refused | _Sealed
    file = None
    try:
        weights = parse_adapter(
            request.path,
            request.config,
            name=request.name,
            expert_scaling=request.expert_scaling,
            expert_b_layout=request.expert_b_layout,
            max_rank=request.max_rank,
            base=request.base,
            tables=request.tables,
            opened=opened,
        )
        weights.linears = in_order(weights.linears, request.config)
        element = request.budget.element_bytes
        size = AdapterSize(weights.num_bytes, weights.slot_bytes(element), weights.gpu_bytes(element))
        engine.send_bytes(_encode(_Parsed(size)))
        engine.recv_bytes()
        head, file = write_sealed(weights)
        answer = _Sealed(head)
    except UserError as error:
        answer = _Refused(_readable(str(error)), error.field)
    except Exception as error:  # noqa: BLE001 - whatever it was, it was caused by this folder
        answer = _Refused(f"adapter {request.name!r}: {_reason(error)}", "lora_path")
    engine.send_bytes(_encode(answer))
    if file is not None:
        send_handle(engine, file, None)


def limit_this_process(limits: Limits = Limits()) -> Callable[[int], None]:
    """For a process that only reads an adapter: processor time (SIGXCPU ends it), memory and descriptors. What is
    returned wants the bytes of the weight files, and allows what they need."""
    _limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    _limit(resource.RLIMIT_CORE, 0)
    _limit_work(limits, 0, None)
    return lambda num_bytes: _limit_work(limits, num_bytes, None)


def _limit_work(limits: Limits, num_bytes: int, room: int | None) -> None:
    """For files of so many bytes. `room` is what the adapter may take in the end, None if that is not bounded."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + limits.memory_bytes + max(limits.memory_per_byte * num_bytes, room or 0))
    _limit(resource.RLIMIT_CPU, int(time.process_time() + limits.cpu_s + num_bytes / limits.cpu_bytes_per_s) + 1)
    if room is not None:
        _limit(resource.RLIMIT_FSIZE, room)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _reason(error: Exception) -> str:
    if out_of_memory(error) or (isinstance(error, OSError) and error.errno == errno.EFBIG):
        return f"it {NO_MEMORY}"
    traceback.print_exc()
    return _readable(f"it cannot be read: {type(error).__name__}: {error}")


def _readable(text: str) -> str:
    """Names in files may be long, or hold surrogates that no message can carry."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
