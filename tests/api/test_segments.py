"""Reasoning, calls and text of an answer: whatever it holds and however it comes in pieces."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.text.calls.formats import FORMATS, HERMES, ToolFormat, format_named
from api.text.calls.marked_call import DEEPSEEK_MARKS
from api.text.channels import Channels, reader_of
from api.text.deltas import Delta, Reasoning, Text, ToolArguments, ToolStart, joined, text_of
from api.text.segments import Layout, Segments
from testing.waiting import PATIENCE_S

FRAGMENTS = [
    *("<think>", "</think>", "<thi", "nk>", "</th", "<", ">", "/"),
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "<|python"),
    *('{"name": "f", "arguments": {"a": "b"}}', '{"name"', ": ", '"f"', ', "arguments"', '{"a": 1, "b": [1, {}]}'),
    *('{"arguments": "{}", "name": "g"}', '{"parameters": null, "name": "h"}', '{"x": 1}', '{"type": "function", '),
    *("{", "}", "[", "]", '"', "\\", ",", ";", "\n", " ", " " * 40, "\n" * 40, "text", "é👋"),
    *("<arg_key>", "a</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>f\n<arg_key>a</arg_key>", "<arg_"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', 'f">', '<parameter name="a">', "</invoke>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
    *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n", "```json", "```", "f<｜tool▁sep｜>{", "<｜tool▁"),
    *("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:", "0<|tool_call_argument_begin|>", "functions."),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call"),
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"),
    *("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", " to=functions.f<|channel|>", "<|message|>"),
    *("<|channel|>commentary<|message|>", "<|start|>", "<|return|>", "<|cha", "assistant", "<|"),
    *("<function=", "f>", "<parameter=a>", "</parameter>", "</function>", "<function=f>", "<para", "x" * 300, "1"),
]
LAYOUTS = st.builds(
    lambda thinking, tools, most: Layout(thinks=thinking is not None, thinking=bool(thinking), tools=tools,
                                          parameters={"f": {"a": {"type": "integer"}}}, max_calls=most,
                                          channels=tools is not None and tools.channels),
    st.sampled_from([None, False, True]),
    st.sampled_from([None, *FORMATS]),
    st.sampled_from([None, 1, 2]),
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=25).map("".join)


def read(layout: Layout, parts: list[str]) -> list[Delta]:
    ids = map(str, itertools.count())
    kind = Channels if layout.channels else Segments
    segments = kind(layout, new_id=lambda: next(ids))
    deltas = [delta for part in parts for delta in segments.push(part)]
    return joined([*deltas, *segments.finish()])


@settings(max_examples=150, deadline=None)
@given(TEXTS, LAYOUTS, st.data())
def test_any_cut_gives_the_same_deltas(text: str, layout: Layout, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(layout, [text])
    assert read(layout, parts) == whole
    assert read(layout, list(text)) == whole


@settings(max_examples=150, deadline=None)
@given(TEXTS, LAYOUTS)
def test_calls_are_well_formed_and_numbered(text: str, layout: Layout) -> None:
    """A call's start comes before its arguments, calls come one after another, there are not too many."""
    starts = 0
    for delta in read(layout, [text]):
        match delta:
            case ToolStart(index, _, name):
                assert index == starts and name
                starts += 1
            case ToolArguments(index):
                assert index == starts - 1
    assert layout.max_calls is None or starts <= layout.max_calls
    assert layout.tools is not None or starts == 0


@settings(max_examples=150, deadline=None)
@given(st.text(), LAYOUTS)
def test_text_without_markers_is_text(text: str, layout: Layout) -> None:
    if layout.thinking or (layout.tools is not None and layout.tools.bare and text.lstrip().startswith("{")):
        return
    if any(marker in text for marker in ("<think>", *(each.opens for each in FORMATS))):
        return
    assert text_of(read(layout, [text])) == text


_NAMES = st.from_regex(r"[a-zA-Z_][\w-]{0,20}", fullmatch=True)
_STRINGS = st.one_of(st.text(max_size=20), st.sampled_from(["</tool_call>", '"}', "<tool_call>", "</parameter", "\\"]))
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_STRINGS, inner, max_size=3)),
    max_leaves=8,
)
_CALLS = st.lists(st.tuples(_NAMES, st.dictionaries(_STRINGS, _VALUES, max_size=4)), min_size=1, max_size=3)
_PLAIN = st.text("abc é\n", max_size=20).map(str.strip)


