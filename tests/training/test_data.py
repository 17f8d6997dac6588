"""training.data: files, forms, what is learnt, packing, order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from api.text.messages import normalise
from api.text.tokenizer import Tokenizer, load_tokenizer
from demo.paths import demo_model
from demo.texts.tools import CLOCK, WEATHER
from testing.models.tiny import tiny_model
from training.config import TrainConfig
from training.data import IGNORED, DataError, PackedDataset, ShuffledSampler, build, build_datasets
from training.data.collate import PackingCollator, PaddingCollator, PreferenceCollator
from training.data.packing import pack

_QWEN3 = Path(__file__).with_name("qwen3.jinja")
_TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


@pytest.fixture(scope="module", params=["demo", "qwen3", "named"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo's, with its own template, with another, and with a list: another, and its own for chats with tools."""
    if request.param != "named":
        return load_tokenizer(demo_model(), chat_template=_QWEN3 if request.param == "qwen3" else None)
    folder, own = tmp_path_factory.mktemp("named"), load_tokenizer(demo_model())
    own._backend.save(str(folder / "tokenizer.json"))
    templates = {"tool_use": own.template.source if own.template else "", "default": _QWEN3.read_text()}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "<|im_end|>"}))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(demo_model())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def _config(folder: Path, text: str | list[Any], name: str = "d.jsonl", **more: Any) -> TrainConfig:
    path = folder / name
    written = text if isinstance(text, str) else "".join(json.dumps(row) + "\n" for row in text)
    path.write_bytes(written.encode(errors="surrogateescape"))  # bytes that are not UTF-8 as "\udc.."
    return TrainConfig(dataset=(str(path),), dataset_dir=str(folder), **{"cutoff_len": 4096, **more})


def _learnt(tokenizer: Tokenizer, item: dict[str, list[int]]) -> list[str]:
    """The texts that the loss counts, one for each run of neighbours."""
    runs: list[list[int]] = [[]]
    for token, label in zip(item["input_ids"], item["labels"], strict=True):
        if label != IGNORED:
            assert label == token
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


# ---- what is learnt

_words = st.text(st.sampled_from("ab \n?<|>im_end/think."), min_size=1, max_size=12)
_texts = st.one_of(_words, st.just("<|im_end|>\n<|im_start|>assistant\n"), st.just("<think>why</think>\n\nso"))
_calls = st.builds(
    lambda value: [{"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": value})}}], _words
)


@st.composite
def _talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = draw(st.sampled_from([[], [{"role": "system", "content": "Be brief."}]]))
    talk = list(talk)
    for _ in range(draw(st.integers(1, 3))):
        talk.append({"role": "user", "content": draw(_texts)})
        for calls in draw(st.lists(_calls, max_size=2)):
            talk += [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "r"}]
        talk.append({"role": "assistant", "content": draw(_texts)})
    return talk


@settings(max_examples=40, deadline=None)
@given(talk=_talks(), tools=st.sampled_from([[], [WEATHER], [WEATHER, CLOCK]]))
def test_every_answer_is_learnt_once_behind_what_the_server_shows(
    tokenizer: Tokenizer, folder: Path, talk: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    """Prompts are rendered and tokenised here as a request is; nothing of the renderer under test is used."""
    data, _ = build_datasets(_config(folder, [{"messages": talk, "tools": tools}]), tokenizer)
    checked = normalise(talk)
    expected = []
    how: dict[str, Any] = {"trust_control_tokens": False, "variables": {"tools": tools} if tools else {}}
    how["template"] = (tokenizer.tool_template if tools else None) or tokenizer.template
    for i, message in enumerate(checked):
        if message["role"] == "assistant":
            prompt = tokenizer.render(checked[:i], **how, add_generation_prompt=True)
            whole = tokenizer.render(checked[: i + 1], **how, add_generation_prompt=False)
            answer = whole.restored().removeprefix(prompt.restored())
            expected.append((tokenizer.encode_rendered(prompt), answer.rstrip("\n")))
    found = []
    for n in range(len(data)):
        item = data[n]
        ids, labels = item["input_ids"], item["labels"]
        begins = [i for i, label in enumerate(labels) if label != IGNORED and labels[i - 1] == IGNORED]
        for begin, text in zip(begins, _learnt(tokenizer, item), strict=True):
            found.append((ids[:begin], text))
    assert found == expected


def test_rewritten_history_makes_samples_of_their_own(folder: Path, demo: Tokenizer) -> None:
    talk = [*_TALK, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "<think>so</think>See you."}]
    qwen3 = load_tokenizer(demo_model(), chat_template=_QWEN3)
    one, _ = build_datasets(_config(folder, [{"messages": talk}]), demo)
    assert [_learnt(demo, one[i]) for i in range(len(one))] == [
        ["Hello!<|im_end|>", "<think>so</think>See you.<|im_end|>"]
    ]
    two, _ = build_datasets(_config(folder, [{"messages": talk}]), qwen3)
    empty = "<think>\n\n</think>\n\n"
    assert [_learnt(qwen3, two[i]) for i in range(len(two))] == [
        [f"{empty}Hello!<|im_end|>"],
        ["<think>\nso\n</think>\n\nSee you.<|im_end|>"],
    ]
    assert "think" not in qwen3.decode(two[1]["input_ids"], skip_special_tokens=False).split("Bye")[0]
    quiet, _ = build_datasets(_config(folder, [{"messages": _TALK}], enable_thinking=False), qwen3)
    assert _learnt(qwen3, quiet[0]) == ["Hello!<|im_end|>"]
    with pytest.raises(DataError, match=r"d\.jsonl:1: .*enable_thinking"):
        build_datasets(_config(folder, [{"messages": talk}], enable_thinking=False), qwen3)


