"""Prompts of some lengths are run before the server listens, so that no request waits for kernels to be compiled."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from dataclasses import replace

import torch

from engine.attention.base import BLOCK_SIZE
from engine.errors import EngineError
from engine.experts.gpu.compute import chunk_lengths
from engine.model.load import Progress
from engine.model.step import OutputKind
from engine.planning.plan import EnginePlan, computes_chunks
from engine.steps.inputs import StepArrays
from engine.steps.runner import ModelRunner
from scheduler.plan import NO_STATE, RowState, StepPlan, StepRow
from scheduler.request import Request, SamplingParams

SHORT = (5, 48)  # tokens: a GPU's kernels differ in their tiles, and are compiled again for odd numbers
# of prompts that come at once, some in one step and some in the next: torch loads other kernels for products of so many
# rows, a few milliseconds each
TOGETHER = (64, 128, 256, 512, 1024, 2048)


def warm_up(
    runner: ModelRunner, plan: EnginePlan, progress: Progress, *, short: bool = True, long: bool = True
) -> None:
    """Where steps run on a GPU; of several, on each of them at once. `short`, `long`: which prompts the runner may get,
    long ones where a GPU computes experts of such chunks.
    EngineError: what failed, and which prompt."""
    if runner.device.type == "cpu":
        return
    most, model = min(plan.token_budget, plan.max_model_len), plan.source.config
    wanted = {*SHORT, *TOGETHER} if short else set[int]()
    if long and computes_chunks(plan.placement):
        wanted |= set(chunk_lengths(model.num_experts, model.num_experts_per_tok))
    lengths = sorted(n for n in wanted if n <= most)
    todo = [(n, slot) for n in lengths for slot in ((0, 1) if plan.config.max_adapter_slots else (0,))]
    stage = "Compiling kernels for prompts"
    for done, (tokens, slot) in enumerate(todo):
        progress(stage, done, len(todo))
        try:
            run_prompt(runner, tokens, slot, plan.num_blocks)
        except Exception as error:
            what = f"a prompt of {tokens} tokens{' with an adapter' if slot else ''}"
            raise EngineError(f"{what}, tried before the server listens: {type(error).__name__}: {error}") from error
    progress(stage, len(todo), len(todo))


def run_prompt(runner: ModelRunner, tokens: int, slot: int, scratch_block: int) -> None:
    """A prompt of which no token is valid, with adapter slot `slot`: experts neither compute nor count anything, keys
    and values go to a block that belongs to no request."""
    table = array("i", [scratch_block] * -(-tokens // BLOCK_SIZE))
    request = Request("", [0] * tokens, SamplingParams(temperature=0.0))
    state = RowState(NO_STATE, NO_STATE) if runner.model.keeps_states else None
    arrays = StepArrays.of(StepPlan(0, [StepRow(request, 0, tokens, slot, True, state=state)], [table]), {})
    with runner.computing(), ExitStack() as trials:
        for experts in runner.model.expert_backends:
            trials.enter_context(experts.trial())
        runner.model.begin_step(tokens, lora=slot > 0, eager=True, slots={slot} - {0})
        given = runner.step_input(arrays, every=True, greedy=False)
        runner.model.plan(given.batch)
        nothing = torch.zeros(1, dtype=torch.int32, device=runner.device)
        hidden = runner.executor.forward(replace(given, bsz=nothing)).hidden
        runner.model.output(hidden[-1:], OutputKind.GREEDY)
        if runner.model.mtp is not None:
            runner.model.predict(given.ids, hidden, given.batch, nothing)
        if runner.device.type == "cuda":
            torch.cuda.current_stream(runner.device).synchronize()
        for _ in range(1 if runner.model.mtp is None else 2):
            runner.model.check()
