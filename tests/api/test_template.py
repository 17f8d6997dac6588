"""Chat templates render as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from api.text.calls.formats import FORMATS, ToolFormat
from api.text.calls.style import CallStyle
from api.text.template import ChatTemplate, TemplateError

QWEN_STYLE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TRIMMED = """\
{% for message in messages %}
    {% if message.role == 'user' %}
U: {{ message.content | trim }}
    {% endif %}
    {% generation %}
{{ message | tojson }} {{ message | tojson(indent=2) }}
    {% endgeneration %}
{% endfor %}
{{ bos_token }}{{ tools is none }}{{ documents is none }}"""
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": '  héllo "you" 👋 '},
    {"role": "assistant", "content": "<think>hm</think>\n\nyes"},
    {"role": "user", "content": "more?"},
]


@pytest.mark.parametrize("source", [QWEN_STYLE, TRIMMED])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_same_text_as_transformers(source: str, options: dict[str, Any], count: int) -> None:
    options = {"add_generation_prompt": True, **options}
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template([MESSAGES[:count]], chat_template=source, **options, **special)
    prompt = options.pop("add_generation_prompt")
    text = ChatTemplate(source, special).render(MESSAGES[:count], add_generation_prompt=prompt, variables=options)
    assert text == expected[0]


PIECES = ["The answer", "m", "im_end|>", "<|im_end|>", "e", "|", "an", "'", '"', "é", " ", "\n", "<think>", "U: "]
SHOWN = """{% for message in messages %}{{ message.role }}
{{ message.content | trim }}<|im_end|>message{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"""


@pytest.mark.parametrize("source", [QWEN_STYLE, SHOWN])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=4))
def test_continue_final_message_ends_where_transformers_ends(source: str, pieces: list[str]) -> None:
    """Whatever else of the prompt its text stands in. A blank one that the template trims leaves no trace; transformers
    drops white space of the template's with it."""
    content = "".join(pieces)
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    text = ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    if content.strip() or source is QWEN_STYLE:
        expected, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
        assert text == expected[0]
    else:
        assert text.endswith("assistant\n")


@pytest.mark.parametrize("more", [{"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"content": None}])
def test_what_is_no_text_alone_cannot_be_continued(more: dict[str, Any]) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "so", **more}]
    with pytest.raises(TemplateError, match="cannot be continued"):
        ChatTemplate(QWEN_STYLE, {}).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_raise_exception_is_the_users_error() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(MESSAGES)


def test_what_is_no_template_is_said_at_once() -> None:
    with pytest.raises(TemplateError, match="wrong"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(MESSAGES)


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES).isdigit()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_where_a_template_lists_no_tools_calls_are_read_as_we_tell_them(form: ToolFormat) -> None:
    """The form that the prompt describes is the one that is looked for."""
    source = "".join(f"{{{{ {sign!r} }}}}" for sign in form.signs) + "{{ messages[0].content }}"
    style = CallStyle.of(ChatTemplate(source, {}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    (told, *_), variables = style.offered([{"role": "user", "content": "x"}], [tool])
    assert not style.takes_tools and not variables
    assert style.form.channels or (style.form.opens in told["content"] and style.form.tags is None)