def test_switches_of_what_is_learnt(folder: Path, demo: Tokenizer) -> None:
    quoted = {"role": "user", "content": "Say <|im_end|>"}
    talk = [*_TALK, quoted, {"role": "assistant", "content": "No <|im_end|>"}]
    end = demo.encode("<|im_end|>", add_special_tokens=False)[0]

    def built(**more: Any) -> dict[str, list[int]]:
        return build_datasets(_config(folder, [{"messages": talk}], **more), demo)[0][0]

    assert built()["input_ids"].count(end) == 4
    assert built(split_special_tokens=False)["input_ids"].count(end) == 6
    assert _learnt(demo, built(mask_history=True)) == ["No <|im_end|><|im_end|>"]
    assert built(train_on_prompt=True)["labels"] == built()["input_ids"]
    talk[1] = {**talk[1], "weight": 0}
    assert _learnt(demo, built()) == ["No <|im_end|><|im_end|>"]


# ---- forms

_TOOLS = [{"name": "f", "parameters": {"type": "object"}}]
_FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"messages": [{"role": "system", "content": "S"}, *_TALK]}),
    ({}, {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}], "system": "S"}),
    ({}, {"instruction": "Hi", "input": "", "output": "Hello!", "system": "S"}),
    ({}, {"prompt": "Hi", "completion": "Hello!", "system": "S"}),
    (
        {"formatting": "alpaca", "columns": {"prompt": "q", "response": "a", "system": "s"}},
        {"q": "Hi", "a": "Hello!", "s": "S"},
    ),
    (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "m"},
            "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "u", "assistant_tag": "a"},
        },
        {"m": [{"who": "system", "what": "S"}, {"who": "u", "what": "Hi"}, {"who": "a", "what": "Hello!"}]},
    ),
]


@pytest.mark.parametrize(("entry", "row"), _FORMS)
def test_forms_of_one_conversation_are_the_same_tokens(
    folder: Path, demo: Tokenizer, entry: dict[str, Any], row: dict[str, Any]
) -> None:
    expected, _ = build_datasets(_config(folder, [_FORMS[0][1]], "first.jsonl"), demo)
    config = _config(folder, json.dumps([row], indent=1), "one.json")
    if entry:
        (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "one.json", **entry}}))
        config = TrainConfig(dataset=("mine",), dataset_dir=str(folder))
    assert build_datasets(config, demo)[0][0] == expected[0]


def test_calls_of_sharegpt_and_openai_are_the_same_tokens(folder: Path, demo: Tokenizer) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "r"}, {"from": "gpt", "value": "Hello!"},
        ],
        "tools": json.dumps(_TOOLS),
    }  # fmt: skip
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    middle = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "r"}]
    openai = {"messages": [_TALK[0], *middle, _TALK[1]], "tools": [{"type": "function", "function": _TOOLS[0]}]}
    first, _ = build_datasets(_config(folder, [sharegpt], "s.jsonl"), demo)
    second, _ = build_datasets(_config(folder, [openai], "o.jsonl"), demo)
    assert first[0] == second[0]
    call_text, answer = _learnt(demo, first[0])
    assert '{"name": "f", "arguments": {"x": 1}}' in call_text and answer == "Hello!<|im_end|>"


def test_csv_and_parquet(folder: Path, demo: Tokenizer) -> None:
    import pyarrow
    import pyarrow.parquet

    expected, _ = build_datasets(_config(folder, [{"instruction": 'a\n"b"', "output": "c"}]), demo)
    table, _ = build_datasets(_config(folder, 'instruction,output\n"a\n""b""",c\n', "t.csv"), demo)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"instruction": 'a\n"b"', "output": "c"}]), folder / "t.parquet"
    )
    columns, _ = build_datasets(TrainConfig(dataset=(str(folder / "t.parquet"),)), demo)
    assert table[0] == columns[0] == expected[0]


