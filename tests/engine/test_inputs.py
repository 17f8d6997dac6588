"""A step's arrays are what its plan says, token by token; a row with drafts has the logits of its tokens one by one."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.base import BLOCK_SIZE
from engine.steps.graphs.inputs import PaddedInputs
from engine.steps.inputs import StepArrays, TokenCounts
from native import available
from scheduler.plan import StepPlan, StepRow
from scheduler.request import Request, SamplingParams
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model
from tests.engine.parity import prompts

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not available()[0], reason=f"no native kernels: {available()[1]}")


@st.composite
def rows(draw: st.DrawFn) -> tuple[StepRow, array[int]]:
    """A chunk of a prompt, or a decode row: of a known token with drafts, or of one that is still on the device."""
    prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=70))
    request = Request(draw(st.uuids()).hex, prompt, SamplingParams())
    request.output = draw(st.lists(st.integers(10, 19), max_size=40))
    known = len(request.prompt) + len(request.output)
    kind = draw(st.sampled_from(["chunk", "drafts", "pending"]))
    slot, drafts = draw(st.integers(0, 3)), ()
    if kind == "chunk":
        start = draw(st.integers(0, known - 1))
        tokens = draw(st.integers(1, known - start))
        row = StepRow(request, start, tokens, slot, start + tokens == known)
    elif kind == "drafts":
        drafts = tuple(draw(st.lists(st.integers(20, 29), max_size=4)))
        row = StepRow(request, known - 1, 1 + len(drafts), slot, True, drafts)
    else:
        row = StepRow(request, known, 1, slot, True)
        request.num_in_flight = 2  # the token of the step before, and this one's
    blocks = -(-(row.start + row.num_tokens) // BLOCK_SIZE) + draw(st.integers(0, 2))
    return row, array("i", draw(st.lists(st.integers(0, 999), min_size=blocks, max_size=blocks)))


@given(st.lists(rows(), max_size=6))
def test_arrays_are_what_the_plan_says_of_each_token(planned):
    plan = StepPlan(0, [row for row, _ in planned], [table for _, table in planned])
    places = {row.request.request_id: i for i, row in enumerate(plan.rows)}
    arrays = StepArrays.of(plan, places)
    ids, sources, positions, slots, adapters, kept, kept_starts, starts = [], [], [], [], [], [], [0], [0]
    for row, table in planned:
        for position in range(row.start, row.start + row.num_tokens):
            token = row.token(position)
            ids.append(0 if token is None else token)
            sources.append(places[row.request.request_id] if token is None else -1)
            positions.append(position)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            adapters.append(row.adapter_slot)
        kept += range(len(ids) - row.num_samples, len(ids))
        kept_starts.append(len(kept))
        starts.append(len(ids))
    assert arrays.ids.tolist() == ids and arrays.sources.tolist() == sources
    assert arrays.positions.tolist() == positions and arrays.slot_mapping.tolist() == slots
    assert arrays.adapters.tolist() == adapters and arrays.row_starts.tolist() == starts
    assert arrays.kept.tolist() == kept and arrays.kept_starts.tolist() == kept_starts
    last = [end - 1 for end, row in zip(kept_starts[1:], plan.rows, strict=True) if row.samples]
    assert arrays.last_kept.tolist() == last
    assert arrays.context_lens.tolist() == [row.start + row.num_tokens for row in plan.rows]
    sampled = torch.arange(100, 100 + len(planned))
    assert arrays.token_ids(sampled).tolist() == [i if s < 0 else 100 + s for i, s in zip(ids, sources, strict=True)]
    lora = arrays.lora(CPU)
    assert (lora is None) == (not any(adapters)) and (lora is None or lora.slots.tolist() == adapters)


@given(st.lists(rows(), max_size=6))
def test_padded_arrays_end_with_rows_that_write_to_the_scratch_block(planned):
    planned = [(row, table) for row, table in planned if row.num_tokens == 1]
    plan = StepPlan(0, [row for row, _ in planned], [table for _, table in planned])
    arrays = StepArrays.of(plan, {row.request.request_id: 0 for row in plan.rows})
    inputs, n = PaddedInputs(8, 3, 77, CPU), len(planned)
    inputs.fill(arrays, n)
    for name, padding in (("ids", 0), ("sources", -1), ("positions", 0), ("slot_mapping", 77 * BLOCK_SIZE)):
        assert inputs[name].tolist() == getattr(arrays, name).tolist() + [padding] * (8 - n)
    assert inputs["bsz"].tolist() == [n] and inputs["slots"].tolist() == arrays.adapters.tolist() + [0] * (8 - n)


@given(st.lists(st.integers(0, 5)), st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4))
def test_counts_follow_the_output(prompt, parts):
    counts, output = TokenCounts(prompt), []
    for part in [[], *parts]:
        output += part
        counts.update(output)
        for drafts in ((), (5, 3, 5)):
            tokens, numbers = counts.seen(drafts)
            assert sorted(tokens.tolist()) == sorted({*prompt, *output, *drafts})
            held = dict(zip(tokens.tolist(), numbers.tolist(), strict=True))
            assert all(held[token] == [*output, *drafts].count(token) for token in held)


@pytest.mark.parametrize("rules", ["reference", pytest.param(None, marks=needs_native)], ids=str)
@pytest.mark.parametrize("way", [{}, {"logprobs": 1}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}], ids=str)
def test_a_row_samples_after_each_of_its_drafts(tmp_path, rules, way):
    """Whatever the drafts are, what is sampled after each is what follows it when tokens come one by one."""
    save_hf(tiny_model(3), tmp_path)
    harness = Harness(tmp_path, rules=rules, pack_cache="off", max_num_seqs=2)
    runner, (prompt,) = harness.core.runner, prompts(1, [20])
    tables = [array("i", range(4)), array("i", range(4, 8))]

    def run(*rows: StepRow) -> list[list[int]]:
        """What is sampled after each of a row's kept tokens."""
        step = runner.launch_forward(StepPlan(0, list(rows), tables[: len(rows)]))
        runner.launch_sample(step)
        accepted, sampled = runner.tokens(step), step.tokens.tolist()
        after = [sampled[a:b] for a, b in pairwise(step.arrays.kept_starts.tolist())]
        assert all(tokens == each[: len(tokens)] for tokens, each in zip(accepted, after, strict=True))
        if "logprobs" in way:
            assert [x.chosen.token for x in step.logprobs[rows[0].request.request_id]] == after[0]
        return after

    params = SamplingParams(temperature=0.0, **way)
    request, other = Request("a", prompt, params), Request("b", prompt[:5], params)
    expected = []
    ((token,), _) = run(StepRow(request, 0, 20, 0, True), StepRow(other, 0, 5, 0, True))
    for draft in (token, 5, 6):
        request.output.append(draft)
        expected += run(StepRow(request, 19 + len(request.output), 1, 0, True))[0]
    request = Request("c", prompt, params, output=[token])
    together = run(StepRow(request, 20, 3, 0, True, (5, 6)), StepRow(other, 0, 5, 0, True))
    assert together[0] == expected
    waiting = [int(runner.sampled[runner._places[name]]) for name in ("c", "b")]
    assert waiting == [tokens[-1] for tokens in together]
    harness.close()
