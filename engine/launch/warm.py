"""Prompts of some lengths are run before the server listens, so that no request waits for kernels to be compiled; and
steps are timed, so that the first burst is not divided as if nobody knew how long they take."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from engine.attention.base import BLOCK_SIZE
from engine.device import to_device
from engine.errors import EngineError
from engine.experts.gpu.compute import chunk_lengths
from engine.model.load import Progress
from engine.model.step import OutputKind
from engine.planning.plan import EnginePlan, computes_chunks
from engine.steps.inputs import StepArrays
from engine.steps.runner import InFlight, ModelRunner
from scheduler.plan import NO_STATE, RowState, StepPlan, StepRow
from scheduler.request import Request, SamplingParams

SHORT = (5, 48)  # tokens: a GPU's kernels differ in their tiles, and are compiled again for odd numbers
# of prompts that come at once, some in one step and some in the next: torch loads other kernels for products of so many
# rows, a few milliseconds each
TOGETHER = (64, 128, 256, 512, 1024, 2048)
_EACH = 64  # tokens, at least, of each of these prompts
_DECODES = (1, 8, 32)  # rows of a token each
_SAMPLING = (  # what tokens are chosen by: kernels of their own
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.9, presence_penalty=0.5, logprobs=1),
)


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
        prompts = _burst(tokens, plan.config.max_num_seqs) if tokens in TOGETHER else [tokens]
        try:
            run_prompts(runner, prompts, slot, plan.num_blocks)
        except Exception as error:
            what = f"{_named(prompts)}{' with an adapter' if slot else ''}"
            raise EngineError(f"{what}, tried before the server listens: {type(error).__name__}: {error}") from error
    progress(stage, len(todo), len(todo))


def _burst(tokens: int, most: int) -> list[int]:
    """So many tokens as at most `most` prompts of one length, but for a token."""
    count = min(tokens // _EACH, most)
    return [tokens // count + (i < tokens % count) for i in range(count)]


def _named(prompts: Sequence[int]) -> str:
    return f"a prompt of {prompts[0]} tokens" if len(prompts) == 1 else f"{len(prompts)} prompts of {prompts[0]} tokens"


def run_prompts(runner: ModelRunner, lengths: Sequence[int], slot: int, scratch_block: int) -> None:
    """Prompts in one step, with adapter slot `slot`, and a token after each in every way of choosing one. No token of
    them is valid: experts neither compute nor count anything, keys and values go to a block that belongs to no
    request."""
    prompts = [[0] * tokens for tokens in lengths]
    plans = [_plan(runner, prompts, slot, scratch_block, sampling) for sampling in _SAMPLING]
    arrays = StepArrays.of(plans[0], {})
    with runner.computing(), ExitStack() as trials:
        for experts in runner.model.expert_backends:
            trials.enter_context(experts.trial())
        runner.model.begin_step(arrays.num_tokens, lora=slot > 0, eager=True, slots={slot} - {0})
        given = runner.step_input(arrays, every=True, greedy=False)
        runner.model.plan(given.batch)
        nothing = torch.zeros(1, dtype=torch.int32, device=runner.device)
        hidden = runner.executor.forward(replace(given, bsz=nothing)).hidden
        kept = hidden[to_device(arrays.kept, torch.int64, runner.device)]
        greedy, *others = plans
        steps = [InFlight(greedy, arrays=arrays, greedy=runner.model.output(kept, OutputKind.GREEDY).greedy)]
        steps += [InFlight(plan, arrays=arrays, logits=runner.model.logits(kept)) for plan in others]
        if runner.model.mtp is not None:
            runner.model.predict(given.ids, hidden, given.batch, nothing)
        if runner.device.type == "cuda":
            torch.cuda.current_stream(runner.device).synchronize()
        for _ in range(1 if runner.model.mtp is None else 2):
            runner.model.check()
    for step in steps:
        runner.launch_sample(step)
    runner.settle()


def _plan(
    runner: ModelRunner,
    prompts: Sequence[list[int]],
    slot: int,
    scratch_block: int,
    sampling: SamplingParams,
    *,
    decode: bool = False,
) -> StepPlan:
    """Of whole prompts or, with `decode`, of a token behind each."""
    state = RowState(NO_STATE, NO_STATE) if runner.model.keeps_states else None
    rows, tables = [], []
    for i, prompt in enumerate(prompts):
        request = Request(str(i), prompt, sampling, output=[0])
        start, tokens = (len(prompt), 1) if decode else (0, len(prompt))
        rows.append(StepRow(request, start, tokens, slot, True, state=state))
        tables.append(array("i", [scratch_block] * -(-(start + tokens) // BLOCK_SIZE)))
    return StepPlan(0, rows, tables)


def first_figures(runner: ModelRunner, plan: EnginePlan) -> Iterator[tuple[StepPlan, float, int | None]]:
    """Of steps that a GPU computes alone: the plan, seconds, distinct experts over all layers if they are counted.
    Other ranks take part, as in every step. Nothing where a CPU computes experts, whose steps of many tokens take
    seconds."""
    elsewhere = set(plan.placement.used(".mlp.experts")) - {"gpu"}
    if runner.device.type == "cpu" or elsewhere or runner.proposals is not None:
        return iter(())
    return timed_steps(runner, min(plan.token_budget, plan.max_model_len), plan.config.max_num_seqs, plan.num_blocks)


def timed_steps(
    runner: ModelRunner, most: int, rows: int, scratch_block: int
) -> Iterator[tuple[StepPlan, float, int | None]]:
    """Bursts of prompts of up to `most` tokens in all, then up to `rows` decode rows. Tokens are of the whole
    vocabulary; their keys and values go to a block that belongs to no request."""
    greedy, vocabulary = _SAMPLING[0], runner.model.config.vocab_size
    steps = [(_burst(tokens, rows), False) for tokens in TOGETHER if tokens <= most]
    steps += [([min(_EACH, most) - 1] * count, True) for count in _DECODES if count <= rows]
    for lengths, decode in steps:
        prompts = [[(i * n + at) % vocabulary for at in range(n)] for i, n in enumerate(lengths)]
        trial = _plan(runner, prompts, 0, scratch_block, greedy, decode=decode)
        for _ in range(2):  # the second time is that of a server that has run for a while
            began = time.perf_counter()
            step = runner.launch_forward(trial)
            runner.launch_sample(step)
            runner.tokens(step)
            seconds = time.perf_counter() - began
        touched = step.experts_touched
        yield trial, seconds, sum(touched.values()) if touched else None
