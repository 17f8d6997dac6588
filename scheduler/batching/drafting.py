"""Draft tokens into what a step has left."""

from __future__ import annotations

from msgspec.structs import replace

from scheduler.core import Core
from scheduler.drafts.drafter import Drafter, Place
from scheduler.drafts.gain import MOST_DRAFTS
from scheduler.plan import StepPlan, StepRow
from scheduler.request import Request, Status


def add_drafts(core: Core, rows: list[StepRow], owed: int) -> None:
    """Into tokens and blocks that nobody else wants; `owed` blocks are wanted by others. Those that turn out not to be
    needed come back at once."""
    if core.drafter is not None and core.drafter.may_look_up:
        with core.drafter.measured():
            _add_drafts(core, core.drafter, rows, owed)


def _add_drafts(core: Core, drafter: Drafter, rows: list[StepRow], owed: int) -> None:
    blocks, config = core.blocks, core.config
    budget = min(config.max_num_batched_tokens - sum(row.num_tokens for row in rows), MOST_DRAFTS)
    spare = blocks.num_free - owed
    places: dict[int, Place] = {}
    decoding = 0
    for i, row in enumerate(rows):
        request = row.request
        if not (row.is_decode and row.samples):
            continue
        decoding += 1
        if request.num_in_flight > 1 or not drafter.is_due(request):
            continue  # its last token is not known, or it rests
        end = row.start + 1
        room = (len(request.blocks) + max(0, spare)) * blocks.block_size - end
        if (most := min(budget, room, _wanted(core, request, len(request.output), end))) > 0:
            places[i] = Place(request, most)
    if not places:
        return
    chosen = drafter.drafts(list(places.values()), decoding, mixed=decoding < len(rows))
    for (i, (request, _)), proposed in zip(places.items(), chosen, strict=True):
        end = rows[i].start + 1
        room = (len(request.blocks) + max(0, spare)) * blocks.block_size - end
        drafts = tuple(proposed[: min(budget, room)])
        if drafts:
            spare += len(request.blocks)
            blocks.grow(request, end + len(drafts))
            spare -= len(request.blocks)
            budget -= len(drafts)
            request.num_drafts = len(drafts)
            state = None if core.states is None else core.states.keep(request, rows[i])
            rows[i] = replace(rows[i], num_tokens=1 + len(drafts), drafts=drafts, state=state)


def drafts_follow(core: Core, drafter: Drafter, plan: StepPlan) -> bool:
    """Whether drafts are expected to pay behind the tokens of `plan`, which is in flight."""
    if not drafter.may_look_up:
        return False
    places, decoding = [], 0
    with drafter.measured():
        for row in plan.rows:
            request = row.request
            if not (row.is_decode and row.samples) or request.status is not Status.RUNNING:
                continue
            decoding += 1
            if not drafter.is_due(request):
                continue
            if (most := _wanted(core, request, len(request.output) + 1, row.start + 2)) > 0:
                places.append(Place(request, most))
        return bool(places) and drafter.follow(places, decoding, mixed=decoding < len(plan.rows))


def _wanted(core: Core, request: Request, output: int, end: int) -> int:
    """Drafts that its limits leave to a request with `output` tokens of output, behind the position before `end`."""
    return min(request.sampling.max_tokens - output, core.config.max_tokens_held - end) - 1
