"""What one process does with its one kt backend; prints JSON, and nothing else, to stdout.

python -m tests.kt.worker CASE JSON-ARGUMENTS
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from engine.architectures.config import ModelConfig
from engine.errors import KtserveError
from engine.experts.base import ExpertBuffers, ExpertTask
from engine.experts.kt.backend import KtExperts
from engine.lora.adapter import ExpertLora
from engine.weights.store import ExpertStore
from tests.kt.stores import config, expected, fill, make_store, relative_error

ROWS = (1, 2, 3, 7, 9, 10, 11, 16, 33, 64)


def run(kt: KtExperts, task: ExpertTask) -> torch.Tensor:
    kt.post(task)
    kt.wait(task)
    return task.buffers.out.clone()


def accuracy(method: str, kinds: list[str], shape: list[int], dtype: str = "bfloat16", split: bool = False) -> Any:
    """Errors by rows, over two layers and two buffer sets; rows past bsz untouched; the method each layer chose."""
    return errors_of(*loaded(method, kinds, shape, split), dtype)


def full(method: str, kinds: list[str], shape: list[int]) -> Any:
    """One backend through everything: accuracy, a thousand replays, calls that must be refused."""
    kt, c, stores = loaded(method, kinds, shape)
    return {
        "accuracy": errors_of(kt, c, stores),
        "replay": replay(kt, c),
        "guards": call_guards(kt, c, stores[0]),
    }


def loaded(
    method: str, kinds: list[str], shape: list[int], split: bool = False
) -> tuple[KtExperts, ModelConfig, list[ExpertStore]]:
    c = config(*shape)
    kt = KtExperts(c, method, max_rows=64)
    stores = [make_store(c, (kinds[0], kinds[1], kinds[2]), layer, split=split) for layer in range(2)]
    for layer, store in enumerate(stores):
        kt.load_layer(layer, store)
    return kt, c, stores


def errors_of(kt: KtExperts, c: ModelConfig, stores: list[ExpertStore], dtype: str = "bfloat16") -> Any:
    errors: dict[str, float] = {}
    untouched = True
    for layer, store in enumerate(stores):
        for size in (64, 17):
            b = ExpertBuffers.allocate(size, c.num_experts_per_tok, c.hidden_size, getattr(torch, dtype))
            task = kt.bind(layer, b)
            for rows in (r for r in ROWS if r <= size):
                fill(b, c, rows, seed=rows, skip=0.2 * layer)
                got = run(kt, task)
                errors[f"{layer}/{size}/{rows}"] = relative_error(got[:rows], expected(store, b, rows))
                untouched &= bool((got[rows:] == 7.0).all())
    return {"errors": errors, "untouched": untouched, "methods": list(kt.methods.values()), "threads": kt.threads}


def replay(kt: KtExperts, c: ModelConfig) -> Any:
    """1000 replays of one task with changing bsz: same bits as the first time, no memory, no threads."""
    b = ExpertBuffers.allocate(32, c.num_experts_per_tok, c.hidden_size, torch.bfloat16)
    task = kt.bind(0, b)
    sizes = [0, 1, 5, 9, 10, 31, 32]
    fill(b, c, 32, seed=3)
    first: dict[int, torch.Tensor] = {}
    me = psutil.Process()
    start = threads = 0
    same = True
    for n in range(1000):
        rows = sizes[n % len(sizes)]
        b.bsz[0] = rows
        b.out.fill_(7.0)
        got = run(kt, task)
        if rows in first:
            same &= torch.equal(first[rows], got)
        else:
            first[rows] = got
        if n == 200:
            gc.collect()
            start, threads = me.memory_info().rss, me.num_threads()
    gc.collect()
    return {
        "same": same,
        "grown_bytes": me.memory_info().rss - start,
        "grown_threads": me.num_threads() - threads,
        "bsz_0_untouched": bool((first[0] == 7.0).all()),
        "rebound": kt.bind(0, b) is task,
        "different": not torch.equal(first[1][0], first[32][1]),
    }


def refused(action: Callable[[], Any]) -> list[str]:
    try:
        action()
    except KtserveError as e:
        return [type(e).__name__, str(e)]
    return ["nothing", ""]


def call_guards(kt: KtExperts, c: ModelConfig, store: ExpertStore) -> Any:
    """Every bad call is refused with its reason and the next good one is right."""
    b = ExpertBuffers.allocate(40, c.num_experts_per_tok, c.hidden_size, torch.bfloat16)
    task = kt.bind(0, b)
    said: dict[str, list[str]] = {}
    errors: list[float] = []

    def bad(name: str, change: Callable[[], Any]) -> None:
        fill(b, c, 8, seed=1)
        change()
        said[name] = refused(lambda: run(kt, task))
        if int(b.bsz[0]) <= b.max_rows and not bool((b.out == 7.0).all()):
            said[name].append("out was written")
        fill(b, c, 8, seed=2)
        errors.append(relative_error(run(kt, task)[:8], expected(store, b, 8)))

    bad("too many rows", lambda: b.bsz.fill_(41))
    bad("negative rows", lambda: b.bsz.fill_(-1))
    bad("nan", lambda: b.hidden[3].fill_(float("nan")))
    bad("inf", lambda: b.hidden[7, 1].fill_(float("-inf")))
    bad("nan past bsz", lambda: b.hidden[8].fill_(float("nan")))
    bad("id too large", lambda: b.ids[2, 1].fill_(c.num_experts))
    bad("id too small", lambda: b.ids[2, 0].fill_(-2))
    bad("twice", lambda: b.ids[5].fill_(3))
    bad("nan weight", lambda: b.weights[4].fill_(float("nan")))
    bad("too large", lambda: b.hidden[:8].fill_(3e4))

    def buffers(**change: torch.Tensor) -> Callable[[], Any]:
        return lambda: kt.bind(0, replace(b, **change))

    k, h = c.num_experts_per_tok, c.hidden_size
    said["top-k"] = refused(buffers(ids=torch.zeros(40, k + 1, dtype=torch.int64)))
    said["ids type"] = refused(buffers(ids=torch.zeros(40, k, dtype=torch.int32)))
    said["hidden size"] = refused(buffers(hidden=torch.zeros(40, h + 32, dtype=torch.bfloat16)))
    said["out rows"] = refused(buffers(out=torch.zeros(39, h, dtype=torch.bfloat16)))
    said["bsz type"] = refused(buffers(bsz=torch.zeros(1, dtype=torch.int64)))
    said["strided"] = refused(buffers(weights=torch.zeros(k, 40).T))
    said["buffers too large"] = refused(lambda: kt.bind(0, ExpertBuffers.allocate(65, k, h, torch.bfloat16)))
    said["no layer"] = refused(lambda: kt.bind(2, b))
    said["twice loaded"] = refused(lambda: kt.load_layer(0, store))
    said["stream"] = refused(lambda: kt.post(task, stream=object()))
    zeros = torch.zeros(1)
    lora = ExpertLora(zeros, zeros, zeros, zeros, zeros, zeros, 1.0, 1.0, 1.0)
    said["adapter"] = refused(lambda: kt.set_adapter(1, {0: lora}))
    kt.set_adapter(1, {})
    kt.set_adapter(1, None)
    return {"said": said, "errors": errors}


def load_guards() -> Any:
    """Weights that would poison or crash are refused, naming them; then a good layer loads and computes."""
    c = config(256, 256)
    kt = KtExperts(c, "auto", max_rows=32)
    said = {}
    for name, kind, projection, expert in (
        ("bf16 nan", "BF16", "up", 5),
        ("f32 inf", "F32", "down", 0),
        ("q8_0 nan scale", "Q8_0", "gate", 7),
        ("q6_k inf scale", "Q6_K", "down", 3),
    ):
        store = make_store(c, (kind, kind, kind))
        data = store.expert(projection, expert).data
        value = np.float16("nan") if "nan" in name else np.float16("inf")
        if kind == "Q8_0":
            data[34:36] = np.frombuffer(value.tobytes(), np.uint8)
        elif kind == "Q6_K":
            data[208:210] = np.frombuffer(value.tobytes(), np.uint8)
        elif kind == "F32":
            data[4:8] = np.frombuffer(np.float32("inf").tobytes(), np.uint8)
        else:
            data[4:6] = (0xC0, 0x7F)
        said[name] = refused(lambda store=store: kt.load_layer(0, store))
    small = config(256, 512)
    said["shape"] = refused(lambda: kt.load_layer(0, make_store(small, ("BF16", "BF16", "BF16"))))
    fewer = config(256, 256, experts=7)
    said["experts"] = refused(lambda: kt.load_layer(0, make_store(fewer, ("BF16", "BF16", "BF16"))))
    mixed = make_store(c, ("BF16", "BF16", "BF16"), split=True)
    other = make_store(c, ("Q8_0", "Q8_0", "Q8_0"), split=True)
    assert isinstance(mixed.up, list) and isinstance(other.up, list)
    mixed.up[4] = other.up[4]
    said["types differ"] = refused(lambda: kt.load_layer(0, mixed))
    chosen = {}
    for layer, kinds in enumerate(
        (("BF16",) * 3, ("Q8_0",) * 3, ("Q4_K", "Q4_K", "Q6_K"), ("Q4_1",) * 3, ("F32",) * 3, ("Q8_0", "BF16", "Q8_0"))
    ):
        store = make_store(c, kinds, layer)  # type: ignore[arg-type]
        kt.load_layer(layer, store)
        b = ExpertBuffers.allocate(16, 2, 256, torch.float32)
        fill(b, c, 12, seed=1)
        got = run(kt, kt.bind(layer, b))
        chosen["/".join(kinds)] = [kt.methods[layer], relative_error(got[:12], expected(store, b, 12))]
    return {"said": said, "chosen": chosen}


def one_per_process() -> Any:
    """A second backend is refused, beside a living one and after `close`; a fork is refused; the first goes on."""
    c = config(64, 64)
    said = {
        "method": refused(lambda: KtExperts(c, "AMXBF17", max_rows=8)),
        "size": refused(lambda: KtExperts(c, "AMXInt4", max_rows=8)),
        "threads": refused(lambda: KtExperts(c, max_rows=8, threads=10_000)),
        "rows": refused(lambda: KtExperts(c, max_rows=0)),
    }
    kt = KtExperts(c, "AMXBF16", max_rows=8)  # what was refused took no claim
    said["second"] = refused(lambda: KtExperts(c, "AMXBF16", max_rows=8))
    store = make_store(c, ("BF16", "BF16", "BF16"))
    kt.load_layer(0, store)
    b = ExpertBuffers.allocate(8, 2, 64, torch.bfloat16)
    task = kt.bind(0, b)
    fill(b, c, 8, seed=1)
    kt.post(task)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answers = [
            refused(lambda: kt.post(task)),
            refused(lambda: kt.bind(0, b)),
            refused(lambda: kt.load_layer(1, store)),
            refused(lambda: KtExperts(c, max_rows=8)),
        ]
        os.write(write, json.dumps(answers).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said["fork"], said["fork bind"], said["fork load"], said["fork second"] = json.load(answer)
    os.waitpid(child, 0)
    kt.wait(task)
    error = relative_error(b.out, expected(store, b, 8))
    kt.close()
    said["after close"] = refused(lambda: KtExperts(c, "AMXBF16", max_rows=8))
    return {"said": said, "error": error}


def block_types(kinds: list[str], others: list[str]) -> Any:
    """One layer per block type that GGUF takes: mean and largest error over rows; and types that it does not take."""
    c = config(256, 512, 8, 2)
    kt = KtExperts(c, "GGUF", max_rows=64)
    b = ExpertBuffers.allocate(64, 2, 256, torch.bfloat16)
    errors = {}
    for layer, kind in enumerate(kinds):
        store = make_store(c, (kind, kind, kind), layer)
        kt.load_layer(layer, store)
        found = []
        for rows in (1, 5, 9, 12, 64):
            fill(b, c, rows, seed=rows)
            found.append(relative_error(run(kt, kt.bind(layer, b))[:rows], expected(store, b, rows)))
        errors[kind] = found
    said = {}
    for kind in others:
        store = make_store(c, ("Q8_0", kind, "Q8_0"))
        said[kind] = refused(lambda store=store: kt.load_layer(len(kinds), store))
    return {"errors": errors, "said": said}


def engine(mix: str, seed: int, family: str) -> Any:
    """A whole bf16 engine with kt experts: its error against float32 transformers, and that of transformers in bf16."""
    from benchmarks.accuracy.table import Files, measure

    with tempfile.TemporaryDirectory() as folder:
        found = measure(Files(Path(folder), "BF16", seed, family=family), mix, seed, rules="cpu-kt")
    return {"error": found.error, "transformers": found.transformers, "positions": found.positions}


CASES = {f.__name__: f for f in (accuracy, full, load_guards, one_per_process, block_types, engine)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = CASES[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(answer))
