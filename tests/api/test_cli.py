"""The command line: help, child commands, terminal chat, what is imported."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from api.cli import launch
from api.cli import main as command_line
from api.cli.launch import LoadingBar
from api.config import ServeConfig
from engine.config import EngineConfig
from engine.messages import ATTENTION_STAGE, Loading
from ktserve.settings import settings_of
from testing import forked
from testing.waiting import PATIENCE_S
from tests.api.conftest import ROOT, environment, serving

Here = Callable[..., tuple[int, str, str]]
ANSWER = "user\n{}\nassistant\n"


def ktserve(*argv: str, stdin: str = "", **fake: Any) -> subprocess.CompletedProcess[str]:
    return forked.run("api.cli.main", argv, environment(**fake), stdin=stdin, timeout=PATIENCE_S)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a command that starts no process in this one: its status, and what it printed."""
    for name in [name for name in os.environ if name.startswith("KTSERVE_")]:
        monkeypatch.delenv(name)

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            status = command_line.main(argv)
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "argv", [[], ["serve"], ["chat"], ["plan"], ["check"], ["doctor"], ["adapters"], ["adapters", "inspect"]]
)
def test_help(here: Here, argv: list[str]) -> None:
    status, said, _ = here(*argv, "--help")
    assert status == 0 and said.startswith("usage: ktserve")
    assert "--model_path" not in said or argv == ["serve"]


def test_every_setting_is_in_the_help(here: Here) -> None:
    _, text, _ = here("serve", "--help")
    for setting in settings_of(EngineConfig) + settings_of(ServeConfig):
        assert re.search(rf"^  {setting.flag}[ ,]", text, re.MULTILINE), setting.flag


