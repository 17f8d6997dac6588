"""What the rows of the CPU benchmark share: files, engines and servers that stay up, time left, the JSON."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.client import our_server
from benchmarks.cpu.engine import BenchEngine
from benchmarks.kernels.probe import Peaks, compared, known_read_gb_s, measure_peaks
from benchmarks.models.make import adapter_path, made_model, write_adapter
from benchmarks.models.shapes import Shape
from benchmarks.peers.llamacpp import Flags, Peer
from native import _native

NUM_ADAPTERS = 4
SHORT = 16  # prompt tokens where only decode is measured
_READS = {"of_read": "gb_s", "call_of_read": "call_gb_s"}
STREAM_CONTEXT = 256  # positions a stream of the server rows needs at most


class Run:
    """`shape` is what --layers makes of Qwen3-30B-A3B, or a test's own. Results are written after every record."""

    def __init__(self, args: argparse.Namespace, shape: Shape) -> None:
        self.args, self.shape, self.quick = args, shape, bool(args.quick)
        self.peer = Peer(args.llama) if args.llama else None
        self.end_s = time.monotonic() + args.minutes * 60
        self.row_end_s = self.end_s
        self.peaks: dict[str, Peaks] = {}
        self.itl_target_ms: dict[str, float] = {}
        self._flags: dict[str, Flags] = {}
        self._key: tuple[str, str] | None = None
        self._up = ExitStack()
        self._held: Any = None
        self.data: dict[str, Any] = record.origin() | {"machine": describe_machine(args.threads)}
        self.threads = int(self.data["machine"]["threads"])
        self.data |= {
            "versions": versions(self.peer),
            "layers": shape.layers,
            "peaks": {},
            "peer_sweep": {},
            "rows": [],
        }

    # ---- files

    def model(self, mix: str) -> Path:
        return made_model(self.args.models, self.shape, mix)

    def adapters(self) -> list[Path]:
        paths = [adapter_path(self.args.models.absolute(), self.shape.layers, i) for i in range(NUM_ADAPTERS)]
        for seed, path in enumerate(paths, 1):
            if not (path / "adapter_config.json").exists():
                print(f"writing {path.name} ...", flush=True)
                write_adapter(path, self.shape, seed=seed)
        return paths

    @property
    def adapter_names(self) -> list[str]:
        return [f"a{i}" for i in range(NUM_ADAPTERS)]

    def adapter_flags(self) -> list[str]:
        return [f"{name}={path}" for name, path in zip(self.adapter_names, self.adapters(), strict=True)]

    # ---- what stays up between rows: one engine here, or the two servers; never both

    def engine(self, mix: str) -> BenchEngine:
        """In this process, prompts' budget 512. Its pool measures the peaks each time."""
        if self._key != (mix, "engine"):
            self.release()
            engine = BenchEngine(self.model(mix), self.shape, mix, self.threads, pack_cache=self._pack_cache(mix))
            self._up.callback(gc.collect)
            self._up.callback(engine.close)
            engine.settle()
            self._key, self._held = (mix, "engine"), engine
            print(f"  {mix}: engine loaded in {engine.load_s:.1f} s", flush=True)
        self.measure_peaks(mix, self._held.pool)
        return self._held  # type: ignore[no-any-return]

    def servers(self, mix: str) -> tuple[str, str | None]:
        """URLs of ours and the peer's, adapters loaded in both and applied to no request that does not ask."""
        if self._key != (mix, "servers"):
            self.release()
            began = time.monotonic()
            target = self.itl_target_ms.get(mix, 150.0)
            flags = [
                "--device",
                "cpu",
                "--max-num-seqs",
                "32",
                "--no-prefix-caching",
                "--cpu-threads",
                str(self.threads),
            ]
            flags += ["--kv-cache-tokens", str(32 * STREAM_CONTEXT), "--itl-target-ms", f"{target:.0f}"]
            flags += ["--pack-cache", self._pack_cache(mix)]
            for text in self.adapter_flags():
                flags += ["--adapters", text]
            ours = self._up.enter_context(our_server(self.model(mix), flags))
            peer = None
            if self.peer:
                loras = [path.parent / f"{path.name}.gguf" for path in self.adapters()]
                server = self.peer.server(self.model(mix), self.flags(mix), 16, STREAM_CONTEXT, loras)
                peer = self._up.enter_context(server)
            self._key, self._held = (mix, "servers"), (ours, peer)
            print(f"  {mix}: servers up in {time.monotonic() - began:.1f} s, ITL target {target:.0f} ms", flush=True)
        return self._held  # type: ignore[no-any-return]

    def release(self) -> None:
        self._held = self._key = None
        self._up.close()
        gc.collect()

    def _pack_cache(self, mix: str) -> str:
        return str(self.args.models / "packed" / f"{self.shape.layers}L-{mix}")

    def flags(self, mix: str) -> Flags:
        """The peer's best, from a sweep on this file, which takes no time from the row that asks."""
        if mix not in self._flags and self.peer:
            began = time.monotonic()
            threads = sorted({1, self.threads}) if self.threads > 1 else [1]
            best, lines = self.peer.sweep(self.model(mix), threads, self.quick)
            self._flags[mix] = best
            self.data["peer_sweep"][mix] = {"best": str(best), "tried": lines}
            self.row_end_s += time.monotonic() - began
            self.write()
        return self._flags[mix]

    def measure_peaks(self, mix: str, pool: Any) -> None:
        """By this pool; of several measurements of a type the highest counts, for rows recorded before it too."""
        pool.begin_step()
        peaks = measure_peaks(pool, "", 1 << 26 if self.quick else 1 << 30)
        pool.end_step()
        print(f"  {peaks}{compared(peaks, self.data['machine'].get('known_read_gb_s'))}", flush=True)
        if mix in self.peaks:
            known = vars(self.peaks[mix])
            peaks = Peaks(**{name: max(value, known[name]) for name, value in vars(peaks).items()})
        self.peaks[mix] = peaks
        self.data["peaks"][mix] = vars(peaks)
        for entry in self.data["rows"]:
            if entry["type"] == mix:
                entry |= shares(entry, peaks)

    # ---- repetitions and records

    def leave_out(self, row: str, mix: str, *why: str) -> None:
        """Say in the results what was not measured."""
        for text in why:
            self.data.setdefault("left_out", []).append(f"{row} {mix}: {' '.join(text.split())[:300]}")
        self.write()

    def repeats(self, wanted: int) -> Iterator[int]:
        """0 ... wanted - 1, cut short when this row's share of the time is over; at least one."""
        began = time.monotonic()
        for i in range(1 if self.quick else wanted):
            now = time.monotonic()
            if i and now + (now - began) / i > self.row_end_s:
                return
            yield i

    def alternate(
        self, wanted: int, ours: Callable[[], float], peer: Callable[[], float] | None
    ) -> tuple[list[float], list[float]]:
        """Repetitions of both, the order changing from one to the next."""
        mine: list[float] = []
        theirs: list[float] = []
        for i in self.repeats(wanted):
            turns = [(ours, mine)] + ([(peer, theirs)] if peer else [])
            for measure, into in reversed(turns) if i % 2 else turns:
                into.append(measure())
        return mine, theirs

    def record(
        self, row: str, mix: str, what: str, unit: str, ours: Sequence[float], peer: Sequence[float], **more: Any
    ) -> None:
        """A line of the table: medians, their ratio, whatever else was seen, and its shares of the type's peaks."""
        if mix in self.peaks:
            more |= shares(more, self.peaks[mix])
        mine, theirs = statistics.median(ours), statistics.median(peer) if peer else None
        entry: dict[str, Any] = {"row": row, "type": mix, "what": what, "unit": unit, "ours": mine, "peer": theirs}
        entry |= {"ratio": mine / theirs if theirs else None, "all_ours": list(ours), "all_peer": list(peer), **more}
        self.data["rows"].append(entry)
        self.write()
        beside = f"   peer {theirs:9.2f}   x{mine / theirs:.2f}" if theirs else "   no peer"
        extra = "  ".join(f"{k} {v:.3g}" for k, v in more.items() if isinstance(v, float))
        print(f"  {row:<9} {mix:<7} {what:<40} {mine:9.2f} {unit:<7}{beside}   {extra}", flush=True)

    def write(self) -> None:
        self.data["seconds"] = round(self.args.minutes * 60 - (self.end_s - time.monotonic()))
        record.write(self.args.out, self.data)