def written(tools: ToolFormat, calls: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    objects = [json.dumps({"name": name, "arguments": arguments}, indent=indent) for name, arguments in calls]
    texts = [(name, json.dumps(arguments, indent=indent)) for name, arguments in calls]
    marks = tools.marks or DEEPSEEK_MARKS
    match tools.name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "llama3":
            return "; ".join(one.replace('"arguments"', '"parameters"', 1) for one in objects)
        case "deepseek_v3":
            parts = [f"{marks.begin}function{marks.separator}{n}\n```json\n{a}\n```{marks.end}" for n, a in texts]
        case "deepseek_v31":
            parts = [f"{marks.begin}{n}{marks.separator}{a}{marks.end}" for n, a in texts]
        case "kimi_k2":
            parts = [f"{marks.begin}functions.{n}:7{marks.separator}{a}{marks.end}" for n, a in texts]
        case _:
            raise AssertionError(tools.name)
    return f"{tools.opens}{marks.between.join(parts)}{tools.closes}"


@settings(max_examples=150, deadline=None)
@given(
    _CALLS,
    _PLAIN,
    _PLAIN,
    st.sampled_from([form.name for form in FORMATS if form.tags is None and not form.channels]),
    st.sampled_from([None, 2]),
)
def test_what_templates_write_is_read_back(
    calls: list[tuple[str, dict[str, Any]]], reasoning: str, content: str, name: str, indent: int | None
) -> None:
    tools = format_named(name)
    content = "" if tools.bare else content
    text = f"<think>\n{reasoning}\n</think>\n\n{content}\n{written(tools, calls, indent)}"
    deltas = read(Layout(thinks=True, tools=tools), [text])
    assert "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)) == reasoning
    assert text_of(deltas) == content
    assert collected(deltas) == calls


def collected(deltas: list[Delta]) -> list[tuple[str, Any]]:
    names = [delta.name for delta in deltas if isinstance(delta, ToolStart)]
    texts = ["" for _ in names]
    for delta in deltas:
        if isinstance(delta, ToolArguments):
            texts[delta.index] += delta.text
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


_SCALARS = {
    "string": st.text("abc<\"' \n", max_size=20).filter(lambda t: t == t.strip("\n")),
    "integer": st.integers(),
    "boolean": st.booleans(),
    "object": st.dictionaries(st.text("ab", max_size=2), st.integers()),
}


def as_qwen(name: str, values: dict[str, str], line: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>{line}" for key, value in values.items()]
    return f"<tool_call>{line}<function={name}>{line}{''.join(parts)}</function>{line}</tool_call>\n"


def as_glm(name: str, values: dict[str, str], line: str) -> str:
    """GLM-4.5 writes lines, GLM-4.7 none."""
    parts = [f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in values.items()]
    return f"<tool_call>{name}{line}{''.join(parts)}</tool_call>{line}"


def as_minimax(name: str, values: dict[str, str], line: str) -> str:
    parts = [f'<parameter name="{key}">{line}{value}{line}</parameter>\n' for key, value in values.items()]
    return f'<minimax:tool_call>\n<invoke name="{name}">{line}{"".join(parts)}</invoke>\n</minimax:tool_call>{line}'


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_xml_calls_are_read_by_their_schemas(data: st.DataObject) -> None:
    calls, parameters, text = [], {}, ""
    form = data.draw(st.sampled_from([form for form in FORMATS if form.tags is not None]))
    write = {"qwen3_coder": as_qwen, "glm4": as_glm, "minimax_m2": as_minimax}[form.name]
    for number in range(data.draw(st.integers(1, 3))):
        kinds = data.draw(st.dictionaries(_NAMES, st.sampled_from(list(_SCALARS)), max_size=3))
        arguments = {key: data.draw(_SCALARS[kind]) for key, kind in kinds.items()}
        parameters[f"f{number}"] = {key: {"anyOf": [{"type": kind}]} for key, kind in kinds.items()}
        calls.append((f"f{number}", arguments))
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        text += write(f"f{number}", values, data.draw(st.sampled_from(["", "\n"])))
    layout = Layout(tools=form, parameters=parameters)
    assert collected(read(layout, [text])) == calls
    assert collected(read(layout, list(text))) == calls


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"x"',
        "<tool_call>no call</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>",
        "<tool_",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    deltas = read(Layout(tools=HERMES), ["so: ", text])
    assert text_of(deltas) == f"so: {text}".replace(": <tool_call>", ":<tool_call>") and len(deltas) == 1


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>", ""),
    ],
)
def test_arguments_are_streamed_as_they_come(form: str, before: str, after: str) -> None:
    segments = Segments(Layout(tools=format_named(form)), new_id=lambda: "id")
    text = before + '{"city": "Ber'
    assert joined(segments.push(text)) == [ToolStart(0, "id", "f"), ToolArguments(0, '{"city": "Ber')]
    assert joined(segments.push('lin"}')) == [ToolArguments(0, 'lin"}')]
    assert joined([*segments.push(after), *segments.finish()]) == []


