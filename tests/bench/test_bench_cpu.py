"""Rows of the benchmark run at a tiny shape and say what they should; the report is made of them."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from benchmarks.client import StreamError, _count
from benchmarks.cpu import state
from benchmarks.cpu.formats import HEAD
from benchmarks.cpu.formats import measure as measure_format
from benchmarks.cpu.nodes import compare as compare_nodes
from benchmarks.cpu.run import keep_other_machines, measure, parse
from benchmarks.cpu.state import Run
from benchmarks.kernels.probe import Peaks, compared, known_read_gb_s
from benchmarks.models.make import write_model
from benchmarks.models.shapes import Shape
from benchmarks.peers.kt import KtError, KtPeer, Variant, spare_threads, variants
from benchmarks.peers.llamacpp import Flags, PeerError, request
from benchmarks.record import RESULTS
from benchmarks.report import pages
from benchmarks.report import tables as report
from benchmarks.report.roofline import plot
from benchmarks.report.targets import target
from engine.experts.kt.process import kt_available
from tests.bench.shape import SHAPE

AVX2 = ("avx2",)
AVX512 = (*AVX2, "avx512_vnni", "avx512_bf16")
AMX = (*AVX512, "amx_bf16", "amx_int8")


def _flags(folder):
    out = str(folder / "out.json")
    return ["--models", str(folder), "--out", out, "--types", "Q8_0", "--quick", "--threads", "1"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    rows = "decode,prefill,long,batch,python,idle"
    args = parse([*_flags(folder), "--rows", rows])
    run = measure(args, SHAPE)
    assert json.loads((folder / "out.json").read_text())["rows"] == run.data["rows"]
    return run.data


def test_every_row_is_measured_and_the_peer_is_left_empty(results):
    assert "left_out" not in results
    assert [entry["row"] for entry in results["rows"]] == ["decode", *["prefill"] * 4, "batch", *["python"] * 2, "idle"]
    assert all(entry["peer"] is None and entry["ratio"] is None and entry["ours"] > 0 for entry in results["rows"])
    decode = results["rows"][0]
    assert decode["gb_s"] == pytest.approx(decode["step_mb"] * decode["ours"] / 1e3)
    python = next(entry for entry in results["rows"] if entry["row"] == "python")
    assert 0 < python["python_share"] < 1


def _shares_are_of(data):
    peaks = {name: Peaks(**values) for name, values in data["peaks"].items()}
    seen = [entry for entry in data["rows"] if {"gb_s", "gop_s", "call_gb_s"} & entry.keys()]
    for entry in seen:
        mine = peaks[entry["type"]]
        for rate, share in (("gb_s", "of_read"), ("call_gb_s", "call_of_read")):
            alone = "read_mb" in entry and rate == "gb_s"  # reading was measured beside it
            of = entry["step_mb"] / entry["read_mb"] if alone else entry.get(rate, 0.0) * 1e9 / mine.bytes_per_s
            assert rate not in entry or entry[share] == pytest.approx(of)
        if "gop_s" in entry:
            assert entry["of_peak"] == pytest.approx(entry["gop_s"] * 1e9 / mine.of(entry["peak_of"]))
    return len(seen)


def test_shares_are_of_the_peaks_that_are_told(results):
    assert _shares_are_of(results) == 6


@pytest.mark.parametrize("path", sorted(RESULTS.glob("cpu*.json")), ids=lambda path: path.name)
def test_kept_shares_are_of_the_peaks_that_are_told(path):
    assert _shares_are_of(json.loads(path.read_text()))


def test_a_higher_peak_counts_for_earlier_rows_too(tmp_path, monkeypatch):
    run = Run(parse(_flags(tmp_path)), SHAPE)
    found = iter((Peaks(10e9, 1e9, 1e9, 4e9), Peaks(20e9, 0.5e9, 1e9, 8e9)))
    monkeypatch.setattr(state, "measure_peaks", lambda pool, isa, read_bytes: next(found))
    pool = SimpleNamespace(begin_step=lambda: None, end_step=lambda: None)
    run.measure_peaks("Q8_0", pool)
    run.record("decode", "Q8_0", "decode", "tok/s", [1.0], [], gb_s=5.0)
    run.record("prefill", "Q8_0", "prefill", "tok/s", [1.0], [], gop_s=2.0, peak_of="int8")
    assert [run.data["rows"][0]["of_read"], run.data["rows"][1]["of_peak"]] == [0.5, 0.5]
    run.measure_peaks("Q8_0", pool)
    assert [run.data["rows"][0]["of_read"], run.data["rows"][1]["of_peak"]] == [0.25, 0.25]
    assert run.peaks["Q8_0"] == Peaks(20e9, 1e9, 1e9, 8e9)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            {"row": "decode", "what": "decode, 1 sequence", "ratio": 1.2, "of_read": 0.5},
            "1.15x and 88% of read, 1.20x and 50%",
        ),
        ({"row": "arrivals", "what": "gaps", "ratio": 0.2, "ours": 3.81, "unit": "x"}, "at most 3x, 3.81 x"),
        ({"row": "start", "what": "second start", "ratio": 39.8, "ours": 12.3, "unit": "s"}, "at most 1.5x, 39.80x"),
        ({"row": "adapters", "what": "kept", "ratio": 3.0, "kept": 0.85}, "92% of base, 85%"),
        ({"row": "first", "what": "first", "ratio": 0.1, "ended": 2}, "ended, 2"),
    ],
)
def test_what_is_missed_is_told_by_the_figure_asked_for(entry, text):
    assert report._missed([{"type": "Q8_0", **entry}], AVX512)[0].endswith(f"{text})")


def test_the_report_has_a_line_for_every_row_and_replaces_the_old_one(results):
    table = report.render(results)
    page = "before\n<!-- results of cpu.json: begin -->\nold\n<!-- results of cpu.json: end -->\nafter"
    once = pages.insert(page, "cpu.json", table)
    assert once == pages.insert(once, "cpu.json", table)
    assert once.startswith("before\n") and once.endswith("\nafter") and "old" not in once
    assert sum(line.startswith("| ") and "Q8_0" in line for line in once.splitlines()) == len(results["rows"])
    assert "Measured without llama.cpp" in once
    with pytest.raises(ValueError, match="without its end"):
        pages.insert("<!-- results of cpu.json: begin -->", "cpu.json", "")


def test_a_format_has_a_line_with_all_its_columns(tmp_path):
    write_model(tmp_path / "m.gguf", SHAPE, "IQ4_XS")
    row = measure_format(tmp_path / "m.gguf", SHAPE, "IQ4_XS", None, threads=1, tokens=2, repeats=1)
    assert row.bits == pytest.approx(4.31, abs=0.01)
    assert min(row.decode, row.prefill, row.of_read) > 0
    assert 1e-3 < row.error < row.peer_error
    assert row.line().count("|") == len(HEAD) + 1
    assert row.peer_decode is None is row.peer_flags


def test_another_machine_gets_a_section_of_its_own(monkeypatch):
    machines = {"cpu.json": "Machine A", "cpu-b.json": "Machine B"}
    monkeypatch.setattr(pages, "load", lambda name: {"machine": {"cpu": machines[name], "threads": 2}})
    both = pages.with_section(pages.with_section("text\n", "cpu.json"), "cpu-b.json")
    assert both.index("text") < both.index("## Results: Machine A, 2 threads") < both.index("## Results: Machine B")
    assert both == pages.with_section(both, "cpu.json")
    assert pages.insert(both, "cpu-b.json", "new").count("new") == 1


@pytest.mark.parametrize(
    ("isa", "bf16", "int8"),
    [
        (["avx2"], "AVX2 vfmadd", "AVX2 vpmaddubsw"),
        (["avx2", "avx512_vnni"], "AVX-512 vfmadd", "AVX-512 vpdpbusd"),
        (["avx2", "avx512_vnni", "avx512_bf16"], "AVX-512 vdpbf16ps", "AVX-512 vpdpbusd"),
        (["avx2", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"], "AMX tdpbf16ps", "AMX tdpbssd"),
    ],
)
def test_a_share_of_a_peak_names_its_instruction(isa, bf16, int8):
    assert (report.instruction(isa, "bf16"), report.instruction(isa, "int8")) == (bf16, int8)


def test_results_of_another_machine_are_not_overwritten(results, tmp_path):
    out = tmp_path / "cpu.json"
    out.write_text(json.dumps(results | {"machine": {"cpu": "another", "threads": 64}}))
    with pytest.raises(SystemExit, match="another, 64 threads"):
        keep_other_machines(out, results["machine"])
    out.write_text(json.dumps(results))
    keep_other_machines(out, results["machine"])
    keep_other_machines(tmp_path / "new.json", results["machine"])


def test_a_known_read_bandwidth_is_stood_beside_the_probe():
    peaks = Peaks(30e9, 1.0, 1.0, 1.0)
    assert compared(peaks, None) == ""
    assert "86% of the 35 GB/s" in compared(peaks, 35.0) and "TOO SLOW" not in compared(peaks, 35.0)
    assert "TOO SLOW" in compared(peaks, 40.0)
    assert known_read_gb_s({"cpu family": "0", "model": "0"}, 2) is None


def test_rows_beside_a_slow_memory_are_void(results):
    seen = results["peaks"]["Q8_0"]["bytes_per_s"] / 1e9
    for known, slow in ((seen / 0.9, False), (seen / 0.8, True)):
        table = report.render(results | {"machine": results["machine"] | {"known_read_gb_s": known}})
        assert ("its rows are void" in table) is slow
        assert ("| void |" in table) is slow and ("Missed: nothing." in table or not slow)


def test_the_plot_has_a_point_for_every_decode_row(results):
    tree = ElementTree.fromstring(plot(results))
    circles = [node for node in tree.iter() if node.tag.endswith("circle")]
    assert len(circles) == sum(entry["row"] in ("decode", "batch") for entry in results["rows"])
    assert plot({"rows": [], "peaks": {}}) == ""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two groups of workers need two CPUs")
def test_nodes_are_made_of_one_machine(tmp_path, capsys):
    write_model(tmp_path / "model.gguf", SHAPE, "Q8_0")
    compare_nodes(tmp_path / "model.gguf", SHAPE, "Q8_0", 2, [1, 2], 32, 4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines] == ["decode, 1 rows", "decode, 2 rows", "prefill 32"]


def test_a_start_is_timed_twice_and_leaves_no_packed_experts(tmp_path):
    run = measure(parse([*_flags(tmp_path), "--rows", "start,first"]), SHAPE)
    assert "left_out" not in run.data
    assert [e["what"] for e in run.data["rows"]][:2] == ["first start", "second start"]
    assert not list(tmp_path.glob("packed-*"))
    entry = run.data["rows"][2]
    assert entry["row"] == "first" and entry["running"] == 1 and entry["ours"] > 0
    assert target(entry, AVX512)[0]


def test_experts_are_timed_beside_kt_kernel_or_its_absence_is_told(tmp_path):
    run = measure(parse([*_flags(tmp_path), "--rows", "kt"]), SHAPE)
    if not kt_available()[0]:
        assert run.data["rows"] == [] and "kt_kernel" in run.data["left_out"][0]
        return
    rows = run.data["rows"]
    assert [e["rows"] for e in rows] == [1, 8]
    for entry in rows:
        assert entry["ratio"] == pytest.approx(entry["peer_us"] / entry["us"])
        assert entry["peer_us"] == min(entry["peer_all_us"].values())
        assert entry["peer_name"] in report.render(run.data)


def test_kt_kernels_classes_are_those_of_the_same_precision():
    assert variants("BF16", 8) == [Variant("AMXBF16_MOE", 8), Variant("AMXBF16_MOE", 256)]
    assert [str(v) for v in variants("Q4_K", 8, blocks=True)][2] == "MOE on Q4_K"
    assert {v.name for v in variants("Q8_0", 8)} == {"AMXInt8_MOE"}
    assert variants("Q6_K", 8) == []
    assert [spare_threads(n) for n in (1, 2, 4, 16)] == [1, 1, 3, 14]


def test_a_class_that_kt_kernel_lacks_is_an_error():
    with pytest.raises(KtError, match="kt_kernel"):
        KtPeer([Variant("No_MOE", 2)], (8, 2, 256, 256), 1, 8, 1)


@pytest.mark.parametrize(
    ("isa", "entry", "good"),
    [
        (AVX512, {"row": "decode", "what": "decode, 1 sequence", "ratio": 1.5, "of_read": 0.9}, True),
        (AVX512, {"row": "decode", "what": "decode, 1 sequence", "ratio": 1.5, "of_read": 0.8}, False),
        (AVX512, {"row": "decode", "what": "decode, 1 sequence", "ratio": None, "of_read": 0.9}, None),
        (AVX512, {"row": "decode", "what": "decode, 1 sequence", "ratio": None, "of_read": 0.8}, False),
        (AVX2, {"row": "decode", "what": "decode, 1 sequence", "ratio": 1.2, "of_read": 0.3}, True),
        (AVX2, {"row": "batch", "what": "decode, 32 sequences", "ratio": 1.1, "of_read": 0.9}, False),
        (AMX, {"row": "batch", "what": "decode, 32 sequences", "ratio": 2.9, "of_read": 0.8}, False),
        (AMX, {"row": "batch", "what": "decode, 32 sequences", "ratio": 2.9, "of_read": 0.84}, True),
        (AVX512, {"row": "prefill", "what": "prefill 512", "ratio": 1.8, "of_peak": 0.7, "type": "BF16"}, True),
        (AVX512, {"row": "prefill", "what": "prefill 512", "ratio": 1.8, "of_peak": 0.7}, False),
        (AVX512, {"row": "prefill", "what": "prefill 8192", "ratio": None, "of_peak": 0.5}, False),
        (AMX, {"row": "prefill", "what": "prefill 2048", "ratio": 3.0, "of_peak": 0.11}, False),
        (AVX2, {"row": "prefill", "what": "prefill 32768", "ratio": None, "of_peak": 0.1}, None),
        (AVX2, {"row": "server", "what": "server, 8 streams", "ratio": 2.1, "ttft_s": 1.0, "peer_ttft_s": 3.3}, True),
        (AVX2, {"row": "server", "what": "server, 8 streams", "ratio": 2.1, "ttft_s": 1.2, "peer_ttft_s": 3.3}, False),
        (AVX2, {"row": "adapters", "what": "", "ratio": 3.0, "kept": 0.9}, False),
        (AVX2, {"row": "adapters", "what": "", "ratio": 3.0, "kept": 0.92, "type": "Q4_K_M"}, True),
        (AVX2, {"row": "idle", "what": "", "ratio": None, "ours": 97.9}, False),
        (AVX2, {"row": "arrivals", "what": "", "ratio": None, "ours": 2.0}, True),
        (AVX2, {"row": "first", "what": "", "ratio": 0.1, "ended": 0}, True),
        (AVX2, {"row": "first", "what": "", "ratio": 0.1, "ended": 1}, False),
        (AVX2, {"row": "start", "what": "first start", "ratio": 1.9, "ours": 30.0}, True),
        (AVX2, {"row": "start", "what": "second start", "ratio": 1.9, "ours": 7.0}, False),
        (AVX2, {"row": "start", "what": "second start", "ratio": None, "ours": 7.0}, None),
        (AVX2, {"row": "kt", "what": "", "ratio": 1.9, "rows": 8, "threads": 2}, False),
        (AVX2, {"row": "kt", "what": "", "ratio": 1.3, "rows": 1, "threads": 14}, False),
        (AVX2, {"row": "kt", "what": "", "ratio": 1.3, "rows": 8, "threads": 14}, True),
    ],
)
def test_targets_are_judged(isa, entry, good):
    assert target({"type": "Q8_0", **entry}, isa)[1] is good


def test_a_missing_peer_is_told(tmp_path):
    with pytest.raises(PeerError, match="there is no llama-batched-bench"):
        measure(parse([*_flags(tmp_path), "--rows", "decode", "--llama", str(tmp_path)]), SHAPE)


def test_a_peer_that_fails_leaves_its_columns_empty(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("llama-bench", "llama-batched-bench"):
        (folder / name).write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo version: 1 && exit\necho no >&2; kill -ILL $$\n'
        )
        (folder / name).chmod(0o755)
    run = measure(parse([*_flags(tmp_path), "--rows", "decode", "--llama", str(folder)]), SHAPE)
    assert [(e["row"], e["peer"]) for e in run.data["rows"]] == [("decode", None)]
    assert len(run.data["left_out"]) == 1 and "status -4: no" in run.data["left_out"][0]
    assert run.peer is not None  # for the next row


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
