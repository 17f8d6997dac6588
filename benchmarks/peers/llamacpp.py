"""llama.cpp beside us: its benchmarks and its server, run from a folder of its binaries on the same files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.client import child, free_port


class PeerError(Exception):
    """A binary of the peer is missing or failed; the message ends with what it said last."""


@dataclass(frozen=True)
class Flags:
    """What the sweep chooses among; everything else is llama.cpp's default."""

    threads: int
    flash: bool = True
    repack: bool = True
    ubatch: int = 512
    gpu: bool = False  # all layers there; the file not mapped, as llama.cpp advises for experts on the CPU
    cpu_layers: int = 0  # with a GPU: the experts of the first so many layers stay on the CPU
    offload: bool = True  # with a GPU: experts of many rows are copied there
    wide_cache: bool = False  # keys and values in float32

    def bench(self) -> list[str]:
        return [*self._common(), "--repack", str(int(self.repack))]

    def common(self) -> list[str]:
        flags = [*self._common(), *([] if self.repack else ["--no-repack"])]
        if self.gpu:
            flags += ["-ngl", "99", "--load-mode", "none"]
            flags += ["--n-cpu-moe", str(self.cpu_layers)] if self.cpu_layers else []
            flags += [] if self.offload else ["--no-op-offload"]
        return flags

    def _common(self) -> list[str]:
        flags = ["-t", str(self.threads), "-fa", "on" if self.flash else "off", "-ub", str(self.ubatch)]
        return flags + (["-ctk", "f32", "-ctv", "f32"] if self.wide_cache else [])

    def __str__(self) -> str:
        return " ".join(self.common())