def test_ids_of_calls_are_the_models_own_where_its_template_writes_no_name_but_them() -> None:
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    starts = [delta for delta in read(Layout(tools=format_named("kimi_k2")), [text]) if isinstance(delta, ToolStart)]
    assert [start.name for start in starts] == ["f", "f"]
    assert starts[0].id == "functions.f:3" != starts[1].id  # no two results of one answer have the same


@pytest.mark.parametrize("arguments", ['{"a": 1', '{"a": [1, {', "nul"])
@pytest.mark.parametrize("form", ["deepseek_v31", "kimi_k2"])
@pytest.mark.parametrize("closed", [True, False])
def test_calls_behind_broken_arguments_are_read(form: str, arguments: str, closed: bool) -> None:
    tools = format_named(form)
    assert tools is not None and tools.marks is not None
    marks = tools.marks
    first = f"{marks.begin}f{marks.separator}{arguments}{marks.end if closed else ''}"
    second = f"{marks.begin}g{marks.separator}{{}}{marks.end}"
    text = f"{tools.opens}{first}{second}{tools.closes}"
    for parts in ([text], list(text)):
        deltas = read(Layout(tools=tools), parts)
        assert [delta.name for delta in deltas if isinstance(delta, ToolStart)] == ["f", "g"]
        assert [delta.text for delta in deltas if isinstance(delta, ToolArguments)] == [arguments, "{}"]


def test_a_long_header_ends_where_it_ends_however_it_is_cut() -> None:
    text = f"<|channel|>final<|message|>hi<|end|><|start|>assistant{'x' * 600}<|channel|>final<|message|>kept"
    whole = read(Layout(channels=True), [text])
    assert read(Layout(channels=True), list(text)) == whole
    assert isinstance(whole[-1], Text) and whole[-1].text.endswith("kept")


def test_only_what_is_sent_to_a_function_is_a_call() -> None:
    layout = Layout(channels=True, tools=format_named("hermes"))
    text = "<|channel|>analysis to={}<|message|>print(1)<|call|>"
    assert [type(delta) for delta in read(layout, [text.format("python")])] == [Reasoning]
    assert [type(delta) for delta in read(layout, [text.format("functions.python")])] == [ToolStart, ToolArguments]
    channels = Channels(layout)
    channels.push(text.format("functions.f").removesuffix("<|call|>"))
    channels.finish()
    assert channels.finish() == [] and channels.calls == 1


def test_a_call_that_breaks_off_in_a_string_ends_at_its_marker() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "b\n</tool_call>\ndone'
    assert read(Layout(tools=HERMES), [text])[-1] == Text("\ndone")


def test_reasoning_can_be_left_out_and_left_open() -> None:
    assert read(Layout(thinks=True, thinking=True), ["hm\n</think>\n\nyes"]) == [Reasoning("hm"), Text("yes")]
    assert read(Layout(thinks=True, thinking=True), ["hm"]) == [Reasoning("hm")]
    assert read(Layout(thinks=True, show_reasoning=False), ["<think>hm</think>yes"]) == [Text("yes")]
    assert read(Layout(thinks=True), ["yes, <think>"]) == [Text("yes, <think>")]


PIECES = ['<tool_call>{"', "<tool_call>", '{"name": "f"', "\n", " ", "<function=", "<"]


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_takes_long(piece: str) -> None:
    """Work grows with the length of the text: nothing is read again and again. Each piece meets each format and each
    opening, each format each opening."""
    began = time.monotonic()
    for number, tools in enumerate(FORMATS, PIECES.index(piece)):
        tags = f"{tools.opens}f<arg_key>a</arg_key><arg_value>", f'{tools.opens}<invoke name="f"><parameter name="a">'
        openings = ("", tools.opens, f"{tools.opens}<function=f><parameter=a>", *tags)
        for opened in (openings[number % 5], openings[(number + 2) % 5]):
            segments = reader_of(Layout(thinks=True, tools=tools, channels=tools.channels))
            segments.push(opened)
            for _ in range(10_000):
                segments.push(piece)
            segments.finish()
    assert time.monotonic() - began < PATIENCE_S / 2
