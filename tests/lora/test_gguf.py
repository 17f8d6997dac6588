"""`ktserve adapters convert --to gguf`: llama.cpp's file, equal to serving with the adapter."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import UserError
from engine.lora.adapter import AdapterWeights
from engine.lora.files.convert import convert
from engine.weights.open import open_model
from testing.models.gguf_writer import GGUF_NAMES, save_gguf
from testing.models.tiny import FAMILIES, tiny_model
from tests.lora import make
from tests.lora.merge import expert_deltas, pair_delta

LATENT = ("deepseek_v2", "deepseek_v3")


def drawn(family: str) -> tuple[torch.nn.Module, AdapterWeights]:
    base = tiny_model(seed=4, family=family)
    weights = make.random_adapter(make.config_of(base), rank=3, alpha=12.0)
    weights.linears = {name: pair for name, pair in weights.linears.items() if not name.endswith("kv_b_proj")}
    return base, weights


def with_lora(path: Path, adapter: Path, out: Path) -> Path:
    """A GGUF model with an adapter's file added as llama.cpp adds it: alpha / r B A, tensor by tensor."""
    model, lora = gguf.GGUFReader(path), gguf.GGUFReader(adapter)
    alpha = float(lora.fields["adapter.lora.alpha"].parts[-1][0])
    halves = {tensor.name: tensor.data for tensor in lora.tensors}
    writer = gguf.GGUFWriter(out, str(model.fields["general.architecture"].contents()))
    for name, field in model.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in model.tensors:
        values = tensor.data
        if f"{tensor.name}.lora_a" in halves:
            a, b = halves.pop(f"{tensor.name}.lora_a"), halves.pop(f"{tensor.name}.lora_b")
            assert a.shape[-2] == b.shape[-1]
            values = values + (alpha / a.shape[-2] * (b @ a)).reshape(values.shape).astype(np.float32)
        writer.add_tensor(tensor.name, values)
    assert not halves
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    """Our own reader of GGUF models finds the sums that serving computes."""
    base, weights = drawn(family)
    path = tmp_path / "base.gguf"
    save_gguf(base, path, "F32", "F32")
    folder = make.write(
        tmp_path / "adapter", make.linear_keys(weights) | make.per_expert_keys(weights), make.lora_config(3, 12.0)
    )
    convert(str(folder), "gguf", str(tmp_path / "lora.gguf"), str(path))
    fields = gguf.GGUFReader(tmp_path / "lora.gguf").fields
    said = {name: fields[name].contents() for name in ("general.type", "adapter.type", "general.architecture")}
    assert said == {"general.type": "adapter", "adapter.type": "lora", "general.architecture": GGUF_NAMES[family]}
    plain, merged = open_model(str(path)), open_model(str(with_lora(path, tmp_path / "lora.gguf", tmp_path / "m.gguf")))
    for name in plain.names():
        delta = merged.tensor(name).dequantise() - plain.tensor(name).dequantise()
        pair = weights.linears.get(name.removesuffix(".weight"))
        torch.testing.assert_close(
            delta, torch.zeros_like(delta) if pair is None else pair_delta(pair), rtol=0, atol=2e-6
        )
    for layer, lora in weights.experts.items():
        for projection, deltas in expert_deltas(lora).items():
            for expert in range(deltas.shape[0]):
                got, was = (s.experts(layer).expert(projection, expert).dequantise() for s in (merged, plain))
                torch.testing.assert_close(got - was, deltas[expert], rtol=0, atol=2e-6)


def test_ranks_and_scales_that_differ(tmp_path: Path) -> None:
    """One alpha for all: shorter ranks are padded, other scales are in B."""
    base = tiny_model(seed=4)
    save_gguf(base, tmp_path / "base.gguf", "F32", "F32")
    weights = make.random_adapter(make.config_of(base), experts=False)
    fields = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 24}, "use_rslora": True}
    tensors = make.linear_keys(weights)
    tensors = {k: (t[:2] if "lora_A" in k else t[:, :2]) if "q_proj" in k else t for k, t in tensors.items()}
    folder = make.write(tmp_path / "adapter", tensors, make.lora_config(**fields))
    convert(str(folder), "gguf", str(tmp_path / "lora.gguf"), str(tmp_path / "base.gguf"))
    reader = gguf.GGUFReader(tmp_path / "lora.gguf")
    halves, alpha = {t.name: t.data for t in reader.tensors}, float(reader.fields["adapter.lora.alpha"].parts[-1][0])
    for name, scale in (
        ("q", 6 / 2**0.5),
        ("k", 24 / 3**0.5),
        ("v", 6 / 3**0.5),
    ):
        at = f"{make.PREFIX}model.layers.1.self_attn.{name}_proj"
        a, b = (halves[f"blk.1.attn_{name}.weight.lora_{half}"] for half in "ab")
        want = scale * (tensors[f"{at}.lora_B.weight"] @ tensors[f"{at}.lora_A.weight"])
        torch.testing.assert_close(torch.from_numpy(alpha / a.shape[0] * (b @ a)), want)


@pytest.mark.parametrize("family", LATENT)
def test_projections_that_llama_cpp_has_in_halves_are_refused(tmp_path: Path, family: str) -> None:
    base = tiny_model(seed=4, family=family)
    save_gguf(base, tmp_path / "base.gguf", "F32", "F32")
    weights = make.random_adapter(make.config_of(base), experts=False)
    folder = make.write(tmp_path / "adapter", make.linear_keys(weights), make.lora_config())
    with pytest.raises(UserError, match="kv_b_proj: GGUF holds it in halves"):
        convert(str(folder), "gguf", str(tmp_path / "lora.gguf"), str(tmp_path / "base.gguf"))
    assert not list(tmp_path.glob("*lora.gguf*"))


def test_the_file_is_new(tmp_path: Path) -> None:
    base, weights = drawn("qwen3_moe")
    save_gguf(base, tmp_path / "base.gguf", "F32", "F32")
    folder = make.write(tmp_path / "adapter", make.linear_keys(weights), make.lora_config(3, 12.0))
    for out in ("base.gguf", "lora", "lora.bin"):
        with pytest.raises(UserError, match=r"give the name of a new \.gguf file"):
            convert(str(folder), "gguf", str(tmp_path / out), str(tmp_path / "base.gguf"))
