"""Every form on disk reads back to the same deltas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.errors import AdapterError
from engine.lora.files.parse import parse_adapter
from tests.lora import make
from tests.lora.forms import FORMS, assert_same, write_form
from tests.lora.merge import all_deltas

CONFIG = make.model_config()


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_round_trip(tmp_path: Path, form: str, dtype: torch.dtype, extra: int) -> None:
    weights = make.random_adapter(CONFIG, dtype=dtype, extra=extra)
    read = parse_adapter(write_form(tmp_path, form, weights), CONFIG, name="x")
    assert read.format == FORMS[form] + ("+extra-mlps" if extra else "")
    assert read.warnings == [] and read.rank == 3
    assert_same(read, weights)
    tensors = [pair.a for pair in read.linears.values()] + [lora.up_b for lora in read.experts.values()]
    assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)


def test_attention_only(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG, experts=False)
    read = parse_adapter(make.write(tmp_path, make.linear_keys(weights), make.lora_config()), CONFIG, name="x")
    assert read.format == "peft-attention" and read.warnings == [] and read.experts == {}
    assert_same(read, weights)


def test_experts_only_in_the_fused_file(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG, linears=False)
    read = parse_adapter(
        make.write(tmp_path, None, make.lora_config(), fused=make.fused_keys(weights)), CONFIG, name="x"
    )
    assert_same(read, weights)


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG)
    for form in ("A", "B", "E", "B bin"):
        folder = write_form(tmp_path / form, form, weights)
        read = parse_adapter(folder, CONFIG, name="x")
        for file in folder.iterdir():
            file.write_bytes(b"\0" * file.stat().st_size)  # in place: a mapped view would change
        assert_same(read, weights)


def test_adapter_name_in_keys(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG)
    tensors = {
        key.replace(".weight", ".default.weight"): tensor
        for key, tensor in (make.linear_keys(weights) | make.per_expert_keys(weights)).items()
    }
    assert_same(parse_adapter(make.write(tmp_path, tensors, make.lora_config()), CONFIG, name="x"), weights)


def test_extra_mlps_in_their_own_file(tmp_path: Path) -> None:
    """It counts, also where older values lie in the adapter's file."""
    weights, older = make.random_adapter(CONFIG, extra=2), make.random_adapter(CONFIG, extra=2, seed=7)
    tensors = make.linear_keys(weights) | make.per_expert_keys(weights)
    save_file(make.extra_keys(weights), tmp_path / "lora_experts.safetensors")
    assert_same(parse_adapter(make.write(tmp_path, tensors, make.lora_config()), CONFIG, name="x"), weights)
    make.write(tmp_path, tensors | make.extra_keys(older), make.lora_config())
    read = parse_adapter(tmp_path, CONFIG, name="x")
    assert_same(read, weights)
    assert read.warnings == [
        "12 tensors of lora_experts.safetensors count instead of those in adapter_model.safetensors"
    ]


def test_gate_up_shares_a_when_not_block_diagonal(tmp_path: Path) -> None:
    """What PEFT trains afresh: one A for gate and up, no zeros in B."""
    generator = torch.Generator().manual_seed(3)
    tensors, want = {}, {}
    for layer in (0, 2):
        a, b = torch.randn(4, 4, 24, generator=generator), torch.randn(4, 32, 4, generator=generator)
        key = f"{make.PREFIX}model.layers.{layer}.mlp.experts"
        tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = make.flatten_3d(a, b, False)
        delta = 1.5 * (b @ a)
        want |= {f"layers.{layer}.gate": delta[:, :16], f"layers.{layer}.up": delta[:, 16:]}
    read = parse_adapter(make.write(tmp_path, tensors, make.lora_config(4, 6)), CONFIG, name="x")
    got = all_deltas(read)
    assert sorted(got) == sorted(want) and read.rank == 4
    for name, delta in want.items():
        torch.testing.assert_close(got[name], delta)
    assert read.warnings == [f"layer {layer}: no expert LoRA on down_proj, taken as zero" for layer in (0, 2)]


