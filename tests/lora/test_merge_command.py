"""`ktserve adapters merge`: a whole model, equal to serving its base with the adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from engine.errors import UserError
from engine.lora.merge import merge
from engine.main import main
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import FAMILIES, save_hf, tiny_model
from testing.shared_reader import SharedReader
from tests.lora import make
from tests.lora.merge import merge as merged_here


@pytest.fixture(autouse=True)
def shared_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all but the command, which starts and ends its own: processes that import torch once for all tests."""
    if request.function is not test_the_command:
        monkeypatch.setattr("engine.lora.merge.ReaderProcesses", SharedReader)


PROMPT = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]])


def adapter(folder: Path, config: object, **fields: object) -> tuple[Path, object]:
    weights = make.random_adapter(config, scale=0.1, **fields)
    tensors = make.linear_keys(weights) | make.per_expert_keys(weights) | make.extra_keys(weights)
    return make.write(folder, tensors, make.lora_config()), weights


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str, fused: bool) -> None:
    """As transformers opens what is written; sharded, experts one by one or stacked."""
    base = tiny_model(seed=4, family=family)
    save_hf(base, tmp_path / "base", sharded=True, fused=fused)
    (tmp_path / "base/tokenizer.json").write_text("{}")
    folder, weights = adapter(tmp_path / "adapter", make.config_of(base))
    said = merge(str(tmp_path / "base"), str(folder), str(tmp_path / "out"))
    assert str(tmp_path / "out") in said and "warning" not in said
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        got, want = opened(PROMPT).logits, merged_here(base, weights)(PROMPT).logits
    assert (got - want).abs().max() < 2e-5
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (tmp_path / "base").iterdir()}


def test_the_merged_model_is_served_as_the_adapter_is(tmp_path: Path) -> None:
    base = tiny_model(seed=4)
    save_hf(base, tmp_path / "base")
    folder, _ = adapter(tmp_path / "adapter", make.config_of(base))
    merge(str(tmp_path / "base"), str(folder), str(tmp_path / "out"))
    beside, merged = Harness(tmp_path / "base"), Harness(tmp_path / "out")
    beside.adapter("a", folder)
    prompts = [[3, 14, 15, 92, 65], [5] * 20]
    assert beside.generate(prompts, ["a", "a"]) == merged.generate(prompts, [None, None])
    beside.close()
    merged.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_changes_is_rounded_once_and_nothing_else_is(tmp_path: Path, dtype: torch.dtype) -> None:
    base = tiny_model(seed=4, dtype=dtype)
    save_hf(base, tmp_path / "base")
    folder, weights = adapter(tmp_path / "adapter", make.config_of(base), linears=False)
    merge(str(tmp_path / "base"), str(folder), str(tmp_path / "out"))
    want = merged_here(tiny_model(seed=4, dtype=dtype).float(), weights).to(dtype)
    save_hf(want, tmp_path / "want")
    with (
        safe_open(tmp_path / "out/model.safetensors", "pt") as got,
        safe_open(tmp_path / "want/model.safetensors", "pt") as expected,
    ):
        assert set(got.keys()) == set(expected.keys())
        for name in got.keys():  # noqa: SIM118
            ours, theirs = got.get_tensor(name), expected.get_tensor(name)
            if "experts" not in name:
                assert torch.equal(ours, theirs)
                continue
            # Sums in another order may round to the value beside, now and then; 1e-6: of sums that cancel.
            torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6)
            assert (ours != theirs).float().mean() < 0.01


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    base = tiny_model(seed=4)
    save_hf(base, tmp_path / "base")
    config = make.config_of(base)
    folder, _ = adapter(tmp_path / "adapter", config)
    extra, _ = adapter(tmp_path / "extra", config, extra=1)
    save_gguf(base, tmp_path / "base.gguf")
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    for model, path, out, match in (
        (tmp_path / "base.gguf", folder, tmp_path / "new", "only a folder with safetensors"),
        (tmp_path / "base", extra, tmp_path / "new", "extra MLPs beside the experts cannot be merged"),
        (tmp_path / "base", folder, full, "is not an empty folder"),
        (tmp_path / "base", full, tmp_path / "new", "holds no adapter"),
    ):
        with pytest.raises(UserError, match=match):
            merge(str(model), str(path), str(out))
    assert not (tmp_path / "new").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make.SAMPLES / "base-model"
    weights = make.random_adapter(make.sample_config())
    folder = make.write(tmp_path / "a", make.per_expert_keys(weights), make.lora_config(use_rslora=True))
    argv = ["merge", str(folder), "--config-json", json.dumps({"model": str(model)}), "--out", str(tmp_path / "out")]
    assert main(argv) == 1
    assert "give expert_scaling" in capsys.readouterr().err
    assert main([*argv, "--expert-scaling", "alpha/r"]) == 0
    assert (tmp_path / "out/config.json").is_file()
