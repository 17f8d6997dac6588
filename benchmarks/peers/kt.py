"""kt_kernel's experts as a peer, in a process of its own (it allows one pool per process and never frees weights)."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import gguf
import torch

from benchmarks.models.blocks import random_bytes

# Of the same precision, by the type of our weights; the last is the class that computes from a GGUF file's own blocks.
_INT8, _INT4, _BLOCKS = "AMXInt8_MOE", "AMXInt4_MOE", "MOE"
_CLASSES = {
    "BF16": ("AMXBF16_MOE",),
    "Q8_0": (_INT8, _BLOCKS),
    "Q4_0": (_INT4, _BLOCKS),
    "Q4_1": (_INT4,),
    "Q4_K": (_INT4, _BLOCKS),
    "Q4_K_M": (_INT4,),
}
# K_CFG decides up to how many rows a class works without tiles, and multiplies its scratch memory.
_SECOND_K_CFG = {"AMXBF16_MOE": 256, _INT8: 64, _INT4: 64}
_SECOND_MOST_ROWS = 512
_ABSENT = {"AMXBF16_MOE": "AVX2BF16_MOE"}  # what stands in where there is no AVX-512


class KtError(Exception):
    """kt_kernel lacks the class on this CPU, does not load, or its process died."""


@dataclass(frozen=True)
class Variant:
    """One of kt_kernel's classes with one K_CFG; `blocks` is the type of the blocks that it is given, or empty."""

    name: str
    k_cfg: int
    blocks: str = ""

    def __str__(self) -> str:
        return f"{self.name} on {self.blocks}" if self.blocks else f"{self.name}, K_CFG {self.k_cfg}"


def variants(type: str, top_k: int, *, blocks: bool = False) -> list[Variant]:
    """Those to compare weights of `type` with; none if kt_kernel has no such precision. `blocks`: GGUF's too."""
    found = []
    for name in _CLASSES.get(type, ()):
        if name == _BLOCKS:
            found += [Variant(name, top_k, type)] if blocks else []
        else:
            found += [Variant(name, top_k), Variant(name, _SECOND_K_CFG[name])]
    return found


def spare_threads(cpus: int) -> int:
    """Its queue thread spins beside the workers: with a worker on every CPU it collapses."""
    return cpus - 2 if cpus > 4 else max(1, cpus - 1)


class KtProcess:
    """A process in which kt_kernel works: `serve(pipe, *arguments)` answers what is asked, a string is why it cannot.
    KtError as soon as it cannot."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def ask(self, message: object) -> Any:
        self._pipe.send(message)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise KtError(f"kt_kernel's process ended with status {self._process.exitcode}") from None
        if isinstance(answer, str):
            self._process.join(10)
            raise KtError(answer)
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():  # its own pool may keep it
            self._process.kill()
            self._process.join()


class KtPeer(KtProcess):
    """Times kt_kernel over the same choices of experts. KtError as soon as it cannot."""

    def __init__(
        self, wanted: Sequence[Variant], shape: tuple[int, int, int, int], layers: int, max_rows: int, threads: int
    ) -> None:
        """shape: experts, top_k, hidden, intermediate."""
        super().__init__(_serve, list(wanted), shape, layers, max_rows, threads)

    def best_s(self, ids: list[torch.Tensor], repeats: int) -> dict[Variant, float]:
        """Seconds a call: the fastest of `repeats` rounds over all of `ids` (each [rows, top_k]), layers in turn,
        after one to warm up. Its threads spin for a while afterwards; this returns when they sleep."""
        seconds: dict[Variant, float] = self.ask((ids, repeats))
        return seconds


def _serve(
    pipe: Connection,
    wanted: list[Variant],
    shape: tuple[int, int, int, int],
    layers: int,
    max_rows: int,
    threads: int,
) -> None:
    torch.set_num_threads(1)
    try:
        made = _Modules(wanted, shape, layers, max_rows, threads)
    except (KtError, ImportError, OSError, RuntimeError) as error:
        pipe.send(f"kt_kernel: {error}")
        return
    pipe.send(wanted)
    with contextlib.suppress(EOFError):  # the parent is gone
        while (message := pipe.recv()) is not None:
            pipe.send(made.best_s(*message))
    sys.stdout.flush()


class _Modules:
    """What kt_kernel holds in its process; nothing of it is ever freed."""

    def __init__(
        self, wanted: list[Variant], shape: tuple[int, int, int, int], layers: int, max_rows: int, threads: int
    ) -> None:
        from engine.experts.kt.process import load_extension, stdout_to_stderr

        self.ext, self.quiet, self.shape = load_extension(), stdout_to_stderr, shape
        self.keep: list[Any] = []
        self.modules: dict[Variant, list[Any]] = {}
        top_k = shape[1]
        self.most = {v: max_rows if v.k_cfg == top_k else min(max_rows, _SECOND_MOST_ROWS) for v in wanted}
        with self.quiet():
            config = self.ext.WorkerPoolConfig()
            config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
            self.cpu = self.ext.CPUInfer(config)
            self.keep.append(config)
            shared: dict[str, list[torch.Tensor]] = {v.blocks: self._sources("") for v in wanted if not v.blocks}
            for variant in wanted:
                for _ in range(layers):  # blocks are computed from in place: every layer needs its own
                    sources = shared.get(variant.blocks) or self._sources(variant.blocks)
                    self.modules.setdefault(variant, []).append(self._module(variant, sources))

    def _sources(self, blocks: str) -> list[torch.Tensor]:
        """Gate, up, down of all experts."""
        experts, _, hidden, intermediate = self.shape
        sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        one = [torch.from_numpy(random_bytes(blocks or "BF16", n, k)) for n, k in sizes]
        sources = [t.expand(experts, len(t)).contiguous() for t in one]
        self.keep.append(sources)
        return sources

    def _module(self, variant: Variant, sources: list[torch.Tensor]) -> Any:
        experts, _, hidden, intermediate = self.shape
        classes = dir(self.ext.moe)
        name = variant.name if variant.name in classes else _ABSENT.get(variant.name, variant.name)
        if name not in classes:
            raise KtError(f"no {variant.name} on this CPU")
        config = self.ext.moe.MOEConfig(experts, variant.k_cfg, hidden, intermediate, 0)
        config.layer_idx, config.pool = len(self.keep), self.cpu.backend_
        config.max_len = -(-self.most[variant] // 256) * 256
        config.gate_proj, config.up_proj, config.down_proj = (t.data_ptr() for t in sources)
        if variant.blocks:
            number = int(gguf.GGMLQuantizationType[variant.blocks])
            config.gate_type = config.up_type = config.down_type = number
            config.hidden_type = int(gguf.GGMLQuantizationType.BF16)
            config.m_block, config.group_min_len, config.group_max_len = 32, 10, config.max_len
        module, order = getattr(self.ext.moe, name)(config), torch.arange(experts, dtype=torch.int64)
        self.cpu.submit(module.load_weights_task(order.data_ptr()))
        self.cpu.sync()
        self.keep += [config, order]
        return module

    def best_s(self, ids: list[torch.Tensor], repeats: int) -> dict[Variant, float]:
        found = {}
        for variant, owners in self.modules.items():
            if len(ids[0]) > self.most[variant]:
                continue
            held = [_task(m, i, self.shape[2]) for m, i in zip(itertools.cycle(owners), ids, strict=False)]
            self.keep.append(held)
            tasks = [task for task, _ in held]
            with self.quiet():
                _round(self.cpu, tasks)
                found[variant] = min(_round(self.cpu, tasks) for _ in range(repeats)) / len(ids)
        time.sleep(0.1)
        return found


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
