"""The parts of the GPU benchmark are commands that their modules take, in an order that fits."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest

from benchmarks.cpu.client import Burst
from benchmarks.gpu import run as bench_gpu
from benchmarks.gpu.run import PARTS, Part, command, parse, run
from benchmarks.gpu.served import Served, served_config, steady_tok_s
from benchmarks.models.folder import write_folder
from engine.config import EngineConfig


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


def test_the_engine_of_a_server_is_measured(tmp_path):
    """The settings are those of `ktserve serve` with the flags; a row and a long prompt are run."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    small |= {"vocab_size": 512, "max_position_embeddings": 8192}
    model = write_folder(tmp_path / "model", small)
    written = (model / "model-0.safetensors").stat().st_mtime_ns
    assert (write_folder(model, small) / "model-0.safetensors").stat().st_mtime_ns == written
    flags = ["--device", "cpu", "--cpu-threads", "1", "--pack-cache", "off", "--kv-cache-tokens", "8192"]
    config = served_config(model, flags)
    assert config == EngineConfig(model=str(model), device="cpu", cpu_threads=1, pack_cache="off", kv_cache_tokens=8192)
    served = Served(config)
    row = served.decode(2, 0.0)
    assert row["engine_tok_s"] == pytest.approx(2e3 / row["engine_ms"]) and 0 < row["host_ms"] <= row["engine_ms"]
    seen = served.first_token(700, 1)
    assert seen["longest_gap_ms"] >= seen["gap_ms"] > 0 and seen["ttft_s"] > 0
    assert served.burst(2, 8, 16) > 0
    assert not served.core.busy
    served.core.close()


def test_tokens_a_second_while_all_streams_run():
    seen = Burst(8, 9.0, ttft_s=[1.0, 2.0], gaps_s=[[1.0, 1.0, 1.0], [0.5, 0.5, 5.0]])
    assert steady_tok_s(seen) == 2  # from 2 to 4 s: two of the first stream, two of the second
    assert math.isnan(steady_tok_s(Burst(2, 9.0, ttft_s=[1.0, 7.0], gaps_s=[[1.0], [1.0]])))