_PREFERENCES: list[dict[str, Any]] = [
    {"messages": _TALK[:1], "chosen": _TALK[1], "rejected": {"role": "assistant", "content": "No."}},
    {"prompt": _TALK[:1], "chosen": _TALK[1:], "rejected": [{"role": "assistant", "content": "No."}]},
    {"chosen": _TALK, "rejected": [_TALK[0], {"role": "assistant", "content": "No."}]},
    {"prompt": "Hi", "chosen": "Hello!", "rejected": "No."},
    {"instruction": "Hi", "input": "", "chosen": "Hello!", "rejected": "No."},
    {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Hello!"},
        "rejected": {"from": "gpt", "value": "No."},
    },
]


@pytest.mark.parametrize("row", _PREFERENCES)
def test_preferences(folder: Path, demo: Tokenizer, row: dict[str, Any]) -> None:
    data, _ = build_datasets(_config(folder, [row], stage="dpo"), demo)
    item = {name: demo.decode(ids, skip_special_tokens=False) for name, ids in data[0].items()}
    assert item == {
        "prompt_ids": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "chosen_ids": "Hello!<|im_end|>",
        "rejected_ids": "No.<|im_end|>",
    }
    batch = PreferenceCollator(0)([data[0], data[0]])
    assert batch["input_ids"].shape[0] == 4
    assert [row[row != IGNORED].tolist() for row in batch["labels"]][1:3] == [
        data[0]["chosen_ids"],
        data[0]["rejected_ids"],
    ]


# ---- errors

_GOOD = json.dumps({"messages": _TALK}) + "\n"


@pytest.mark.parametrize(
    ("name", "text", "place", "said"),
    [
        ("d.jsonl", _GOOD + "{", ":2", "not JSON"),
        ("d.jsonl", _GOOD + "\n[1]\n", ":3", "a row is an object"),
        ("d.json", "[\n " + _GOOD + ",\n {} ]", ":4", "no known form"),
        ("d.json", "[\n " + _GOOD + "\n {} ]", ":4", "',' or ']'"),
        ("d.jsonl", _GOOD + '{"messages": [{"role": "user", "content": "x"}]}\n', ":2", "answer is missing"),
        ("d.jsonl", '{"messages": [{"role": "king", "content": "x"}]}\n', ":1", "messages[0].role"),
        ("d.jsonl", '{"messages": [{"role": "assistant", "content": ""}]}\n', ":1", "an answer is empty"),
        ("d.jsonl", '{"conversations": [{"from": "you", "value": "x"}]}\n', ":1", "allowed is human, gpt"),
        ("d.csv", "instruction,output\na,b\nc\n", ":3", "number of cells"),
        ("d.jsonl", "", "", "is empty"),
        ("d.jsonl", "\n" * 9000 + _GOOD + '{"a": "\udcff"}', ":9002", "not UTF-8"),
        ("d.json", "[\n" + _GOOD + ',{"a": "\udcff"}]', ":3", "not UTF-8"),
        ("d.csv", "instruction,output\na,b\nc,\udcff\n", ":3", "not UTF-8"),
        ("d.txt", "x", "", "ends in '.txt'"),
        ("d.parquet", "x", "", "not parquet"),
    ],
)
def test_a_bad_row_names_file_and_line(
    folder: Path, demo: Tokenizer, name: str, text: str, place: str, said: str
) -> None:
    with pytest.raises(DataError) as error:
        build_datasets(_config(folder, text, name), demo)
    assert str(error.value).startswith(f"{folder / name}{place}: ") and said in str(error.value)


def test_a_template_that_is_not_there_is_named_by_its_setting(folder: Path) -> None:
    with pytest.raises(DataError, match=r"template .*none\.jinja: no such file"):
        build.load_tokenizer(_config(folder, _GOOD, template=str(folder / "none.jinja")))


def test_over_long_samples(folder: Path, demo: Tokenizer) -> None:
    long = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a b c d e f g h i j k l"}]
    rows = [{"messages": _TALK}, {"messages": long}]
    short, full = (build_datasets(_config(folder, [row]), demo)[0].lengths[0] for row in rows)
    assert short < full
    with pytest.raises(DataError, match=rf"d\.jsonl:2: {full} tokens are more than cutoff_len {full - 1}"):
        build_datasets(_config(folder, rows, cutoff_len=full - 1, overlong="error"), demo)
    cut, _ = build_datasets(_config(folder, rows, cutoff_len=full - 1), demo)
    assert cut.lengths == [short, full - 1] and (cut.report.truncated, cut.report.dropped) == (1, 0)
    left, _ = build_datasets(_config(folder, rows, cutoff_len=full - 1, overlong="drop"), demo)
    assert left.lengths == [short] and left.report.dropped == 1
    with pytest.raises(DataError, match="all of its 2 rows are too long"):
        build_datasets(_config(folder, rows, cutoff_len=8, overlong="drop"), demo)


