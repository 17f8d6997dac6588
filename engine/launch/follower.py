"""`ktserve engine rank`: a rank other than 0. It runs the steps that rank 0 tells it, and ends with rank 0.

It plans and samples nothing: the plan is rank 0's, token ids come over the group, and what it computes of logits only
rank 0 looks at.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import numpy as np
import torch

from engine.errors import UserError
from engine.launch.assemble import load_runner, pad_decode
from engine.launch.backends import make_backends
from engine.launch.leader import Start
from engine.launch.rank_plans import on_rank
from engine.launch.warm import warm_up
from engine.lora.adapter import AdapterWeights
from engine.lora.sealed_memory import map_sealed
from engine.model.causal_lm import CausalLM
from engine.model.step import OutputKind
from engine.planning.plan import EnginePlan
from engine.ranks.group import Ranks
from engine.ranks.progress import Progress, Stage, Wait
from engine.ranks.shard import Shard
from engine.ranks.watch import Watch
from engine.steps.orders import Begin, Loaded, Prepared, Step, decode, encode
from engine.steps.runner import ModelRunner

_Order = TypeVar("_Order", Begin, Step)


def serve(orders: Connection, slots: socket.socket) -> NoReturn:
    """A rank's process: load what rank 0 sends, then run its steps until it closes `orders`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the engine: its parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _serve(orders, slots)
    except (EOFError, ConnectionError):  # rank 0 has closed, or ended
        os._exit(0)
    except Exception:  # noqa: BLE001 - whatever it was, the ranks are no longer at the same place
        traceback.print_exc()
        os._exit(1)


def _serve(orders: Connection, slots: socket.socket) -> NoReturn:
    message: tuple[EnginePlan, Shard, Start] = pickle.loads(orders.recv_bytes())
    sent, shard, start = message
    progress = Progress.open(start.progress, shard.rank)
    progress.enter(Stage.LOADING)
    Watch(progress, start.limits, partial(_end, start.leader))
    plan = on_rank(sent, shard)
    try:
        runner, group = _load(plan, start.store, progress)
    except Exception as error:  # noqa: BLE001 - rank 0 says it, and ends this process
        user = isinstance(error, UserError)
        text = str(error) if user else f"{type(error).__name__}: {error}"
        orders.send_bytes(encode(Loaded(text, user, getattr(error, "field", None))))
        orders.recv_bytes()  # until it does
        os._exit(1)
    orders.send_bytes(encode(Loaded()))
    _order(orders, progress, Begin)
    progress.enter(Stage.CONNECTING)
    group.connect()
    decode_steps = _order(orders, progress, Begin).decode
    progress.enter(Stage.PREPARING)
    pad_decode(runner, plan, decode_steps, lambda *_: None)
    warm_up(runner, plan, lambda *_: None)
    progress.enter(Stage.SERVING)
    threading.Thread(target=_fill_slots, args=(slots, runner.model), name="slots", daemon=True).start()
    gc.collect()
    gc.freeze()
    orders.send_bytes(encode(Prepared()))
    while True:
        order = _order(orders, progress, Step)
        progress.begin_step()
        follow(runner, order)


def _load(plan: EnginePlan, store: str, progress: Progress) -> tuple[ModelRunner, Ranks]:
    backends, cpus = make_backends(plan), os.sched_getaffinity(0)
    spare = backends.spare_cpus or cpus  # beside rank 0's pool, which has not begun to spin
    os.sched_setaffinity(0, spare)  # the group's threads have what this one has
    group = Ranks(backends.device, store, progress)
    os.sched_setaffinity(0, cpus)  # all of them read weights
    runner = load_runner(plan, backends, group, progress.loaded_part)
    os.sched_setaffinity(0, spare)
    return runner, group


def _order(orders: Connection, progress: Progress, expected: type[_Order]) -> _Order:
    progress.begin_wait(Wait.STEP)
    order = decode(orders.recv_bytes())
    if not isinstance(order, expected):
        raise RuntimeError(f"rank 0 sent {type(order).__name__} where {expected.__name__} belongs")
    progress.end_wait()
    return order


def _end(leader: int, why: str) -> NoReturn:
    """Rank 0 gives no sign of life: it cannot end the engine itself."""
    print(f"engine: {why}: the engine ends", file=sys.stderr, flush=True)
    if os.getppid() == leader:
        os.kill(leader, signal.SIGKILL)
    os._exit(1)


def follow(runner: ModelRunner, order: Step) -> None:
    """The part of `ModelRunner.launch_forward` and `launch_sample` in which ranks meet."""
    arrays, model = order.arrays, runner.model
    slots = set(np.unique(arrays.adapters).tolist()) - {0}
    runner.release(order.idle)
    with runner.computing():
        model.begin_step(arrays.num_tokens, lora=bool(slots), eager=not order.padded, slots=slots)
        if order.padded and runner.padded is not None:
            runner.padded.launch(arrays)
            if not order.greedy:
                model.head.whole(runner.padded.logits[: len(arrays.kept)])
            return
        given = runner.step_input(arrays, every=order.every, greedy=order.greedy)
        model.plan(given.batch)
        hidden = runner.executor.forward(given).hidden
        if given.output_kind is OutputKind.HIDDEN and len(arrays.kept):
            model.logits(hidden[torch.from_numpy(arrays.kept).to(hidden.device)])
        for first, end in order.logits:
            model.logits(hidden[first:end])
        model.check()


def _fill_slots(slots: socket.socket, model: CausalLM) -> None:
    """Adapters as they come; answers each with why it could not be taken, or nothing."""
    connection = Connection(os.dup(slots.fileno()))
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)
    try:
        while True:
            message = connection.recv_bytes()
            _, files, _, _ = socket.recv_fds(slots, 1, 1)
            try:
                adapter = map_sealed(message[4:], files[0])
            finally:
                for file in files:
                    os.close(file)
            connection.send_bytes(_fill(model, int.from_bytes(message[:4], "little"), adapter).encode())
    except (EOFError, ConnectionError, OSError):
        return  # rank 0 has closed; the other thread sees it too


def _fill(model: CausalLM, slot: int, adapter: AdapterWeights) -> str:
    try:
        model.set_adapter(slot, adapter)
    except Exception as error:  # noqa: BLE001 - that slot is not filled, whatever it was
        return f"{type(error).__name__}: {error}"
    return ""
