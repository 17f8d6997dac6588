"""Latent attention on a GPU: its kernel beside plain torch, and decode and a long prompt at DeepSeek-V3's layer shape.

    python -m benchmarks.gpu.latent [--rows 1 8 32] [--contexts 4096 32768] [--prompt 30000] [--experts 64]
                                    [--parts kernel chunk served] [--model DIR] [--tiny] [--out FILE.json]

kernel   microseconds of a layer of 128 heads by flashinfer, and in torch, over caches that no L2 holds; `hbm_share`:
         the bytes of the sequences' positions over that time, as a share of the GPU's data sheet
chunk    milliseconds of a layer of 128 heads for a chunk that ends at a context, absorbed and expanded, kv_b's products
         included, and the attention's multiplications of the form as TFLOP/s; `error` is between the two
served   the engine of `ktserve serve` with 2 dense and 2 sparse layers, random weights, attention on the GPU and
         native experts on the CPU: as benchmarks.gpu.decode states (ms, tok/s, `peak`: the experts' bytes as a share of
         the read bandwidth measured here), and the time to the first token of a long prompt alone

All 256 experts of V3 take 22.5 GB a layer: by default there are 64 of its size, and the vocabulary is a quarter; a step
of 8 or 32 rows then reads fewer experts than V3's would. --tiny: small, on the CPU; shows that it works.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.decode import AHEAD, SECONDS, Bench, measure, read_bandwidth
from benchmarks.gpu.hbm import copied_bytes_per_s, sheet_bytes_per_s
from benchmarks.gpu.served import BEHIND, Served
from benchmarks.models.configs import DEEPSEEK_V3
from benchmarks.models.folder import write_described
from benchmarks.models.random import expert_bytes
from benchmarks.settings import served_config
from engine.architectures.parts.mla import Latent
from engine.architectures.parts.rotation import Rotation
from engine.attention.base import BLOCK_SIZE, AttentionBackend, BatchLayout
from engine.attention.flashinfer_latent import FlashInferLatentAttention
from engine.attention.latent import ReferenceLatentAttention
from engine.linear.latent import TorchLatentUp
from testing.harness import model_runner

FOUR_LAYERS: dict[str, Any] = DEEPSEEK_V3 | {"num_hidden_layers": 4, "first_k_dense_replace": 2, "vocab_size": 32768}
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
BF16 = torch.bfloat16
CACHES = 8  # layers whose caches are read in turn: no L2 holds them all
PARTS = ("kernel", "chunk", "served")
CHUNKS = (128, 256, 512, 1024, 4096)
CONTEXT = 4096  # positions of a sequence in decode


def microseconds(work: Callable[[int], object], device: str) -> float:
    """Of one call, the best of five times CACHES calls; each call is given its number."""
    for number in range(2):
        work(number)
    times = []
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(CACHES):
            work(number)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / CACHES * 1e6)
    return min(times)


def graphed(work: Callable[[int], object]) -> Callable[[int], object]:
    """All CACHES calls as one CUDA graph, replayed with the first."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CACHES):
            work(number)
    return lambda number: graph.replay() if number == 0 else None


