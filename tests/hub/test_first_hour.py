"""The mistakes of somebody's first hour: each ends with one line that says what is wrong and what to type."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from api.cli import child
from api.cli.main import main
from demo.paths import demo_adapters
from engine.main import main as engine
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model

ADAPTER = demo_adapters()["pirate"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("first")
    model = tiny_model()
    for name in ("empty", "half", "dense", "pickled", "several", "lost", "bin", "bare"):
        (root / name).mkdir()
    save_gguf(model, root / "half/tiny.gguf", split=9)
    max((root / "half").iterdir()).unlink()
    save_gguf(model, root / "ok.gguf")
    whole = (root / "ok.gguf").read_bytes()
    (root / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (root / "page.gguf").write_bytes(b"<!DOCTYPE html><html>")
    (root / "pointer.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    (root / "several/a-Q8_0.gguf").write_bytes(whole)
    (root / "several/a-Q4_0.gguf").write_bytes(whole)
    (root / "empty.gguf").touch()
    (root / "model.zip").write_bytes(b"PK\x03\x04")
    save_hf(model, root / "lost", sharded=True)
    max((root / "lost").glob("*.safetensors")).unlink()
    (root / "bin/pytorch_model.bin").write_bytes(b"?")
    (root / "bare/model.safetensors").write_bytes(b"?")
    dense = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (root / "dense/config.json").write_text(json.dumps(dense))
    (root / "dense/model.safetensors").write_bytes(b"?")
    missing = {"model_type": "glm_moe_dsa", "architectures": ["X"]}
    (root / "pickled/config.json").write_text(json.dumps(missing))
    (root / "pickled/model.safetensors").write_bytes(b"?")
    return root


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made here: a child of its own would import torch for each."""
    monkeypatch.setattr(child, "_status", lambda argv: engine([*argv[argv.index("plan") :]]))


MISTAKES = (
    ("plan {}/nothing", "what has been fetched: ktserve models"),
    ("plan Org/Model-30B-A3B", "hf:Org/Model-30B-A3B"),
    ("serve Org/Model:Q4_K_M", "hf:Org/Model:Q4_K_M"),
    ("plan hf:Model", "write hf:ORG/REPO"),
    ("plan {}/empty", "ktserve pull"),
    ("plan {}/half", "ktserve pull"),
    ("plan {}/cut.gguf", "ktserve pull"),
    ("plan {}/page.gguf", "a web page"),
    ("plan {}/pointer.gguf", "git lfs pull"),
    ("serve {}/several", "ktserve plan {}/several compares them"),
    ("plan {}/empty.gguf", "ktserve pull"),
    ("plan {}/model.zip", "unpack it"),
    ("plan {}/lost", "ktserve pull"),
    ("plan {}/lost/model-00001-of-00004.safetensors", "name the folder that it is in: {}/lost"),
    ("plan {}/bin", "pickled weights are not read; fetch a model: ktserve pull"),
    ("plan {}/bare", "ktserve pull"),
    ("plan https://example.com/Org/Model", "hf:ORG/REPO"),
    ("pull https://example.com/Org/Model", "write hf:ORG/REPO"),
    ("plan {}/dense", "this one is dense, a model without experts: llama.cpp"),
    ("plan {}/pickled", "of this one sparse attention over the positions"),
    ("plan {}/ok.gguf --kv-cache-tokens 1000000000000", "would fit:"),
    ("plan {}/ok.gguf --adapters law", "write NAME=PATH"),
    ("plan {}/ok.gguf --adapters law={}/empty", "holds no adapter"),
    ("plan {}/ok.gguf --n-gpu-layers 99", "experts that do not fit the GPU stay on the CPU"),
    ("plan {}/ok.gguf -c 4096", "--max-model-len"),
    ("plan {}/ok.gguf --max-modellen 4096", "did you mean --max-model-len?"),
    ("plan {}/ok.gguf --kv-cache-memory 10XB", "GiB"),
    ("plan {}/ok.gguf --adapters law={}/nothing", "cannot be opened"),
    ("plan {}/ok.gguf {}/cut.gguf", "ktserve --help"),
    ("chat --url localhost:8000", "write http://HOST:PORT"),
    ("chat --url http://127.0.0.1:9", "start one: ktserve serve"),
    ("adapters publish {adapter} http://127.0.0.1:9", "start one: ktserve serve"),
    ("keys new --tenant a/b", "A-Z a-z 0-9"),
    ("serve --config {}/nothing.yaml", "No such file"),
    ("serve {}/ok.gguf", "--skip-tokenizer"),
    ("serve {}/ok.gguf --host 0.0.0.0 --port 0", "ktserve keys new"),
    ("serve {}/ok.gguf --api-keys-file {}/keys", "ktserve keys new"),
    ("serve {}/ok.gguf --port {port}", "without --port a free one is taken"),
    ("serve {}/ok.gguf --tokenizer {}/nope", "--tokenizer"),
    ("srve {}/ok.gguf", "did you mean serve?"),
    ("{}/ok.gguf", "ktserve serve {}/ok.gguf"),
)


@pytest.mark.parametrize(("typed", "advice"), MISTAKES)
def test_a_mistake_is_one_line_with_the_next_step(
    typed: str, advice: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        typed = typed.replace("{port}", str(taken.getsockname()[1])).replace("{adapter}", str(ADAPTER))
        words = typed.replace("{}", str(folder)).split()
        assert main(words) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], lines
    assert advice.replace("{}", str(folder)) in lines[-1]


def test_what_this_machine_lacks_is_said_with_how_to_find_out(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    native = pytest.importorskip("native._native")
    lacking = [["--isa", "amx"]] if native.best_isa() != "amx" else []
    lacking += [["--device", "cuda"]] if not torch.cuda.is_available() else []
    for flags in lacking:
        assert main(["plan", str(folder / "ok.gguf"), *flags]) == 1
        assert "ktserve doctor" in capfd.readouterr().err.splitlines()[-1]
