"""The tokenizer and the rows made with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo.corpus import build_rows
from demo.texts import tools
from demo.texts.dialogue import conversation, document
from demo.texts.world import Message
from demo.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    IM_START,
    SPECIAL,
    VOCAB_SIZE,
    load_tokenizer,
    render,
    save_tokenizer,
    token_id,
)


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [token_id(tokenizer, t) for t in SPECIAL] == [VOCAB_SIZE - 3, VOCAB_SIZE - 2, VOCAB_SIZE - 1]
    assert tokenizer.encode(f"{IM_START}user\n{IM_END}").tokens[0] == IM_START
    with pytest.raises(KeyError, match="no token"):
        token_id(tokenizer, "<|nothing|>")


@settings(derandomize=True, max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    normal = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == normal


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("What is 123 + 45?").tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == ["1", "2", "3", "4", "5"]


def _template() -> Any:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment()
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = tools.dumps
    return environment.from_string(CHAT_TEMPLATE)


def test_template_is_what_the_training_saw() -> None:
    rng = random.Random(0)
    template = _template()
    for _ in range(300):
        messages, _first = conversation(rng)
        assert template.render(messages=messages) == render(messages)
        rendered = template.render(messages=messages[:-1], add_generation_prompt=True)
        assert rendered == render(messages[:-1], True)
        assert render(messages).startswith(rendered)
    with pytest.raises(jinja2.TemplateError, match="unknown role: critic"):
        template.render(messages=[{"role": "critic", "content": "x"}])


@pytest.mark.parametrize("system", ["", "Be kind."])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_are_rendered_as_the_training_saw_them(system: str, as_text: bool) -> None:
    arguments = [{"city": "Rome"}, {"city": 'A "B"'}]
    calls = [
        {"function": {"name": "get_time", "arguments": tools.dumps(each) if as_text else each}} for each in arguments
    ]
    both = [tools.WEATHER, tools.CLOCK]
    openai = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "Late."},
    ]
    trained: list[Message] = [
        {"role": "system", "content": tools.system_text(both, system)},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "\n".join(tools.call_text("get_time", each) for each in arguments)},
        {"role": "user", "content": tools.result_text("{}")},
        {"role": "assistant", "content": "Late."},
    ]
    assert _template().render(messages=openai, tools=both) == render(trained)


def test_saved_form_loads_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    rng = random.Random(1)
    for _ in range(50):
        messages, _ = conversation(rng)
        text = theirs.apply_chat_template(messages, tokenize=False)
        assert text == render(messages)
        assert theirs.encode(text) == load_tokenizer(tmp_path).encode(text).ids
    assert theirs.eos_token == IM_END and theirs.pad_token == END_OF_TEXT


def test_rows_hold_the_conversations(tokenizer: Tokenizer) -> None:
    rows = build_rows(tokenizer, "json", 300, length=128, seed=1)
    assert rows.ids.shape == rows.segment.shape == rows.learn.shape
    assert rows.num_tokens / rows.ids.size > 0.85
    start, end = token_id(tokenizer, IM_START), token_id(tokenizer, IM_END)
    seen = 0
    for ids, segment, learn in zip(rows.ids, rows.segment, rows.learn, strict=True):
        assert not learn[segment == 0].any()
        for s in range(1, int(segment.max()) + 1):
            text = ids[segment == s]
            assert text[0] == start
            taught = text[learn[segment == s]]
            assert taught[-1] == end  # an answer teaches its end mark
            assert tokenizer.encode(tokenizer.decode(text.tolist(), skip_special_tokens=False)).ids == text.tolist()
            seen += 1
    assert seen > 280


def test_rows_are_the_same_by_seed(tokenizer: Tokenizer) -> None:
    one, two, other = (build_rows(tokenizer, "plain", 200, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one.ids, two.ids) and np.array_equal(one.learn, two.learn)
    assert not np.array_equal(one.ids[:5], other.ids[:5])


def test_all_styles_are_cheap_in_tokens(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    text = [document(rng) for _ in range(200)]
    ids = tokenizer.encode_batch(text)
    assert sum(len(e.ids) for e in ids) < 0.6 * sum(map(len, text))
