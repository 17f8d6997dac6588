"""A run's folder is its own; a command that is killed takes its training along; words may stand in any order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from api.cli.main import build_parser
from api.cli.train import ordered
from engine.errors import UserError
from training.loop.output import output_folder
from training.run import train


def test_two_runs_never_write_into_one_folder(config):
    config.output.mkdir(parents=True)
    code = "import sys; from pathlib import Path; from training.loop.output import output_folder\n"
    code += "with output_folder(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(config.output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"another run, process {other.pid}, writes into it"):
        train(replace(config, overwrite_output_dir=True))
    other.kill()
    other.communicate()
    train(replace(config, max_steps=1, save_strategy="no"))  # a lock ends with its process
    assert not (config.output / ".lock").exists()


@pytest.mark.parametrize("change", [{"dataset": ("/nowhere.json",)}, {"resume_from_checkpoint": "true"}])
def test_a_refused_run_leaves_no_folder(config, change):
    output = config.output / "a" / "b"
    with pytest.raises(UserError):
        train(replace(config, output_dir=str(output), **change))
    assert not config.output.exists()
    config.output.mkdir()
    with pytest.raises(UserError):
        train(replace(config, output_dir=str(output), **change))
    assert config.output.exists() and not output.parent.exists()


def test_what_was_written_stays(tmp_path):
    with pytest.raises(UserError, match="x"), output_folder(tmp_path / "out"):
        (tmp_path / "out" / "file").write_text("")
        raise UserError("x", "x")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_killing_the_command_ends_the_training(config, tmp_path):
    settings = {
        "model_name_or_path": config.model_name_or_path, "dataset": config.dataset[0], "output_dir": config.output_dir,
        "device": "cpu", "max_steps": 100000, "save_strategy": "no", "logging_steps": 1, "kt_num_threads": 1,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "ktserve" / "__main__.py"), "train", str(tmp_path / "run.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    (child,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    child.wait(timeout=300)  # raises if it goes on


_OVERRIDES = st.lists(st.sampled_from(["max_steps=5", "a.b=c=d", "lora_target=[q_proj]"]), max_size=3)
_FLAGS = st.permutations([("--resume",), ("--publish", "http://x"), ("--admin-key", "a=1"), ("--skip_bad_rows", "3")])


@given(st.data(), _OVERRIDES, _FLAGS, st.sampled_from([None, "out/checkpoint-5"]), st.booleans())
def test_overrides_stand_anywhere(data, overrides, flags, folder, first):
    """Behind the file, between flags and behind them; what --resume takes is a folder, never a setting."""
    groups = [[word] for word in overrides]
    flags = flags[: data.draw(st.integers(0, 4))]
    groups += [[*flag, folder] if flag == ("--resume",) and folder else list(flag) for flag in flags]
    groups = data.draw(st.permutations(groups))
    leading = [g for g in groups if g[0] != "--resume" or folder is None] if first else []
    argv = ["train", *(w for g in leading if g[0].startswith("--") for w in g), "c.yaml"]
    argv += [word for group in groups for word in group if not (group in leading and group[0].startswith("--"))]
    args = build_parser().parse_args(ordered(argv))
    assert args.file == "c.yaml" and sorted(args.overrides) == sorted(overrides)
    names = {flag[0] for flag in flags}
    assert args.resume == ((folder or "true") if "--resume" in names else None)
    assert args.publish == ("http://x" if "--publish" in names else None)
    assert args.admin_key == ("a=1" if "--admin-key" in names else None)
    assert args.skip_bad_rows == ("3" if "--skip_bad_rows" in names else None)


def test_other_commands_are_left_alone():
    assert ordered(["plan", "--train", "c.yaml", "a=1"]) == ["plan", "--train", "c.yaml", "a=1"]
    assert ordered([]) == []
