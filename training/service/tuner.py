"""Tuning runs of an engine: their orders, whose turn it is, and the micro-batch that is computed.

A run's orders are worked in the order in which they came. Batches of several runs go through the base in one
micro-batch, each with its own adapter; the tenant that has been computed the least, by its weight, comes first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError, KtserveError, UserError
from engine.folders import replace_folder
from engine.lora.adapters import Adapters
from engine.lora.files.parse import parse_adapter
from engine.lora.files.writer import StockModel, write_adapter
from engine.lora.order import in_order
from engine.messages import AdapterInfo, FromEngine, Reply, Tune
from engine.model.causal_lm import CausalLM
from engine.tuning import GONE, NO_ROOM, Batch, CloseRun, LoadRun, OpenRun, OptimStep, PublishRun, SaveRun, Tuned
from engine.units import format_bytes
from engine.work import Work
from training.service.adapter import CANNOT_WRITE, TrainableAdapter
from training.service.losses import check_batch, counted, group_of
from training.service.model import Part, ServedModel
from training.service.room import Room
from training.service.runs import RefusedOrderError, TunedRun, Turns, WaitingOrder, diverged, error_of

log = logging.getLogger("ktserve")
_FILES = "tuning-files"  # a kind of work, and its thread's name
_LARGE = 1 << 24  # products of a projection, in multiplications for each thread, from which several threads pay
MAX_RUNS = 64
_FAULTS = (RuntimeError, MemoryError, ValueError)  # of torch, beside errors of ours


class EngineTuner:
    """`engine.steps.base.Tuner`. `micro_batch`: tokens of one; `longest`: of a text. `max_rank`: of an adapter. `base`:
    what adapters' files say they were trained on."""

    def __init__(
        self,
        model: CausalLM,
        adapters: Adapters,
        send: Callable[[FromEngine], None],
        *,
        micro_batch: int,
        longest: int,
        max_rank: int,
        base: str | None = None,
    ) -> None:
        self._model, self._adapters, self._send = ServedModel(model), adapters, send
        self._config = model.config
        self._micro_batch, self._longest = micro_batch, min(micro_batch, longest)
        self._room = Room(model.config, self._model.device, micro_batch)
        self._max_rank, self._base = max_rank, base
        self._runs: dict[str, TunedRun] = {}
        self._work = Work(_FILES)
        self._turns = Turns()
        self._pieces: Iterator[None] | None = None
        self._tokens = self._steps = 0
        self._seconds = 0.0

    # ---- messages

    def handle(self, message: Tune) -> None:
        try:
            self._take(message)
        except KtserveError as error:
            self._refuse(message.call_id, error)

    def _take(self, message: Tune) -> None:
        order = message.order
        if isinstance(order, OpenRun):
            return self._open(message, order)
        run = self._runs.get(message.run)
        if run is None:
            raise RefusedOrderError(GONE, f"there is no tuning run {message.run!r}", "run")
        if isinstance(order, CloseRun):
            self._close_run(run, EngineError(f"the run {run.name!r} was closed"))
            self._answer(message.call_id, Tuned())
            return
        if isinstance(order, Batch):
            whole = self._micro_batch // group_of(order.loss)
            check_batch(order, self._model.vocabulary, min(whole, self._longest))
        others = {other.tenant for other in self._runs.values() if other.orders}
        if run.tenant not in others:
            self._turns.come(run.tenant, others)
        run.orders.append(WaitingOrder(message.call_id, order))

    def _open(self, message: Tune, order: OpenRun) -> None:
        name = message.run
        if name in self._runs:
            raise UserError(f"the run {name!r} is open already", "run")
        if len(self._runs) >= MAX_RUNS:
            raise RefusedOrderError(NO_ROOM, f"{MAX_RUNS} runs are open, the most that are: close one", "run")
        if not 1 <= order.rank <= self._max_rank:
            raise UserError(f"rank {order.rank}; allowed are 1 to {self._max_rank} (--max-adapter-rank)", "rank")
        wanted = self._room.of_run(order.rank, order.targets)
        free = self._room.free(self._runs.values())
        for device, size in wanted.items():
            if size > free[device]:
                left = f"{format_bytes(max(free[device], 0))} are free{' on the GPU' if device == 'cuda' else ''}"
                raise RefusedOrderError(
                    NO_ROOM if self._runs else 400,
                    f"an adapter of rank {order.rank} takes {format_bytes(size)} in training (masters, moments, "
                    f"gradients), and {left}: take a smaller rank, or wait for other runs",
                    "rank",
                )
        run = self._runs[name] = TunedRun(name, order.tenant, order.weight, wanted)
        self._work.start(_FILES, partial(self._made, order), partial(self._opened, run, message.call_id))

    def _made(self, order: OpenRun) -> TrainableAdapter:
        """On a thread: a large adapter takes seconds."""
        adapter = TrainableAdapter(
            self._config,
            self._model.linears,
            rank=order.rank,
            alpha=order.alpha,
            targets=order.targets,
            seed=order.seed,
            device=self._model.device,
        )
        if order.state is not None:
            adapter.load(Path(order.state))
        elif order.adapter is not None:
            given = parse_adapter(order.adapter, self._config, name="adapter", max_rank=order.rank, base=self._base)
            adapter.begin_with(given)
        return adapter

    def _opened(self, run: TunedRun, call_id: int, future: Future[TrainableAdapter]) -> None:
        error = error_of(future)
        if run.closed:
            error = EngineError(f"the run {run.name!r} was closed")
        if error is None:
            run.made, run.on_disk = future.result(), False
            self._answer(call_id, Tuned({"hidden_size": float(self._config.hidden_size)}))
            return
        self._refuse(call_id, error)
        if not run.closed:
            self._close_run(run, RefusedOrderError(GONE, f"there is no tuning run {run.name!r}: {error}", "run"))

    # ---- pieces

    @property
    def ready(self) -> bool:
        self._work.take()
        return self._pieces is not None or any(self._waiting_runs())

    @property
    def busy(self) -> bool:
        return self._pieces is not None or self._work.busy or any(run.orders for run in self._runs.values())

    def advance(self, seconds: float) -> float:
        started = time.monotonic()
        while self._piece() and time.monotonic() - started < seconds:
            pass
        took = time.monotonic() - started
        self._seconds += took
        return took

    def stats(self) -> dict[str, float | int]:
        return {
            "tuning_runs": len(self._runs),
            "tuning_tokens": self._tokens,
            "tuning_steps": self._steps,
            "tuning_s": self._seconds,
        }

    def close(self) -> None:
        self._work.close()

    def _waiting_runs(self) -> Iterator[TunedRun]:
        return (run for run in self._runs.values() if run.orders and not run.on_disk)

    def _piece(self) -> bool:
        """Whether there may be more."""
        self._work.take()
        if self._pieces is None:
            self._pieces = self._next()
            if self._pieces is None:
                return False
        try:
            next(self._pieces)
        except StopIteration:
            self._pieces = None
        return True

    def _next(self) -> Iterator[None] | None:
        waiting = self._turns.order(self._waiting_runs())
        batches = [run for run in waiting if isinstance(run.orders[0].order, Batch)]
        for run in waiting:
            if run not in batches and not run.blocked:
                return self._small(run)
        for run in waiting:
            run.blocked = False
        return self._batch(batches) if batches else None

    def _small(self, run: TunedRun) -> Iterator[None]:
        """Whatever is no batch."""
        waiting = run.orders[0]
        order = waiting.order
        if isinstance(order, SaveRun | LoadRun):
            run.on_disk = True
            call = partial(self._files, run.adapter, order)
            self._work.start(_FILES, call, partial(self._filed, run, waiting))
            return
        try:
            if isinstance(order, OptimStep):
                yield from self._step(run, waiting, order)
            elif isinstance(order, PublishRun):
                self._publish(run, waiting, order)
        except KtserveError as error:
            self._end(run, waiting, error)
        except _FAULTS as error:
            log.exception("an order of a tuning run failed")
            self._close_run(run, EngineError(f"the run's order failed: {type(error).__name__}: {error}"))

    def _publish(self, run: TunedRun, waiting: WaitingOrder, order: PublishRun) -> None:
        """Without room now it stays the run's first order, and others have their turn."""
        if waiting.copied is None:
            waiting.copied = run.adapter.weights(order.name)
            waiting.copied.linears = in_order(waiting.copied.linears, self._config)
        if not self._adapters.adopt(order.name, waiting.copied):
            run.blocked = True
            return
        adapter = next(info for info in self._adapters.infos() if info.name == order.name)
        self._end(run, waiting, Tuned(), adapter)

    def _files(self, adapter: TrainableAdapter, order: SaveRun | LoadRun) -> None:
        """On a thread; the run's other orders wait."""
        if isinstance(order, LoadRun):
            adapter.load(Path(order.state), optimizer=order.optimizer)
            return
        if order.state is not None:
            adapter.save(Path(order.state))
        if order.adapter is not None:
            folder = Path(order.adapter)
            weights = adapter.weights(folder.name)
            stock = StockModel.of(self._config)
            try:
                replace_folder(folder, lambda part: write_adapter(weights, part, "peft", base=self._base, stock=stock))
            except CANNOT_WRITE as error:
                raise UserError(f"{folder} cannot be written: {error}", "adapter") from error

    def _filed(self, run: TunedRun, waiting: WaitingOrder, future: Future[None]) -> None:
        run.on_disk = False
        error = error_of(future)
        if isinstance(waiting.order, LoadRun) and error is None:
            run.learnt = False
        self._end(run, waiting, Tuned() if error is None else error)

    def _step(self, run: TunedRun, waiting: WaitingOrder, order: OptimStep) -> Iterator[None]:
        if not run.learnt:
            self._end(run, waiting, UserError("there are no gradients: a batch has to come before the step", "run"))
            return
        norm = 0.0
        for norm in run.adapter.step(order):
            if norm != norm or norm == float("inf"):
                self._close_run(run, diverged(run, "the norm of its gradients"))
                return
            yield
            if run.closed:
                return
        run.learnt = False
        self._steps += 1
        self._end(run, waiting, Tuned(metrics={"grad_norm": norm}))

    def _batch(self, runs: list[TunedRun]) -> Iterator[None]:
        """A micro-batch of as many runs' samples as go into one."""
        chosen: list[tuple[TunedRun, WaitingOrder, Part]] = []
        room = self._micro_batch
        for run in runs:
            waiting = run.orders[0]
            part = self._part(run, waiting, room)
            if part is not None:
                room -= part.tokens
                chosen.append((run, waiting, part))
        try:
            pieces = self._model.compute([part for _, _, part in chosen], self._room.kept)
            for _ in self._threaded(pieces, self._micro_batch - room):
                yield
                if all(run.closed for run, _, _ in chosen):
                    return
        except (KtserveError, *_FAULTS) as error:
            log.exception("a training micro-batch failed")
            for run in [run for run, _, _ in chosen if not run.closed]:
                self._close_run(run, EngineError(f"the run's micro-batch failed: {type(error).__name__}: {error}"))
            return
        for run, waiting, part in chosen:
            self._computed(run, waiting, part)

    def _threaded(self, pieces: Iterator[None], tokens: int) -> Iterator[None]:
        """With torch's threads where its products are large: small ones lose by them, and serving steps, between which
        the pool's workers sleep, have one."""
        large = tokens * self._config.hidden_size**2 >= _LARGE * self._model.threads
        while True:
            threads = torch.get_num_threads()
            torch.set_num_threads(self._model.threads if large else 1)
            try:
                next(pieces)
            except StopIteration:
                return
            finally:
                torch.set_num_threads(threads)
            yield

    @staticmethod
    def _part(run: TunedRun, waiting: WaitingOrder, room: int) -> Part | None:
        """The next samples of a batch that `room` tokens hold; None: not one group."""
        order = waiting.order
        assert isinstance(order, Batch)
        group, end, tokens = group_of(order.loss), waiting.done, 0
        while end < len(order.samples):
            more = sum(len(sample.tokens) for sample in order.samples[end : end + group])
            if tokens + more > room:
                break
            tokens, end = tokens + more, end + group
        if end == waiting.done:
            return None
        samples = order.samples[waiting.done : end]
        learn = order.learn and not order.base
        adapter = None if order.base else run.adapter
        return Part(adapter, samples, order.loss, order.settings, learn, group, all_targets=order.outputs)

    def _computed(self, run: TunedRun, waiting: WaitingOrder, part: Part) -> None:
        order = waiting.order
        assert isinstance(order, Batch)
        self._tokens += part.tokens
        self._turns.charge(run, part.tokens)
        if run.closed:
            return
        if part.loss != part.loss or abs(part.loss) == float("inf"):
            self._close_run(run, diverged(run, "its loss"))
            return
        run.learnt |= part.learn
        waiting.done += len(part.samples)
        waiting.loss += part.loss
        waiting.hits += part.hits
        waiting.logprobs += [values.numpy().tobytes() for values in part.logprobs]
        if waiting.done == len(order.samples):
            count = sum(len(counted(sample, order.loss)) for sample in order.samples)
            metrics = {"loss": waiting.loss, "targets": float(count), "hits": float(waiting.hits)}
            self._end(run, waiting, Tuned(metrics, waiting.logprobs))

    # ---- ends

    def _end(
        self, run: TunedRun, waiting: WaitingOrder, result: Tuned | BaseException, adapter: AdapterInfo | None = None
    ) -> None:
        if run.closed:  # all of its orders are answered
            return
        if not run.orders or run.orders[0] is not waiting:
            raise EngineError(f"run {run.name!r}: an order that is not its first has ended")
        run.orders.popleft()
        if isinstance(result, Tuned):
            self._answer(waiting.call_id, result, adapter)
        else:
            self._refuse(waiting.call_id, result)

    def _close_run(self, run: TunedRun, error: KtserveError) -> None:
        run.closed = True
        del self._runs[run.name]
        for waiting in run.orders:
            self._refuse(waiting.call_id, error)
        run.orders.clear()

    def _answer(self, call_id: int, tuned: Tuned, adapter: AdapterInfo | None = None) -> None:
        self._send(Reply(call_id=call_id, ok=True, tuned=tuned, adapter=adapter))

    def _refuse(self, call_id: int, error: BaseException) -> None:
        field, status = (error.field, 400) if isinstance(error, UserError) else (None, 500)
        status = error.status if isinstance(error, RefusedOrderError) else status
        self._send(Reply(call_id=call_id, ok=False, error=str(error), field=field, status=status))


def make_tuner(core: EngineCore, send: Callable[[FromEngine], None], config: EngineConfig) -> EngineTuner:
    """Of an engine that has loaded its model. UserError for one that cannot be trained."""
    model = core.runner.model
    if not isinstance(model, CausalLM):
        raise UserError("--fine-tuning needs a model", "fine_tuning")
    if not config.max_adapter_slots:
        raise UserError("--fine-tuning: with --max-adapter-slots 0 no adapter is served", "max_adapter_slots")
    return EngineTuner(
        model,
        core.adapters,
        send,
        micro_batch=config.training_tokens,
        longest=core.scheduler.config.max_model_len,
        max_rank=config.max_adapter_rank,
        base=config.model,
    )