def shares(seen: dict[str, Any], peaks: Peaks) -> dict[str, float]:
    """What the rates of a record are of the machine's peaks, of the read peak as it was beside the record if known."""
    found = {name: seen[rate] * 1e9 / peaks.bytes_per_s for name, rate in _READS.items() if rate in seen}
    if "read_mb" in seen:
        found["of_read"] = seen["step_mb"] / seen["read_mb"]
    if "gop_s" in seen:
        found["of_peak"] = seen["gop_s"] * 1e9 / peaks.of(seen["peak_of"])
    return found


def describe_machine(threads: int | None) -> dict[str, Any]:
    """For the results; `threads` None: as many as CPUs. `isa`: what kernels use, so KTSERVE_ISA shows."""
    threads = threads or len(os.sched_getaffinity(0))
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = named.get("flags", "").split()
    chosen = _native.choose_isa("")
    used = {"avx2": ["avx2"], "avx512": ["avx2", "avx512_vnni", "avx512_bf16"]}
    isa = [f for f in ("avx2", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if f in flags]
    isa = [f for f in isa if f in used.get(chosen, isa)]
    model = (
        f"{named.get('model name', platform.machine())}, family {named.get('cpu family')} model {named.get('model')}"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = known_read_gb_s(named, threads)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "isa": isa,
        "memory_gb": round(memory / 1e9),
        "load_before": os.getloadavg()[0],
    } | ({"known_read_gb_s": known} if known else {})


def versions(peer: Peer | None) -> dict[str, str]:
    out = {"python": platform.python_version()} | {name: _version(name) for name in ("ktserve", "torch", "numpy")}
    return out | ({"llama.cpp": peer.version()} if peer else {})


def _version(package: str) -> str:
    """`not installed` where it runs from its sources."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
