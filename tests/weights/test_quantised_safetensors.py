"""FP8, GPTQ and AWQ checkpoints: their values, what is refused, and what the native kernels make of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.accuracy.table import recording
from engine.errors import ModelFileError, UserError
from engine.weights.open import open_model
from engine.weights.packed import packed_bytes
from native import available
from testing.harness import Harness, full_logits
from testing.models.quantised import FP8_CONFIG, float_quantised_config, int4_config, save_quantised
from testing.models.tiny import tiny_model
from tests.engine.parity import prompts
from tests.weights.planned import plan

SIZES: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "head_dim": 64}
FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "fp8": (FP8_CONFIG, False),
    **{f"f8-{by}": (float_quantised_config(by), False) for by in ("channel", "tensor", "block")},
    "gptq-sym-128": (int4_config("gptq", 128, sym=True), True),
    "gptq-asym-32": (int4_config("gptq", 32, sym=False), False),
    "gptq-v2-64": (int4_config("gptq", 64, checkpoint_format="gptq_v2"), False),
    "awq-128": (int4_config("awq", 128), False),
    "awq-32": (int4_config("awq", 32), False),
}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(form: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    config, sym = FORMS[form]
    folder = tmp_path_factory.mktemp(form)
    model = tiny_model(5, num_hidden_layers=2, **SIZES)
    with torch.no_grad():  # a trained router is sure of itself; a random one would flip at every other token
        for layer in model.model.layers:
            layer.mlp.gate.weight *= 6
    return folder, *save_quantised(model, folder, config, sym)


def test_values_are_those_of_the_format(saved: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    folder, _, exact = saved
    source = open_model(str(folder))
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        np.testing.assert_array_equal(source.tensor(name).dequantise().numpy(), exact[name].numpy())
        store = source.experts(layer)
        for projection in ("gate", "up", "down"):
            for expert in range(4):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                got = store.expert(projection, expert).dequantise()
                np.testing.assert_array_equal(got.numpy(), exact[name].numpy())


@pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")
def test_they_are_held_in_their_own_bytes_and_none_is_widened(
    form: str, saved: tuple[Path, Any, dict[str, torch.Tensor]]
) -> None:
    source = open_model(str(saved[0]))
    name = "model.layers.0.self_attn.q_proj"
    held = packed_bytes(source.tensor(f"{name}.weight"), "bf16")
    stored = load_file(saved[0] / "model.safetensors")
    parts = [t for n, t in stored.items() if n.startswith(f"{name}.") and not n.endswith("g_idx")]
    wanted = 1.11 if form == "gptq-v2-64" else 1.05  # groups of 64 are held as pairs of groups of 32
    assert held <= wanted * sum(t.numel() * t.element_size() for t in parts)
    assert not [n for n in plan(source, backend="native", linear_backend="native").notes if "dequantised" in n]


@pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")
def test_logits_are_those_of_the_values(form: str, saved: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    """FP8 meets float32 activations and is exact; int4 meets activations in int8."""
    folder, model, _ = saved
    engine = Harness(folder, rules=None, dtype="float32", pack_cache="off")
    with recording(engine) as seen:
        results = engine.generate(prompts(8, [30, 9]), max_tokens=4)
    engine.close()
    assert len(results) == 2
    for rid, result in engine.results.items():
        tokens = engine.prompts[rid] + result.tokens
        got = torch.stack([seen[rid, i] for i in range(len(tokens) - 1)])
        want = full_logits(model, tokens)[:-1]
        error = (got - want).abs().mean(-1) / want.abs().mean(-1)
        assert float(error.median()) < (1e-4 if "8" in form[:3] else 0.05)


def edited(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] |= config
    (to / "config.json").write_text(json.dumps(fields))
    return to


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in ("fp8", "f8-channel", "gptq-asym-32"):
        made[name] = tmp_path_factory.mktemp("one")
        save_quantised(tiny_model(5, num_hidden_layers=1, **SIZES), made[name], FORMS[name][0])
    return made


Q = "model.layers.0.self_attn.q_proj"


def _scaled_by(strategy: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = float_quantised_config("channel")["config_groups"]["group_0"]
    changed = {**group, "weights": {**group["weights"], "strategy": strategy}, "input_activations": inputs}
    return {"config_groups": {"group_0": changed}}


@pytest.mark.parametrize(
    ("form", "change", "config", "message"),
    [
        ("fp8", {f"{Q}.weight_scale_inv": None}, {}, rf"{Q}.weight_scale_inv \[2, 2\] is missing"),
        ("fp8", {f"{Q}.weight_scale_inv": torch.ones(1)}, {}, r"shape \[1\]; wanted F32 or F16 or BF16 \[2, 2\]"),
        ("fp8", {}, {"weight_block_size": None}, "weight_block_size is None"),
        ("fp8", {}, {"weight_block_size": [128, 64]}, "must be a multiple of 128"),
        ("fp8", {}, {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ("fp8", {}, {"quant_method": "bitsandbytes"}, "'bitsandbytes'; of safetensors plain weights"),
        ("fp8", {}, {"quant_method": "gptq", "bits": 4, "group_size": 128}, "no quantization_config of fp8"),
        ("f8-channel", {f"{Q}.weight_scale": None}, {}, rf"{Q}.weight_scale \[256, 1\] is missing"),
        ("f8-channel", {f"{Q}.weight_scale": torch.ones(1)}, {}, r"shape \[1\]; wanted F32 or F16 or BF16 \[256, 1\]"),
        ("f8-channel", {}, {"format": "pack-quantized"}, "num_bits is 8; of pack-quantized 4 are read"),
        ("f8-channel", {}, {"format": "int-quantized"}, "format is 'int-quantized'"),
        ("f8-channel", {}, _scaled_by("group"), "strategy is 'group'; allowed is channel or tensor or block"),
        ("f8-channel", {}, _scaled_by("channel", {"dynamic": False}), "dynamic is false"),
        ("gptq-asym-32", {}, {"desc_act": True}, "act-order"),
        ("gptq-asym-32", {}, {"bits": 8}, "bits is 8; of gptq 4 bits are read"),
        ("gptq-asym-32", {}, {"group_size": 48}, "multiples of 32"),
        ("gptq-asym-32", {}, {"group_size": 64}, r"qzeros has type I32 and shape .*; wanted I32"),
        ("gptq-asym-32", {f"{Q}.qzeros": None}, {}, f"{Q}.qzeros .* is missing"),
        ("gptq-asym-32", {f"{Q}.bias": torch.ones(256)}, {}, f"does not account for: {Q}.bias"),
        ("gptq-asym-32", {}, FP8_CONFIG, "no quantization_config of gptq or awq"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(
    folders: dict[str, Path],
    tmp_path: Path,
    form: str,
    change: dict[str, torch.Tensor | None],
    config: dict[str, Any],
    message: str,
) -> None:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in change.items():
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value

    with pytest.raises(ModelFileError, match=message):
        open_model(str(edited(folders[form], tmp_path, apply, **config)))


def test_act_order_is_refused_where_only_the_index_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"].flip(0).contiguous()

    source = open_model(str(edited(folders["gptq-asym-32"], tmp_path, shuffle)))
    with pytest.raises(ModelFileError, match=f"{Q}.g_idx .*act-order"):
        source.tensor(f"{Q}.weight").dequantise()


def test_biases_of_zeros_are_passed_over(folders: dict[str, Path], tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.bias"] = torch.zeros(256)
        tensors["model.layers.0.mlp.experts.1.up_proj.bias"] = torch.zeros(128)

    source = open_model(str(edited(folders["gptq-asym-32"], tmp_path, add)))
    assert not source.has(f"{Q}.bias")


@pytest.mark.skipif(not available()[0], reason="the native kernels are not built here")
def test_a_scale_that_is_not_finite_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight_scale_inv"][1, 0] = torch.nan

    folder = edited(folders["fp8"], tmp_path, spoil)
    with pytest.raises((ModelFileError, UserError), match=r"q_proj.*row 128, values 0 to 127: not finite"):
        Harness(folder, rules=None, dtype="float32", pack_cache="off")
