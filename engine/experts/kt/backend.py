"""Routed experts on kt_kernel 0.7.2's CPU classes, for base rows and adapters of attention.

One pool (CPUInfer) a process, one of its MOE objects a layer, one task per (layer, buffers): made once, replayed with
whatever `bsz` says then. kt_kernel checks next to nothing and ends the process or computes nonsense instead, so
every call goes through kt_guard first. Its memory is never given back, not even by `close`: a process makes one
KtExperts and keeps it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError, ExpertBackendError
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.capabilities import TouchedExperts
from engine.experts.kt import guard, process
from engine.experts.kt.process import kt_available
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore, WeightTensor

__all__ = ["KtExperts", "kt_available"]

NO_EXPERT_LORA = (
    "the kt backend cannot apply LoRA inside experts: kt_kernel's classes know no adapter per row. "
    "Use --expert-backend native or reference; adapters on attention alone work with kt"
)
_ROW_STEP = 32  # the int8 class wants max_len in such steps
_LLAMAFILE_GROUP = 256  # its scratch for a group of rows is no smaller
_GGML_BF16 = 30


@dataclass
class _Call:
    """A bound task: kt_kernel's handle, bf16 copies of hidden and out where the buffers are not bf16, and what
    became of the last post (`rows` submitted; `error` for wait to raise)."""

    task: Any
    ids: Any  # numpy view of buffers.ids
    hidden: torch.Tensor
    out: torch.Tensor
    rows: int = 0
    error: str | None = None


class KtExperts(ExpertBackend):
    """`method`: AMXBF16, AMXInt8, AMXInt4 (quantised while loading), GGUF (the file's own blocks), or auto: per layer
    GGUF where kt_kernel takes the blocks, else AMXBF16. `max_rows`: rows of the largest buffers that will be bound.
    `threads`: workers of the pool; default from the CPUs of this process, leaving room for its queue thread.

    UserError for a method that this CPU or the model's sizes rule out, or too many threads. ExpertBackendError if
    kt_kernel does not load or this process has a kt backend already.
    """

    def __init__(self, config: ModelConfig, method: str = "auto", *, max_rows: int, threads: int | None = None) -> None:
        ready, why = kt_available()
        if not ready:
            raise ExpertBackendError(why)
        self._ext = process.load_extension()
        self._config = config
        self._method = method
        self._here = guard.methods_here(dir(self._ext.moe))
        guard.check_method(method, config, self._here)
        if max_rows < 1:
            raise ExpertBackendError(f"max_rows {max_rows}: at least 1")
        cpus = process.usable_cpus()
        self.threads = process.pool_threads(threads, cpus)
        self.max_rows = max_rows
        self._closed = False
        self.methods: dict[int, str] = {}  # by layer, as chosen
        self._touched = TouchedExperts.of(len(config.layers))
        self._modules: dict[int, Any] = {}
        self._tasks: dict[tuple[int, int], ExpertTask] = {}
        self._keep: list[Any] = []  # what kt_kernel keeps pointers to
        process.claim_process()
        self._pid = os.getpid()
        try:
            with process.stdout_to_stderr():
                self._pool = self._make_pool(cpus.node)
        except RuntimeError as e:
            process.release_claim()
            raise ExpertBackendError(f"kt_kernel's pool of {self.threads} threads: {e}") from e

    @property
    def offers(self) -> tuple[object, ...]:
        return (self._touched,)

    def _make_pool(self, node: int) -> Any:
        wanted = self._ext.WorkerPoolConfig()
        wanted.subpool_count = 1
        wanted.subpool_numa_map = [node]
        wanted.subpool_thread_count = [self.threads]
        pool = self._ext.CPUInfer(wanted)
        # The pool lives as long as the process: its destructor prints, and frees what layers still point to.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return pool

    def load_layer(self, layer: int, store: ExpertStore) -> None:
        """ModelFileError for wrong shapes, NaN or infinity, or a type that the method does not take."""
        self._check_process()
        if layer in self._modules:
            raise ExpertBackendError(f"layer {layer} is loaded already, and kt_kernel cannot replace it")
        guard.check_store(store, self._config)
        method = guard.choose_method(self._method, store, self._config, self._here)
        prepare = _block_pointer if method.name == "GGUF" else _bf16_pointer
        sources = [prepare(store, projection) for projection, _ in store.projections()]
        with process.stdout_to_stderr():
            module = self._build(layer, method, store, [pointer for pointer, _ in sources])
        if method.name == "GGUF":  # computed from in place; the other classes have repacked their copy
            self._keep += [owner for _, owner in sources]
        self._modules[layer] = module
        self.methods[layer] = method.name

    def _build(self, layer: int, method: guard.Method, store: ExpertStore, pointers: list[int]) -> Any:
        c = self._config
        wanted = self._ext.moe.MOEConfig(
            c.num_experts, c.num_experts_per_tok, c.hidden_size, c.moe_intermediate_size, 0
        )
        wanted.layer_idx = layer
        wanted.pool = self._pool.backend_
        wanted.max_len = -(-self.max_rows // _ROW_STEP) * _ROW_STEP
        wanted.gate_proj, wanted.up_proj, wanted.down_proj = pointers
        if method.name == "GGUF":
            wanted.m_block, wanted.group_min_len = 32, 10
            wanted.group_max_len = max(_LLAMAFILE_GROUP, wanted.max_len)
            wanted.hidden_type = _GGML_BF16
            wanted.gate_type, wanted.up_type, wanted.down_type = (
                _ggml_number(store.type(projection)) for projection, _ in store.projections()
            )
        order = torch.arange(c.num_experts, dtype=torch.int64)
        try:
            module = getattr(self._ext.moe, method.extension_class)(wanted)
            self._keep += [wanted, order]
            self._run(module.load_weights_task(order.data_ptr()))
        except RuntimeError as e:
            raise ExpertBackendError(f"kt_kernel could not load layer {layer} as {method.name}: {e}") from e
        return module

    def _run(self, task: Any) -> None:
        self._pool.submit(task)
        self._pool.sync()

    def set_adapter(self, slot: int, layers: dict[int, ExpertLora] | None) -> None:
        """AdapterError for any expert LoRA: kt_kernel's classes have no adapter per row."""
        if layers:
            raise AdapterError(
                NO_EXPERT_LORA,
                keys=[f"layers.{layer}.experts" for layer in sorted(layers)],
            )

    def bind(self, layer: int, buffers: ExpertBuffers) -> ExpertTask:
        """The same task for the same layer and buffers: kt_kernel never frees a task's arguments."""
        self._check_process()
        if layer not in self._modules:
            raise ExpertBackendError(f"layer {layer} has no experts loaded (loaded: {sorted(self._modules)})")
        key = (layer, id(buffers))
        if key not in self._tasks:
            guard.check_buffers(buffers, self._config, self.max_rows)
            self._tasks[key] = ExpertTask(layer, buffers, self._call(layer, buffers))
        return self._tasks[key]

    def _call(self, layer: int, b: ExpertBuffers) -> _Call:
        direct = b.hidden.dtype == torch.bfloat16
        hidden = b.hidden if direct else torch.zeros_like(b.hidden, dtype=torch.bfloat16)
        out = b.out if direct else torch.zeros_like(b.out, dtype=torch.bfloat16)
        task = self._modules[layer].forward_task(
            b.bsz.data_ptr(),
            self._config.num_experts_per_tok,
            b.ids.data_ptr(),
            b.weights.data_ptr(),
            hidden.data_ptr(),
            out.data_ptr(),
            False,
        )
        return _Call(task, b.ids.numpy(), hidden, out)

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        """A call that kt_kernel would not survive is not submitted; `wait` raises what is wrong with it."""
        self._check_process()
        if stream is not None:
            raise ExpertBackendError("the kt backend is driven from the CPU only; it has no stream to follow")
        call: _Call = task.handle
        rows = int(task.buffers.bsz[0])
        call.rows, call.error = 0, self._wrong(task, rows)
        if call.error is not None or rows == 0:  # kt_kernel takes 0 for 1
            return
        if call.hidden is not task.buffers.hidden:
            call.hidden[:rows].copy_(task.buffers.hidden[:rows])
        self._pool.submit(call.task)
        call.rows = rows
        chosen = np.bincount(call.ids[:rows].ravel() + 1)[1:]  # -1 is skipped
        self._touched.counts[task.layer] += int(np.count_nonzero(chosen))

    def _wrong(self, task: ExpertTask, rows: int) -> str | None:
        if not 0 <= rows <= task.buffers.max_rows:
            return f"bsz is {rows}, the buffers hold 0 to {task.buffers.max_rows} rows"
        if rows == 0:
            return None
        return guard.check_call(task.handle.ids[:rows], task.buffers.hidden[:rows], self._config.num_experts)

    def wait(self, task: ExpertTask, stream: Any = None) -> None:
        """ExpertBackendError names the layer and the rows; the backend stays usable."""
        call: _Call = task.handle
        where = f"layer {task.layer}"
        if call.error is not None:
            raise ExpertBackendError(f"{where}: {call.error}")
        if call.rows == 0:
            return
        try:
            self._pool.sync()
        except RuntimeError as e:
            raise ExpertBackendError(f"{where}: kt_kernel: {e}") from e
        # Finite inputs can still leave float16's range inside the GGUF class (its activation scales).
        wrong = guard.nonfinite_rows(call.out[: call.rows], "kt_kernel's results")
        if wrong is not None:
            raise ExpertBackendError(f"{where}: {wrong} (activations too large for {self.methods[task.layer]}?)")
        if call.out is not task.buffers.out:
            task.buffers.out[: call.rows].copy_(call.out[: call.rows])

    def close(self) -> None:
        """Let go of the buffers once nothing writes to them. The pool and the weights stay until the process ends."""
        if os.getpid() == self._pid and not self._closed:
            self._pool.sync()
        self._closed = True
        self._tasks.clear()

    def _check_process(self) -> None:
        if self._closed:
            raise ExpertBackendError("this kt backend is closed")
        if os.getpid() != self._pid:
            raise ExpertBackendError(
                f"this kt backend belongs to process {self._pid}; kt_kernel does not survive fork: use spawn"
            )


# kt_kernel reads a layer's weights as one contiguous run of all experts behind a pointer. Its bf16, int8 and int4
# classes repack a copy while loading. Its llamafile class keeps computing from the pointer: the blocks stay in memory.


def _ggml_number(name: str) -> int:
    """A GGML type's number from its name."""
    return int(gguf.GGMLQuantizationType[name])


def _bf16_pointer(store: ExpertStore, projection: str) -> tuple[int, Any]:
    """(address, owner) of a projection as bfloat16 [E, out, in]; keep the owner until the layer has loaded."""
    if store.type(projection) == "BF16":
        return _block_pointer(store, projection)
    tensor = store.stacked(projection, torch.bfloat16).contiguous()
    return tensor.data_ptr(), tensor


def _block_pointer(store: ExpertStore, projection: str) -> tuple[int, Any]:
    """(address, owner) of a projection's stored bytes, all experts.
    Keep the owner as long as the layer is used."""
    held: WeightTensor | list[WeightTensor] = getattr(store, projection)
    data = held.data[:] if isinstance(held, WeightTensor) else np.concatenate([weight.data[:] for weight in held])
    data = np.ascontiguousarray(data)
    return int(data.ctypes.data), data
