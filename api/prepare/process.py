"""The process that prepares prompts: `python ktserve/__main__.py prompts ADDRESS SETTINGS`.

It loads the tokenizer once and forks a child for each connection, so that a child can be cut off and replaced within
milliseconds. A job that uses more CPU time or memory than it may ends its child by a signal of the kernel's; the api
sees the connection close. ADDRESS is the path of a unix socket, SETTINGS a TextSettings as JSON.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from api.errors import ApiError, TooLongError
from api.prepare.job import LENGTH, Declined, Job, Kind, Prepared, TextSettings, decode_job, encode
from api.prepare.prompts import Form, Preparer, tokenizer_of
from engine.errors import UserError

log = logging.getLogger("ktserve")
_READ_AT_ONCE = 2**16  # bytes
MEMORY_LIMIT_BYTES = 2**30  # beyond what the loaded tokenizer takes


def main(arguments: Sequence[str], forms: Mapping[Kind, Form]) -> NoReturn:
    """Serve until killed (the api's end kills it). `forms`: as `Preparer` takes them."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    address, settings = arguments[0], msgspec.json.decode(arguments[1], type=TextSettings)
    preparer = Preparer(
        tokenizer_of(settings),
        forms,
        trust_control_tokens=settings.trust_control_tokens,
        unknown_fields=settings.unknown_fields,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )
    gc.freeze()  # children share these pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _serve(connection, preparer, settings.cpu_limit_s)
                    os._exit(0)


def _serve(connection: socket.socket, preparer: Preparer, cpu_limit_s: float) -> None:
    """Jobs of one connection, one after another, until the api closes it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT_BYTES,) * 2)
    connection.sendall(LENGTH.pack(os.getpid()))
    jobs = io.BufferedReader(socket.SocketIO(connection, "r"), _READ_AT_ONCE)  # several small jobs may have come
    while (frame := _receive(jobs)) is not None:
        raw = _receive(jobs)
        if raw is None:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # SIGPROF ends a process that does not handle it
        answer, pieces = _answer(preparer, decode_job(frame), raw), []
        if isinstance(answer, Prepared):
            answer, pieces = msgspec.structs.replace(answer, answer=[]), answer.answer
        frame = encode(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(LENGTH.pack(len(frame)) + frame + LENGTH.pack(sum(map(len, pieces))))
        for piece in pieces:
            connection.sendall(piece)


def _answer(preparer: Preparer, job: Job, raw: bytes) -> Prepared | Declined:
    try:
        return preparer.prepare(job, raw)
    except ApiError as error:
        long = (error.prompt_tokens, error.limit) if isinstance(error, TooLongError) else None
        return Declined(error.status, error.message, error.param, error.code, long)
    except UserError as error:
        return Declined(400, str(error), error.field)
    except MemoryError:
        return Declined(400, f"the prompt needs more than {MEMORY_LIMIT_BYTES >> 20} MiB to prepare")
    except Exception:  # a fault of ours ends this job, not the process that the next ones need
        log.exception("preparing a %s request failed", job.kind.value)
        return Declined(500, "internal error", code="internal_error")


def _receive(jobs: io.BufferedIOBase) -> bytes | None:
    """A frame, None at the end."""
    head = jobs.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = jobs.read(size)
    return data if len(data) == size else None