def decode_rows(rows: int, context: int, device: str) -> BatchLayout:
    pages = -(-context // BLOCK_SIZE)
    tables = [array("i", range(row * pages, (row + 1) * pages)) for row in range(rows)]
    slots = [table[-1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE for table in tables]
    at = [torch.tensor(values, dtype=torch.int64, device=device) for values in ([context - 1] * rows, slots)]
    return BatchLayout(list(range(rows + 1)), [context] * rows, tables, at[0], at[1], padded=True)


def kernels(rows: Sequence[int], contexts: Sequence[int], device: str, tiny: bool) -> list[dict[str, Any]]:
    spec = Latent(4 if tiny else 128, None, 512, 128, 128, Rotation(64, 1e4, max(contexts)))
    row_blocks = -(-max(contexts) // BLOCK_SIZE)
    blocks, layers, on = max(rows) * row_blocks, list(range(CACHES)), torch.device(device)
    made: dict[str, AttentionBackend] = {"torch": ReferenceLatentAttention(spec, layers, blocks, BF16, on)}
    caches = made["torch"].cache  # type: ignore[attr-defined]
    for cache in caches.values():
        cache.normal_()
    if device == "cuda":
        fast = FlashInferLatentAttention(spec, [0], 1, BF16, on, max(rows), row_blocks)
        fast.cache, made["flashinfer"] = caches, fast
        print("\n".join(fast.notes), flush=True)
    results, sheet = [], sheet_bytes_per_s(on)
    for context in contexts:
        for count in rows:
            step = decode_rows(count, context, device)
            q, k = (torch.randn(count, heads, spec.width, device=device, dtype=BF16) / 4 for heads in (spec.heads, 1))
            line: dict[str, Any] = {"rows": count, "context": context, "mb": count * context * spec.width * 2 / 1e6}
            outs = {}
            for name, attention in made.items():
                attention.plan(step)

                def work(number: int, attention: AttentionBackend = attention, q: Any = q, k: Any = k) -> torch.Tensor:
                    return attention.forward(number, q, k, k[..., : spec.kv_rank])

                outs[name] = work(0).float()
                line[f"{name}_us"] = microseconds(graphed(work) if attention.captures else work, device)
                if sheet is not None:
                    line[f"{name}_hbm_share"] = line["mb"] / line[f"{name}_us"] * 1e12 / sheet
            if "flashinfer" in outs:
                difference = (outs["flashinfer"] - outs["torch"]).abs().mean()
                line["error"] = float(difference / outs["torch"].abs().mean())
            results.append(line)
            print(line, flush=True)
    return results


def chunks(contexts: Sequence[int], device: str, tiny: bool) -> list[dict[str, Any]]:
    heads, results = 4 if tiny else 128, []
    spec = Latent(heads, None, 512, 128, 128, Rotation(64, 1e4, max(contexts)))
    blocks, on = -(-max(contexts) // BLOCK_SIZE), torch.device(device)
    up = TorchLatentUp(torch.randn(heads, 256, 512, device=device, dtype=BF16) / 16, 128)
    for context in contexts:
        for tokens in (t for t in ((200,) if tiny else CHUNKS) if t <= context):
            batch = one_chunk(tokens, context, device)
            shape = (tokens, heads, 128)
            q_nope, q_rope = (torch.randn(*shape[:2], n, device=device, dtype=BF16) / 4 for n in (128, 64))
            line: dict[str, Any] = {"tokens": tokens, "context": context}
            q, outs = torch.cat((q_nope, q_rope), -1), dict[str, torch.Tensor]()
            for form in ("absorbed", "expanded"):
                attention = _attention(spec, blocks, on, form)
                attention.cache[0].copy_(
                    torch.randn(attention.cache[0].shape, generator=torch.Generator().manual_seed(0))
                )
                attention.plan(batch)

                def work(_: int, attention: Any = attention, form: str = form, q: Any = q) -> torch.Tensor:
                    if form == "expanded":
                        out: torch.Tensor = attention.expanded(0, 0, q, partial(up.expand, slot=0))
                        return out
                    asked = torch.cat((up.absorb(q[..., :128], None), q[..., 128:]), -1)
                    return up.values(attention.absorbed(0, 0, asked), None)

                outs[form] = work(0).float()
                milliseconds = microseconds(work, device) / 1e3
                each = 2 * heads * (576 + 512 if form == "absorbed" else 192 + 128)
                line[f"{form}_ms"] = milliseconds
                line[f"{form}_tflops"] = tokens * (context - tokens / 2) * each / milliseconds / 1e9
                del attention
            difference = (outs["expanded"] - outs["absorbed"]).abs().mean()
            results.append({**line, "error": float(difference / outs["absorbed"].abs().mean())})
            print(results[-1], flush=True)
    return results


def _attention(
    spec: Latent, blocks: int, device: torch.device, form: str
) -> ReferenceLatentAttention | FlashInferLatentAttention:
    if device.type == "cpu":  # of which `expands_from` decides
        never = replace(spec, value_dim=4096)
        return ReferenceLatentAttention(spec if form == "expanded" else never, [0], blocks, BF16, device)
    expand_from = 1 if form == "expanded" else None
    return FlashInferLatentAttention(spec, [0], blocks, BF16, device, 1, blocks, expand_from=expand_from)


def one_chunk(tokens: int, context: int, device: str) -> BatchLayout:
    positions = torch.arange(context - tokens, context, device=device)
    table = array("i", range(-(-context // BLOCK_SIZE)))
    return BatchLayout([0, tokens], [context], [table], positions, positions)


def served(args: argparse.Namespace, context: int) -> dict[str, Any]:
    described = {**FOUR_LAYERS, "n_routed_experts": args.experts, **(TINY if args.tiny else {})}
    most = max(args.rows)
    positions = max(most * (context + AHEAD + BLOCK_SIZE), 2 * (args.prompt + BEHIND + BLOCK_SIZE))
    flags = ["--device", "cuda", "--pack-cache", "off", "--max-num-seqs", str(most), "--expert-backend", "native"]
    flags += ["--kv-cache-tokens", str(positions)]
    if args.tiny:
        flags += ["--device", "cpu", "--cpu-threads", "1", "--rules", "reference", "--cuda-graphs", "padded"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as temporary:
        model = write_described(args.model or Path(temporary) / "model", described)
        written_s = time.perf_counter() - began
        engine = Served(served_config(model, flags))
    print(f"written in {written_s:.0f} s, loaded in {engine.loaded_s:.0f} s: ktserve serve MODEL {' '.join(flags)}")
    print("\n".join(engine.lines), flush=True)
    runner = model_runner(engine.core)
    prompts = []
    for _ in range(1 if args.tiny else 2):  # the first compiles kernels for such chunks
        prompts.append({"prompt": args.prompt, **engine.first_token(args.prompt, 0)})
        print(prompts[-1], flush=True)
    for attention in runner.model.attention_backends:
        if not isinstance(attention, FlashInferLatentAttention | ReferenceLatentAttention):
            raise SystemExit(f"{type(attention).__name__} has no cache that could be filled")
        for cache in attention.cache.values():
            cache.normal_()
    seconds = 0.0 if args.tiny else SECONDS
    bench = Bench(runner.model.config, runner, engine.core.scheduler.config.num_blocks, most, 0, context, seconds)
    bytes_per_s = read_bandwidth(runner.model.expert_backends[0], 1 << 24 if args.tiny else 4 << 30)
    each, results = expert_bytes(runner.model.config), []
    for rows in args.rows:
        results.append(measure(bench, rows, bytes_per_s, each, 0))
        print(results[-1], flush=True)
    return {
        "config": described, "flags": flags, "context": context, "lines": engine.lines, "read_gb_s": bytes_per_s / 1e9,
        "written_s": written_s, "loaded_s": engine.loaded_s, "decode": results, "prompts": prompts,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768], help="of the kernels")
    parser.add_argument("--prompt", type=int, default=30000)
    parser.add_argument("--experts", type=int, default=64, help="of a layer: V3 has 256; a multiple of 8")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--model", type=Path, help="folder of the random model; it is written if it is not there")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: shows that it works")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.rows, args.contexts, args.prompt = [1, 2], [64, 128], 200
    device, found = "cpu" if args.tiny else "cuda", dict[str, Any]()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found["about"] = {"gpu": gpu, "torch": torch.__version__, "experts": args.experts}
    if device == "cuda":
        on = torch.device(device)
        sheet = sheet_bytes_per_s(on)
        found["about"] |= {"hbm_gb_s": sheet and sheet / 1e9, "copied_gb_s": copied_bytes_per_s(on) / 1e9}
    with torch.inference_mode():
        if "kernel" in args.parts:
            found["kernel"] = kernels(args.rows, args.contexts, device, args.tiny)
        if "chunk" in args.parts:
            found["chunk"] = chunks([256] if args.tiny else args.contexts, device, args.tiny)
    if device == "cuda":
        torch.cuda.empty_cache()
    if args.out and (found.get("kernel") or found.get("chunk")):
        record.write(args.out, found)  # so much is there, whatever follows
    if "served" in args.parts:
        found["served"] = served(args, 64 if args.tiny else CONTEXT)
    if args.out:
        record.write(args.out, found)


if __name__ == "__main__":
    main()
