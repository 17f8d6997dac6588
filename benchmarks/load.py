"""How fast weights come from files into their places, each way beside a plain read of the same bytes.

python -m benchmarks.load [--device cuda] [--types BF16 Q4_K] [--experts 128] [--cold] [--out FILE.json]

A layer of experts at Qwen3-30B-A3B's shape is written to a file for each type, then read by all threads and brought to
its place, in GB of the file a second, the best of `--rounds`. `--cold`: the system forgets the file before each. The
file is removed afterwards; a plain read in a cold and in a warm state tells what the disk and the memory give.

read        the file's bytes into buffers of the threads
check       counts values, or scales of blocks, that are not finite
numbers     dequantised to bfloat16 on the CPU (tables, reference backend)
native      packed for the CPU's kernels: experts; `linear` the same bytes as one projection
gpu         the layer's experts as the GPU has them: through pinned memory, with `--device cpu` on the CPU itself
gpu-linear  one projection likewise
hot         packed experts of the CPU's kernels to the GPU, four at a time, as hybrid experts begin (bytes packed)
pin         packed experts pinned for that, and for streamed prefill (bytes packed)
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import record
from benchmarks.models.configs import QWEN3_30B_A3B
from engine.architectures.config import ModelConfig
from engine.architectures.registry import config_from_hf
from engine.experts.capabilities import PackedWeights
from engine.experts.gpu.backend import GpuExperts
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedLayer, PackedSource
from engine.experts.native import NativeExperts
from engine.files.model_file import ModelFile
from engine.linear.gpu import GpuLinearBackend
from engine.linear.native import NativeLinearBackend
from engine.weights.dequant import nonfinite
from engine.weights.store import ExpertStore, WeightTensor
from engine.weights.threads import in_order, loading_threads
from engine.weights.tiled.packer import Packer
from native.topology import make_pool
from testing.models.block_types import encode
from testing.models.quantised import made_blocks

TYPES = ("BF16", "F32", "F16", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "F8_E4M3", "Q3_K", "IQ2_XXS")
MADE = ("F8_E4M3", "INT4_G32", "INT4_G128")
BF16 = torch.bfloat16
READ_BYTES = 4 << 20  # at a time, by each thread


def write_layer(path: Path, type: str, config: ModelConfig) -> ExpertStore:
    """One expert's random weights as often as the layer has experts; the speed does not depend on them."""
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    places: dict[str, tuple[int, int]] = {}
    with path.open("wb") as file:
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
            data, _ = made_blocks(values, type) if type in MADE else encode(values, type)
            content = np.ascontiguousarray(data).view(np.uint8).tobytes()
            places[name] = file.tell(), len(content) * experts
            for _ in range(experts):
                file.write(content)
        os.fsync(file.fileno())
    held = ModelFile(path)
    tensors = {n: WeightTensor(n, (experts, *shapes[n]), type, held.bytes(*place)) for n, place in places.items()}
    return ExpertStore(0, tensors["gate"], tensors["up"], tensors["down"])


def read(path: Path) -> None:
    """All of a file, into one buffer for each thread."""
    file, local = ModelFile(path), threading.local()

    def some(start: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = np.empty(READ_BYTES, np.uint8)
        file.read_into(start, local.buffer[: min(READ_BYTES, file.size - start)])

    for _ in in_order(partial(some, start) for start in range(0, file.size, READ_BYTES)):
        pass


def forget(path: Path) -> None:
    """The system's copy of a file in memory."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


class Ways:
    """What is measured, for one type, on one device."""

    def __init__(self, config: ModelConfig, path: Path, store: ExpertStore, device: torch.device) -> None:
        self.config, self.path, self.store, self.device = config, path, store, device
        self.sizes: dict[str, Any] = {"max_rows": 64, "max_slots": 1, "max_rank": 16}
        self.packer = Packer(device)

    def all(self) -> Iterator[tuple[str, int, Callable[[], object]]]:
        """Name, bytes, and what is timed."""
        gate, size = self.store.gate, self.store.num_bytes
        assert isinstance(gate, WeightTensor)
        rows = WeightTensor("p", (gate.shape[0] * gate.shape[1], gate.shape[2]), gate.type, gate.data)
        pool = make_pool()
        yield "read", size, partial(read, self.path)
        yield "check", gate.num_bytes, partial(nonfinite, gate.data, gate.type, gate.shape)
        yield "numbers", gate.num_bytes, partial(gate.dequantise, BF16)
        yield "native", size, lambda: NativeExperts(self.config, BF16, pool).load_layer(0, self.store)
        linear = NativeLinearBackend(BF16, pool)
        yield "linear", rows.num_bytes, partial(linear.load, "p", rows, None)
        yield "gpu", size, self._gpu
        projection = GpuLinearBackend(BF16, self.device, 1, 16, None, self.packer)
        yield "gpu-linear", rows.num_bytes, partial(projection.load, "p", rows, None)
        experts = NativeExperts(self.config, BF16, pool)
        experts.load_layer(0, self.store)
        packed = next(offer for offer in experts.offers if isinstance(offer, PackedWeights))
        source = PackedSource(packed, Sizes.of(self.config), self.device)
        yield "hot", experts.num_bytes, partial(self._hot, source.add(0))
        source.close()
        if self.device.type == "cuda":
            yield "pin", experts.num_bytes, partial(self._pin, source)

    def _gpu(self) -> None:
        made = GpuExperts(self.config, BF16, self.device, pack=self.packer, **self.sizes)
        made.load_layer(0, self.store)

    def _hot(self, layer: PackedLayer) -> None:
        at_once, layout = 4, layer.layout(BF16.itemsize)
        staging = torch.empty(at_once * layer.expert_bytes, dtype=torch.uint8, device=self.device)
        slots = torch.empty(self.config.num_experts, layout.num_bytes, dtype=torch.uint8, device=self.device)
        for first in range(0, len(slots), at_once):
            some = range(first, min(first + at_once, len(slots)))
            layer.bring_each([(layer, expert) for expert in some], staging)
            layer.convert(len(some), slots[some.start : some.stop], staging, BF16)

    def _pin(self, source: PackedSource) -> None:
        source.add(0)
        source.close()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--experts", type=int, default=128, help="of the layer; fewer make smaller files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="the file is not in memory before each round")
    parser.add_argument("--folder", type=Path, help="where the file is written (default: the system's)")
    parser.add_argument("--ways", nargs="+", help="names of those that are measured (default: all)")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as where native kernels or a GPU compute
    config = config_from_hf({**QWEN3_30B_A3B, "num_hidden_layers": 1, "num_experts": args.experts})
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    found: dict[str, dict[str, float]] = {}
    print(f"{loading_threads()} threads; GB of the file a second, and of `read`")
    for type in args.types:
        found[type] = {}
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path = Path(folder) / "layer.bin"
            store = write_layer(path, type, config)
            for name, size, call in Ways(config, path, store, device).all():
                if args.ways and name not in ("read", *args.ways):
                    continue
                best = 0.0
                for _ in range(args.rounds):
                    if args.cold:
                        forget(path)
                    best = max(best, size / seconds(call, device) / 1e9)
                found[type][name] = round(best, 3)
                print(f"{type:8} {name:10} {best:7.2f}  {best / found[type]['read']:5.2f}", flush=True)
    if args.out:
        record.write(args.out, {"threads": loading_threads(), "cold": args.cold, "gb_per_s": found})


if __name__ == "__main__":
    main()
