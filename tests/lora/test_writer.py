"""What is written in either form reads back as the same adapter, and is whole or not there."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine.errors import AdapterError, UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.files import writer
from engine.lora.files.convert import convert
from engine.lora.files.folder import CONFIG_FILE
from engine.lora.files.parse import parse_adapter
from engine.lora.files.writer import FORMS, write_adapter
from engine.weights.open import open_model
from testing.models.tiny import save_hf, tiny_model
from tests.lora import make
from tests.lora.forms import FORMS as READ_FORMS
from tests.lora.forms import assert_same, write_form

CONFIG = make.model_config()


def uneven(seed: int) -> AdapterWeights:
    """Other ranks and scales in one layer than in the next."""
    weights, other = (make.random_adapter(CONFIG, rank=rank, alpha=6.0, seed=seed + rank) for rank in (3, 5))
    first = min(weights.experts)
    weights.experts[first] = other.experts[first]
    weights.linears |= {name: pair for name, pair in other.linears.items() if ".0." in name}
    return weights


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make_one", [lambda: make.random_adapter(CONFIG), lambda: uneven(0)], ids=["even", "uneven"])
def test_what_is_written_reads_back(tmp_path, form, make_one):
    weights = make_one()
    write_adapter(weights, tmp_path / "a", form, base="base")
    read = parse_adapter(tmp_path / "a", CONFIG, name="a", base="base")
    assert read.format == {"peft": "peft-per-expert", "kt-fused": "kt-fused"}[form]
    assert read.warnings == []
    assert_same(read, weights)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_attention_alone(tmp_path, form):
    weights = make.random_adapter(CONFIG, experts=False)
    if form == "kt-fused":
        with pytest.raises(UserError, match="no LoRA on experts"):
            write_adapter(weights, tmp_path, form)
        return
    write_adapter(weights, tmp_path, form)
    assert_same(parse_adapter(tmp_path, CONFIG, name="a"), weights)


def test_bfloat16_stays_bfloat16(tmp_path):
    weights = make.random_adapter(CONFIG, dtype=torch.bfloat16)
    write_adapter(weights, tmp_path, "peft")
    read = parse_adapter(tmp_path, CONFIG, name="a")
    assert all(lora.gate_a.dtype == lora.down_b.dtype == torch.bfloat16 for lora in read.experts.values())
    assert_same(read, weights)


class Stopped(BaseException):
    """As SIGKILL: nothing after it runs."""


@pytest.mark.parametrize(("old", "form"), [("none", "kt-fused"), ("kt-fused", "peft")])
def test_ended_anywhere_the_folder_is_the_old_one_the_new_one_or_none(tmp_path, monkeypatch, old, form):
    """The process ends before each call that changes the folder; none after it is made, clean-up included."""
    before, after = make.random_adapter(CONFIG, seed=1), make.random_adapter(CONFIG, seed=2)
    real = {name: getattr(Path, name) for name in ("replace", "unlink", "write_text")}
    seen, calls, done = set(), 0, False
    while not done:
        folder = tmp_path / str(calls)
        if old != "none":
            write_adapter(before, folder, old)
        left = iter(range(calls))

        def ending(name, left=left):
            def call(*args, **kwargs):
                if next(left, None) is None:
                    raise Stopped
                return real[name](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(Path, name, ending(name))
            with suppress(Stopped):
                write_adapter(after, folder, form)
                done = True
        try:
            read = parse_adapter(folder, CONFIG, name="a")
        except AdapterError:
            seen.add("none")
        else:
            new = torch.equal(read.experts[0].gate_a, after.experts[0].gate_a)
            assert_same(read, after if new else before)
            seen.add("new" if new else "old")
        calls += 1
    assert calls > 8
    assert seen == {"none", "new"} | ({"old"} if old != "none" else set())


def test_a_full_disk_leaves_the_old_adapter(tmp_path, monkeypatch):
    weights = make.random_adapter(CONFIG, seed=1)
    write_adapter(weights, tmp_path, "peft")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_sync", full)
    with pytest.raises(UserError, match=f"{tmp_path}: No space left on device"):
        write_adapter(make.random_adapter(CONFIG, seed=2), tmp_path, "kt-fused")
    assert_same(parse_adapter(tmp_path, CONFIG, name="a"), weights)
    assert not list(tmp_path.glob(".*"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_hf(tiny_model(num_hidden_layers=2, mlp_only_layers=[1], num_experts=4), folder)
    return folder


@pytest.mark.parametrize(
    ("read_form", "form"), [(form, "peft") for form in READ_FORMS if form != "E 0.18"] + [("B", "kt-fused")]
)
def test_every_form_that_is_read_converts(tmp_path, base, read_form, form):
    config = open_model(str(base)).config
    weights = make.random_adapter(config)
    source = write_form(tmp_path / "source", read_form, weights)
    text = convert(str(source), form, str(tmp_path / "out"), str(base))
    assert form in text
    assert_same(parse_adapter(tmp_path / "out", config, name="a"), weights)


def test_converting_needs_the_base_and_an_empty_folder(tmp_path, base):
    weights = make.random_adapter(open_model(str(base)).config)
    write_adapter(weights, tmp_path / "a", "peft", base=str(base))
    convert(str(tmp_path / "a"), "kt-fused", str(tmp_path / "b"), None)
    with pytest.raises(UserError, match="not an empty folder"):
        convert(str(tmp_path / "a"), "peft", str(tmp_path / "b"), None)
    content = json.loads((tmp_path / "a" / CONFIG_FILE).read_text())
    (tmp_path / "a" / CONFIG_FILE).write_text(json.dumps(content | {"base_model_name_or_path": "Qwen/none"}))
    with pytest.raises(UserError, match="give --model"):
        convert(str(tmp_path / "a"), "peft", str(tmp_path / "c"), None)
