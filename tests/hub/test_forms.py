"""Several forms of one model: the table that `plan` prints, and the rates that it expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report.efficiency import OUT, content
from engine.config import EngineConfig
from engine.diagnostics import forms
from engine.planning import expected
from engine.planning.expected import MachineRates, Work, expect, work_of
from engine.weights.open import open_model
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model

RECORDED = json.loads(OUT.read_text())["shares"]
MACHINE = MachineRates("avx2", 50e9, 500e9, 100e9)


def test_the_recorded_shares_are_those_of_the_results() -> None:
    assert OUT.read_text() == content(), "run python -m benchmarks.report.pages"


@given(
    isa=st.sampled_from(sorted(RECORDED)),
    kind=st.sampled_from(["Q8_0", "Q4_K", "BF16", "IQ2_XXS", "TQ1_0"]),
    sizes=st.tuples(*[st.floats(1e6, 1e12)] * 3),
    experts=st.integers(8, 256),
    factor=st.floats(1.5, 4),
)
def test_rates_follow_the_machine_and_never_pass_its_roofs(
    isa: str, kind: str, sizes: tuple[float, float, float], experts: int, factor: float
) -> None:
    work = Work(kind, int(sizes[0]), int(sizes[1]), experts, 8, sizes[2])
    slow = MachineRates(isa, 40e9, 900e9, 300e9)
    fast = MachineRates(isa, slow.read * factor, slow.int8 * factor, slow.plain * factor)
    here, there = expect(work, slow), expect(work, fast)
    if kind not in RECORDED[isa]:
        assert (here.decode_1, here.decode_8, here.prefill) == (None, None, None)
        return
    for one, other in ((here.decode_1, there.decode_1), (here.decode_8, there.decode_8), (here.prefill, there.prefill)):
        if one is not None and other is not None:
            assert 0 < one[0] <= one[1] and other == pytest.approx([factor * value for value in one])
    assert here.decode_1 is not None and here.decode_8 is not None
    assert here.decode_1[1] * work.step_bytes(1) <= 1.001 * slow.read
    assert here.decode_8[1] >= 0.999 * here.decode_1[1]  # eight sequences share what they read
    assert work.step_bytes(1) == pytest.approx(work.step_bytes(8, 8))  # all of them choose the same experts
    assert work.step_bytes(1) < work.step_bytes(8) <= work.step_bytes(8, experts) or experts == 8


def test_work_is_what_the_files_hold(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    save_hf(model, tmp_path)
    source = open_model(str(tmp_path))
    work = work_of(source)
    embeddings = model.get_input_embeddings().weight
    assert work.dense_bytes + work.expert_bytes == source.num_bytes - embeddings.numel() * embeddings.element_size()
    assert work.step_bytes(1) == work.dense_bytes + work.expert_bytes * work.top_k / work.experts
    assert work.step_bytes(10_000) == work.dense_bytes + work.expert_bytes
    assert work.head_operations == 2 * embeddings.numel()
    smaller = {how: work_of(source, how) for how in ("int8", "int4")}
    assert [each.type for each in smaller.values()] == ["Q8_0", "Q4_1"]
    assert smaller["int4"].expert_bytes < smaller["int8"].expert_bytes < work.expert_bytes
    assert smaller["int8"].operations == work.operations


def test_the_table_has_a_row_for_each_form_and_says_why_one_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_measured", lambda config: MACHINE)
    monkeypatch.setattr(expected, "_MEASURED_BYTES", 0)  # caches hold the whole model
    save_gguf(tiny_model(), tmp_path / "tiny-Q8_0.gguf")
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(b"GGUF")
    found = [(name, str(tmp_path / f"tiny-{name}.gguf")) for name in ("Q8_0", "Q4_0")]
    said = forms.forms_table(EngineConfig(max_model_len=64), found)
    header, first, second, *rest = said.splitlines()
    assert header.startswith("form") and first.startswith("Q8_0") and " to " in first and "64" in first
    assert second.split() == ["Q4_0", *["-"] * 6]
    assert any(line.startswith("Q4_0: tiny-Q4_0.gguf:") for line in rest)