@pytest.mark.parametrize("version, swapped", [("0.18.1", True), ("0.19.0", False), ("1.0.0.dev0", False)])
def test_square_case_is_settled_by_the_version(tmp_path: Path, version: str, swapped: bool) -> None:
    """H = 2I and gate_up alone: both orientations fit."""
    config = make.model_config(hidden_size=32)
    a, b = torch.randn(4, 3, 32), torch.randn(4, 32, 3)
    key = f"{make.PREFIX}model.layers.0.mlp.experts"
    half_a, half_b = make.flatten_3d(a, b, swapped)
    tensors = {f"{key}.lora_A.weight": half_a, f"{key}.lora_B.weight": half_b}
    folder = make.write(tmp_path, tensors, make.lora_config(peft_version=version))
    deltas = all_deltas(parse_adapter(folder, config, name="x"))
    torch.testing.assert_close(torch.cat([deltas["layers.0.gate"], deltas["layers.0.up"]], 1), 2 * (b @ a))


@pytest.mark.parametrize("form", ["B", "D"])
def test_missing_experts_and_projections_are_zero(tmp_path: Path, form: str) -> None:
    weights = make.random_adapter(CONFIG)
    folder = write_form(tmp_path, form, weights)
    prefix = "" if form == "D" else make.PREFIX
    gone = [f"{prefix}model.layers.0.mlp.experts.1.", f"{prefix}model.layers.0.mlp.experts.3.up_proj."]
    tensors = make.linear_keys(weights, prefix) | make.per_expert_keys(weights, prefix)
    kept = {
        key: tensor
        for key, tensor in tensors.items()
        if not key.startswith(tuple(gone)) and ".layers.2.mlp.ex" not in key
    }
    read = parse_adapter(make.write(folder, kept, make.lora_config()), CONFIG, name="x")
    assert read.warnings == [
        "layer 2: no expert LoRA, taken as zero",
        "layer 0: 4 expert projections have no LoRA, taken as zero",
    ]
    del weights.experts[2]
    for name in ("gate_b", "up_b", "down_b"):
        getattr(weights.experts[0], name)[1] = 0
    weights.experts[0].up_b[3] = 0
    assert_same(read, weights)


def test_missing_layer_of_the_fused_file(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG)
    kept = {k: t for k, t in make.fused_keys(weights).items() if not k.startswith(("layers.2", "layers.0.experts.up"))}
    read = parse_adapter(make.write(tmp_path, {}, make.lora_config(), fused=kept), CONFIG, name="x")
    assert read.warnings == [
        "layer 2: no expert LoRA, taken as zero",
        "layer 0: no expert LoRA on up, taken as zero",
    ]
    assert set(read.experts) == {0} and not read.experts[0].up_b.any()
    assert torch.equal(read.experts[0].down_b, weights.experts[0].down_b)


def test_stale_keys_beside_the_fused_file(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG)
    stale = make.per_expert_keys(make.random_adapter(CONFIG, seed=5, rank=2))
    stale = {key: torch.zeros_like(t) if "lora_B" in key else t for key, t in stale.items()}
    make.write(tmp_path, make.linear_keys(weights) | stale, make.lora_config(), fused=make.fused_keys(weights))
    make.write_manifest(tmp_path)
    read = parse_adapter(tmp_path, CONFIG, name="x")
    assert read.warnings == [
        f"{len(stale)} stale expert tensors beside fused_expert_lora.safetensors are all zero and ignored"
    ]
    assert_same(read, weights)


# ---- scale


@pytest.mark.parametrize("form, experts_scale", [("A", "alpha/r"), ("A'", "alpha/r"), ("E", "alpha/sqrt(r)")])
def test_rslora_where_the_form_settles_it(tmp_path: Path, form: str, experts_scale: str) -> None:
    weights = make.random_adapter(CONFIG)
    write_form(tmp_path, form, weights)
    fields: dict[str, Any] = {"use_rslora": True}
    if form == "E":
        fields |= {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 6 * math.sqrt(2)}}
    make.write(tmp_path, None, make.lora_config(**fields))
    if form == "A":
        (tmp_path / "kt_adapter_manifest.json").unlink()
        make.write_manifest(tmp_path)
    read = parse_adapter(tmp_path, CONFIG, name="x")
    root = 6 / math.sqrt(3)
    assert all(pair.scale == pytest.approx(root) for pair in read.linears.values())
    scales = {s for lora in read.experts.values() for s in (lora.gate_scale, lora.up_scale, lora.down_scale)}
    assert all(scale == pytest.approx(2.0 if experts_scale == "alpha/r" else root) for scale in scales)


