"""Batches: padding, and packed rows whose samples never attend to one another.

Labels of padding are `IGNORED`. Rows are padded on the right, so that causal attention never looks at padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.build import IGNORED, Item

NO_SEGMENT = -1  # of padding


@dataclass(frozen=True)
class PaddingCollator:
    """Items {input_ids, labels} -> input_ids, labels, position_ids, attention_mask: int64 [rows, longest]. The mask is
    1 on tokens and 0 on padding. `multiple`: the length is rounded up to one of it."""

    pad_id: int
    multiple: int = 8

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        length = _length(items, self.multiple)
        mask = _padded([[1] * len(item["input_ids"]) for item in items], length, 0)
        return {
            "input_ids": _padded([item["input_ids"] for item in items], length, self.pad_id),
            "labels": _padded([item["labels"] for item in items], length, IGNORED),
            "position_ids": torch.arange(length).expand(len(items), length).contiguous(),
            "attention_mask": mask,
        }


@dataclass(frozen=True)
class PackingCollator:
    """Items of a PackedDataset -> input_ids, labels, position_ids, segments: int64 [rows, longest], and attention_mask
    [rows, 1, longest, longest]: a token sees those before it in its own sample and itself. Items of one sample each,
    as evaluation's are, are padded (`PaddingCollator`).

    The mask is explicit because transformers finds samples by their positions only where no cache is made. sdpa takes a
    bool mask (True: seen); eager attention adds its mask to the scores, so it is `dtype`: 0 where seen, else the
    smallest number. Padding is a segment of its own in which each token sees itself alone: no row of the mask is
    empty, which would make NaN.
    """

    pad_id: int
    attention: str = "sdpa"
    dtype: torch.dtype = torch.float32
    multiple: int = 8

    def __post_init__(self) -> None:
        if self.attention not in ("sdpa", "eager"):
            raise ValueError(f"packed rows need attention sdpa or eager, not {self.attention}")

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        if "segments" not in items[0]:
            return PaddingCollator(self.pad_id, self.multiple)(items)
        length = _length(items, self.multiple)
        segments = _padded([item["segments"] for item in items], length, NO_SEGMENT)
        labels = _padded([item["labels"] for item in items], length, IGNORED)
        positions = _padded([item["position_ids"] for item in items], length, 0)
        labels[positions == 0] = IGNORED  # a sample's first token is not foretold by the sample before it
        return {
            "input_ids": _padded([item["input_ids"] for item in items], length, self.pad_id),
            "labels": labels,
            "position_ids": positions,
            "segments": segments,
            "attention_mask": self._mask(block_diagonal(segments)),
        }

    def _mask(self, seen: Tensor) -> Tensor:
        if self.attention == "sdpa":
            return seen
        return torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, torch.finfo(self.dtype).min)


@dataclass(frozen=True)
class PreferenceCollator:
    """Items {prompt_ids, chosen_ids, rejected_ids} -> what PaddingCollator makes of 2 x items rows: all chosen answers
    behind their prompts, then all rejected ones. Labels are the answers'."""

    pad_id: int
    multiple: int = 8

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        rows = [_answered(item, name) for name in ("chosen_ids", "rejected_ids") for item in items]
        return PaddingCollator(self.pad_id, self.multiple)(rows)


def block_diagonal(segments: Tensor) -> Tensor:
    """[rows, tokens] int64 -> bool [rows, 1, tokens, tokens]: which keys (last) each query sees."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    padding = (segments == NO_SEGMENT)[:, :, None] & ~torch.eye(length, dtype=torch.bool)
    return (same & causal & ~padding)[:, None]


def _answered(item: Item, name: str) -> Item:
    prompt, answer = item["prompt_ids"], item[name]
    return {"input_ids": [*prompt, *answer], "labels": [IGNORED] * len(prompt) + list(answer)}


def _length(items: Sequence[Item], multiple: int) -> int:
    longest = max(len(item["input_ids"]) for item in items)
    return -(-longest // multiple) * multiple


def _padded(rows: Sequence[Sequence[int]], length: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)
