"""What of a chat's tokens chats behind the same system message and tools share."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from api.bodies.parsing import Notes
from api.prepare.chat import Chats
from api.text.bytelevel import byte_level_tokenizer, byte_of_char
from api.text.calls.definitions import ToolUse, tool_use
from api.text.parts import part_ends
from api.text.shared import shared_length
from api.text.template import ChatTemplate
from api.text.tokenizer import Encoded, Tokenizer
from tests.api.conftest import MERGES, SPECIAL, TEMPLATE
from tests.api.test_control import THINKING
from tests.api.test_template import QWEN_STYLE

TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{%- for tool in tools %}{{- '<tool_call>' + tool | tojson + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user query.') }}{% endif %}
{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
ESCAPED = "{% for m in messages %}<|im_start|>{{ m | tojson(ensure_ascii=true) }}<|im_end|>\n{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"  # no control token closes a message
REFUSING = "{% if messages | length < 3 %}{{ raise_exception('more') }}{% endif %}" + TEMPLATE
NEWLINE = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("u", "s"), ("e", "r"), ("us", "er")]


def tokenizer(template: str) -> Tokenizer:
    """Byte-level, with tokens of several line ends: what a client writes may grow into what stands before it."""
    merges = [*MERGES, *NEWLINE]
    tokens = [*SPECIAL, *byte_of_char(), *map("".join, merges), "<tool>"]
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    added.append(AddedToken("<tool>", special=False, normalized=False))
    return Tokenizer(byte_level_tokenizer(tokens, merges, added), ChatTemplate(template, {}), "test")


TEMPLATES = {
    "chatml": TEMPLATE,
    "thinking": THINKING,
    "qwen": QWEN_STYLE,
    "tools": TOOLS,
    "escaped": ESCAPED,
    "plain": PLAIN,
}
TOKENIZERS = {name: tokenizer(source) for name, source in {**TEMPLATES, "refusing": REFUSING}.items()}
FRAGMENTS = st.sampled_from(
    [*SPECIAL, "|", "<tool>", "<think>", "</think>", "\n", "\n\n", " ", "é", "\\u", "0", "user"]
)
WRITTEN = st.lists(FRAGMENTS | st.text(max_size=4), max_size=6).map("".join)
PARTS = st.lists(WRITTEN, min_size=1, max_size=2).map(lambda texts: [{"type": "text", "text": text} for text in texts])
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WRITTEN | PARTS})
TURNS = st.lists(TURN, max_size=3)
USER = {"role": "user", "content": "hello"}


def use_of(names: list[str]) -> ToolUse | None:
    tools = [{"type": "function", "function": {"name": name, "description": f"{name}|"}} for name in names]
    return tool_use(tools, [], None, None, parallel=True).use


def encoded(name: str, messages: list[dict[str, Any]], use: ToolUse | None = None) -> tuple[list[int], int]:
    """Token ids of the prompt, and how many others share."""
    return prompt_of(name, messages, use)[:2]


def prompt_of(name: str, messages: list[dict[str, Any]], use: ToolUse | None = None) -> Encoded:
    made = TOKENIZERS[name]
    assert made.template is not None
    chats = Chats(made, made.template, trust_control_tokens=False)
    how = {"add_generation_prompt": True, "continue_final_message": False}
    return made.encode_shared(chats.rendered(messages, {}, use, Notes("ignore"), keeps_states=True, **how))


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(TEMPLATES)))
def test_it_begins_every_other_chat(data: st.DataObject, name: str) -> None:
    """Whatever comes behind the system message, and however it is written."""
    system = data.draw(WRITTEN)
    use = use_of(data.draw(st.sampled_from([[], ["look"], ["look", "write"]])))
    head: list[dict[str, Any]] = [{"role": "system", "content": system}] if data.draw(st.booleans()) else []
    role = data.draw(st.sampled_from(["user", "user", "assistant"]))
    chats = []
    for _ in range(2):
        first = {"role": role, "content": data.draw(WRITTEN | PARTS)}
        chats.append([*head, first, *data.draw(TURNS), {"role": "user", "content": data.draw(WRITTEN)}])
    (one, shared), (other, _) = (encoded(name, chat, use) for chat in chats)
    assert one[:shared] == other[:shared] and shared < len(one)
    spelled = name == "plain" and any(token in str(chats[0]) for token in SPECIAL)
    if head and name != "escaped" and not spelled:
        text = TOKENIZERS[name].decode(one[:shared], skip_special_tokens=False)
        assert unicodedata.normalize("NFC", system.strip()) in text
        assert all(f"{tool.name}|" in text for tool in (use.tools if use else ()))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_it_ends_where_the_user_speaks(name: str) -> None:
    head = {"role": "system", "content": "Answer in one word. " * 3}
    ids, shared = encoded(name, [head, USER, {"role": "assistant", "content": "hi"}, {**USER, "content": "more"}])
    text = TOKENIZERS[name].decode(ids[:shared], skip_special_tokens=False)
    assert text.count("Answer in one word.") == 3 and "user" in text and "hello" not in text


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("chatml", [{"role": "system", "content": "Be brief."}]),
        ("chatml", [{"role": "assistant", "content": "hi"}]),
        ("refusing", [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "hi"}]),
    ],
)
def test_of_some_chats_it_is_not_known(name: str, messages: list[dict[str, Any]]) -> None:
    """No user speaks, or the template refuses the chat up to there: they are rendered all the same."""
    ids, shared = encoded(name, messages)
    assert ids and shared == 0


def test_what_stands_before_a_chat_without_a_system_message_is_shared() -> None:
    shared = encoded("tools", [USER], use_of(["look"]))[1]
    assert shared > encoded("tools", [USER])[1] > 0


def test_of_a_long_chat_the_beginning_alone_is_rendered_again() -> None:
    rendered: list[int] = []

    class Counting(ChatTemplate):
        def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
            rendered.append(len(messages))
            return super().render(messages, **how)

    chat = [{"role": "system", "content": "Be brief."}, *[USER, {"role": "assistant", "content": "hi"}] * 50, USER]
    template = Counting(TEMPLATE, {})
    shared_length(template, chat, {}, template.render(chat))
    assert rendered == [len(chat), 2]


WORDS = "hello there " * 30  # 360 characters
RULE = "-----\n"
ENDS = (f"\n{RULE}", "</doc>\n", "\n\n")


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        ([WORDS], []),
        ([f"{WORDS}\n\n", f"{WORDS}\n \n", "Why?"], [1, 2]),
        (["a\n\n", "b\n\n", f"{WORDS}\n\n", "c\n\n", "Why?"], [3, 4]),  # 256 characters apart, but for the last one
        ([f"<doc>\n{WORDS}\n\n", f"{WORDS}</doc>\n", f"<doc>{WORDS}</doc> \n", "\n\n", "Why?"], [2, 3, 4]),
        ([f"{WORDS}\n\n", f"{WORDS}\n{RULE}", f"{WORDS}\n```\n", "Why?"], [2, 3]),
        ([*[f"{WORDS}\n\n"] * 12, f"{WORDS}\n{RULE}", "Why?"], [12, 13]),  # few paragraphs where documents are marked
        ([f"{WORDS}\n\n", "Why?\n\n"], [1, 2]),
    ],
)
def test_parts_of_a_text_end_behind_blank_lines_and_marks(pieces: list[str], kept: list[int]) -> None:
    assert part_ends("".join(pieces)) == [len("".join(pieces[:count])) for count in kept]


@settings(deadline=None)
@given(st.data(), st.sampled_from(sorted(TEMPLATES)))
def test_two_prompts_are_the_same_up_to_the_parts_that_they_share(data: st.DataObject, name: str) -> None:
    """However what follows is written: what is computed up to there can be used again."""
    said = "".join(WORDS + data.draw(WRITTEN) + data.draw(st.sampled_from(ENDS)) for _ in range(2))
    one, other = (prompt_of(name, [{"role": "user", "content": said + data.draw(WRITTEN)}]) for _ in range(2))
    same = next((i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b), len(one.ids))
    assert list(one.part_ends) == sorted(one.part_ends)
    for end in set(one.part_ends) & set(other.part_ends):
        assert end <= same
    if name == "escaped":
        assert not one.part_ends  # the template has changed the message


def test_parts_are_those_of_a_message_that_ends_the_chat() -> None:
    asked = {"role": "user", "content": f"{WORDS}\n\n{WORDS}\n\nWhy?"}
    ends = prompt_of("chatml", [asked]).part_ends
    texts = [
        TOKENIZERS["chatml"].decode(prompt_of("chatml", [asked]).ids[:end], skip_special_tokens=False) for end in ends
    ]
    assert [text.count("hello") for text in texts] == [30, 60] and all(
        text.rstrip("\n").endswith("e ") for text in texts
    )
    assert prompt_of("chatml", [asked, {"role": "assistant", "content": "hi"}, USER]).part_ends == []
    assert prompt_of("chatml", [asked, {"role": "assistant", "content": "hi"}]).part_ends == []
