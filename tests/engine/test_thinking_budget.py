"""Reasoning ends where its budget does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from engine.grammar.masks import allowed_words, masks_of
from engine.steps.limits import check_sampling
from scheduler.request import SamplingParams, ThinkingBudget

VOCABULARY = 70
BEGIN, END = 66, 67
CLOSING = (3, END, 4)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=40, max_size=40),
    st.integers(0, 20),
    st.sampled_from([None, BEGIN]),
    st.integers(0, 9),
)
def test_the_closing_tokens_come_when_the_budget_is_spent(
    wished: list[int], budget: int, begin: int | None, before: int
) -> None:
    """A model that wishes for any tokens, and gets them where the masks allow it."""
    if begin is not None:
        wished = [0] * before + [begin] + [token for token in wished if token != begin]
    thinking = ThinkingBudget(budget, begin, END, CLOSING)
    (mask,) = masks_of(SamplingParams(thinking=thinking), (), VOCABULARY)
    output: list[int] = []
    for token in wished:
        words = allowed_words([mask], output, VOCABULARY)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCABULARY]
        if not mask.applies(len(output)):
            assert allowed.all()
        output.append(token if allowed[token] else int(allowed.argmax()))
    start = 0 if begin is None else before + 1
    late = begin is not None and before >= 8  # too late to be the beginning of reasoning
    if late or END in wished[start : start + budget]:
        assert output == wished
    else:
        over = start + budget
        assert output[:over] == wished[:over]
        assert tuple(output[over : over + len(CLOSING)]) == CLOSING[: len(output) - over]
        assert output[over + len(CLOSING) :] == wished[over + len(CLOSING) :]


@pytest.mark.parametrize(
    "budget", [ThinkingBudget(-1, None, 1, (1,)), ThinkingBudget(1, 70, 1, (1,)), ThinkingBudget(1, None, 1, (2,))]
)
def test_a_budget_that_cannot_be_kept_is_refused(budget: ThinkingBudget) -> None:
    with pytest.raises(UserError, match="thinking_token_budget"):
        check_sampling(SamplingParams(thinking=budget), (), VOCABULARY)
