"""Histories of twenty turns of what vendors publish, parts of them broken, become prompts of any template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import beta as claude_beta
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import chat
from openai.types import responses as codex

from api.dialects.forms import FORMS
from api.errors import ApiError
from api.prepare.job import Job, Kind, Prepared
from api.prepare.prompts import Preparer
from api.text.tokenizer import load_tokenizer
from testing.fuzz.broken import FINITE, broken
from tests.api.test_vendor_chats import TEMPLATES
from tests.api.vendor_types import examples, members

TURNS = 20
USER = {"role": "user", "content": "go on"}


def _objects(union: Any) -> list[Any]:
    return [each for each in members(union) if isinstance(each, type) and hasattr(each, "__required_keys__")]


def _of(kinds: list[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(kinds).flatmap(examples)


_ARGUMENTS: st.SearchStrategy[Any] = st.sampled_from(["{}", '{"a": 1}', "[1]", "", "{", "null", '"x"', {"a": [1]}])
_CALL = st.builds(
    lambda name, arguments, number: {
        "id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments},
    },
    st.sampled_from(["f", "g", "n__f", "a b"]), _ARGUMENTS, st.integers(0, 3),
)  # fmt: skip
_CHATS = st.one_of(
    _of(_objects(chat.ChatCompletionMessageParam)),
    st.builds(
        lambda calls, text: {"role": "assistant", "content": text, "tool_calls": calls},
        st.lists(_CALL, max_size=3), st.sampled_from([None, "", "so"]),
    ),
    st.builds(
        lambda number, text: {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
        st.integers(0, 3), st.sampled_from(["", "ok", "[1]"]),
    ),
)  # fmt: skip
_OLLAMA = st.one_of(
    _CHATS,
    st.builds(
        lambda name, arguments: {
            "role": "assistant", "content": "", "thinking": "hm", "images": ["aGk="],
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        },
        st.sampled_from(["f", "g"]), _ARGUMENTS,
    ),
    st.just({"role": "tool", "tool_name": "f", "content": "ok"}),
)  # fmt: skip
_BLOCKS = _of(_objects(claude_beta.BetaContentBlockParam))
_CLAUDE = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant"]),
    st.one_of(st.just("so"), st.lists(_BLOCKS, max_size=3)),
)
_ITEMS = _of(_objects(codex.ResponseInputItemParam))
PATHS: dict[Kind, tuple[str, st.SearchStrategy[Any]]] = {
    Kind.CHAT: ("messages", _CHATS),
    Kind.MESSAGES: ("messages", _CLAUDE),
    Kind.RESPONSES: ("input", _ITEMS),
    Kind.COMPACT: ("input", _ITEMS),
    Kind.OLLAMA_CHAT: ("messages", _OLLAMA),
}


def histories(turns: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Each third turn is broken. At the end the user asks for something."""
    some = st.lists(
        st.one_of(turns, turns, turns.flatmap(lambda turn: broken(turn, FINITE))), min_size=1, max_size=TURNS
    )
    return some.map(lambda made: [*made, {"role": "assistant", "content": "ok"}, USER])


@pytest.fixture(scope="session")
def prepare(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Kind, Any], Prepared]:
    """Of a body, for a model with one of the templates."""
    preparers: dict[str, Preparer] = {}
    for name, template in {**TEMPLATES, "plain": None}.items():
        path = None
        if template is not None:
            path = tmp_path_factory.mktemp(name) / "template.jinja"
            path.write_text(template)
        tokenizer = load_tokenizer(model_dir, None, path)
        preparers[name] = Preparer(tokenizer, FORMS, trust_control_tokens=False, unknown_fields="warn")

    def prepare(name: str, kind: Kind, body: Any) -> Prepared:
        return preparers[name].prepare(Job(kind, 512, 1 << 20), json.dumps(body).encode())

    return prepare


@pytest.mark.parametrize("kind", PATHS, ids=lambda kind: str(kind.value))
def test_any_history_becomes_a_prompt(prepare: Callable[[str, Kind, Any], Prepared], kind: Kind) -> None:
    field, turns = PATHS[kind]

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(histories(turns), st.sampled_from([*TEMPLATES, "plain"]))
    def check(history: list[Any], template: str) -> None:
        try:
            made = prepare(template, kind, {field: history})
        except ApiError as error:
            pytest.fail(f"{template}: {error.message}: {json.dumps(history)}")
        assert made.prompts[0]

    check()
