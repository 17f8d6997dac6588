"""The engine process: a socket, a loop, an end. Started by the api, ends with it."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import UserError
from engine.heartbeat import Heartbeat
from engine.messages import (
    FatalError,
    FromEngine,
    Loading,
    MessageBatch,
    Ready,
    Reply,
    Shutdown,
    ToEngine,
    decode_to_engine,
    encode,
)

Build = Callable[
    [EngineConfig, Callable[[FromEngine], None], Callable[[str, int, int], None]], tuple[EngineCore, Ready]
]

_IDLE_S = 1.0  # how often an idle engine looks whether its parent lives
THREADS_S = 0.002  # how often it looks after loads while nothing runs
_MAX_FRAME_BYTES = 64 << 20


class EngineProcess:
    """Binds a DEALER at `address` for exactly one api, and beats in the file that it made (`engine.heartbeat`)."""

    def __init__(self, address: str, heartbeat: str) -> None:
        self._heartbeat = Heartbeat(Path(heartbeat))
        self._heartbeat.start()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._socket.bind(address)
        self._parent = os.getppid()
        self._unsent: list[FromEngine] = []
        self._stop = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the api decides
        signal.signal(signal.SIGTERM, self._on_term)

    def serve(self, config: EngineConfig, build: Build) -> int:
        """Load the model and answer until told to end. Returns the exit status."""
        try:
            core, ready = build(config, self.send, self._progress)
        except UserError as error:
            self.send(FatalError(message=str(error), user=True))
            return self._close(1)
        except Exception as error:  # noqa: BLE001 - reported to the api, whatever it is
            self.send(FatalError(message=f"{type(error).__name__}: {error}", user=False, detail=traceback.format_exc()))
            return self._close(1)
        self.send(ready)
        self._flush()
        status = 0
        try:
            self._loop(core)
        except Exception as error:  # noqa: BLE001 - a fault outside a step: tell the api, then end
            self.send(FatalError(message=f"{type(error).__name__}: {error}", user=False, detail=traceback.format_exc()))
            status = 1
        core.close()
        return self._close(status)

    def send(self, message: FromEngine) -> None:
        """It goes with the others of this step."""
        self._unsent.append(message)

    def _flush(self) -> None:
        if self._unsent:
            messages, self._unsent = self._unsent, []
            self._socket.send(encode(messages[0] if len(messages) == 1 else MessageBatch(messages=messages)))

    def _loop(self, core: EngineCore) -> None:
        gc.collect()
        gc.freeze()  # a full collection need not look at the model again: it would stall a step
        worked = True
        while not self._stop and os.getppid() == self._parent:
            idle_s = THREADS_S if core.waiting_for_threads else _IDLE_S
            messages = self._receive(0.0 if worked and core.busy else idle_s)
            with self._heartbeat.working():
                for message in messages:
                    if isinstance(message, Shutdown):
                        return
                    core.handle(message)
                worked = core.step()
            self._flush()

    def _receive(self, timeout_s: float) -> list[ToEngine]:
        """All that has arrived; waits up to `timeout_s` for the first."""
        messages: list[ToEngine] = []
        while self._socket.poll(0 if messages else int(timeout_s * 1000)):
            frame = self._socket.recv()
            try:
                messages.append(decode_to_engine(frame))
            except msgspec.DecodeError as error:
                self._answer_broken(frame, error)
        return messages

    def _answer_broken(self, frame: bytes, error: msgspec.DecodeError) -> None:
        """A frame of another version's api: answer the call if it can be told which, and go on."""
        print(f"engine: message not understood: {error}", flush=True)
        try:
            call_id = msgspec.msgpack.decode(frame).get("call_id")
        except (msgspec.DecodeError, AttributeError):
            return
        if isinstance(call_id, int):
            self.send(Reply(call_id=call_id, ok=False, status=500, error=f"message not understood: {error}"))

    def _progress(self, stage: str, done: int, total: int) -> None:
        self.send(Loading(stage=stage, done=done, total=total))
        self._flush()

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self._stop = True

    def _close(self, status: int) -> int:
        self._flush()
        self._heartbeat.stop()
        self._socket.close()
        self._context.term()
        return status
