"""Gated delta nets in training beside serving: texts of a micro-batch apart, whatever form the served model has."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout
from engine.attention.delta import DeltaInputs, DeltaVectors, split_gates, split_wide
from engine.tuning import Batch, LoadRun, OpenRun, OptimStep, SaveRun
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import STATEFUL, save_hf, tiny_model
from tests.parallel.test_heads import nets
from tests.tuning.conftest import Tuning, sample
from tests.tuning.test_gradients import sampled_as_trained
from training.service.delta import TrainedDelta

LENGTHS = st.lists(st.sampled_from([1, 2, 5, 63, 64, 65, 130]), min_size=1, max_size=4)


def drawn(net: DeltaNet, tokens: int, seed: int = 0) -> tuple[DeltaInputs, DeltaVectors]:
    g = torch.Generator().manual_seed(seed)
    wide = [net.channels + net.value_width] if net.fused else [net.channels, net.value_width]
    gates = [2 * net.value_heads] if net.fused_gates else [net.value_heads] * 2
    given = DeltaInputs(
        *([torch.randn(tokens, n, generator=g).requires_grad_() for n in sizes] for sizes in (wide, gates))
    )
    conv, decay, bias, norm = (
        torch.randn(shape, generator=g) * 0.5
        for shape in ((net.kernel, net.channels), (net.value_heads,), (net.value_heads,), (net.value_dim,))
    )
    return given, DeltaVectors(conv, -decay.exp(), bias, norm, 1e-6)


def mixed(net: DeltaNet, given: DeltaInputs, w: DeltaVectors, lengths: list[int]) -> torch.Tensor:
    backend = TrainedDelta(net)
    rows = torch.arange(sum(lengths))
    backend.plan(BatchLayout([0, *accumulate(lengths)], lengths, [], rows, rows))
    return backend.mix(0, given, w)


def one_by_one(net: DeltaNet, given: DeltaInputs, w: DeltaVectors, text: slice) -> torch.Tensor:
    """The formulas of `DeltaNet`, position by position, float64."""
    wide, gates = ([part[text].double() for part in parts] for parts in (given.wide, given.gates))
    qkv, z = split_wide(wide[0], net) if net.fused else wide
    b, a = split_gates(gates[0], net) if net.fused_gates else gates
    conv, decay, bias, norm = (part.double() for part in (w.conv, w.decay, w.dt_bias, w.norm))
    shared = net.value_heads // net.key_heads
    key_of = [head % net.key_heads if net.tiled else head // shared for head in range(net.value_heads)]
    s, found = torch.zeros(net.value_heads, net.key_dim, net.value_dim, dtype=torch.float64), []
    for at in range(len(qkv)):
        first = max(0, at - net.kernel + 1)
        seen = F.silu((qkv[first : at + 1] * conv[first - at - 1 :]).sum(0))
        q, k, v = torch.split(seen, [net.key_width, net.key_width, net.value_width])
        q, k = (part.view(net.key_heads, -1) for part in (q, k))
        q, k = ((part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt())[key_of] for part in (q, k))
        s = s * (decay * F.softplus(a[at] + bias)).exp()[:, None, None]
        change = (v.view(net.value_heads, -1) - torch.einsum("hd,hde->he", k, s)) * torch.sigmoid(b[at])[:, None]
        s = s + torch.einsum("hd,he->hde", k, change)
        found.append(torch.einsum("hd,hde->he", q * net.key_dim**-0.5, s))
    out = torch.stack(found)
    out = out * (out.square().mean(-1, keepdim=True) + w.norm_eps).rsqrt() * norm
    return out.flatten(1) * F.silu(z)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(of=nets(), lengths=LENGTHS, seed=st.integers(0, 9))
def test_texts_and_their_gradients_are_those_of_each_alone(of: tuple[DeltaNet, int], lengths: list[int], seed: int):
    net, ends = of[0], list(accumulate(lengths))
    given, w = drawn(net, sum(lengths), seed)
    inputs = [*given.wide, *given.gates]
    got = mixed(net, given, w, lengths)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(seed))
    grads = torch.autograd.grad((got * weights).sum(), inputs)
    texts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    wanted = torch.cat([one_by_one(net, given, w, text) for text in texts])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3)
    for grad, exact in zip(grads, torch.autograd.grad((wanted * weights).sum(), inputs), strict=True):
        size = float(exact.abs().max()) + 1.0
        assert float((grad - exact).abs().max()) < 2e-3 * size


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    keys=st.integers(1, 4), shared=st.integers(1, 4), dims=st.tuples(*[st.sampled_from([16, 32, 64, 128])] * 2),
    kernel=st.integers(2, 8), fused=st.booleans(), lengths=LENGTHS, dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_what_backward_needs_is_in_the_memory_plan(
    keys: int, shared: int, dims: tuple[int, int], kernel: int, fused: bool, lengths: list[int], dtype: str
):
    net = DeltaNet(keys, keys * shared, *dims, kernel, fused=fused, fused_gates=fused)
    given, w = drawn(net, sum(lengths))
    given = DeltaInputs([part.to(getattr(torch, dtype)) for part in given.wide], given.gates)
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = mixed(net, given, w, lengths)
    values = sum(storage.nbytes() for storage in kept.values()) / 4
    own = sum(part.numel() for part in (w.conv, w.decay, w.dt_bias, w.norm))
    assert out.requires_grad and values <= sum(lengths) * net.trained_values(0) + own


@pytest.mark.parametrize("family", STATEFUL)
def test_samples_of_one_micro_batch_do_not_see_each_other(family: str, tmp_path: Path):
    save_hf(tiny_model(family=family), tmp_path)
    tuning = Tuning(tmp_path)
    tuning.ask(OpenRun(rank=4, alpha=8.0))
    stepped(tuning)
    texts = [sample(n, length) for n, length in enumerate((70, 1, 9, 130, 2))]
    for found, text in zip(tuning.logprobs(texts), texts, strict=True):
        np.testing.assert_allclose(found, tuning.logprobs([text])[0], rtol=1e-4, atol=2e-5)
    sampled_as_trained(tuning)
    tuning.engine.close()


@pytest.mark.parametrize("family", STATEFUL)
def test_a_run_over_a_gguf_file_is_one_over_safetensors(family: str, tmp_path: Path):
    """In gradients, in its state, in its adapter's file, and in what is served of it, although the file has the
    projections of delta nets in another form."""
    model = tiny_model(family=family)
    save_hf(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "m.gguf", "F32", "F32")
    text = sample(7, 90)
    runs = []
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        tuning = Tuning(path)
        tuning.ask(OpenRun(rank=4, alpha=8.0, seed=3))
        runs.append(tuning)
    first, second = (tuning.engine.core.tuner._runs["run"].adapter for tuning in runs)
    assert [*first.parameters] == [*second.parameters]
    assert all(torch.equal(parameter, second.parameters[name]) for name, parameter in first.parameters.items())
    stepped(runs[0])
    runs[0].ask(SaveRun(state=str(tmp_path / "state"), adapter=str(tmp_path / "adapter-a")))
    runs[1].ask(LoadRun(str(tmp_path / "state")))
    runs[1].ask(SaveRun(adapter=str(tmp_path / "adapter-b")))
    for tuning in runs:
        tuning.ask(Batch([text, sample(2, 5)]))
    for name, parameter in first.parameters.items():
        other = second.parameters[name]
        assert torch.equal(parameter, other), name
        size = float(parameter.grad.abs().max()) + 1e-3
        assert float((parameter.grad - other.grad).abs().max()) < 2e-3 * size, name
    wanted = runs[0].logprobs([text])[0]
    np.testing.assert_allclose(runs[1].logprobs([text])[0], wanted, rtol=1e-4, atol=2e-5)
    assert np.abs(wanted - runs[0].logprobs([text], base=True)[0]).max() > 1e-2
    for number, (tuning, name) in enumerate(((runs[0], "b"), (runs[1], "a"))):
        tuning.ask(OpenRun(rank=4, alpha=8.0, adapter=str(tmp_path / f"adapter-{name}")), f"again-{number}")
        found = tuning.logprobs([text], f"again-{number}")[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)
    sampled_as_trained(runs[1])
    served = runs[1].engine
    served.adapter("file", tmp_path / "adapter-a")
    prompt = text.tokens[:20]
    assert len({tuple(tokens) for tokens in served.generate([prompt] * 2, ["file", "live"], max_tokens=8)}) == 1
    for tuning in runs:
        tuning.engine.close()


def stepped(tuning: Tuning) -> None:
    """Two steps, after which the adapter does something."""
    for n in range(2):
        tuning.ask(Batch([sample(n, 70), sample(n + 9, 6)]))
        tuning.ask(OptimStep(2e-2))
