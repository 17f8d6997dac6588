"""The parts of the GPU benchmark are commands that their modules take, in an order that fits."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from benchmarks.gpu import run as bench_gpu
from benchmarks.gpu.run import PARTS, Part, command, parse, run


def test_every_part_is_a_module_and_follows_what_it_needs():
    made: list[str] = []
    for name, part in PARTS.items():
        assert importlib.util.find_spec(f"benchmarks.{part.module}"), name
        assert not part.needs or part.needs in made, name
        assert part.out not in made
        made.append(part.out)


def test_a_part_is_compared_with_the_one_before_where_that_has_run(tmp_path):
    args = parse(["--out", str(tmp_path), "--quick"])
    assert "--peer" not in command(PARTS["decode"], args)
    (tmp_path / "gpu-decode-kt.json").write_text("{}")
    words = command(PARTS["decode"], args)
    assert words[words.index("--peer") + 1] == str(tmp_path / "gpu-decode-kt.json")
    assert words[-2:] == ["--out", str(tmp_path / "gpu-decode.json")]
    assert words[words.index("--layers") + 1] == "2"


def test_a_part_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(bench_gpu, "PARTS", {"a": Part("no_such_module", "", "a.json"), "b": PARTS["llamacpp"]})
    args = parse(["--out", str(tmp_path), "--parts", "a", "b"])
    failed = run(args)
    assert "a: ended with status 1" in failed[0] and "b: left out" in failed[1]
    assert sys.executable not in capfd.readouterr().out


def test_a_dry_run_does_not_overwrite_results(capsys):
    with pytest.raises(SystemExit):
        parse(["--quick"])
    assert "--quick needs --out" in capsys.readouterr().err
