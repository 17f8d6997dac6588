"""Runs a reader on mutated files in a forked process with limits. A crash, a loop or an overrun is one of its possible
ends, and not the end of the run."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from testing.fuzz.mutate import Files
from testing.fuzz.readers import REFUSALS, Reader

_MEMORY_BYTES = 1 << 30  # beyond what the process has; the files take at most a few MiB
_CPU_S = 10
_WALL_S = 120.0  # on a machine that is busy


@dataclass(frozen=True)
class End:
    """How one folder ended: `kind` is "read", "refused", "cut off" or what must not be; `signature` is the same for
    ends that look alike."""

    kind: str
    signature: str
    detail: str = ""

    @property
    def allowed(self) -> bool:
        return self.kind in ("read", "refused", "cut off")


def run(reader: Reader, cases: Sequence[Files]) -> Iterator[End]:
    """The ends of `cases`, in their order."""
    at = 0
    while at < len(cases):
        for end in _run_some(reader, cases[at:]):
            at += 1
            yield end


def _run_some(reader: Reader, cases: Sequence[Files]) -> Iterator[End]:
    """Up to the first end that took the process along."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _work(reader, cases, theirs)
    os.close(theirs)
    try:
        yield from _follow(reader, child, ours, len(cases))
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _follow(reader: Reader, child: int, pipe: int, count: int) -> Iterator[End]:
    buffer, seen, deadline = b"", 0, time.monotonic() + _WALL_S
    while seen < count:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            yield End("took too long", "wall clock")
            return
        data = os.read(pipe, 1 << 16)
        if not data:
            yield _ended(reader, os.waitpid(child, 0)[1])
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            seen += 1
            yield End(**json.loads(line))
        deadline = time.monotonic() + _WALL_S


def _ended(reader: Reader, status: int) -> End:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    name = signal.Signals(number).name if number else f"status {os.WEXITSTATUS(status)}"
    if reader.limited and number in (signal.SIGPROF, signal.SIGKILL):
        return End("cut off", name)
    return End("took too much processor time" if number == signal.SIGPROF else "crashed", name)


def _work(reader: Reader, cases: Sequence[Files], pipe: int) -> None:
    """The child's life."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # panics of libraries print there
    for files in cases:
        folder = Path(mkdtemp(prefix="ktfuzz-"))
        for name, data in files.items():
            (folder / name).write_bytes(data)
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        end = _end_of(reader, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        rmtree(folder)
        os.write(pipe, json.dumps(end.__dict__).encode() + b"\n")
    os._exit(0)


def _end_of(reader: Reader, folder: Path) -> End:
    try:
        reader.read(folder)
    except BaseException as error:  # noqa: BLE001 - every end is reported
        kind = type(error).__name__
        signature = f"{kind}: {re.sub('[0-9]+', '#', str(error).replace(str(folder), ''))[:60]}"
        if kind in REFUSALS:
            return End("refused", signature)
        if reader.limited and isinstance(error, MemoryError):
            return End("cut off", kind)
        return End("raised", signature, traceback.format_exc()[-3000:])
    return End("read", "")
