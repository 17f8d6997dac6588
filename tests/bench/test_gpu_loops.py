"""The inner loops of the GPU's benchmarks on a CPU, at tiny shapes: what they ask of the engine is there. Their figures
mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy.table import recording
from benchmarks.gpu import attention, decode, experts, quantised, timeline
from benchmarks.models.configs import QWEN3_30B_A3B
from benchmarks.models.random import DRY, random_store
from engine.architectures.registry import config_from_hf
from engine.attention.reference import ReferenceAttention
from engine.experts.gpu.layout import Sizes
from engine.experts.native import NativeExperts
from engine.experts.streamed.backend import StreamedExperts
from native import available
from native.topology import make_pool
from testing.bridge import HostBridge
from testing.harness import Harness
from testing.models.tiny import save_hf, tiny_model

CPU, BF16, LAYERS = torch.device("cpu"), torch.bfloat16, 2
CONFIG = config_from_hf({**QWEN3_30B_A3B, **DRY, "num_hidden_layers": LAYERS})


@pytest.fixture
def native() -> NativeExperts:
    ready, reason = available()
    if not ready:
        pytest.skip(reason)
    made = NativeExperts(CONFIG, BF16, make_pool(1))
    for layer in range(LAYERS):
        made.load_layer(layer, random_store(layer, CONFIG))
    return made


def test_decode_steps_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    decode.main(["--dry", "--layers", str(LAYERS), "--rows", "1", "3", "--adapters", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["results"]
    assert [row["rows"] for row in rows] == [1, 3]
    assert all(min(row[name] for name in ("ms", "plain_ms", "gpu_ms", "adapters_ms", "gbytes")) > 0 for row in rows)


def test_experts_are_run_and_timed(native: NativeExperts) -> None:
    bridge = HostBridge(native, CONFIG, CPU)
    step = experts.Step(CONFIG, LAYERS, rows=3, exponent=1.0, device=CPU)
    step.buffers.out.fill_(torch.nan)
    bridge.begin_step(3, lora=False, eager=True)
    step.run(bridge, step.tasks(bridge))
    bridge.check()
    assert step.buffers.out.isfinite().all() and step.buffers.out.count_nonzero() and step.distinct >= 2
    assert experts.cpu_ms(native, CONFIG, LAYERS, 3, repeats=2) > 0
    bridge.close()


def test_attention_reads_the_steps_that_are_timed() -> None:
    backend = ReferenceAttention(attention.CONFIG.layers[0].attention, [0], attention.BLOCKS, BF16, CPU)
    step = attention.layout([(1, 40), (5, 20)], device="cpu")
    q, kv = torch.randn(6, 32, 128, dtype=BF16), torch.randn(6, 4, 128, dtype=BF16)
    backend.plan(step)
    assert backend.forward(0, q, kv, kv).isfinite().all()


def test_quantised_layers_are_made(monkeypatch: Any) -> None:
    monkeypatch.setattr(quantised, "SIZES", Sizes(experts=8, top_k=2, hidden=256, inner=256))
    for form in quantised.FORMATS:
        assert quantised.Layers(form, 3, 1, CPU).chosen_bytes > 0


def test_a_streamed_step_is_recorded(native: NativeExperts, monkeypatch: Any) -> None:
    """Its products, which need a GPU, are left out."""
    bridge = HostBridge(native, CONFIG, CPU)
    streamed = StreamedExperts(bridge, CONFIG, BF16, CPU, max_rows=8, max_slots=1, max_rank=16, threshold=4)
    for layer in range(LAYERS):
        streamed.add_source(layer, random_store(layer, CONFIG))
    monkeypatch.setattr(streamed._parts.compute, "run", lambda *_, lora: None)
    monkeypatch.setattr(timeline, "_event", _Clock())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    recorder = timeline.Recorder(streamed)
    step = experts.Step(CONFIG, LAYERS, rows=8, device=CPU)
    tasks = step.tasks(streamed)
    streamed.begin_step(8, lora=False, eager=True)
    for task in tasks:
        streamed.post(task)
        streamed.wait(task)
    rows = recorder.rows()
    assert [row["layer"] for row in rows] == list(range(LAYERS))
    assert all(set(timeline.KINDS) <= set(row) for row in rows)
    assert 0 <= timeline.hidden(rows) <= 1 and "layer 1" in timeline.chart(rows)
    streamed.close()


def test_the_logits_of_padded_steps_are_recorded(tmp_path: Path) -> None:
    """Greedy steps of graphs leave them in a buffer; those of plain steps are the same."""
    save_hf(tiny_model(), tmp_path)
    found = []
    for graphs in ("off", "padded"):
        engine = Harness(tmp_path, cuda_graphs=graphs)
        with recording(engine) as logits:
            engine.generate([[5, 6, 7], [8, 9]], max_tokens=3)
        engine.close()
        found.append(logits)
    plain, padded = found
    assert plain.keys() == padded.keys() and len(plain) == 9
    for at, row in plain.items():
        torch.testing.assert_close(padded[at], row)


class _Clock:
    """Events of a GPU that does everything at once: each comes 1 ms after the one before."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def __call__(self) -> _Clock:
        self.at += 1
        return _Clock(self.at)

    def elapsed_time(self, other: _Clock) -> float:
        return other.at - self.at
