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
SPECS = [GrammarSpec("regex", f"{spaces}[abc]{{2,6}}true") for spaces in ("", r"[ \n]{0,3}")]
SPACES = frozenset(i for i, token in enumerate(TOKENS) if token.isspace())
WISHES = [*b"abc {}\n", THINK, THOUGHT, END, TOKENS.index(b"true"), TOKENS.index(b"ab")]


@pytest.fixture(scope="module")
def executor() -> LLExecutor:
    return LLExecutor(1)


def mask_of(spec: GrammarSpec, after: int | None, opens: int | None) -> GrammarMask:
    mask = GrammarMask(after, opens, SPACES)
    mask.matcher = matcher_of(spec, TOKENIZER)
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


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(SPECS), st.sampled_from(["open", "may come", "off"]), st.integers(0, 10**6))
def test_what_follows_reasoning_keeps_to_the_grammar(
    executor: LLExecutor, spec: GrammarSpec, reasoning: str, seed: int
) -> None:
    mask = mask_of(spec, None if reasoning == "off" else THOUGHT, THINK if reasoning == "may come" else None)
    output, ended = written(executor, mask, seed)
    reads = Segments(Layout(thinks=reasoning != "off", thinking=reasoning == "open"))
    text = b"".join(TOKENS[token] for token in output).decode()
    deltas = joined([*reads.push(text), *reads.finish()])
    answer = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    first = next((token for token in output if token not in SPACES), None)
    thought = any(isinstance(delta, Reasoning) for delta in deltas) or first == THINK
    behind = reasoning == "off" or (reasoning == "may come" and first != THINK) or THOUGHT in output
    if ended and behind:
        assert re.fullmatch(rf"\s*{spec.text}", answer)
    elif behind:
        assert re.fullmatch(r"\s*[abc]{0,6}(true)?", answer)
    if reasoning == "off":
        assert not thought


@settings(max_examples=160, deadline=None)
@given(
    st.sampled_from(SPECS), st.sampled_from([None, THINK]), st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 6)
)
def test_drafts_are_masked_as_steps_are(
    executor: LLExecutor, spec: GrammarSpec, opens: int | None, seed: int, done: int, drafted: int
) -> None:
    output, _ = written(executor, mask_of(spec, THOUGHT, opens), seed)
    before, drafts = output[:done], output[done : done + drafted]
    at_once = allowed_after(executor, mask_of(spec, THOUGHT, opens), before, drafts)
    mask = mask_of(spec, THOUGHT, opens)
    for count, allowed in enumerate(at_once):
        assert allowed_after(executor, mask, before + drafts[:count], []) == [allowed]


def test_reasoning_may_come_behind_white_space(executor: LLExecutor) -> None:
    """As GLM-4.6 writes it. Behind the reasoning the grammar starts from its beginning."""
    mask = mask_of(SPECS[1], THOUGHT, THINK)
    assert THINK in allowed_after(executor, mask, [*b"\n"], [])[0]
    begun, _, thinking = allowed_after(executor, mask, [*b"\n"], [*b"\n", THINK])
    assert THINK in begun and len(thinking) == len(TOKENS)
    (behind,) = allowed_after(executor, mask, [*b"\n", THINK, *b"x\n", THOUGHT], [])
    assert behind == allowed_after(executor, mask_of(SPECS[1], None, None), [], [])[0]
    assert THINK not in allowed_after(executor, mask_of(SPECS[1], THOUGHT, THINK), [*b"\na"], [])[0]
