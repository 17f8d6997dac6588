"""Rows of the benchmark run at a tiny shape and say what they should; the report is made of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import report
from benchmarks.bench_cpu import measure, parse
from benchmarks.bench_cpu_client import StreamError, _count
from benchmarks.make_model import Shape
from benchmarks.peer_llamacpp import Flags, PeerError, request
from tests.bench.test_make_model import SHAPE


def _flags(folder):
    out = str(folder / "out.json")
    return ["--models", str(folder), "--out", out, "--types", "Q8_0", "--quick", "--threads", "1"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    rows = "decode,prefill,batch,python,idle"
    args = parse([*_flags(folder), "--rows", rows])
    run = measure(args, SHAPE)
    assert json.loads((folder / "out.json").read_text())["rows"] == run.data["rows"]
    return run.data


def test_every_row_is_measured_and_the_peer_is_left_empty(results):
    assert "left_out" not in results
    assert [entry["row"] for entry in results["rows"]] == ["decode", *["prefill"] * 2, "batch", *["python"] * 2, "idle"]
    assert all(entry["peer"] is None and entry["ratio"] is None and entry["ours"] > 0 for entry in results["rows"])
    decode = results["rows"][0]
    assert decode["gb_s"] == pytest.approx(decode["step_mb"] * decode["ours"] / 1e3)
    assert decode["of_read"] == pytest.approx(decode["gb_s"] / decode["read_gb_s"])
    python = next(entry for entry in results["rows"] if entry["row"] == "python")
    assert 0 < python["python_share"] < 1


def test_the_report_has_a_line_for_every_row_and_replaces_the_old_one(results):
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter"
    once = report.insert(page, report.render(results))
    assert once == report.insert(once, report.render(results))
    assert once.startswith("before\n") and once.endswith("\nafter") and "old" not in once
    assert sum(line.startswith("| ") and "Q8_0" in line for line in once.splitlines()) == len(results["rows"])
    assert "Measured without llama.cpp" in once
    with pytest.raises(ValueError, match="begin"):
        report.insert("no markers", "")


def test_the_plot_has_a_point_for_every_decode_row(results):
    tree = ElementTree.fromstring(report.plot(results))
    circles = [node for node in tree.iter() if node.tag.endswith("circle")]
    assert len(circles) == sum(entry["row"] in ("decode", "batch") for entry in results["rows"])
    assert report.plot({"rows": [], "roofs": {}}) == ""


@pytest.mark.parametrize(
    ("entry", "good"),
    [
        ({"row": "decode", "what": "decode, 1 sequence", "ratio": 1.5, "of_read": 0.9}, True),
        ({"row": "decode", "what": "decode, 1 sequence", "ratio": 1.5, "of_read": 0.8}, False),
        ({"row": "decode", "what": "decode, 1 sequence", "ratio": None, "of_read": 0.9}, None),
        ({"row": "decode", "what": "decode, 1 sequence", "ratio": None, "of_read": 0.8}, False),
        ({"row": "batch", "what": "decode, 32 sequences", "ratio": 2.9}, False),
        ({"row": "prefill", "what": "prefill 512", "ratio": 1.8, "of_peak": 0.6, "type": "BF16"}, True),
        ({"row": "prefill", "what": "prefill 512", "ratio": 1.8, "of_peak": 0.6}, False),
        ({"row": "server", "what": "server, 8 streams", "ratio": 2.1, "ttft_s": 1.0, "peer_ttft_s": 3.3}, True),
        ({"row": "server", "what": "server, 8 streams", "ratio": 2.1, "ttft_s": 1.2, "peer_ttft_s": 3.3}, False),
        ({"row": "adapters", "what": "", "ratio": 3.0, "kept": 0.85}, False),
        ({"row": "adapters", "what": "", "ratio": 3.0, "kept": 0.85, "type": "Q4_K_M"}, True),
        ({"row": "idle", "what": "", "ratio": None, "ours": 97.9}, False),
        ({"row": "arrivals", "what": "", "ratio": None, "ours": 2.0}, True),
    ],
)
def test_targets_are_judged(entry, good):
    assert report.target({"type": "Q8_0", **entry})[1] is good


def test_a_missing_peer_is_told(tmp_path):
    with pytest.raises(PeerError, match="there is no llama-bench"):
        measure(parse([*_flags(tmp_path), "--rows", "decode", "--llama", str(tmp_path)]), SHAPE)


@pytest.mark.parametrize("wrong", [["--rows", "decode,nothing"], ["--types", "Q5_0"]])
def test_unknown_rows_and_types_are_refused(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--models", str(tmp_path), *wrong])
    assert "choose from" in capsys.readouterr().err


def test_tokens_are_counted_in_both_servers_events():
    assert _count({"choices": [{"token_ids": [4, 5]}]}, 3) == (2, 5)
    assert _count({"content": "x", "tokens_predicted": 4}, 3) == (1, 4)
    assert _count({"content": "", "stop": True, "tokens_predicted": 8}, 7) == (0, 8)
    with pytest.raises(StreamError, match="boom"):
        _count({"error": "boom"}, 0)


def test_the_peer_gets_every_adapter_by_number_and_its_flags_by_name():
    path, body = request([1, 2], 3, 1, 2)
    assert path == "/completion"
    assert body["lora"] == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 1.0}]
    assert "lora" not in request([1], 3, None, 0)[1]
    flags = Flags(2, flash=False, repack=False)
    assert flags.common() == ["-t", "2", "-fa", "off", "-ub", "512", "--no-repack"]
    assert flags.bench()[-2:] == ["--repack", "0"]


def test_the_default_shape_is_the_models():
    shape = Shape()
    assert (shape.hidden, shape.experts, shape.top_k, shape.intermediate, shape.head_dim) == (2048, 128, 8, 768, 128)