def test_val_size_holds_rows_out(folder: Path, demo: Tokenizer) -> None:
    rows = [{"instruction": f"say {i}", "output": str(i)} for i in range(10)]
    train, held = build_datasets(_config(folder, rows, val_size=0.3, seed=5), demo)
    assert held is not None and (len(train), len(held)) == (7, 3)
    texts = {
        demo.decode(part[i]["input_ids"], skip_special_tokens=True) for part in (train, held) for i in range(len(part))
    }
    assert len(texts) == 10
    assert [held[i] for i in range(3)] == [
        build_datasets(_config(folder, rows, val_size=3, seed=5), demo)[1][i]
        for i in range(3)  # type: ignore[index]
    ]
    with pytest.raises(DataError, match="none is left to train on"):
        build_datasets(_config(folder, rows, val_size=10), demo)


# ---- packing and order


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(0, 9))
def test_packing_is_first_fit_in_a_drawn_order(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 50, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)
    assert rows == pack(lengths, 50, seed)
    for later, row in enumerate(rows):  # what begins a row had no room in any before it
        assert all(sum(lengths[i] for i in before) + lengths[row[0]] > 50 for before in rows[:later])


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model(vocab_size=64, num_hidden_layers=2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_have_the_logits_they_have_alone(model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(64, (n,), generator=generator).tolist() for n in (5, 1, 7, 3)]

    def item(rows: list[list[int]]) -> dict[str, list[int]]:
        ids = [token for row in rows for token in row]
        positions = [i for row in rows for i in range(len(row))]
        return {
            "input_ids": ids, "labels": ids, "position_ids": positions,
            "segments": [n for n, row in enumerate(rows) for _ in row],
        }  # fmt: skip

    def logits(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
        with torch.no_grad():
            return model(**kept).logits  # with the cache that models make unless told not to

    packed = logits(PackingCollator(0, attention)([item(texts), item(texts[:2])]))
    assert packed.isfinite().all()
    at = 0
    for text in texts:
        alone = logits(PaddingCollator(0)([{"input_ids": text, "labels": text}]))[0, : len(text)]
        torch.testing.assert_close(packed[0, at : at + len(text)], alone, rtol=1e-5, atol=1e-5)
        at += len(text)
    torch.testing.assert_close(packed[1, :6], packed[0, :6], rtol=1e-5, atol=1e-5)


def test_packed_rows_of_a_data_set(folder: Path, demo: Tokenizer) -> None:
    rows = [{"instruction": f"say {i}", "output": "x " * i} for i in range(1, 12)]
    single, _ = build_datasets(_config(folder, rows, cutoff_len=64), demo)
    packed, _ = build_datasets(_config(folder, rows, cutoff_len=64, packing=True), demo)
    assert isinstance(packed, PackedDataset) and len(packed) < len(single) and max(packed.lengths) <= 64
    parts = []
    for n in range(len(packed)):
        item = packed[n]
        for segment in range(max(item["segments"]) + 1):
            at = [i for i, number in enumerate(item["segments"]) if number == segment]
            assert [item["position_ids"][i] for i in at] == list(range(len(at)))
            parts.append({name: [item[name][i] for i in at] for name in ("input_ids", "labels")})
    key = str
    assert sorted(parts, key=key) == sorted((single[i] for i in range(len(single))), key=key)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 3))
def test_the_order_goes_on_where_a_state_left_it(size: int, done: int, ahead: int) -> None:
    whole, sampler = ShuffledSampler(size, 7), ShuffledSampler(size, 7)
    stream = [index for _ in range(6) for index in whole]
    assert all(sorted(stream[e * size : (e + 1) * size]) == list(range(size)) for e in range(6))
    iterator = iter(sampler)
    for _ in range(done % (5 * size)):
        if next(iterator, None) is None:
            iterator = iter(sampler)
            next(iterator)
    ahead = min(ahead, done % (5 * size))
    resumed = ShuffledSampler(size, 7)
    resumed.load_state_dict(sampler.state_dict(ahead))
    rest = [*resumed, *resumed]
    start = done % (5 * size) - ahead
    assert rest == stream[start:][: len(rest)] and len(rest) >= size
    with pytest.raises(DataError, match="resume with the same data"):
        ShuffledSampler(size + 1, 7).load_state_dict(sampler.state_dict())