def test_mistakes_are_one_line(here: Here, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    for argv, part in (
        ([], "required"),
        (["sevre"], "did you mean serve?"),
        (["benhc"], "did you mean bench?"),
        (["keys", "nwe"], "did you mean new?"),
        (["serve", "--max-num-seq", "1"], "did you mean --max-num-seqs"),
        (["serve", "a", "--model", "b"], "given twice"),
        (["chat", "/nope"], "no such file"),
        (["serve", "--backend_type", "ktransformers", "--max_batch_size", "4"], "one request at a time"),
        (["serve", str(tmp_path), "--architectures", "MixtralForCausalLM"], "Qwen3MoeForCausalLM"),
    ):
        status, _, error = here(*argv)
        assert status == 1, argv
        assert part in error and len(error.splitlines()) == 1, error


def test_what_ktransformers_calls_a_model(model_dir: Path) -> None:
    done = ktserve("plan", "--model_path", str(model_dir), "--model_name", "mine", "--kt-method", "AMXINT8")
    config = json.loads(done.stdout)["config"]
    assert (config["served_model_name"], config["kt_method"]) == ("mine", "AMXInt8"), done.stderr
    done = ktserve("serve", str(model_dir), "--architectures", "Qwen3MoeForCausalLM", "--port", "0", fatal="enough")
    assert "--architectures Qwen3MoeForCausalLM: read from the model's own files here" in done.stderr


def test_children_get_the_settings_and_give_their_status(model_dir: Path) -> None:
    done = ktserve("plan", str(model_dir), "--max-model-len", "99", "--adapters", "a=/x")
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["command"] == "plan"
    assert (said["config"]["model"], said["config"]["max_model_len"]) == (str(model_dir), 99)
    assert said["config"]["adapters"] == ["a=/x"]
    assert json.loads(ktserve("check", str(model_dir)).stdout)["command"] == "check"
    said = json.loads(ktserve("adapters", "inspect", "some/path", "--model", "m").stdout)
    assert (said["command"], said["path"], said["config"]["model"]) == ("inspect", "some/path", "m")
    options = ["--to", "peft", "--out", "o", "--expert-scaling", "alpha/r"]
    said = json.loads(ktserve("adapters", "convert", "some/path", *options).stdout)
    assert said["more"] == ["--to=peft", "--out=o", "--expert-scaling=alpha/r"]
    assert ktserve("adapters", "inspect", "bad").returncode == 7


def test_a_model_whose_text_cannot_be_served_fails_the_check(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    done = ktserve("check", str(tmp_path))
    assert done.returncode == 1 and f"error: {tmp_path}" in done.stderr and "not a sound tokenizer" in done.stderr
    assert ktserve("check", str(tmp_path), "--skip-tokenizer").returncode == 0
    assert ktserve("check", str(tmp_path), "--tokenizer", str(model_dir)).returncode == 0


def test_ktransformers_flags_are_explained(model_dir: Path) -> None:
    done = ktserve("plan", f"--model_path={model_dir}", "--cache_lens", "512")
    assert json.loads(done.stdout)["config"]["kv_cache_tokens"] == 512
    assert "--cache-lens 512: here --kv-cache-tokens 512" in done.stderr


def test_one_request_at_a_time(model_dir: Path) -> None:
    done = ktserve("serve", str(model_dir), "--backend_type", "ktransformers", "--port", "0", fatal="enough")
    assert "here --max-num-seqs 1" in done.stderr and done.stderr.splitlines()[-1] == "error: enough"


def test_chat(model_dir: Path) -> None:
    lines = [
        "hé 👋",
        "/adapter reverse",
        "abc",
        "/adapter nope",
        "/adapter",
        "/reset",
        "x",
        "/adapters",
        "/what",
        "/quit",
        "y",
    ]
    done = ktserve("chat", str(model_dir), "--adapters", "reverse=/x", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "fake" in line or line.startswith("weights")]
    loaded = [f"weights: {done} of 3" for done in (1, 2, 3)]
    assert said == ["memory plan: fake", *loaded, "note: fake"]  # what is planned, before it is loaded
    assert done.stdout.startswith(ANSWER.format("hé 👋"))
    assert "cba" in done.stdout, "the adapter answers with the whole conversation reversed"
    assert done.stdout.endswith(ANSWER.format("x") + "\n"), "after /reset the conversation starts again"
    for part in (
        "(reverse answers)",
        "no adapter 'nope'; there is: reverse",
        "(the base model answers)",
        "unknown command /what",
    ):
        assert part in done.stderr


def test_chat_commands(model_dir: Path) -> None:
    lines = [
        "/regenerate",
        "/system be brief",
        "abc",
        "/regenerate",
        "/system",
        "/reset",
        "one\\",
        "two",
        '"""three',
        'four"""',
    ]
    done = ktserve("chat", str(model_dir), stdin="\n".join(lines))
    assert done.returncode == 0 and "there is no message to answer again" in done.stderr
    brief = "system\nbe brief\n" + ANSWER.format("abc") + "\n"
    assert done.stdout.startswith(brief * 2), "the same prompt, answered twice"
    assert ANSWER.format("one\ntwo") in done.stdout and "user\nthree\nfour\n" in done.stdout


def test_chat_with_a_server(model_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret")
    flags = ["--api-keys-file", str(keys), "--adapters", "reverse=/x"]
    with serving(model_dir, tmp_path, *flags, key="secret") as server:
        url = ("chat", "--url", server.url)
        done = ktserve(*url, "--key-file", str(keys), stdin="hi\n/adapters\n/reset\n/adapter reverse\nabc\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(ANSWER.format("hi")) and "cba" in done.stdout
        assert done.stderr.split()[:2] == ["base", "reverse"]
        assert "--key-file FILE" in ktserve(*url).stderr.splitlines()[-1]
    assert "start one: ktserve serve" in ktserve(*url).stderr.splitlines()[-1]
    assert "write http://HOST:PORT" in ktserve("chat", "--url", "there").stderr
    for setting in ("--max-num-seqs=4", "--chat-template=/x", "--adapters=a=/b"):
        said = ktserve("chat", "--url", "http://127.0.0.1:9", setting).stderr.splitlines()[-1]
        assert f"leave out {setting.partition('=')[0]}" in said


def test_chat_options(model_dir: Path) -> None:
    flags = ["--system", "be brief", "--adapter", "reverse", "--adapters", "reverse=/x", "--default-max-tokens", "9"]
    done = ktserve("chat", str(model_dir), *flags, stdin="hi\n")
    assert done.stdout == "\ntnatsissa"[:9] + "\n"
    assert ktserve("chat", str(model_dir), "--adapter", "nope").stderr.splitlines()[-1].startswith("error: no adapter")


def test_chat_outlives_what_goes_wrong(model_dir: Path) -> None:
    flags = ["--adapters", "fail=/x", "--adapters", "reverse=/y"]
    done = ktserve("chat", str(model_dir), *flags, stdin="/adapter fail\nabc\n/adapter\n/reset\nok\n", max_model_len=60)
    assert done.returncode == 0 and "a fault of the fake" in done.stderr
    assert done.stdout.endswith(ANSWER.format("ok") + "\n")
    done = ktserve("chat", str(model_dir), stdin="a long message " * 9 + "\nok\n", max_model_len=60)
    assert "fills the context" in done.stderr and done.stdout.endswith(ANSWER.format("ok") + "\n")


def test_chat_on_a_terminal(model_dir: Path) -> None:
    """Ctrl-C stops an answer; at the prompt it ends the program, and the terminal is as before."""
    main, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    argv = [sys.executable, "-m", "api.cli.main", "chat", str(model_dir), "--adapters", "gated=/x"]
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment(), stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
    )  # fmt: skip
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            ready, _, _ = select.select([main], [], [], PATIENCE_S)
            assert ready, f"{text!r} did not come: {seen!r}"
            seen += os.read(main, 4096).decode(errors="replace")
        seen = seen.partition(text)[2]

    try:
        until("base> ")
        os.write(main, b"hello\n")
        until("assistant")
        until("base> ")
        os.write(main, b"/adapter gated\n")
        until("gated> ")
        os.write(main, b"hello\n")
        until("user")
        os.write(main, b"\x03")
        until("gated> ")
        os.write(main, b"\x03")
        assert process.wait(PATIENCE_S) == 130
        assert termios.tcgetattr(terminal)[3] == before[3]
    finally:
        process.kill()
        process.wait()
        os.close(main)
        os.close(terminal)


def test_generation_config(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    for content, shown in (
        ({"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 1}, "temperature 0.6, top_k 20"),
        ({"temperature": 0.6, "do_sample": False}, "temperature 0.0"),
    ):
        path.write_text(json.dumps(content))
        done = ktserve("chat", str(model_dir), "--generation-config", str(tmp_path), stdin="")
        assert f"sampling defaults from generation_config.json: {shown} (" in done.stderr
    path.write_text(json.dumps({"temperature": "warm"}))
    done = ktserve("chat", str(model_dir), "--generation-config", str(tmp_path))
    assert done.returncode == 1 and "temperature: input should be a valid number, got 'warm'" in done.stderr


def test_a_yaml_file_serves_all_commands(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": str(model_dir), "max_num_seqs": 3, "port": 0, "default_max_tokens": 4}))
    assert json.loads(ktserve("plan", "--config", str(path)).stdout)["config"]["max_num_seqs"] == 3
    assert ktserve("chat", "--config", str(path), stdin="a\n").stdout.startswith("use")


def test_importing_everything_imports_no_torch(tmp_path: Path) -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "api").rglob("*.py")
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert len(modules) > 20


def test_each_layer_is_a_line_where_there_is_no_terminal() -> None:
    written = io.StringIO()
    with LoadingBar(Console(file=written)) as bar:
        for done in range(4):
            bar.update(Loading(stage="Loading layers", done=done, total=3))
    lines = written.getvalue().splitlines()
    assert lines == ["Loading layers ...", *(f"Loading layers: {done} of 3" for done in (1, 2, 3))]


def test_only_a_stage_that_stands_still_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    async def written(moves: bool) -> list[str]:
        output = io.StringIO()
        with LoadingBar(Console(file=output)) as bar:
            bar.update(Loading(stage=ATTENTION_STAGE, done=0, total=1))
            if moves:
                bar.update(Loading(stage=ATTENTION_STAGE, done=1, total=1))
            told = asyncio.Event()
            asyncio.get_running_loop().call_later(launch._SLOW_S, told.set)  # behind what the bar waits for
            await told.wait()
        return output.getvalue().splitlines()

    monkeypatch.setattr(launch, "_SLOW_S", 0.01)
    still, moving = asyncio.run(written(False)), asyncio.run(written(True))
    assert moving == ["Attention kernels ...", "Attention kernels: 1 of 1"]
    assert still[0] == moving[0] and "flashinfer's cache" in still[1]


def test_the_engine_starts_before_what_a_server_is_made_of_is_imported() -> None:
    """Pydantic, FastAPI and the tokenizer's library take most of a second."""
    code = "import sys; import api.cli.main, api.cli.early; print(*sorted(set(sys.modules) & set(sys.argv[1:])))"
    heavy = (
        "pydantic",
        "fastapi",
        "uvicorn",
        "tokenizers",
        "jinja2",
        "numpy",
        "transformers",
        "torch",
        "api.cli.serve",
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [], done.stderr