@dataclass(frozen=True)
class Peer:
    folder: Path
    libraries: tuple[Path, ...] = ()  # folders of what the binaries were linked with, if not where they look

    def version(self) -> str:
        said = self._run("llama-batched-bench", ["--version"], 60, both=True).splitlines()
        return next((line.removeprefix("version: ") for line in said if line.startswith("version: ")), "unknown")

    def sweep(self, model: Path, threads: list[int], quick: bool) -> tuple[Flags, list[dict[str, Any]]]:
        """The flags with the best product of prefill and decode speed, one change at a time from the default;
        the better of two passes counts."""
        most = max(threads)
        start = Flags(most)
        candidates = [start, replace(start, flash=False), replace(start, repack=False)]
        candidates += [Flags(t) for t in threads if t != most]
        n_prompt, n_gen = (32, 4) if quick else (128, 16)
        passes = [[self._try(model, flags, n_prompt, n_gen) for flags in candidates] for _ in range(1 if quick else 2)]
        lines = [max(tries, key=lambda line: float(line["score"])) for tries in zip(*passes, strict=True)]
        best = candidates[max(range(len(lines)), key=lambda i: float(lines[i]["score"]))]
        if not quick:
            wide = replace(best, ubatch=1024)
            pair = [self._try(model, flags, 1024, 0) for flags in (best, wide)]
            lines += pair
            best = wide if pair[1]["prefill"] > pair[0]["prefill"] * 1.02 else best
        for line in lines:
            print(f"  peer {line['flags']:<34} prefill {line['prefill']:7.1f}  decode {line['decode']:6.1f} tok/s")
        print(f"  peer's best flags: {best}", flush=True)
        return best, lines

    def _try(self, model: Path, flags: Flags, n_prompt: int, n_gen: int) -> dict[str, Any]:
        speeds = self.bench(model, flags, [n_prompt], n_gen)
        prefill, decode = speeds[f"pp{n_prompt}"], speeds.get(f"tg{n_gen}", 0.0)
        return {"flags": str(flags), "prefill": prefill, "decode": decode, "score": prefill * (decode or 1.0)}

    def bench(self, model: Path, flags: Flags, prompts: list[int], n_gen: int) -> dict[str, float]:
        """tok/s by test: "pp512", "tg64". A first prompt of 64 warms up and is not counted."""
        sizes = ",".join(str(n) for n in [64, *prompts])
        args = ["-m", str(model), "-p", sizes, "-n", str(n_gen), "-r", "1", "--no-warmup", "-o", "jsonl"]
        lines = [json.loads(line) for line in self._run("llama-bench", [*args, *flags.bench()], 600).splitlines()]
        tests = [line for i, line in enumerate(lines) if i]  # without the warm-up
        return {f"pp{t['n_prompt']}" if t["n_prompt"] else f"tg{t['n_gen']}": float(t["avg_ts"]) for t in tests}

    def batched(
        self, model: Path, flags: Flags, n_prompt: int, n_gen: int, rows: list[int], *, warm: bool = False
    ) -> dict[int, float]:
        """Decode tok/s of all sequences together, by their number. `warm`: of the second of two times."""
        context = max(rows) * (n_prompt + n_gen) + 64
        counts = ",".join(str(n) for n in rows for _ in range(2 if warm else 1))
        args = ["-m", str(model), "-npp", str(n_prompt), "-ntg", str(n_gen), "-npl", counts]
        args += ["-c", str(context), "--output-format", "jsonl", *flags.common()]
        lines = [line for line in self._run("llama-batched-bench", args, 600).splitlines() if line.startswith("{")]
        return {int(test["pl"]): float(test["speed_tg"]) for test in map(json.loads, lines)}

    @contextmanager
    def server(
        self, model: Path, flags: Flags, streams: int, context: int, loras: list[Path], cache: bool = False
    ) -> Iterator[str]:
        """URL of a llama-server with `streams` slots of `context` positions; the loras are loaded, not applied.
        `cache`: a prompt's beginning may be found again, as it comes; else nowhere."""
        port = free_port()
        args = ["-m", str(model), "--port", str(port), "-np", str(streams), "-c", str(streams * context)]
        args += [*flags.common(), "--no-slots", *([] if cache else ["--no-cache-prompt", "--cache-ram", "0"])]
        if loras:
            args += ["--lora", ",".join(map(str, loras)), "--lora-init-without-apply"]
        with child([str(self._binary("llama-server")), *args], f"http://127.0.0.1:{port}/health"):
            yield f"http://127.0.0.1:{port}"

    @contextmanager
    def cache_server(self, model: Path, streams: int, positions: int, flags: Sequence[str] = ()) -> Iterator[str]:
        """URL of a llama-server with `streams` slots over one cache of so many positions, else by its defaults."""
        port = free_port()
        args = [
            "-m",
            str(model),
            "--port",
            str(port),
            "-np",
            str(streams),
            "-c",
            str(positions),
            "--kv-unified",
            *flags,
        ]
        with child([str(self._binary("llama-server")), *args], f"http://127.0.0.1:{port}/health"):
            yield f"http://127.0.0.1:{port}"

    def _binary(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise PeerError(f"--llama {self.folder}: there is no {name}")
        return path

    def _environment(self) -> dict[str, str] | None:
        if not self.libraries:
            return None
        folders = [str(folder) for folder in self.libraries]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
        }

    def _run(self, name: str, args: list[str], timeout_s: float, *, both: bool = False) -> str:
        command = [str(self._binary(name)), *args]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False, env=self._environment()
            )
        except subprocess.TimeoutExpired:
            raise PeerError(f"{name} took more than {timeout_s:.0f} s") from None
        if done.returncode:
            raise PeerError(f"{name} ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout + done.stderr if both else done.stdout


def request(prompt: list[int], tokens: int, adapter: int | None, adapters: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy streamed request; `adapter` is the place of its lora, all others are off."""
    body = {"prompt": prompt, "n_predict": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    body |= {"cache_prompt": False}
    if adapters:
        body["lora"] = [{"id": i, "scale": float(i == adapter)} for i in range(adapters)]
    return "/completion", body


@dataclass(frozen=True)
class Completion:
    """Of the prompt's tokens those that were computed, and how long that took."""

    computed: int
    prompt_ms: float
    tokens: list[int]


def completed(url: str, prompt: list[int], tokens: int) -> Completion:
    """A greedy answer of `tokens` tokens by the llama-server at `url`."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    data = json.dumps(body).encode()
    request = Request(f"{url}/completion", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        said = json.load(answer)
    timings = said["timings"]
    return Completion(int(timings["prompt_n"]), float(timings["prompt_ms"]), [int(token) for token in said["tokens"]])