@pytest.mark.parametrize("form", ["B", "D"])
@pytest.mark.parametrize("kind, scale", [("alpha/r", 2.0), ("alpha/sqrt(r)", 6 / math.sqrt(3))])
def test_rslora_of_per_expert_keys_takes_expert_scaling(tmp_path: Path, form: str, kind: str, scale: float) -> None:
    folder = write_form(tmp_path, form, make.random_adapter(CONFIG))
    make.write(folder, None, make.lora_config(use_rslora=True))
    read = parse_adapter(folder, CONFIG, name="x", expert_scaling=kind)
    assert {lora.down_scale for lora in read.experts.values()} == {scale}
    assert {pair.scale for pair in read.linears.values()} == {6 / math.sqrt(3)}
    assert read.warnings == []


@pytest.mark.parametrize("rslora", [False, True])
def test_alpha_pattern_on_per_expert_keys_takes_expert_scaling(tmp_path: Path, rslora: bool) -> None:
    folder = write_form(tmp_path, "B", make.random_adapter(CONFIG))
    make.write(folder, None, make.lora_config(use_rslora=rslora, alpha_pattern={"down_proj": 30}))
    with pytest.raises(AdapterError, match="give expert_scaling") as caught:
        parse_adapter(folder, CONFIG, name="x")
    assert caught.value.keys == ["use_rslora", "alpha_pattern"][not rslora :]
    root = math.sqrt(3)
    for kind, scale in (("alpha/r", 2.0), ("alpha/sqrt(r)", 6 / root), ("peft", 30 / root if rslora else 10.0)):
        read = parse_adapter(folder, CONFIG, name="x", expert_scaling=kind)
        assert all(lora.down_scale == pytest.approx(scale) for lora in read.experts.values())


@pytest.mark.parametrize("pattern", [{"q_proj": 30}, {"down_proj": 6}])
def test_alpha_pattern_that_leaves_nothing_open(tmp_path: Path, pattern: dict[str, float]) -> None:
    folder = write_form(tmp_path, "B", make.random_adapter(make.model_config(mlp_only_layers=())))
    make.write(folder, None, make.lora_config(alpha_pattern=pattern))
    read = parse_adapter(folder, make.model_config(mlp_only_layers=()), name="x")
    assert {lora.down_scale for lora in read.experts.values()} == {2.0}


def test_expert_scaling_that_was_not_needed_is_said(tmp_path: Path) -> None:
    folder = write_form(tmp_path, "A", make.random_adapter(CONFIG))
    read = parse_adapter(folder, CONFIG, name="x", expert_scaling="alpha/sqrt(r)")
    assert read.warnings == ["expert_scaling 'alpha/sqrt(r)' was not needed: the files settle it"]
    assert read.experts[0].gate_scale == 2.0


def test_manifest_settles_rank_and_alpha_of_experts(tmp_path: Path) -> None:
    weights = make.random_adapter(CONFIG)
    folder = make.write(
        tmp_path, make.linear_keys(weights), make.lora_config(alpha=12.0), fused=make.fused_keys(weights)
    )
    make.write_manifest(folder, alpha=9.0)
    read = parse_adapter(folder, CONFIG, name="x")
    assert read.experts[0].gate_scale == 3.0
    assert next(iter(read.linears.values())).scale == 4.0


def test_rank_of_the_fused_file_is_the_tensors(tmp_path: Path) -> None:
    experts, linears = make.random_adapter(CONFIG, rank=4), make.random_adapter(CONFIG, rank=3)
    folder = make.write(tmp_path, make.linear_keys(linears), make.lora_config(), fused=make.fused_keys(experts))
    read = parse_adapter(folder, CONFIG, name="x")
    assert read.experts[0].gate_scale == 1.5
    assert read.warnings == ["experts have rank [4], adapter_config.json says 3"]


