"""Token rows for training: conversations packed side by side into rows of fixed length."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo.texts import tools
from demo.texts.dialogue import conversation, document
from demo.tokenizer import END_OF_TEXT, IM_END, IM_START, token_id

DOCUMENT_SHARE: Final = 0.04  # of the base model's texts are without turns
TOOL_SHARE: Final = 0.16  # of them call tools or fill in JSON
_CHUNK: Final = 5000  # conversations that one worker packs at a time


@dataclass(frozen=True)
class Rows:
    """N rows of L tokens. ids uint16 [N, L]; segment uint8 [N, L]: which text of the row, 0 = padding;
    learn bool [N, L]: whether the token counts as a target."""

    ids: npt.NDArray[np.uint16]
    segment: npt.NDArray[np.uint8]
    learn: npt.NDArray[np.bool_]

    @property
    def num_tokens(self) -> int:
        return int((self.segment > 0).sum())


def _sequences(tokenizer: Tokenizer, seed: int, count: int, style: str) -> Iterator[tuple[list[int], list[bool]]]:
    """Each text's token ids and which of them are targets: an answer and its end mark, or the whole of a document."""
    rng = random.Random(f"{style}-{seed}")
    start, end, stop = (token_id(tokenizer, t) for t in (IM_START, IM_END, END_OF_TEXT))
    newline = tokenizer.encode("\n").ids
    pieces: list[str] = []
    plans: list[list[bool] | None] = []  # per text: for each message whether it is a target; None = a document
    for _ in range(count):
        if style == "plain" and rng.random() < DOCUMENT_SHARE:
            pieces.append(document(rng))
            plans.append(None)
            continue
        with_tools = style == "plain" and rng.random() < TOOL_SHARE
        messages, first = tools.case(rng) if with_tools else conversation(rng, style)
        for message in messages:
            pieces += [message["role"] + "\n", message["content"]]
        plans.append([m["role"] == "assistant" and i >= first for i, m in enumerate(messages)])
    encoded = iter(tokenizer.encode_batch(pieces, add_special_tokens=False))
    for plan in plans:
        if plan is None:
            text = [*next(encoded).ids, stop]
            yield text, [True] * len(text)
            continue
        ids: list[int] = []
        learn: list[bool] = []
        for is_target in plan:
            head, body = next(encoded).ids, next(encoded).ids
            ids += [start, *head, *body, end, *newline]
            learn += [False] * (1 + len(head)) + [is_target] * (len(body) + 1) + [False] * len(newline)
        yield ids, learn


def _pack(tokenizer_json: str, seed: int, count: int, style: str, length: int) -> Rows:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rows: list[tuple[list[int], list[int], list[bool]]] = []
    open_rows: list[tuple[list[int], list[int], list[bool]]] = []  # a few, so that short texts fill the gaps
    for ids, learn in _sequences(tokenizer, seed, count, style):
        if len(ids) > length:
            continue
        row = next((r for r in open_rows if len(r[0]) + len(ids) <= length), None)
        if row is None:
            row = ([], [], [])
            open_rows.append(row)
            if len(open_rows) > 8:
                rows.append(open_rows.pop(0))
        segment = (row[1][-1] if row[1] else 0) + 1
        row[0].extend(ids)
        row[1].extend([segment] * len(ids))
        row[2].extend(learn)
    rows += open_rows
    out = Rows(
        np.zeros((len(rows), length), np.uint16),
        np.zeros((len(rows), length), np.uint8),
        np.zeros((len(rows), length), np.bool_),
    )
    for i, (row_ids, row_segment, row_learn) in enumerate(rows):
        n = len(row_ids)
        out.ids[i, :n], out.segment[i, :n], out.learn[i, :n] = row_ids, row_segment, row_learn
    return out


def build_rows(
    tokenizer: Tokenizer, style: str, count: int, length: int = 512, seed: int = 0, workers: int = 1
) -> Rows:
    """`count` texts of a style, packed. The same rows for the same arguments, whatever the number of workers."""
    text = tokenizer.to_str()
    sizes = [min(_CHUNK, count - at) for at in range(0, count, _CHUNK)]
    if workers > 1 and len(sizes) > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            jobs = [pool.submit(_pack, text, seed * 100_000 + i, n, style, length) for i, n in enumerate(sizes)]
            parts = [job.result() for job in jobs]
    else:
        parts = [_pack(text, seed * 100_000 + i, n, style, length) for i, n in enumerate(sizes)]
    return Rows(
        np.concatenate([p.ids for p in parts]),
        np.concatenate([p.segment for p in parts]),
        np.concatenate([p.learn for p in parts]),
    )
