"""Adapters are read in processes of their own: whatever a folder holds, it costs its reader and not the engine.

    engine ──fork server (torch imported once, at the first load)──fork──> reader: limits itself, reads, checks
       ^──────────────── bytes of the files; then the reason, or tensors in sealed memory ──────┘

Every load gets a fresh fork with limits of memory, processor time, descriptors and time, by the size of its files.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError, EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget, AdapterSize
from engine.lora.files.folder import NO_MEMORY, out_of_memory
from engine.lora.files.reader import read_adapter
from engine.lora.reading.forks import Forks, serve
from engine.lora.reading.handover import pack, unpack

_DESCRIPTORS = 64
_MAX_MESSAGE = 64 << 20  # a name and a place for each tensor
_MAX_REASON = 4000
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
class ReadRequest:
    """Arguments of `read_adapter`, and the `budget` that it must fit: `kept` and `others` as `AdapterBudget.check`
    takes them."""

    path: str
    name: str
    config: ModelConfig
    expert_scaling: str | None = None
    max_rank: int | None = None
    base: str | None = None
    budget: AdapterBudget = AdapterBudget()  # noqa: RUF009 - it is immutable
    pinned: bool = False
    kept: list[AdapterSize] = field(default_factory=list)
    others: list[AdapterSize] = field(default_factory=list)


class _Opened(msgspec.Struct, tag=True):
    num_bytes: int


class _Measured(msgspec.Struct, tag=True):
    """All is read and checked. The process waits for an answer before it takes memory that the engine keeps."""

    size: AdapterSize


class _Refused(msgspec.Struct, tag=True):
    reason: str
    field: str | None


class _Read(msgspec.Struct, tag=True):
    """A handle of the tensors' file follows."""

    head: bytes


class _Ended(msgspec.Struct, tag=True):
    """The reader's exit status, negative for a signal's number. Nothing follows."""

    status: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Opened | _Measured | _Refused | _Read | _Ended).decode


class AdapterReader:
    """Several threads may `read`; `close` may come from another and ends the reads that are in progress."""

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._forks = Forks()
        self._closed = False

    def read(
        self, request: ReadRequest, make_room: Callable[[AdapterSize], None] = lambda size: None
    ) -> AdapterWeights:
        """`make_room` gets the adapter's size when that is known, once more if the processes were killed since; when it
        has returned, the memory is taken. UserError with the reason, whatever went wrong with the folder; EngineError
        if no process can be started, or stays."""
        with suppress(EOFError, OSError):  # not a word of how the reader ended: that was not the folder's doing
            return self._read_once(request, make_room)
        try:
            return self._read_once(request, make_room)
        except (EOFError, OSError) as error:
            reason = "the engine ends" if self._closed else f"no process to read it can be started, or stays: {error}"
            raise EngineError(f"adapter {request.name!r}: {reason}") from error

    def close(self) -> None:
        self._closed = True
        self._forks.close()

    def _read_once(self, request: ReadRequest, make_room: Callable[[AdapterSize], None]) -> AdapterWeights:
        with self._forks.open() as ours, Connection(os.dup(ours.fileno())) as reader:
            reader.send((request, self._limits))
            return self._receive(ours, reader, request.name, make_room)

    def _receive(
        self, ours: socket.socket, reader: Connection, name: str, make_room: Callable[[AdapterSize], None]
    ) -> AdapterWeights:
        """`reader` is what speaks over `ours`."""
        began, allowed_s = time.monotonic(), self._limits.wall_s
        while True:
            left = began + allowed_s - time.monotonic()
            if not reader.poll(max(left, 0)):
                raise AdapterError(f"adapter {name!r}: reading it took longer than {allowed_s:.0f} s")
            match _decode(reader.recv_bytes(_MAX_MESSAGE)):
                case _Opened(num_bytes):
                    allowed_s += num_bytes / self._limits.wall_bytes_per_s
                case _Measured(size):
                    asked = time.monotonic()
                    make_room(size)
                    allowed_s += time.monotonic() - asked
                    reader.send_bytes(b"")
                case _Refused(reason, at):
                    raise UserError(reason, at) if at != "lora_path" else AdapterError(reason)
                case _Read(head):
                    _, files, _, _ = socket.recv_fds(ours, 1, 1)
                    if not files:
                        raise EOFError("its process ended before it had sent the tensors")
                    try:
                        return unpack(head, files[0])
                    finally:
                        os.close(files[0])
                case _Ended(status):
                    raise self._ended(name, status)

    def _ended(self, name: str, status: int) -> Exception:
        if self._closed:
            return EngineError(f"adapter {name!r}: the engine ends")
        if status == -signal.SIGXCPU:
            return AdapterError(f"adapter {name!r}: reading it took more processor time than files of its size may")
        if status == -signal.SIGKILL:
            return AdapterError(f"adapter {name!r}: the process that read it was killed, probably for want of memory")
        return AdapterError(f"adapter {name!r}: the process that read it ended (status {status})")


def main() -> NoReturn:
    """`ktserve/__main__.py adapter-readers`: started by `Forks`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides
    os.nice(10)  # running requests come first
    torch.set_num_threads(1)
    gc.freeze()  # readers share these pages
    serve(_read, lambda status: _encode(_Ended(status)))


def _read(engine: Connection) -> None:
    """The reader's life, in a process of its own."""
    request: ReadRequest
    limits: Limits
    request, limits = engine.recv()
    limit_this_process(limits)

    def opened(num_bytes: int) -> None:
        budget, kept, others = request.budget, request.kept, request.others
        budget.check(request.name, kept, others, AdapterSize(num_bytes // _FILES_PER_BYTE, 0), request.pinned)
        _limit_work(limits, num_bytes, budget.room(kept, others))
        engine.send_bytes(_encode(_Opened(num_bytes)))

    answer: _Refused | _Read
    file = None
    try:
        weights = read_adapter(
            request.path,
            request.config,
            name=request.name,
            expert_scaling=request.expert_scaling,
            max_rank=request.max_rank,
            base=request.base,
            opened=opened,
        )
        element = request.budget.element_bytes
        size = AdapterSize(weights.num_bytes, weights.slot_bytes(element), weights.gpu_bytes(element))
        engine.send_bytes(_encode(_Measured(size)))
        engine.recv_bytes()
        head, file = pack(weights)
        answer = _Read(head)
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
