"""Rank 0: starts the other ranks as processes, tells them what it runs, and ends with any of them.

engine (rank 0) ──a plan, then each step──> rank 1 ... N - 1
                ──adapters for slots──────>            over a socket of its own: loading one stops no step
                <─────loaded, or why not───
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from engine.errors import EngineError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.sealed_memory import write_sealed
from engine.ranks.adapters import adapter_part
from engine.ranks.group import Ranks
from engine.ranks.progress import Progress, Stage, Wait
from engine.ranks.watch import BEAT_S, LIMITS, Limits, Watch
from engine.steps.orders import Begin, Loaded, Prepared, Step, decode, encode
from ktserve.launcher import die_with_parent, program

if TYPE_CHECKING:
    from engine.planning.plan import EnginePlan

_GRACE_S = 5.0
_MOMENT_S = 0.3
_STORE, _PROGRESS = "ranks", "progress"


class Leader(Ranks):
    """The group as rank 0 sees it. A rank that ends ends this process, and so do one that does not come for too long
    and steps that fail once they were told: whoever supervises the engine starts all of it again."""

    def __init__(self, plan: EnginePlan, device: torch.device) -> None:
        self._shard, self._whole = plan.shard, plan.source.whole
        self._folder = _Folder()
        progress = Progress.create(self._folder.path / _PROGRESS, plan.shard.size)
        super().__init__(device, str(self._folder.path / _STORE), progress)
        progress.enter(Stage.LOADING)
        self._closing = threading.Event()
        self._ending = threading.Lock()
        self._members: list[_Member] = []
        self._watch = Watch(progress, LIMITS, self._end)
        try:
            for rank in range(1, plan.shard.size):
                self._members.append(_Member(plan, Start(rank, self._folder.path, os.getpid(), LIMITS)))
        except BaseException:
            self.close()
            raise

    def meet(self) -> None:
        """Waits until all ranks have loaded and meets them. Raises what one of them could not do."""
        self.progress.begin_wait(Wait.OTHERS)
        for member in self._members:
            member.loaded()
        self.progress.end_wait()
        for member in self._members:
            threading.Thread(target=self._await_end, args=(member,), name=f"rank-{member.rank}", daemon=True).start()
        self._tell(encode(Begin("")))
        self.progress.enter(Stage.CONNECTING)
        self.connect()
        self.progress.enter(Stage.PREPARING)

    def begin(self, decode_steps: str) -> None:
        """How all ranks run decode steps."""
        self._tell(encode(Begin(decode_steps)))

    def all_prepared(self) -> None:
        """Waits until each rank takes steps."""
        self.progress.begin_wait(Wait.OTHERS)
        for member in self._members:
            try:
                member.prepared()
            except (EOFError, OSError):
                self._end("; ".join(self._ended()))
        self.progress.end_wait()
        self.progress.enter(Stage.SERVING)

    def announce(self, step: Step) -> None:
        """Before its first exchange."""
        self.progress.begin_step()
        self._tell(encode(step))

    def set_adapter(self, own: Callable[[int, AdapterWeights], None], slot: int, adapter: AdapterWeights) -> None:
        """Each rank puts its part of an adapter into a slot that no step in flight uses; `own` is this rank's way."""
        for member in self._members:
            member.send_adapter(slot, adapter_part(adapter, replace(self._shard, rank=member.rank), self._whole))
        try:
            own(slot, adapter_part(adapter, self._shard, self._whole))
        finally:
            answers = [self._adapter_answer(member) for member in self._members]
        if failed := [answer for answer in answers if answer]:
            raise EngineError(failed[0])

    def lost(self, error: BaseException) -> NoReturn:
        """The ranks are no longer at the same place."""
        traceback.print_exception(error)
        self._end("; ".join(["a step failed on rank 0 while other ranks were running it", *self._ended()]))

    def close(self) -> None:
        self._closing.set()
        self._watch.stop()
        for member in self._members:
            member.hang_up()
        for member in self._members:
            member.end()
        self._members = []
        super().close()
        self._folder.remove()

    def _adapter_answer(self, member: _Member) -> str:
        """As the member's, which may take as long as a step."""
        for _ in range(max(1, round(LIMITS.serving_s / BEAT_S))):
            if member.answers(BEAT_S):
                return member.adapter_answer()
        self._end(f"rank {member.rank} of {self.size} has not taken an adapter for {LIMITS.serving_s:g} s")

    def _tell(self, message: bytes) -> None:
        self.progress.begin_wait(Wait.SENT)
        for member in self._members:
            try:
                member.orders.send_bytes(message)
            except OSError as error:
                self.lost(error)
        self.progress.end_wait()

    def _await_end(self, member: _Member) -> None:
        member.process.wait()
        if not self._closing.is_set():
            self._end("; ".join(self._ended()))

    def _ended(self) -> list[str]:
        """Which ranks have, as of a moment from now: one that dies takes others with it, which may be seen first."""
        time.sleep(_MOMENT_S)
        ended = [(member.rank, member.status()) for member in self._members]
        return [f"rank {rank} of {self.size} has ended ({_said(at)})" for rank, at in ended if at is not None]

    def _end(self, why: str) -> NoReturn:
        """At once: the interpreter's own end would wait for an exchange that never comes."""
        self._ending.acquire()  # by the first thread that has something to say
        self._closing.set()
        print(f"engine: {why}: the engine ends", file=sys.stderr, flush=True)
        for member in self._members:
            member.process.kill()  # one that is stopped sees nothing of this process's end where the kernel does not
        self._folder.remove()
        os._exit(1)


