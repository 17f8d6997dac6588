"""Whatever the rows of a file are, they become samples or one line that names the file and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.text.tokenizer import Tokenizer, load_tokenizer
from demo.paths import demo_model
from testing.fuzz.broken import broken
from training.config import TrainConfig
from training.data import DataError, build_datasets

_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}], "tools": []},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                  {"role": "tool", "tool_call_id": "c", "content": "x"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s", "tools": "[]"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f"}'},
                       {"from": "observation", "value": "x"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "s"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"},
     "rejected": {"from": "gpt", "value": "c"}},
    {"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}],
     "rejected": [{"role": "assistant", "content": "c"}]},
]  # fmt: skip

_ROWS = st.sampled_from(GOOD).flatmap(lambda row: st.one_of(broken(row), broken(row).flatmap(broken)))
_TEXTS = st.one_of(
    st.lists(_ROWS, min_size=1, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
    st.lists(_ROWS, max_size=3).map(lambda rows: json.dumps(rows, indent=1).encode()),
    st.binary(max_size=40),
    st.sampled_from(
        [b"[" * 5000, b'{"a": ' * 5000, b'[{"messages": ' + b"1" * 5000 + b"}]", b'{"prompt": ' + b"1" * 5000,
         b"instruction,output\na,b\n\"c", b"instruction,output\na\n", b"\xef\xbb\xbf[]", b"[1,]", b"{}\n{}\n"]
    ),
)  # fmt: skip
NAMES = st.sampled_from(["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo_model())


def built(tokenizer: Tokenizer, path: Path, **more: Any) -> None:
    config = TrainConfig(dataset=(str(path),), dataset_dir=str(path.parent), cutoff_len=256, **more)
    try:
        build_datasets(config, tokenizer)
    except DataError as error:
        said = str(error)
        assert said.isprintable() and str(path.parent) in said and len(said) < 1200, said


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(_TEXTS, _TEXTS, _TEXTS), NAMES, st.sampled_from(["sft", "dpo"]), st.booleans())
def test_rows_become_samples_or_one_line(
    tokenizer: Tokenizer, tmp_path: Path, data: bytes, name: str, stage: str, skips: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    built(tokenizer, path, stage=stage, **({"skip_bad_rows": 10} if skips else {}))


_ENTRY = {
    "file_name": "rows.jsonl", "formatting": "sharegpt", "ranking": False, "num_samples": 3,
    "columns": {"messages": "conversations", "system": "system"}, "tags": {"role_tag": "from", "user_tag": "human"},
}  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(broken(_ENTRY), broken(_ENTRY).flatmap(broken)), st.sampled_from(["sft", "dpo"]), st.booleans())
def test_a_description_is_read_or_one_line(
    tokenizer: Tokenizer, tmp_path: Path, entry: Any, stage: str, whole: bool
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD[2]) + "\n")
    (tmp_path / "dataset_info.json").write_text(json.dumps(entry if whole else {"d": entry}))
    config = TrainConfig(dataset=("d",), dataset_dir=str(tmp_path), cutoff_len=256, stage=stage)
    try:
        build_datasets(config, tokenizer)
    except DataError as error:
        assert str(error).isprintable() and len(str(error)) < 1200
