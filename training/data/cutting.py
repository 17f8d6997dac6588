"""Samples that are too long are cut as LLaMA-Factory cuts them. Torch-free.

Turn by turn, each a prompt and its answer, of the room that is left: where the answer fills less than half of it the
prompt's end goes first, else, where the prompt does, the answer's; where both are long each keeps its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def kept(prompt: int, answer: int, room: int) -> tuple[int, int]:
    """Tokens that are kept of a prompt and of its answer, from the first."""
    if prompt + answer <= room:
        return prompt, answer
    if 2 * answer < room:
        most = room
    elif 2 * prompt < room:
        most = room - prompt
    else:
        most = room * answer // (prompt + answer)
    answer = min(answer, most)
    return min(prompt, max(room - answer, 0)), answer


def cut(ids: Sequence[int], learnt: Sequence[bool], limit: int) -> tuple[list[int], list[bool]]:
    """At most `limit` tokens of a sample; `learnt` says which are of answers."""
    ends = [0]
    for _, flags in groupby(learnt):
        ends.append(ends[-1] + len(list(flags)))
    if learnt and learnt[0]:
        ends.insert(0, 0)  # no prompt before the first answer
    if len(ends) % 2 == 0:
        ends.append(ends[-1])  # no answer behind the last prompt
    left_ids: list[int] = []
    left_learnt: list[bool] = []
    for start, middle, end in zip(ends[::2], ends[1::2], ends[2::2], strict=False):
        prompt, answer = kept(middle - start, end - middle, limit - len(left_ids))
        for first, count in ((start, prompt), (middle, answer)):
            left_ids += ids[first : first + count]
            left_learnt += learnt[first : first + count]
        if len(left_ids) >= limit:
            break
    return left_ids, left_learnt
