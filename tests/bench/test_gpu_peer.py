"""The comparison with llama.cpp beside a GPU: its sweep, its best flags by rows, its results; a script is the peer."""

from __future__ import annotations

import json
import stat
import sys

import pytest

from benchmarks.cpu.engine import Needs
from benchmarks.gpu.llamacpp import PLACEMENTS, best_flags, candidates, measure, parse, placement, row
from benchmarks.models.shapes import Shape
from benchmarks.peers.llamacpp import Flags, Peer, PeerError
from rules import Machine, place
from tests.bench.shape import SHAPE
from tests.rules.models import load_rules, modules

# Faster with fewer threads at one row, with more at two; --no-repack fails.
_BATCHED = """#!{python}
import json, os, sys
words = sys.argv[1:]
if "--no-repack" in words:
    sys.exit("no such weights")
if "--version" in words:
    sys.exit(print("ggml: no devices", "version: 7 (test)", sep=chr(10), file=sys.stderr))
threads = int(words[words.index("-t") + 1])
for n in map(int, words[words.index("-npl") + 1].split(",")):
    print(json.dumps({{"pl": n, "speed_tg": 10.0 / threads if n == 1 else 10.0 * threads}}))
with open(sys.argv[0] + ".log", "a") as log:
    log.write(" ".join(words) + " | " + os.environ.get("LD_LIBRARY_PATH", "") + "\\n")
"""


@pytest.fixture
def peer(tmp_path):
    path = tmp_path / "bin" / "llama-batched-bench"
    path.parent.mkdir()
    path.write_text(_BATCHED.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path.parent


def test_ours_and_the_peer_at_its_best_flags_are_recorded(peer, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--models", str(tmp_path), "--llama", str(peer), "--types", "Q8_0", "--rows", "1", "2", "--prompt", "16"]
    flags += ["--placements", "whole", "layers", "--device", "cpu", "--threads", "1", "--quick", "--out", str(out)]
    found = measure(parse(flags), SHAPE)
    assert json.loads(out.read_text())["results"] == found["results"]
    assert [(entry["placement"], entry["rows"]) for entry in found["results"]] == [
        ("whole", 1), ("whole", 2), ("layers", 1), ("layers", 2)
    ]  # fmt: skip
    for entry in found["results"]:
        assert entry["ours_tok_s"] > 0
        assert entry["ratio"] == pytest.approx(entry["ours_tok_s"] / entry["llamacpp_tok_s"])
        assert row(entry).startswith(f"| Q8_0 | {entry['placement']} | {entry['rows']} |")
    assert [swept["cpu_layers"] for swept in found["sweep"]] == [0, 1]
    assert any("error" in line for line in found["sweep"][0]["tried"])
    assert found["versions"]["llama.cpp"] == "7 (test)"
    asked, libraries = (peer / "llama-batched-bench.log").read_text().splitlines()[0].split(" | ")
    assert "-npl 1,1,2,2" in asked and str(peer) in libraries


def test_half_of_the_experts_bytes_are_on_the_gpu_on_both_sides(tmp_path):
    shape = Shape()
    at = {name: placement(name, shape, tmp_path) for name in PLACEMENTS}
    assert {name: where.cpu_layers for name, where in at.items()} == {"whole": 0, "half": 4, "layers": 4, "cpu": 8}
    sizes = Needs(shape, "Q4_K_M").expert  # by layer; Q4_K_M's layers differ
    assert sum(sizes[: at["half"].cpu_layers]) * 2 == sum(sizes)
    assert at["half"].flags == ("--gpu-experts", "64")
    placed = place(load_rules(at["layers"].flags[1]), modules(12, range(12)), Machine(True, True, True, True))
    backends = [placed[f"model.layers.{i}.mlp.experts"].backend for i in range(12)]
    assert backends == ["native"] * 4 + ["gpu"] * 8


def test_every_number_of_rows_has_the_flags_that_are_fastest_there(peer, tmp_path):
    tries = [Flags(1), Flags(4), Flags(2, repack=False)]
    lines = [{"tok_s": {1: 10.0, 8: 10.0}}, {"tok_s": {1: 3.0, 8: 40.0}}, {"error": "no such weights"}]
    assert best_flags(tries, lines, [1, 8]) == {Flags(1): [1], Flags(4): [8]}
    with pytest.raises(PeerError, match="no such weights"):
        best_flags(tries[2:], lines[2:], [1])


def test_flags_leave_the_experts_of_so_many_layers_on_the_cpu():
    tries = candidates(16, gpu=True, cpu_layers=4)
    assert {flags.threads for flags in tries} == {14, 16}
    assert all("-ngl 99 --load-mode none --n-cpu-moe 4" in str(flags) for flags in tries)
    assert sum("--no-op-offload" in str(flags) for flags in tries) == 2
    whole = [str(flags) for flags in candidates(16, gpu=True, cpu_layers=0)]
    assert not any(word in flags for flags in whole for word in ("moe", "repack", "offload"))
    assert {"-fa on", "-fa off"} == {word for flags in whole for word in ("-fa on", "-fa off") if word in flags}
    assert not any("-ngl" in str(flags) for flags in candidates(2, gpu=False, cpu_layers=0))


def test_a_peer_that_does_not_start_is_told(peer, tmp_path):
    with pytest.raises(PeerError, match="status 1"):
        Peer(peer).batched(tmp_path / "m.gguf", Flags(1, repack=False), 16, 4, [1])