@st.composite
def patterned(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, float]]:
    keys = st.sampled_from(
        [
            "q_proj",
            "self_attn.q_proj",
            "layers.0.self_attn.v_proj",
            r".*\.o_proj",
            "model.layers.2.mlp.gate",
            r"mlp\.gate",
            "gate_proj",
            "experts.1.gate_proj",
            r"layers.2.mlp.experts.\d+.(up|down)_proj",
            r"experts\.(0|3)\.down_proj",
            "proj",  # matches nothing: a whole name after a dot is needed
            "roj",
        ]
    )
    ranks = draw(st.dictionaries(keys, st.integers(1, 6), max_size=4))
    alphas = draw(st.dictionaries(keys, st.sampled_from([1.0, 3.0, 8.0, 0.5]), max_size=4))
    return ranks, alphas


@given(patterned(), st.booleans(), st.integers(0, 3))
@hypothesis_settings(max_examples=60)
def test_patterns(tmp_path_factory: pytest.TempPathFactory, patterns: Any, rslora: bool, seed: int) -> None:
    """Ranks and scales by PEFT's own matching; experts of different rank and scale are stacked exactly."""
    from peft.utils.other import get_pattern_key

    ranks, alphas = patterns
    generator = torch.Generator().manual_seed(seed)
    tensors, want = {}, {}

    def add(module: str, size_in: int, size_out: int) -> torch.Tensor:
        rank = ranks.get(get_pattern_key(ranks.keys(), module), 3)
        alpha = alphas.get(get_pattern_key(alphas.keys(), module), 6.0)
        a, b = torch.randn(rank, size_in, generator=generator), torch.randn(size_out, rank, generator=generator)
        tensors[f"{make.PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{make.PREFIX}{module}.lora_B.weight"] = b
        return (alpha / math.sqrt(rank) if rslora else alpha / rank) * (b @ a)

    for layer in range(3):
        for module, shape in make.linear_shapes(CONFIG, layer).items():
            want[module] = add(module, *shape)
        for projection, shape in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24))) if layer != 1 else ():
            deltas = [add(f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj", *shape) for e in range(4)]
            want[f"layers.{layer}.{projection}"] = torch.stack(deltas)
    folder = tmp_path_factory.mktemp("patterns")
    config = make.lora_config(rank_pattern=ranks, alpha_pattern=alphas, use_rslora=rslora)
    make.write(folder, tensors, config)
    read = parse_adapter(folder, CONFIG, name="x", expert_scaling="peft")
    got = all_deltas(read)
    assert sorted(got) == sorted(want)
    for name, delta in want.items():
        torch.testing.assert_close(got[name], delta, rtol=1e-5, atol=1e-5)
    unmatched = [k for k in {**ranks, **alphas} if k in ("proj", "roj")]
    assert all(key in " ".join(read.warnings) for key in unmatched)
    assert read.rank == max(tensor.shape[0] for key, tensor in tensors.items() if "lora_A" in key)


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(list(FORMS)),
    st.integers(0, 99),
)
@hypothesis_settings(max_examples=60)
def test_any_shape(
    tmp_path_factory: pytest.TempPathFactory, rank: int, experts: int, hidden: int, wide: int, form: str, seed: int
) -> None:
    """Sizes that coincide (rank, E, H, I, 2I) do not confuse any form. A case that fits twice names its version."""
    config = make.model_config(hidden_size=hidden * 2, moe_intermediate_size=wide * 2, num_experts=experts)
    weights = make.random_adapter(config, rank=rank, alpha=2.0 * rank, seed=seed)
    folder = write_form(tmp_path_factory.mktemp("shapes"), form, weights)
    gate_up = {r".*\.gate_up_proj": 2 * rank}, {r".*\.gate_up_proj": 4.0 * rank}
    fields: dict[str, Any] = {"peft_version": "0.18.0" if form == "E 0.18" else "0.21.0"}
    if form.startswith("E"):
        fields |= {"rank_pattern": gate_up[0], "alpha_pattern": gate_up[1]}
    make.write(folder, None, make.lora_config(rank, 2.0 * rank, **fields))
    if form == "A":
        (folder / "kt_adapter_manifest.json").unlink()
        make.write_manifest(folder, rank=rank, alpha=2.0 * rank)
    assert_same(parse_adapter(folder, config, name="x"), weights)
