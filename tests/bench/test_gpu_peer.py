"""The comparison with llama.cpp beside a GPU: its sweep, its best flags by rows, its results; a script is the peer."""

from __future__ import annotations

import json
import stat
import sys

import pytest

from benchmarks.gpu.llamacpp import best_flags, candidates, measure, parse
from benchmarks.peers.llamacpp import Flags, Peer, PeerError
from tests.bench.test_make_model import SHAPE

# Faster with fewer threads at one row, with more at two; --no-repack fails.
_BATCHED = """#!{python}
import json, os, sys
words = sys.argv[1:]
if "--no-repack" in words:
    sys.exit("no such weights")
threads = int(words[words.index("-t") + 1])
for n in map(int, words[words.index("-npl") + 1].split(",")):
    print(json.dumps({{"pl": n, "speed_tg": 10.0 / threads if n == 1 else 10.0 * threads}}))
with open(sys.argv[0] + ".log", "a") as log:
    log.write(" ".join(words) + " | " + os.environ.get("LD_LIBRARY_PATH", "") + "\\n")
"""


@pytest.fixture
def peer(tmp_path):
    for name, text in (("llama-batched-bench", _BATCHED), ("llama-bench", "#!{python}\nprint('version: 7 (test)')\n")):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path / "bin"


def test_ours_and_the_peer_at_its_best_flags_are_recorded(peer, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--models", str(tmp_path), "--llama", str(peer), "--types", "Q8_0", "--rows", "1", "2"]
    found = measure(parse([*flags, "--device", "cpu", "--threads", "1", "--quick", "--out", str(out)]), SHAPE)
    assert json.loads(out.read_text())["results"] == found["results"]
    assert sorted(entry["rows"] for entry in found["results"]) == [1, 2]
    for entry in found["results"]:
        assert entry["ours_tok_s"] > 0
        assert entry["ratio"] == pytest.approx(entry["ours_tok_s"] / entry["llamacpp_tok_s"])
    assert any("error" in line for line in found["sweep"]["Q8_0"]["tried"])
    assert found["versions"]["llama.cpp"] == "7 (test)"
    assert str(peer) in (peer / "llama-batched-bench.log").read_text().split("|")[1]


def test_every_number_of_rows_has_the_flags_that_are_fastest_there(peer, tmp_path):
    tries = [Flags(1), Flags(4), Flags(2, repack=False)]
    lines = [{"tok_s": {1: 10.0, 8: 10.0}}, {"tok_s": {1: 3.0, 8: 40.0}}, {"error": "no such weights"}]
    assert best_flags(tries, lines, [1, 8]) == {Flags(1): [1], Flags(4): [8]}
    with pytest.raises(PeerError, match="no such weights"):
        best_flags(tries[2:], lines[2:], [1])


def test_flags_put_all_but_the_experts_on_the_gpu():
    tries = candidates(16, gpu=True)
    assert {flags.threads for flags in tries} == {14, 16, 8}
    assert all("-ngl 99 --n-cpu-moe 99" in str(flags) for flags in tries)
    assert sum("--no-op-offload" in str(flags) for flags in tries) == 2
    assert not any("-ngl" in str(flags) for flags in candidates(2, gpu=False))


def test_a_peer_that_does_not_start_is_told(peer, tmp_path):
    with pytest.raises(PeerError, match="status 1"):
        Peer(peer).batched(tmp_path / "m.gguf", Flags(1, repack=False), 16, 4, [1])
