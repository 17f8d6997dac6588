"""Draft tokens into what a step has left."""

from __future__ import annotations

from msgspec.structs import replace

from scheduler.core import Core
from scheduler.plan import StepRow


def add_drafts(core: Core, rows: list[StepRow], owed: int) -> None:
    """Into tokens and blocks that nobody else wants; `owed` blocks are wanted by others. Those that turn out not to be
    needed come back at once."""
    proposer, blocks, config = core.proposer, core.blocks, core.config
    if proposer is None:
        return
    budget = config.max_num_batched_tokens - sum(row.num_tokens for row in rows)
    spare = blocks.num_free - owed
    for i, row in enumerate(rows):
        request = row.request
        if not (row.is_decode and row.samples) or request.num_in_flight > 1:
            continue  # its last token is not known
        end = row.start + 1
        room = (len(request.blocks) + max(0, spare)) * blocks.block_size - end
        wanted = min(request.sampling.max_tokens - len(request.output), config.max_tokens_held - end) - 1
        count = min(budget, room, wanted)
        drafts = tuple(proposer.propose(request)[:count]) if count > 0 else ()
        if drafts:
            spare += len(request.blocks)
            blocks.grow(request, end + len(drafts))
            spare -= len(request.blocks)
            budget -= len(drafts)
            request.num_drafts = len(drafts)
            rows[i] = replace(row, num_tokens=1 + len(drafts), drafts=drafts)