@dataclass(frozen=True)
class Start:
    """What another rank is told with the plan. `folder`: of the ranks' files; `leader`: rank 0's process."""

    rank: int
    folder: Path
    leader: int
    limits: Limits

    @property
    def store(self) -> str:
        return str(self.folder / _STORE)

    @property
    def progress(self) -> Path:
        return self.folder / _PROGRESS


def start_rank(orders: socket.socket, slots: socket.socket) -> subprocess.Popen[bytes]:
    """A rank's process at the other end of these; it cannot outlive this one."""
    ends = [orders.fileno(), slots.fileno()]
    return subprocess.Popen(
        program("engine", "rank", "--orders", str(ends[0]), "--slots", str(ends[1])),
        stdin=subprocess.DEVNULL,
        pass_fds=ends,
        preexec_fn=die_with_parent() if sys.platform == "linux" else None,
    )


class _Member:
    """Another rank's process and its sockets."""

    def __init__(self, plan: EnginePlan, start: Start) -> None:
        self.rank = start.rank
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        with theirs[0], theirs[1]:
            self.process = start_rank(*theirs)
        self.orders = Connection(ours[0].detach())
        self._sockets = ours[1]
        self._slots = Connection(os.dup(ours[1].fileno()))
        sent = replace(plan, source=None)  # type: ignore[arg-type]  # open files: it opens its own
        self.orders.send_bytes(pickle.dumps((sent, replace(plan.shard, rank=start.rank), start)))

    def loaded(self) -> None:
        try:
            answer = decode(self.orders.recv_bytes())
        except (EOFError, OSError):
            status = _said(self.process.wait())
            raise EngineError(f"rank {self.rank} ended while it was loading ({status})") from None
        if not isinstance(answer, Loaded):
            raise EngineError(f"rank {self.rank} answered {type(answer).__name__} when it was to load")
        if answer.error:
            message = f"rank {self.rank}: {answer.error}"
            raise UserError(message, answer.field) if answer.user else EngineError(message)

    def prepared(self) -> None:
        """Raises EOFError, OSError: it has ended."""
        answer = decode(self.orders.recv_bytes())
        if not isinstance(answer, Prepared):
            raise EngineError(f"rank {self.rank} answered {type(answer).__name__} when it was to prepare")

    def send_adapter(self, slot: int, part: AdapterWeights) -> None:
        head, file = write_sealed(part)
        try:
            self._slots.send_bytes(slot.to_bytes(4, "little") + head)
            socket.send_fds(self._sockets, [b"f"], [file])
        finally:
            os.close(file)

    def answers(self, timeout_s: float) -> bool:
        """Whether it has answered, or ended, after that time."""
        return self._slots.poll(timeout_s)

    def adapter_answer(self) -> str:
        """Why the adapter that was sent last could not be taken; "": it was."""
        try:
            answer = self._slots.recv_bytes().decode()
        except (EOFError, OSError):
            answer = "it has ended"
        return answer and f"rank {self.rank}: {answer}"

    def status(self) -> int | None:
        """With which it has ended, if it has."""
        try:
            return self.process.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def hang_up(self) -> None:
        """It ends when it sees that."""
        with suppress(OSError):
            self._sockets.shutdown(socket.SHUT_RDWR)
        for end in (self.orders, self._slots, self._sockets):
            end.close()

    def end(self) -> None:
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Folder:
    """A directory only this user can enter, locked as the api's: a later start removes it if this process is killed."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ktserve-"))
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _said(status: int) -> str:
    return f"status {status}" if status >= 0 else f"signal {-status}"
