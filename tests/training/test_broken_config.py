"""Whatever a file of settings holds, it is a configuration or one line that says what is wrong with it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.config import ConfigError, TrainConfig, load_config
from training.config.others import NO_OPS
from training.config.refused import REFUSED
from training.main import main

KEYS = [
    *(field.name for field in fields(TrainConfig)), *NO_OPS, *REFUSED, "kt_config", "use_cpu", "novel", "", "1", "~",
    "num_epochs", "lora_r",
]  # fmt: skip
_WORDS = [
    "", "~", "null", "no", "on", "true", "0", "-1", "1", "2", "0.5", "1e3", "1e-30", "1e400", "-.inf", ".nan", "nan",
    "0x10", "0o7", "1_000", "9" * 5000, "1" + "0" * 400, "1:30", "2020-01-01", "!!python/object:os.system x",
    "!!binary aGk=", "!!set {a}", "&a 1", "*a", "<<: *a", "'a'", '"\\ud800"', '"\\0"', "'\u2028'", "a,b,,", ",", "[]",
    "[[]]", "[a, [b]]", "{}", "{a: 1}", "[{name: a}]", "[{name: a, lora_rank: .nan}]", "[{name: [a]}]", "[null]",
    "steps", "epoch", "dpo", "sft", "all", "q_proj", "cosine", "polynomial", "constant", "peft", "cpu", "cuda:9",
    "/nowhere", "/dev/null", "/", "~nobody/x", "\u0661", "\uff11", "x" * 3000, "|\n  a\n  b", ">\n  a", "? a", "- a",
    "%", "@", "`", "#", "a: b: c", "[" * 40, "{a: " * 40, "\ttab",
]  # fmt: skip
_BASE = "model_name_or_path: demo\noutput_dir: out\ndataset: a\n"
_lines = st.builds(
    "{}: {}".format,
    st.sampled_from(KEYS),
    st.one_of(st.sampled_from(_WORDS), st.floats().map(repr), st.integers().map(str), st.text(max_size=8)),
)
_scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(_WORDS)
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner), max_leaves=6
)
_texts = st.lists(_lines, max_size=4).map(lambda lines: (_BASE + "\n".join(lines)).encode("utf-8", "surrogatepass"))
_json = st.dictionaries(st.sampled_from(KEYS), _values, max_size=4).map(
    lambda made: json.dumps({"model_name_or_path": "demo", "output_dir": "out", "dataset": "a", **made}).encode()
)
_overrides = st.one_of(
    st.text(st.characters(), max_size=20),
    st.sampled_from(["output_dir=\udcff", "\udcff=1", "output_dir='a\0'", 'output_dir="\\0"', 'dataset=["\\ud800"]']),
    _lines.map(lambda line: line.replace(": ", "=", 1)),
    _lines.map(lambda line: "adapters.0." + line.replace(": ", "=", 1)),
)
_bytes = st.one_of(
    st.binary(max_size=60),
    st.tuples(_texts, st.binary(max_size=3), st.integers(0, 200)).map(lambda m: m[0][: m[2]] + m[1] + m[0][m[2] :]),
)


def read(path: Path, overrides: list[str]) -> TrainConfig | None:
    """None: it was refused by one line."""
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        said = str(error)
        assert "\n" not in said and said.isprintable() and 5 < len(said) < 1200, said
        return None


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(_texts, _texts, _json, _bytes))
def test_a_file_is_read_or_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(data)
    config = read(path, [])
    if config is not None:
        for field in fields(config):
            value = getattr(config, field.name)
            assert not isinstance(value, float) or math.isfinite(value), field.name
            assert not isinstance(value, str) or os.fsencode(value).find(b"\0") < 0, field.name


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_overrides, min_size=1, max_size=3), st.booleans())
def test_overrides_are_read_or_one_line(tmp_path: Path, overrides: list[str], several: bool) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(_BASE + ("adapters: [{name: a}]\n" if several else ""))
    read(path, overrides)


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "latin", "bomb", "deep", "long", "endless"])
def test_kinds_of_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.yaml"
    match kind:
        case "folder":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "latin":
            path.write_bytes("dataset: caf\xe9".encode("latin-1"))
        case "bomb":
            lines = ["a: &a [x, x]", *(f"{b}: &{b} [*{a}, *{a}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True))]
            path.write_text("\n".join(lines))
        case "deep":
            path.write_text("[" * 100_000)
        case "long":
            path.write_text("a: " + "x" * (2 << 20))
        case "endless":
            path.symlink_to("/dev/zero")
    assert read(path, []) is None


REFUSED_RUNS: list[dict[str, Any]] = [
    {"model_name_or_path": "FOLDER/file"}, {"model_name_or_path": "FOLDER"}, {"model_name_or_path": "x" * 300},
    {"output_dir": "FOLDER/file/x"}, {"output_dir": "x" * 300}, {"output_dir": "/dev/null"},
    {"adapter_name_or_path": "FOLDER"}, {"adapter_name_or_path": "FOLDER/file"}, {"resume_from_checkpoint": "FOLDER"},
    {"template": "FOLDER/bad.jinja"}, {"template": f"{'x' * 300}.jinja"}, {"dataset": "FOLDER/empty.jsonl"},
    {"dataset": "FOLDER/"}, {"kt_weight_path": "FOLDER/file"}, {"per_device_train_batch_size": 65536},
    {"val_size": 24, "eval_strategy": "steps"}, {"stage": "dpo"}, {"lora_target": "q_a_proj"}, {"device": "tpu"},
    {"adapters": "[{name: a, dataset: nope}]"}, {"enable_thinking": "true"},
]  # fmt: skip


@pytest.mark.parametrize("written", REFUSED_RUNS, ids=lambda written: " ".join(written))
def test_a_run_that_cannot_be_is_one_line(
    written: dict[str, Any], chat_model: Path, talks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained. No folder is left of it."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jinja").write_bytes(b"{% if %}")
    run = {
        "model_name_or_path": str(chat_model), "dataset": str(talks), "output_dir": str(tmp_path / "out"),
        "max_steps": 1, "device": "cpu", "kt_num_threads": 1, "lora_rank": 2, "cutoff_len": 64, "plot_loss": "false",
    }  # fmt: skip
    given = {key: str(value).replace("FOLDER", str(tmp_path)) for key, value in {**run, **written}.items()}
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in given.items()))
    capfd.readouterr()
    assert main([str(path)]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and not (tmp_path / "out").exists()
