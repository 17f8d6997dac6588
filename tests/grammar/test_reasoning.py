"""Reasoning before a grammar, without a model: a writer of random wishes, the masks, and the machine that reads it."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor

from api.text.deltas import Reasoning, Text, joined
from api.text.segments import Layout, Segments
from engine.grammar.compile import matcher_of, tokenizer_of
from engine.grammar.mask import GrammarMask, all_ones, fill
from engine.messages import GrammarSpec
from tests.grammar.vocabulary import END, THINK, THOUGHT, TOKENS, VOCABULARY

TOKENIZER = tokenizer_of(VOCABULARY, [END], len(TOKENS))
SPEC = GrammarSpec("regex", "[abc]{2,6}true")
WISHES = [*b"abc {}", THINK, THOUGHT, END, TOKENS.index(b"true"), TOKENS.index(b"ab")]


@pytest.fixture(scope="module")
def executor() -> LLExecutor:
    return LLExecutor(1)


def mask_of(after: int | None, opens: int | None) -> GrammarMask:
    mask = GrammarMask(after, opens)
    mask.matcher = matcher_of(SPEC, TOKENIZER)
    return mask


def allowed_after(executor: LLExecutor, mask: GrammarMask, output: list[int], drafts: list[int]) -> list[set[int]]:
    """After the output, and after each of the drafts."""
    words = all_ones(1 + len(drafts), len(TOKENS))
    fill(executor, [(mask, output, drafts)], words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : len(TOKENS)]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def written(executor: LLExecutor, mask: GrammarMask, seed: int) -> tuple[list[int], bool]:
    """Tokens, and whether they came to an end."""
    chance, output = random.Random(seed), list[int]()
    while len(output) < 60:
        (allowed,) = allowed_after(executor, mask, output, [])
        wished = [token for token in WISHES if token in allowed]
        token = chance.choice(wished or sorted(allowed))
        if token == END:
            return output, True
        output.append(token)
    return output, False


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["open", "may come", "off"]), st.integers(0, 10**6))
def test_what_follows_reasoning_keeps_to_the_grammar(executor: LLExecutor, reasoning: str, seed: int) -> None:
    mask = mask_of(None if reasoning == "off" else THOUGHT, THINK if reasoning == "may come" else None)
    output, ended = written(executor, mask, seed)
    reads = Segments(Layout(thinks=reasoning != "off", thinking=reasoning == "open"))
    text = b"".join(TOKENS[token] for token in output).decode()
    deltas = joined([*reads.push(text), *reads.finish()])
    answer = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    thought = any(isinstance(delta, Reasoning) for delta in deltas) or output[:1] == [THINK]
    behind = reasoning == "off" or (reasoning == "may come" and output[0] != THINK) or THOUGHT in output
    if ended and behind:
        assert re.fullmatch(SPEC.text, answer)
    elif behind:
        assert re.fullmatch("[abc]{0,6}(true)?", answer)
    if reasoning == "off":
        assert not thought


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([None, THINK]), st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 6))
def test_drafts_are_masked_as_steps_are(
    executor: LLExecutor, opens: int | None, seed: int, done: int, drafted: int
) -> None:
    output, _ = written(executor, mask_of(THOUGHT, opens), seed)
    before, drafts = output[:done], output[done : done + drafted]
    at_once = allowed_after(executor, mask_of(THOUGHT, opens), before, drafts)
    mask = mask_of(THOUGHT, opens)
    for count, allowed in enumerate(at_once):
        assert allowed_after(executor, mask, before + drafts[:count], []) == [allowed]
