"""The parts of the GPU benchmark are commands that their modules take, in an order that fits."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import record
from benchmarks.client import Burst
from benchmarks.gpu import hybrid, timeline
from benchmarks.gpu import run as bench_gpu
from benchmarks.gpu.run import PARTS, Part, command, parse, run
from benchmarks.gpu.served import Served, steady_tok_s
from benchmarks.gpu.tests import run as run_tests
from benchmarks.models.folder import write_folder
from benchmarks.models.random import DRY
from benchmarks.settings import served_config
from engine.config import EngineConfig
from engine.experts.capabilities import ExpertCounters, needed


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


SMALL = {"num_hidden_layers": 2, **DRY}
ON_CPU = ["--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "8192"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), SMALL)


def test_the_engine_of_a_server_is_measured(model):
    """The settings are those of `ktserve serve` with the flags; a row and a long prompt are run."""
    written = (model / "model-0.safetensors").stat().st_mtime_ns
    assert (write_folder(model, SMALL) / "model-0.safetensors").stat().st_mtime_ns == written
    flags = [*ON_CPU, "--pack-cache", "off"]
    config = served_config(model, flags)
    assert config == EngineConfig(model=str(model), device="cpu", cpu_threads=1, pack_cache="off", kv_cache_tokens=8192)
    served = Served(config)
    row = served.decode(2, 0.0)
    assert row["engine_tok_s"] == pytest.approx(2e3 / row["engine_ms"]) and 0 < row["host_ms"] <= row["engine_ms"]
    seen = served.first_token(700, 1)
    assert seen["longest_gap_ms"] >= seen["gap_ms"] > 0 and seen["ttft_s"] > 0
    assert served.burst(2, 8, 16) > 0
    alone = served.first_token(700, 0)
    assert alone["ttft_s"] > 0 and alone["decode_ms"] > 0
    assert not served.core.busy
    served.core.close()


def test_decode_steps_choose_what_was_drawn(model):
    """Experts 1 and 3 alone, of all layers; prompts are left to their routers."""
    bench = hybrid.Bench(model, ON_CPU, 3)
    bench.routed.deal(torch.tensor([1, 3]).expand(4, 2, 3, 2))
    counters = needed(bench.routed.inner, ExpertCounters)
    with bench.served.running(3):
        bench.steps(0, 2)
        before = counters.choices()
        bench.steps(0, 6)
        after = counters.choices()
    made = torch.tensor([[b - a for a, b in zip(before[layer], after[layer], strict=True)] for layer in (0, 1)])
    assert (made[:, [1, 3]] >= 15).all() and made.sum() == made[:, [1, 3]].sum()
    bench.served.core.close()


def test_draws_are_distinct_and_as_skewed_as_asked():
    even = hybrid.draws((200, 2, 4), 16, 3, 0.0, seed=1)
    skewed = hybrid.draws((200, 2, 4), 16, 3, 1.1, seed=1)
    assert even.shape == skewed.shape == (200, 2, 4, 3)
    shares = []
    for drawn in (even, skewed):
        assert (drawn.sort(-1).values.diff(dim=-1) > 0).all()
        uses = torch.stack([drawn[:, layer].flatten().bincount(minlength=16) for layer in (0, 1)])
        shares.append(uses.sort(1, descending=True).values[:, :4].sum(1) / uses.sum(1))
    assert (shares[0] < 0.33).all() and (shares[1] > 0.5).all()


def test_a_timeline_says_how_much_of_the_copying_is_hidden():
    first = {"layer": 0, "copy": (0.0, 10.0), "attention": (0.0, 4.0), "wait": (4.0, 10.0), "experts": (10.0, 14.0)}
    second = {
        "layer": 3,
        "copy": (10.0, 20.0),
        "attention": (14.0, 19.0),
        "wait": (19.0, 20.0),
        "experts": (20.0, 24.0),
    }
    assert timeline.hidden([first, second]) == (4 + 4 + 5) / 20
    assert timeline.chart([first, second], width=24).splitlines() == [
        "                 0                  24 ms",
        "layer 0  copy    ==========",
        "         compute aaaa......EEEE",
        "layer 3  copy              ==========",
        "         compute               aaaaa.EEEE",
    ]


def test_tokens_a_second_while_all_streams_run():
    seen = Burst(8, 9.0, ttft_s=[1.0, 2.0], gaps_s=[[1.0, 1.0, 1.0], [0.5, 0.5, 5.0]])
    assert steady_tok_s(seen) == 2  # from 2 to 4 s: two of the first stream, two of the second
    assert math.isnan(steady_tok_s(Burst(2, 9.0, ttft_s=[1.0, 7.0], gaps_s=[[1.0], [1.0]])))


def test_the_gpu_tests_write_how_they_ended(tmp_path, monkeypatch):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.mark.skip(reason='no')\n"
        "def test_left_out(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_broken(broken): pass\n"
    )
    status = run_tests([str(tests)], 1, tmp_path / "gpu-tests.json")
    found = json.loads((tmp_path / "gpu-tests.json").read_text())
    assert status == 1
    assert list(found)[: len(record.KEYS)] == list(record.KEYS)
    assert [found[name] for name in ("passed", "skipped", "failures", "errors")] == [1, 1, 1, 1]
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_bad", "test_broken"]
