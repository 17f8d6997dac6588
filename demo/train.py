"""Trains the demo model and its two adapters from text that demo.texts.world makes up, and measures them.

    python -m demo.train --out DIR --device cuda --minutes 6

DIR then holds `base/` (Hugging Face form), `adapters/pirate` (PEFT keys per expert), `adapters/json` (KT fused files)
and `report.md`. The exit status is 1 if the held-out accuracy is not reached. `python -m demo.export` makes the
GGUF of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo.corpus import Rows, build_rows
from demo.evaluate import failures, measure, said, table
from demo.nn.answer import answerer, hf_model
from demo.nn.lora import init_lora, load_lora, merge, save_fused, save_per_expert
from demo.nn.network import Forward, Shape, State, init_state, load_model, save_model
from demo.tokenizer import END_OF_TEXT, IM_END, save_tokenizer, token_id, train_tokenizer

BASE_SHARE: Final = 0.7  # of the time; the adapters halve the rest
BALANCE_WEIGHT: Final = 0.02
SAVERS: Final[dict[str, Callable[[State, Path, str], None]]] = {"pirate": save_per_expert, "json": save_fused}


@dataclass(frozen=True)
class Budget:
    """How long one training runs: by the clock, or `steps` if given."""

    seconds: float
    steps: int | None = None
    rows: int = 128  # of 512 tokens, in a step
    peak_lr: float = 2e-3
    weight_decay: float = 0.05

    def progress(self, started: float, step: int) -> float:
        """In [0, 1]."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, (time.monotonic() - started) / self.seconds)


def schedule(progress: float) -> float:
    """A short linear warm-up, then a cosine to nearly zero; a share of the peak."""
    warm = 0.02
    if progress < warm:
        return max(progress / warm, 0.01)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warm) / (1 - warm)))


