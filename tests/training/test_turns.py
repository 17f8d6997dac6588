"""Turns of a conversation: an answer with its calls is learnt as one, in every form of data; odd orders are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.text.tokenizer import Tokenizer
from demo.paths import demo_model
from training.config import TrainConfig
from training.data import IGNORED, DataError, build_datasets, load_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
_TEXT = st.sampled_from(["", "Let me see.", "One moment, I add them."])
_CALLS = st.lists(st.fixed_dictionaries({"name": st.just("add"), "arguments": st.dictionaries(
    st.sampled_from("ab"), st.integers(0, 9), max_size=2)}), max_size=3)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TrainConfig(model_name_or_path=str(demo_model())))


def _learnt(tokenizer: Tokenizer, row: dict[str, Any], folder: Path) -> list[str]:
    """The texts that the loss counts, part by part."""
    path = folder / "d.jsonl"
    path.write_text(json.dumps(row))
    config = TrainConfig(model_name_or_path=str(demo_model()), dataset=(str(path),), overlong="error")
    rows, _ = build_datasets(config, tokenizer)
    parts: list[list[int]] = []
    for item in (rows[i] for i in range(len(rows))):
        for token, (before, label) in zip(
            item["input_ids"], zip([IGNORED, *item["labels"]], item["labels"], strict=False), strict=True
        ):
            if label != IGNORED:
                parts += [[]] if before == IGNORED else []
                parts[-1].append(token)
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts]


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns: {"say", "calls"} of the assistant's; each is answered by tools, then the assistant, or by the user."""
    turns = draw(st.lists(st.fixed_dictionaries({"say": _TEXT, "calls": _CALLS}), min_size=1, max_size=3))
    return [{**turn, "say": turn["say"] or ("" if turn["calls"] else "Yes.")} for turn in turns]


def _openai(turns: list[dict[str, Any]]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": "1 + 2?"})
        said: dict[str, Any] = {"role": "assistant", "content": turn["say"] or None}
        if turn["calls"]:
            calls = [
                {"id": f"c{i}", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
                for i, call in enumerate(turn["calls"])
            ]
            said["tool_calls"] = calls
            messages += [said, *({"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in calls)]
            said = {"role": "assistant", "content": "It is 3."}
        messages.append(said)
    return {"messages": messages, "tools": TOOLS}


def _sharegpt(turns: list[dict[str, Any]], user: str, assistant: str, one_list: bool) -> dict[str, Any]:
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"from": user, "value": "1 + 2?"})
        if turn["say"]:
            messages.append({"from": assistant, "value": turn["say"]})
        if turn["calls"]:
            calls = [turn["calls"]] if one_list else turn["calls"]
            messages += [{"from": "function_call", "value": json.dumps(call)} for call in calls]
            messages += [{"from": "observation", "value": "3"} for _ in turn["calls"]]
            messages.append({"from": assistant, "value": "It is 3."})
    return {"conversations": messages, "tools": json.dumps(TOOLS)}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=talks(), names=st.sampled_from([("human", "gpt"), ("user", "assistant")]), one_list=st.booleans())
def test_every_form_of_a_talk_is_learnt_alike(turns, names, one_list, tokenizer, tmp_path):
    """One part per turn, which holds what is said and all calls, and ends once."""
    want = _learnt(tokenizer, _openai(turns), tmp_path)
    assert _learnt(tokenizer, _sharegpt(turns, *names, one_list), tmp_path) == want
    expected = [part for turn in turns for part in ([turn, None] if turn["calls"] else [turn])]
    assert len(want) == len(expected)
    for text, turn in zip(want, expected, strict=True):
        assert text.count("<|im_end|>") == 1
        if turn is not None:
            assert turn["say"] in text and text.count('"name"') == len(turn["calls"])


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (["user", "assistant", "assistant"], "message 3 is the assistant's behind the assistant's"),
        (["user", "tool", "assistant"], "message 2 is a tool's behind the user's"),
        (["tool", "assistant"], "message 1 is a tool's behind nothing"),
        (["user", "assistant", "user"], "the last message is 'user'"),
    ],
)
def test_an_odd_order_names_the_roles(roles, said, tokenizer, tmp_path):
    row = {"messages": [{"role": role, "content": "x"} for role in roles]}
    with pytest.raises(DataError, match=said):
        _learnt(tokenizer, row, tmp_path)


def test_openai_calls_below_tags_of_a_data_set(tokenizer, tmp_path):
    """dataset_info.json that names role and content, over messages with tool_calls."""
    row = _openai([{"say": "", "calls": [{"name": "add", "arguments": {"a": 1}}]}])
    want = _learnt(tokenizer, row, tmp_path)
    (tmp_path / "d.json").write_text(json.dumps([row]))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    tags["observation_tag"] = "tool"
    entry = {"file_name": "d.json", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": entry}))
    config = TrainConfig(model_name_or_path=str(demo_model()), dataset=("d",), dataset_dir=str(tmp_path))
    rows, _ = build_datasets(config, tokenizer)
    learnt = [token for token, label in zip(rows[0]["input_ids"], rows[0]["labels"], strict=True) if label != IGNORED]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == "".join(want)


def test_a_turn_has_one_weight(tokenizer, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "weight": 0},
        {"role": "assistant", "tool_calls": [call]},
    ]
    with pytest.raises(DataError, match="messages 2 and 3 are one turn"):
        _learnt(tokenizer, {"messages": messages, "tools": TOOLS}, tmp_path)


def test_pairs_of_calls_are_one_turn_too(tokenizer, tmp_path):
    row = {
        "conversations": [{"from": "human", "value": "1 + 2?"}],
        "chosen": [{"from": "gpt", "value": "Well."}, {"from": "function_call", "value": '{"name": "add"}'}],
        "rejected": {"from": "gpt", "value": "No."},
        "tools": json.dumps(TOOLS),
    }
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    config = TrainConfig(model_name_or_path=str(demo_model()), dataset=(str(tmp_path / "d.jsonl"),))
    rows, _ = build_datasets(replace(config, stage="dpo"), tokenizer)
    text = tokenizer.decode(rows[0]["chosen_ids"], skip_special_tokens=False)
    assert "Well." in text and '"name"' in text and text.count("<|im_end|>") == 1
    assert rows.report.tokens == 2 * len(rows[0]["prompt_ids"]) + rows.report.learnt
