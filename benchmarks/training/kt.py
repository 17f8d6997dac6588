"""kt_kernel's training class as a peer, in a process of its own: it allows one pool a process and never frees weights,
and where layers share backward buffers a second one in a process crashes."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.peers.kt import KtError, KtProcess

_CLASS = "AMXBF16_SFT_MOE"
_VARIANT = "KT_KERNEL_CPU_VARIANT"  # the environment's choice among kt_kernel's builds
_SETTLE_S = 0.1  # its threads spin for a while after a task


@dataclass(frozen=True)
class KtShape:
    """`variant`: which of kt_kernel's builds is loaded ("amx", "avx512_bf16"); "": its own choice. `shared`: layers
    share one transposed copy of the weights, made again in each backward pass."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    rank: int
    max_rows: int
    threads: int
    variant: str = ""
    shared: bool = False


class KtTrainer(KtProcess):
    """One layer of bf16 experts with LoRA. KtError as soon as kt_kernel cannot."""

    def __init__(self, shape: KtShape) -> None:
        super().__init__(_serve, shape)

    def step_s(self, ids: torch.Tensor) -> tuple[float, float]:
        """Seconds of forward (saving for backward) and of backward. ids [rows, top_k]."""
        # A tensor would be moved into shared memory, away from who has its address.
        seconds: tuple[float, float] = self.ask(ids.numpy())
        return seconds


def _serve(pipe: Connection, shape: KtShape) -> None:
    torch.set_num_threads(1)
    if shape.variant:
        os.environ[_VARIANT] = shape.variant
    try:
        layer = _Layer(shape)
    except (KtError, ImportError, OSError, RuntimeError) as error:
        pipe.send(f"kt_kernel: {error}")
        return
    pipe.send(None)
    with contextlib.suppress(EOFError):  # the parent is gone
        while (ids := pipe.recv()) is not None:
            seconds = layer.step_s(torch.from_numpy(ids))
            time.sleep(_SETTLE_S)
            pipe.send(seconds)


class _Layer:
    def __init__(self, shape: KtShape) -> None:
        from engine.experts.kt.process import load_extension, stdout_to_stderr

        self.shape, self.quiet = shape, stdout_to_stderr
        extension = load_extension()
        if not hasattr(extension.moe, _CLASS):
            raise KtError(f"no {_CLASS} on this CPU: it needs AVX-512 with BF16, or AMX")
        e, r, h, i = shape.experts, shape.rank, shape.hidden, shape.intermediate
        self.base = [_random(n, k).expand(e, n, k).contiguous() for n, k in ((i, h), (i, h), (h, i))]
        sizes = ((e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r))  # A, B of gate, up, down
        self.lora = [_random(*size) for size in sizes]
        self.grads = [torch.zeros_like(matrix) for matrix in self.lora]
        self.order = torch.arange(e, dtype=torch.int64)
        with self.quiet():
            workers = extension.WorkerPoolConfig()
            workers.subpool_count, workers.subpool_numa_map = 1, [0]
            workers.subpool_thread_count = [shape.threads]
            self.cpu = extension.CPUInfer(workers)
            config = extension.moe.MOESFTConfig()
            config.expert_num, config.num_experts_per_tok = e, shape.top_k
            config.hidden_size, config.intermediate_size = h, i
            config.lora_rank, config.lora_alpha, config.lora_dropout = r, 2.0 * r, 0.0
            config.max_cache_depth, config.layer_idx = 1, 0
            config.max_len = -(-shape.max_rows // 256) * 256
            config.share_backward_bb, config.share_cache_pool = shape.shared, False
            config.full_weight_grad, config.authoritative_optimizer_grads = False, True
            config.physical_to_logical_map = self.order.data_ptr()
            config.gate_proj, config.up_proj, config.down_proj = (t.data_ptr() for t in self.base)
            names = [f"{name}_lora_{half}" for name in ("gate", "up", "down") for half in "ab"]
            for name, matrix in zip(names, self.lora, strict=True):
                setattr(config, name, matrix.data_ptr())
            config.pool = self.cpu.backend_
            self.held = (workers, config)
            self.moe = getattr(extension.moe, _CLASS)(config)
            self._run(self.moe.load_weights_task())
        self.base.clear()  # it has copied them

    def _run(self, task: Any) -> float:
        began = time.perf_counter()
        self.cpu.submit(task)
        self.cpu.sync()
        return time.perf_counter() - began

    def step_s(self, ids: torch.Tensor) -> tuple[float, float]:
        rows, top_k = ids.shape
        bsz, ids = torch.tensor([rows], dtype=torch.int32), ids.clone()
        weights = torch.full((rows, top_k), 1 / top_k)
        x, grad_out = (torch.randn(rows, self.shape.hidden).bfloat16() for _ in range(2))
        out, grad_in, grad_weights = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weights)
        inputs = [tensor.data_ptr() for tensor in (ids, weights, x, out)]
        grads = [tensor.data_ptr() for tensor in self.grads]
        with self.quiet():
            forward = self._run(self.moe.forward_sft_task(bsz.data_ptr(), top_k, *inputs, True))
            task = self.moe.backward_task(
                grad_out.data_ptr(), grad_in.data_ptr(), *grads, grad_weights.data_ptr(), 0, 0, 0, False, 1.0
            )
            return forward, self._run(task)


def _random(*size: int) -> torch.Tensor:
    return torch.empty(size).normal_(std=0.02).bfloat16()