def loss_of(
    forward: Forward, ids: torch.Tensor, segment: torch.Tensor, learn: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of the target tokens, and the load-balancing loss. ids, segment, learn [B, L]; a token sees
    the earlier tokens of its own segment."""
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    mask = ((segment.unsqueeze(2) == segment.unsqueeze(1)) & causal).unsqueeze(1)
    hidden, balance = forward(ids, mask)
    wanted = learn[:, 1:] & (segment[:, 1:] == segment[:, :-1])
    logits = F.linear(hidden[:, :-1][wanted], forward.state["lm_head.weight"])
    return F.cross_entropy(logits.float(), ids[:, 1:][wanted]), balance


def fit(
    forward: Forward, parameters: State, rows: Rows, budget: Budget, device: str, label: str, seed: int
) -> tuple[int, float]:
    """AdamW on `parameters` (part of `forward`) over shuffled rows. Returns the number of steps and the last loss."""
    ids, segment, learn = (
        torch.from_numpy(array.astype(kind)).to(device)
        for array, kind in ((rows.ids, "int64"), (rows.segment, "int16"), (rows.learn, "bool"))
    )
    for tensor in parameters.values():
        tensor.requires_grad_(True)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": budget.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=budget.peak_lr, betas=(0.9, 0.98), eps=1e-8, fused=device != "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    size = min(budget.rows, ids.shape[0])
    started, step, at, last = time.monotonic(), 0, ids.shape[0], math.nan
    order = torch.empty(0, dtype=torch.long, device=device)
    while (progress := budget.progress(started, step)) < 1.0:
        if at + size > ids.shape[0]:
            order, at = torch.randperm(ids.shape[0], generator=generator, device=device), 0
        pick = order[at : at + size]
        at += size
        for group in optimizer.param_groups:
            group["lr"] = budget.peak_lr * schedule(progress)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device != "cpu"):
            loss, balance = loss_of(forward, ids[pick], segment[pick], learn[pick])
            total = loss + BALANCE_WEIGHT * balance
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % (200 if device != "cpu" else 20) == 0:  # also keeps the host from running far ahead of the device
            last = loss.item()
            rate = step * size * ids.shape[1] / (time.monotonic() - started)
            print(
                f"{label} {progress:4.0%} step {step} loss {last:.4f} balance {balance.item():.3f} {rate:,.0f} tok/s",
                flush=True,
            )
    for tensor in parameters.values():
        tensor.requires_grad_(False)
    return step, last


def report(out: Path, tokenizer: Tokenizer, device: str, n: int) -> tuple[str, list[str]]:
    """Measures the base and both adapters from the files as stored. Returns a Markdown text and what was missed."""
    shape, state = load_model(out / "base")
    results: dict[str, dict[str, float]] = {}
    samples: list[str] = []
    shown = [
        "Hello!",
        "What is 23 + 48?",
        "What colour is a banana?",
        "Count from 7 to 12.",
        "Tell me a story about a fox.",
    ]
    for style in ("plain", *SAVERS):
        merged = state if style == "plain" else merge(state, load_lora(out / "adapters" / style, shape))
        answer = answerer(hf_model(shape, merged, device), tokenizer, device)
        results[style] = measure(answer, style, n)
        samples += [f"- {style}: {q} -> {a}" for q, a in zip(shown, answer([said(q) for q in shown]), strict=True)]
    return f"{table(results)}\n\n" + "\n".join(samples) + "\n", failures(results)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo.train", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--minutes", type=float, default=6.0, help="training time of all three together")
    parser.add_argument("--steps", type=int, help="steps of each training instead of --minutes (dry run)")
    parser.add_argument("--texts", type=int, default=600_000, help="conversations for the base; a third for an adapter")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens in a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--questions", type=int, default=200, help="questions of each kind in the measurement")
    parser.add_argument("--layers", type=int, default=Shape().num_hidden_layers)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    shape = Shape(num_hidden_layers=args.layers)
    workers = min(8, len(os.sched_getaffinity(0))) if args.texts > 50_000 else 1

    tokenizer = train_tokenizer(args.seed)
    save_tokenizer(tokenizer, args.out / "base")
    eos, pad = token_id(tokenizer, IM_END), token_id(tokenizer, END_OF_TEXT)
    rows = build_rows(tokenizer, "plain", args.texts, seed=args.seed, workers=workers)
    print(f"{len(rows.ids):,} rows, {rows.num_tokens:,} tokens after {time.monotonic() - began:.0f} s", flush=True)

    state = init_state(shape, args.device, args.seed)
    print(f"{sum(t.numel() for t in state.values()):,} parameters", flush=True)
    budget = Budget(60 * args.minutes * BASE_SHARE, args.steps, args.rows, args.lr)
    done = {"base": fit(Forward(shape, state), state, rows, budget, args.device, "base", args.seed)}
    save_model(args.out / "base", shape, state, eos, pad, torch.bfloat16)
    state = {name: tensor.bfloat16().float() for name, tensor in state.items()}  # the adapters learn on what is stored

    for number, (style, save) in enumerate(SAVERS.items(), 1):
        rows = build_rows(tokenizer, style, args.texts // 3, seed=args.seed, workers=workers)
        lora = init_lora(shape, args.device, args.seed + number)
        budget = Budget(60 * args.minutes * (1 - BASE_SHARE) / 2, args.steps, args.rows, args.lr, weight_decay=0.0)
        done[style] = fit(Forward(shape, state, lora), lora, rows, budget, args.device, style, args.seed + number)
        save(lora, args.out / "adapters" / style, "tiny-kite")

    torch.set_float32_matmul_precision("highest")
    print(f"trained after {time.monotonic() - began:.0f} s, measuring", flush=True)
    text, missed = report(args.out, tokenizer, args.device, args.questions)
    (args.out / "report.md").write_text(text)
    (args.out / "training.json").write_text(
        json.dumps({k: {"steps": s, "loss": x} for k, (s, x) in done.items()}) + "\n"
    )
    print(text, flush=True)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
