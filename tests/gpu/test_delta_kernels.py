"""The kernels of gated delta nets against the same in plain torch, over steps that go on from one another."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout
from engine.attention.delta import DeltaInputs, DeltaVectors, ReferenceDeltaNet, StateSlots
from engine.attention.gpu_delta import GpuDeltaNet
from engine.errors import EngineError
from scheduler.plan import NO_STATE, RowState

pytestmark = pytest.mark.gpu
SPEC = DeltaNet(2, 4, 16, 32, 4, fused=True, fused_gates=True)
SPECS = {
    "fused": SPEC,
    "apart": replace(SPEC, fused=False, fused_gates=False),
    "gguf": replace(SPEC, fused=False, fused_gates=False, tiled=True),
    "early": replace(SPEC, fused_gates=False, tiled=True),
    "mixed": replace(SPEC, fused=False),
    "odd": DeltaNet(3, 3, 24, 20, 3, fused=False, fused_gates=False),
    "wide": DeltaNet(1, 3, 40, 24, 2, fused=True, fused_gates=True),
}
SLOTS = StateSlots(8, own=4, kept=4)
NOTHING = torch.zeros(0, dtype=torch.int64)


def vectors_of(spec: DeltaNet, g: torch.Generator, device: torch.device) -> DeltaVectors:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(device)

    heads = spec.value_heads
    return DeltaVectors(
        normal(spec.kernel, spec.channels) / 2,
        -normal(heads).exp(),
        normal(heads),
        1 + 0.1 * normal(spec.value_dim),
        1e-6,
    )


def inputs_of(spec: DeltaNet, tokens: int, g: torch.Generator, dtype: torch.dtype, device: torch.device) -> DeltaInputs:
    """Views of wider tensors, as parts of joined projections are."""
    wide = [spec.channels + spec.value_width] if spec.fused else [spec.channels, spec.value_width]
    gates = [2 * spec.value_heads] if spec.fused_gates else [spec.value_heads] * 2

    def normal(width: int, beside: int) -> torch.Tensor:
        return torch.randn((tokens, width + beside), generator=g).to(device)[:, :width]

    return DeltaInputs([normal(width, 16).to(dtype) for width in wide], [normal(width, 0) for width in gates])


def step(lengths: list[int], contexts: list[int], states: list[RowState], padded: bool = False) -> BatchLayout:
    starts = [0, *accumulate(lengths)]
    return BatchLayout(starts, contexts, [], NOTHING, NOTHING, padded, states)


class Both:
    """A reference and the kernels over the same steps."""

    def __init__(self, spec: DeltaNet, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.spec, self.device, self.dtype = spec, device, dtype
        self.vectors = vectors_of(spec, self.g, device)
        self.oracle = ReferenceDeltaNet(spec, [3], SLOTS, device)
        self.ours = GpuDeltaNet(spec, [3], SLOTS, device, 8)

    def run(self, batch: BatchLayout) -> None:
        given = inputs_of(self.spec, batch.num_tokens, self.g, self.dtype, self.device)
        outs = []
        for backend in (self.oracle, self.ours):
            backend.plan(batch)
            outs.append(backend.mix(3, given, self.vectors))
        assert outs[1].dtype == self.dtype
        close(outs[1].float(), outs[0].float(), 2e-5 if self.dtype == torch.float32 else 1e-2)
        self.compare()

    def compare(self) -> None:
        slots = self.ours.slots[3]
        close(slots.states[: SLOTS.count], self.oracle.states[3], 2e-5)
        close(slots.past[: SLOTS.count], self.oracle.past[3], 2e-5)


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(ours).all()
    assert float((ours - theirs).abs().max()) <= bound * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_prompts_and_decode_rows(kernel_device, name, dtype):
    """Prompts beside rows of one token, cut where states are saved; others begin from what was saved."""
    both = Both(SPECS[name], kernel_device, dtype, 1)
    both.run(step([70, 1, 5], [70, 1, 5], [RowState(0, NO_STATE), RowState(1, NO_STATE), RowState(2, NO_STATE)]))
    both.run(step([1, 1, 2], [71, 2, 7], [RowState(0, 0, ((71, 4),)), RowState(1, 1), RowState(2, 2, ((6, 5),))]))
    both.run(step([1, 66, 1], [72, 68, 8], [RowState(3, 4), RowState(1, 1, ((3, 6), (67, 7))), RowState(2, 2)]))
    both.run(step([3, 1, 1], [4, 72, 72], [RowState(1, 6), RowState(0, 0), RowState(3, 3)]))


def test_drafts(kernel_device):
    """Rows that keep their inputs, of which the next row puts some into the state: behind a prompt, from a snapshot,
    with copies on the way and at the same place; and a state of which nothing is known but its slot."""
    for name in ("fused", "gguf", "odd"):
        both = Both(SPECS[name], kernel_device, torch.float32, 2)
        both.run(step([6, 3], [6, 3], [RowState(0, NO_STATE, ((4, 5),)), RowState(1, NO_STATE, (), 0, True)]))
        both.run(step([4, 2], [10, 3], [RowState(0, 0, (), 0, True), RowState(1, 1, ((1, 6),), 1)]))
        both.run(
            step([3, 1], [11, 4], [RowState(0, 0, ((7, 6), (8, 7), (9, 5)), 2, True), RowState(1, 1, (), 0, True)])
        )
        both.run(
            step([2, 1, 4], [12, 5, 8], [RowState(0, 0, (), 2), RowState(1, 1, (), 1), RowState(2, 5, (), 0, True)])
        )


@pytest.mark.parametrize("seed", range(3))
def test_drawn_steps(kernel_device, seed):
    """Of rows that go on, of any number of tokens, saved and begun from anywhere."""
    drawn = random.Random(seed)
    both = Both(SPECS[drawn.choice(list(SPECS))], kernel_device, torch.float32, seed)
    lengths, kept, ready = [0] * 4, [0] * 4, [NO_STATE]
    for _ in range(6):
        rows = drawn.sample(range(4), drawn.randint(1, 4))
        free = list(range(4, 8))
        layout: list[tuple[int, int, RowState]] = []
        for row in rows:
            replayed = drawn.randint(1, kept[row]) if kept[row] else 0
            source = row if lengths[row] or replayed else drawn.choice(ready)
            if source not in (row, NO_STATE) and source in free:
                free.remove(source)
            tokens, keeps = drawn.choice([1, 1, 2, 4, 65, 130]), False
            if tokens <= 4:
                keeps = drawn.random() < 0.3
            begin, end = lengths[row], lengths[row] + replayed + tokens
            at = sorted(drawn.sample(range(begin + 1, end + 1), min(drawn.randint(0, 2), end - begin, len(free))))
            saves = tuple((position, free.pop()) for position in at)
            layout.append((tokens, end, RowState(row, source, saves, replayed, keeps)))
            lengths[row] = begin + replayed if keeps else end
            kept[row] = tokens if keeps else 0
        sources = {state.source for _, _, state in layout}
        layout = [(n, end, replace_saves(state, sources)) for n, end, state in layout]
        both.run(step(*map(list, zip(*layout, strict=True))))
        ready = [NO_STATE, *(slot for _, _, state in layout for _, slot in state.saves)]


def replace_saves(state: RowState, read: set[int]) -> RowState:
    """Nobody writes to a slot that a row begins from."""
    saves = tuple(each for each in state.saves if each[1] not in read)
    return RowState(state.slot, state.source, saves, state.replayed, state.keeps)


@pytest.mark.parametrize("rows", [1, 3])
def test_padded_rows_change_no_state(kernel_device, rows):
    both = Both(SPEC, kernel_device, torch.float32, 3)
    both.run(step([4] * rows, [4] * rows, [RowState(row, NO_STATE) for row in range(rows)]))
    states = [RowState(row, row, ((5, 5),) if row == 0 else ()) for row in range(rows)]
    given = inputs_of(SPEC, 8, both.g, both.dtype, kernel_device)
    both.oracle.plan(step([1] * rows, [5] * rows, states))
    first = DeltaInputs([part[:rows] for part in given.wide], [part[:rows] for part in given.gates])
    expected = both.oracle.mix(3, first, both.vectors)
    filled = [*states, *[RowState(NO_STATE, NO_STATE)] * (8 - rows)]
    both.ours.plan(step([1] * 8, [5] * rows + [1] * (8 - rows), filled, padded=True))
    close(both.ours.mix(3, given, both.vectors)[:rows], expected, 2e-5)
    both.compare()


def test_long_rows_in_a_padded_step_are_an_error(kernel_device):
    both = Both(SPEC, kernel_device, torch.float32, 3)
    with pytest.raises(EngineError, match="longer ones"):
        both.ours.plan(step([2], [2], [RowState(0, NO_STATE)], padded=True))
    with pytest.raises(EngineError, match="plan"):
        GpuDeltaNet(SPEC, [0], SLOTS, kernel_device, 8).mix(0, DeltaInputs([], []), both.vectors)


@pytest.mark.parametrize("strength", [0.0, 5.0, 40.0])
def test_what_depends_most_on_earlier_tokens(kernel_device, strength):
    """Nothing or nearly all is forgotten, and all keys are nearly the same."""
    both = Both(SPECS["apart"], kernel_device, torch.float32, 4)
    both.vectors = replace(both.vectors, decay=-strength * torch.ones(4, device=kernel_device))
    given = inputs_of(both.spec, 130, both.g, both.dtype, kernel_device)
    alike = given.wide[0][:1] + 0.01 * given.wide[0]
    given = DeltaInputs([alike, given.wide[1]], [given.gates[0] + 4, given.gates[1]])
    outs = []
    for backend in (both.oracle, both.ours):
        backend.plan(step([130], [130], [RowState(0, NO_STATE)]))
        outs.append(backend.mix(3, given, both.vectors))
    close(outs[1], outs[0], 1e-4)
    close(both.ours.slots[3].states[0], both.oracle.states[3][0], 1e-4)
