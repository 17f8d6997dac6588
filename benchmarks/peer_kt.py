"""kt_kernel's experts as a peer, in a process of its own (it allows one pool per process and never frees weights)."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

CLASSES = {"BF16": "AMXBF16_MOE", "Q8_0": "AMXInt8_MOE", "Q4_0": "AMXInt4_MOE", "Q4_1": "AMXInt4_MOE",
           "Q4_K": "AMXInt4_MOE", "Q4_K_M": "AMXInt4_MOE"}  # fmt: skip
# K_CFG decides up to how many rows it works without tiles, and multiplies its scratch memory.
SECOND_K_CFG = {"AMXBF16_MOE": 256, "AMXInt8_MOE": 64, "AMXInt4_MOE": 64}
SECOND_MOST_ROWS = 512


class KtPeer:
    """Times kt_kernel's class of the same precision over the same choices of experts."""

    def __init__(self, type: str, shape: tuple[int, int, int, int], layers: int, max_rows: int, threads: int) -> None:
        """shape: experts, top_k, hidden, intermediate."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(theirs, CLASSES[type], shape, layers, max_rows, threads), daemon=True
        )
        self._process.start()
        self.configs: list[int] = self._pipe.recv()

    def best_s(self, ids: list[torch.Tensor], repeats: int) -> dict[int, float]:
        """Seconds a call by K_CFG: the fastest of `repeats` rounds over all of `ids` (each [rows, top_k]), layers in
        turn. Its threads spin for a while afterwards; this returns when they sleep."""
        self._pipe.send((ids, repeats))
        seconds: dict[int, float] = self._pipe.recv()
        return seconds

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():  # its own pool may keep it
            self._process.kill()


def _serve(
    pipe: Connection, name: str, shape: tuple[int, int, int, int], layers: int, max_rows: int, threads: int
) -> None:
    from engine.experts.kt_process import load_extension, stdout_to_stderr

    torch.set_num_threads(1)
    ext = load_extension()
    experts, top_k, hidden, intermediate = shape
    with stdout_to_stderr():
        wanted = ext.WorkerPoolConfig()
        wanted.subpool_count, wanted.subpool_numa_map, wanted.subpool_thread_count = 1, [0], [threads]
        cpu = ext.CPUInfer(wanted)
        sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        sources = [(torch.randn(n, k) * 0.02).bfloat16().expand(experts, n, k).contiguous() for n, k in sizes]
        order = torch.arange(experts, dtype=torch.int64)
        keep: list[Any] = [wanted, sources, order]
        modules: dict[int, list[Any]] = {}
        most = {top_k: max_rows, SECOND_K_CFG[name]: min(max_rows, SECOND_MOST_ROWS)}
        for k_cfg, rows in most.items():
            for _ in range(layers):
                config = ext.moe.MOEConfig(experts, k_cfg, hidden, intermediate, 0)
                config.layer_idx, config.pool, config.max_len = len(keep), cpu.backend_, -(-rows // 256) * 256
                config.gate_proj, config.up_proj, config.down_proj = (t.data_ptr() for t in sources)
                module = getattr(ext.moe, name)(config)
                cpu.submit(module.load_weights_task(order.data_ptr()))
                cpu.sync()
                keep.append(config)
                modules.setdefault(k_cfg, []).append(module)
    pipe.send(list(most))
    while (message := pipe.recv()) is not None:
        ids, repeats = message
        rows = len(ids[0])
        found = {}
        for k_cfg, owners in modules.items():
            if rows > most[k_cfg]:
                continue
            held = [_task(m, i, hidden) for m, i in zip(itertools.cycle(owners), ids, strict=False)]
            keep.append(held)
            with stdout_to_stderr():
                found[k_cfg] = min(_round(cpu, [task for task, _ in held]) for _ in range(repeats + 1)) / len(ids)
        time.sleep(0.1)
        pipe.send(found)
    sys.stdout.flush()


def _task(module: Any, ids: torch.Tensor, hidden: int) -> tuple[Any, Any]:
    rows, top_k = ids.shape
    bsz = torch.tensor([rows], dtype=torch.int32)
    weights = torch.full((rows, top_k), 1 / top_k)
    x = torch.randn(rows, hidden).bfloat16()
    buffers = (bsz, ids.clone(), weights, x, torch.empty_like(x))
    pointers = [t.data_ptr() for t in buffers]
    return module.forward_task(pointers[0], top_k, *pointers[1:], False), buffers


def _round(cpu: Any, tasks: list[Any]) -> float:
    began = time.perf_counter()
    for task in tasks:
        cpu.submit(task)
        cpu.sync()
    return time.perf_counter() - began
