"""Delta nets of drawn shapes: what ranks compute adds up to what one does, and their parts make the whole."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout
from engine.attention.delta import DeltaInputs, DeltaVectors, ReferenceDeltaNet, StateSlots
from engine.files.model_file import FileBytes, MadeBytes
from engine.lora.adapter import AdapterWeights, LoraPair
from engine.ranks.adapters import adapter_part
from engine.ranks.heads import column_spans, delta_of, row_spans
from engine.ranks.shard import Shard, ShardedSource, by_inputs, by_outputs
from engine.weights.open import open_model
from engine.weights.store import WeightTensor
from scheduler.plan import NO_STATE, RowState
from testing.models.gguf_writer import save_gguf
from testing.models.shapes import config as model_config
from testing.models.tiny import STATEFUL, save_hf, tiny_model

AT = "model.layers.0.self_attn"
HIDDEN = 12
Tensors = dict[str, torch.Tensor]


@st.composite
def nets(draw: st.DrawFn) -> tuple[DeltaNet, int]:
    """(a delta net in one of the forms that files have, ranks)."""
    ranks, each, shared = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    fused_gates = draw(st.booleans())
    fused, tiled = fused_gates and draw(st.booleans()), not fused_gates and draw(st.booleans())
    keys = ranks * each
    return DeltaNet(
        keys, keys * shared, draw(st.sampled_from([1, 4])), draw(st.sampled_from([2, 6])), draw(st.integers(2, 4)),
        fused=fused, fused_gates=fused_gates, tiled=tiled,
    ), ranks  # fmt: skip


def tensors(net: DeltaNet, seed: int) -> Tensors:
    """By the last part of their names."""
    g = torch.Generator().manual_seed(seed)
    found = {module.name: module.shape for module in net.modules(HIDDEN) if module.shape}
    found |= {vector.name.removesuffix(".weight"): vector.shape for vector in net.vectors(HIDDEN)}
    made = {name.rpartition(".")[2]: torch.randn(shape, generator=g) * 0.5 for name, shape in found.items()}
    return made | {"decay": -made["decay"].exp()}


def part(net: DeltaNet, whole: Tensors, rank: int, ranks: int) -> Tensors:
    found = {}
    for name, tensor in whole.items():
        rows, columns = (spans(net, f"{AT}.{name}", rank, ranks) for spans in (row_spans, column_spans))
        held = tensor if rows is None else torch.cat([tensor[span] for span in rows])
        found[name] = held if columns is None else torch.cat([held[:, span] for span in columns], 1)
    return found


def computed(net: DeltaNet, w: Tensors, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is added to the residual stream [T, HIDDEN], the states of the heads behind it)."""
    backend = ReferenceDeltaNet(net, [0], StateSlots(1), torch.device("cpu"))
    n = len(x)
    at = torch.arange(n)
    backend.plan(BatchLayout([0, n], [n], [array("i", [0])], at, at, states=[RowState(0, NO_STATE)]))
    wide = [f"{name}_proj" for name in (["qkvz"] if net.fused else ["qkv", "z"])]
    gates = [f"in_proj_{name}" for name in (["ba"] if net.fused_gates else ["b", "a"])]
    given = DeltaInputs(*([x @ w[name].T for name in names] for names in (wide, gates)))
    conv = w["conv1d"][:, 0].T.contiguous()
    mixed = backend.mix(0, given, DeltaVectors(conv, w["decay"], w["dt_bias"], w["norm"], 1e-6))
    return mixed @ w["out_proj"].T, backend.states[0][0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(net=nets(), seed=st.integers(0, 99), tokens=st.sampled_from([1, 7, 70]))
def test_what_ranks_compute_adds_up(net: tuple[DeltaNet, int], seed: int, tokens: int) -> None:
    """A key head stays with its value heads, whatever the order of these."""
    spec, ranks = net
    whole, x = tensors(spec, seed), torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    out, states = computed(spec, whole, x)
    parts = [computed(spec.of_rank(ranks), part(spec, whole, rank, ranks), x) for rank in range(ranks)]
    torch.testing.assert_close(sum(each[0] for each in parts), out, atol=1e-4, rtol=1e-4)
    shared, keys = spec.value_heads // spec.key_heads, spec.key_heads // ranks
    held = torch.stack([each[1] for each in parts])
    by_key = held.unflatten(1, (shared, keys)).transpose(1, 2) if spec.tiled else held.unflatten(1, (keys, shared))
    expected = states.unflatten(0, (shared, -1)).transpose(0, 1) if spec.tiled else states.unflatten(0, (-1, shared))
    torch.testing.assert_close(by_key.flatten(0, 1), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(net=nets(), seed=st.integers(0, 99))
def test_parts_are_a_smaller_net_s_and_hold_every_row_once(net: tuple[DeltaNet, int], seed: int) -> None:
    spec, ranks = net
    whole = tensors(spec, seed)
    parts = [part(spec, whole, rank, ranks) for rank in range(ranks)]
    small = tensors(spec.of_rank(ranks), seed)
    for name, tensor in whole.items():
        assert all(each[name].shape == small[name].shape for each in parts), name
        if name == "norm":
            assert all(torch.equal(each[name], tensor) for each in parts)
        else:
            values = torch.cat([each[name].flatten() for each in parts])
            assert torch.equal(values.sort().values, tensor.flatten().sort().values), name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(net=nets(), seed=st.integers(0, 99), rank=st.integers(1, 3))
def test_a_rank_s_part_of_an_adapter_belongs_to_its_part_of_the_weights(
    net: tuple[DeltaNet, int], seed: int, rank: int
) -> None:
    spec, ranks = net
    g = torch.Generator().manual_seed(seed)
    shapes = {module.name: module.shape for module in spec.modules(HIDDEN) if module.kind == "linear"}
    pairs = {
        f"model.layers.0.{name}": LoraPair(
            torch.randn(rank, shape[1], generator=g), torch.randn(shape[0], rank, generator=g), 0.5
        )
        for name, shape in shapes.items()
    }
    plain = model_config(num_hidden_layers=1)
    config = replace(plain, layers=(replace(plain.layers[0], attention=spec),))
    changed = {name.rpartition(".")[2]: pair.b @ pair.a for name, pair in pairs.items()}
    for each in range(ranks):
        held = adapter_part(AdapterWeights("a", "made", linears=pairs), Shard(each, ranks), config).linears
        expected = part(spec, changed, each, ranks)
        for name, pair in held.items():
            torch.testing.assert_close(pair.b @ pair.a, expected[name.rpartition(".")[2]], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> WeightTensor:
    """Of a file, with four blocks a row."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    save_gguf(tiny_model(4, family="qwen3_5_moe_text"), path, "Q8_0", "Q8_0")
    weight = open_model(str(path)).tensor(f"{AT}.out_proj.weight")
    assert weight.shape == (64, 128) and weight.type == "Q8_0"
    return weight


@st.composite
def runs(draw: st.DrawFn, total: int) -> tuple[slice, ...]:
    """Parts of [0, total), rising, that do not overlap."""
    cuts = sorted(draw(st.sets(st.integers(0, total), min_size=2, max_size=6)))
    return tuple(slice(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=runs(7), columns=runs(4), kept=st.sampled_from(["memory", "file", "made"]))
def test_spans_of_rows_and_columns_are_read_in_their_order(quantised: WeightTensor, rows, columns, kept: str) -> None:
    """From a file, from memory and from bytes that are made."""
    data = quantised.data
    assert isinstance(data, FileBytes)
    as_kept = {"file": data, "memory": data[:], "made": MadeBytes((data,), data.nbytes, lambda: data[:])}
    weight, whole = replace(quantised, data=as_kept[kept]), quantised.dequantise()
    blocks = tuple(slice(32 * span.start, 32 * span.stop) for span in columns)
    expected = torch.cat([whole[span] for span in rows])
    got = by_outputs(weight, *rows)
    assert got.num_bytes == len(got.data[:]) and torch.equal(got.dequantise(), expected)
    both = by_inputs(got, *blocks, size=2)
    assert both.num_bytes == len(both.data[:])
    assert torch.equal(both.dequantise(), torch.cat([expected[:, span] for span in blocks], 1))


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("early", [False, True])
def test_parts_of_files_make_the_whole(tmp_path, family, early):
    """All forms: one projection by key heads, or several; value heads by their keys, or by turns."""
    if early and family != "qwen3_next":
        pytest.skip("only the first files of Qwen3-Next are so")
    shape = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "shared_expert_intermediate_size": 64}
    model = tiny_model(3, family=family, **shape)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", "Q8_0", "Q8_0", early=early)
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        source = open_model(str(path))
        parts = [ShardedSource(source, Shard(rank, 2)) for rank in range(2)]
        shapes = {module.name: module.shape for module in parts[0].config.modules(0) if module.shape}
        for name in parts[0].names():
            module = name.removesuffix(".weight")
            net, whole = delta_of(source.config, module), source.tensor(name).dequantise()
            for rank, each in enumerate(parts):
                held = each.tensor(name)
                assert tuple(held.dequantise().shape) == held.shape
                if net is not None:
                    last = module.rpartition(".")[2]
                    assert torch.equal(held.dequantise(), part(net, {last: whole}, rank, 2)[last]), name
                    if module.startswith(AT) and last not in ("conv1d", "decay", "dt_bias", "norm"):
                        assert held.shape == shapes[module.removeprefix("model.layers.0.")]
