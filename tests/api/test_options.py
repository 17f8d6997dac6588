"""Flags, variables, file, defaults: the first that knows a setting wins."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from api.cli.main import build_parser
from api.cli.options import resolve
from api.config import ServeConfig
from engine.config import EngineConfig
from engine.errors import UserError
from ktserve.settings import settings_of


def parsed(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *argv])


def settings(*argv: str, **variables: str) -> tuple[EngineConfig, ServeConfig, list[str]]:
    return resolve(parsed(*argv), {f"KTSERVE_{key}": value for key, value in variables.items()})


def test_precedence(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max_num_seqs: 2\nmax-queue: 3\nseed: 4\nport: 9000\n")
    config = ["--config", str(path)]
    assert settings(*config)[0].max_num_seqs == 2
    engine, serve, _ = settings(*config, "--max-num-seqs", "9", MAX_NUM_SEQS="5", MAX_QUEUE="6")
    assert (engine.max_num_seqs, engine.max_queue, engine.seed) == (9, 6, 4)
    assert serve.port == "9000"
    assert engine.max_num_batched_tokens == EngineConfig().max_num_batched_tokens
    assert settings(CONFIG=str(path))[0].seed == 4


def test_every_setting_is_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    samples: dict[type, Any] = {str: "x", int: 7, float: 0.5, bool: True}
    for setting in settings_of(EngineConfig) + settings_of(ServeConfig):
        value = setting.choices[-1] if setting.choices else samples[setting.kind]
        expected = [value] if setting.many else value
        path = tmp_path / "one.yaml"
        path.write_text(f"{setting.name}: {'[' if setting.many else ''}{value}{']' if setting.many else ''}\n")
        flag = [setting.flag] if setting.kind is bool else [setting.flag, str(value)]
        for result in (
            settings(*flag),
            settings("--config", str(path)),
            settings(**{setting.name.upper(): str(value)}),
        ):
            found = next(getattr(part, setting.name) for part in result[:2] if isinstance(part, setting.owner))
            assert found == expected, setting.name


def test_many_values(tmp_path: Path) -> None:
    assert settings("--adapters", "a=1", "--adapters", "b=2")[0].adapters == ["a=1", "b=2"]
    assert settings(API_KEY="k1=a:1:x,y\nk2")[1].api_key == ["k1=a:1:x,y", "k2"]
    path = tmp_path / "c.yaml"
    path.write_text("adapters: [a=1, b=2]")
    assert settings("--config", str(path))[0].adapters == ["a=1", "b=2"]


def test_home_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    engine, serve, _ = settings("--adapters", "law=~/a", "~/m", "--chat-template", "~/t~")
    assert (engine.adapters, serve.chat_template) == (["law=/home/me/a"], "/home/me/t~")
    assert settings(MODEL="~/m")[0].model == "/home/me/m"


def test_switches() -> None:
    assert settings("--no-prefix-caching")[0].prefix_caching is False
    assert settings(PREFIX_CACHING="off")[0].prefix_caching is False
    assert settings("--overlap")[0].overlap is True
    assert settings()[0].overlap is None


@pytest.mark.parametrize(
    ("argv", "variables", "part"),
    [
        (["--max-num-seqs", "many"], {}, "--max-num-seqs: a whole number is expected, got 'many'"),
        (["--dtype", "int8"], {}, "--dtype: 'int8' is not one of auto, bfloat16, float32"),
        (["--max_num_seq", "4"], {}, "did you mean --max-num-seqs"),
        (["--config", "/nowhere.yaml"], {}, "/nowhere.yaml"),
        ([], {"SEED": "1.5"}, "KTSERVE_SEED: a whole number"),
        ([], {"OVERLAP": "perhaps"}, "KTSERVE_OVERLAP: true or false"),
        (["--port"], {}, "expected one argument"),
    ],
)
def test_mistakes_name_their_place(argv: list[str], variables: dict[str, str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        settings(*argv, **variables)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("max_num_seqz: 4", "unknown setting 'max_num_seqz'; did you mean max_num_seqs?"),
        ("max_num_seqs: [1]", "max_num_seqs: a whole number"),
        ("seed: true", "seed: a whole number"),
        ("prefix_caching: 3", "prefix_caching: true or false"),
        ("- a", "'name: value' lines"),
        ("a: [", "--config"),
        ("model: a\nmodel_path: b", "given twice"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        settings("--config", str(path))
    assert part in str(caught.value)


def test_an_unknown_variable_is_mentioned() -> None:
    assert settings(MAX_NUM_SEQZ="4")[2] == [
        "KTSERVE_MAX_NUM_SEQZ is not a setting; did you mean KTSERVE_MAX_NUM_SEQS?"
    ]


def test_ktransformers_flags_and_what_they_mean_here() -> None:
    argv = ["--model_path", "m", "--gguf_path=g", "--optimize_config_path", "r.yaml", "--cache_lens", "4096"]
    argv += ["--chunk_size", "64", "--max_batch_size", "4", "--max_new_tokens", "99", "--cpu_infer", "10"]
    engine, serve, notes = settings(*argv)
    assert (engine.model, engine.gguf, engine.rules) == ("m", "g", "r.yaml")
    assert (engine.kv_cache_tokens, engine.max_num_batched_tokens, engine.max_num_seqs) == (4096, 64, 4)
    assert (engine.cpu_threads, serve.default_max_tokens) == (10, 99)
    assert len(notes) == 8
    assert any(line.startswith("--cache-lens 4096: here --kv-cache-tokens 4096") for line in notes)
