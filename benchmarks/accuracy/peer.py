"""The same GGUF file in ktserve and in llama.cpp: each one's log-probabilities against float32 transformers.

    python -m benchmarks.accuracy.peer --llama FOLDER_WITH_LLAMA_SERVER

mean|d| / mean|ref| over the whole vocabulary's log-probabilities after random prompts, median over prompts.
"""

from __future__ import annotations

import argparse
import copy
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.accuracy.table import SHAPE
from demo.paths import demo_model
from engine.files.gguf.file import open_gguf
from testing.harness import Harness, full_logits
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import tiny_model

VOCABULARY = 2048


def tokenizer_metadata() -> dict[str, Any]:
    """The demo model's tokenizer: llama-server wants one."""
    metadata = open_gguf(demo_model()).metadata
    keys = [k for k in metadata if k.startswith("tokenizer.ggml.") and "token_id" not in k and "add_" not in k]
    return {k: v if isinstance(v := metadata[k], str | int | float) else list(v) for k in keys}


def prompts(count: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [
        torch.randint(300, 2000, (int(n),), generator=g).tolist() for n in torch.randint(4, 60, (count,), generator=g)
    ]


def ours(path: Path, asked: list[list[int]], dtype: str) -> list[torch.Tensor]:
    engine = Harness(path, dtype=dtype, rules="cpu", max_num_batched_tokens=128, pack_cache="off")
    rids = [engine.submit(p, logprobs=VOCABULARY, max_tokens=1) for p in asked]
    engine.run()
    out = []
    for rid in rids:
        row = torch.zeros(VOCABULARY)
        for top in engine.results[rid].logprobs[0].top:
            row[top.token] = top.logprob
        out.append(row)
    engine.close()
    return out


def theirs(path: Path, asked: list[list[int]], binaries: Path, kv: str) -> list[torch.Tensor | None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command: list[str | Path] = [
        binaries / "llama-server",
        "-m",
        path,
        "--port",
        str(port),
        "-c",
        "512",
        "-t",
        "2",
        "--no-warmup",
    ]
    command += ["-ctk", kv, "-ctv", kv, "-fa", "on"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                _until_ready(http)
                return [_ask(http, p) for p in asked]
        finally:
            server.terminate()


def _until_ready(http: httpx.Client) -> None:
    for _ in range(300):
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError("llama-server did not come up")


def _ask(http: httpx.Client, prompt: list[int]) -> torch.Tensor | None:
    """None where the token is half a character: llama-server then keeps its numbers back."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": VOCABULARY, "temperature": 0, "cache_prompt": False}
    reply = http.post("/completion", json=body)
    reply.raise_for_status()
    if "completion_probabilities" not in reply.json():
        return None
    row = torch.zeros(VOCABULARY)
    for top in reply.json()["completion_probabilities"][0]["top_logprobs"]:
        row[top["id"]] = top["logprob"]
    return row


def error(got: Sequence[torch.Tensor | None], want: list[torch.Tensor]) -> float:
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if g is not None]
    return statistics.median(float((g - w).abs().mean() / w.abs().mean()) for g, w in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--formats", default="BF16,Q8_0,Q4_0,Q4_1,Q5_0,Q4_K,Q5_K,Q6_K")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--peer-kv", default="f16,bf16", help="cache types of llama.cpp; its own default is f16")
    parser.add_argument("--prompts", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    caches = args.peer_kv.split(",")
    asked, metadata = prompts(args.prompts), tokenizer_metadata()
    columns = [f"llama.cpp, {kv} cache | ratio" for kv in caches]
    print(f"| weights | native | {' | '.join(columns)} |\n|---|---{'|---|---' * len(caches)}|")
    with tempfile.TemporaryDirectory() as folder:
        for weights in args.formats.split(","):
            errors = []
            for seed in range(3):
                path = Path(folder) / f"{weights}.gguf"
                model = tiny_model(seed, vocab_size=VOCABULARY, **SHAPE)
                with torch.no_grad():
                    for layer in model.model.layers:
                        layer.mlp.gate.weight *= 6  # as in benchmarks.accuracy.table: a router that is sure of itself
                held = save_gguf(copy.deepcopy(model), path, weights, weights, metadata=metadata)
                want = [torch.log_softmax(full_logits(held, p)[-1], -1) for p in asked]
                runs: list[Sequence[torch.Tensor | None]] = [
                    ours(path, asked, args.dtype),
                    *(theirs(path, asked, args.llama, kv) for kv in caches),
                ]
                errors.append([error(run, want) for run in runs])
            mine, *peers = (statistics.mean(column) for column in zip(*errors, strict=True))
            row = " | ".join(f"{peer:.5f} | {mine / peer:.2f}" for peer in peers)
            print(f"| {weights} | {mine:.5f} | {row} |", flush=True)


if __name__ == "__main__":
    main()
