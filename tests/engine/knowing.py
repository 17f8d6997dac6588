"""Drafts of texts that are known beforehand."""

from __future__ import annotations

import torch

from scheduler.drafts import Proposal
from scheduler.request import Request


class Knowing:
    """Drafts whose beginning is right; none where an answer is none of the texts."""

    def __init__(self, texts: list[list[int]], seed: int) -> None:
        self._texts, self._g = texts, torch.Generator().manual_seed(seed)

    def propose(self, request: Request, most: int) -> Proposal:
        known = [*request.prompt, *request.output]
        text = next((each for each in self._texts if each[: len(known)] == known), known)
        right, wrong = torch.randint(0, most + 1, (2,), generator=self._g).tolist()
        coming = text[len(known) :]
        drafts = [*coming[:right], *[(token + 1) % 128 for token in coming[right : right + wrong]]]
        return Proposal(drafts[:most], 9)

    def end(self, request: Request) -> None:
        pass
