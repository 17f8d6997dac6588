"""Experts whose weights are copied to another device layer by layer, against torch's autograd and against the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import nn
from transformers import TrainingArguments

from engine.errors import UserError
from engine.experts.capabilities import PackedWeights, needed
from engine.experts.gpu.layout import Sizes
from engine.experts.gpu.source import PackedSource
from engine.experts.native import NativeExperts
from engine.experts.streamed.layers import LayerStream
from engine.weights.store import WeightSource
from native import _native
from testing.models.tiny import save_hf, tiny_model
from tests.native.blocks import QUANTISED
from tests.native.expert_layers import BF16, F32
from tests.training.expert_layers import BATCHES, PackedLayer, Step, assert_within, errors, run
from tests.training.models import draw_b, losses, ours
from training.config import TrainConfig
from training.experts.native import trainable_layers
from training.experts.streamed import experts as streamed_experts
from training.experts.streamed.choice import Streaming
from training.experts.streamed.experts import StreamedTrainableExperts, Streams
from training.kernels import expert_maker
from training.loop.arguments import common_arguments, on_one_gpu
from training.model import checkpoint_layers
from training.run import train

POOL = _native.WorkerPool([[0], [1]])
CPU = torch.device("cpu")
PLAIN = {
    "f32": (PackedLayer(POOL, ["F32"] * 3, 9, 96, 64, "f32"), F32),
    "bf16": (PackedLayer(POOL, ["BF16"] * 3, 9, 64, 160), BF16),
}
REFERENCES = {name: layer.reference() for name, (layer, _) in PLAIN.items()}
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
)
DEVICES = pytest.mark.parametrize("device", ["cpu", GPU])
DRAWN = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@DEVICES
@pytest.mark.parametrize("name,forward,gradients", [("f32", 1e-5, 1e-5), ("bf16", 0.005, 0.01)])
@DRAWN
@example(rows=1, top_k=1, ranks=[], keep=True, seed=0)
@given(**BATCHES)
def test_drawn_shapes(
    name: str, forward: float, gradients: float, device: str, rows: int, top_k: int, ranks: list[int], keep: bool,
    seed: int,
) -> None:  # fmt: skip
    """Several adapters beside rows without one, wherever their matrices are."""
    layer, dtype = PLAIN[name]
    torch.manual_seed(seed)
    loras = {2 * i + 1: layer.lora(rank) for i, rank in enumerate(ranks)}
    step = Step.draw(rows, top_k, layer, [0, *loras], dtype, seed)
    want = run(REFERENCES[name], step, loras)
    if seed % 2:
        for lora in loras.values():
            lora.place(torch.device(device))
    found = errors(run(layer.streamed(device, keep, dtype), step, loras), want, step)
    assert_within(found, forward, gradients)


@DEVICES
@pytest.mark.parametrize("kind", ["BF16", *QUANTISED])
def test_quantised_weights(kind: str, device: str) -> None:
    """Every format is the numbers that it stands for, in any projection."""
    number = QUANTISED.index(kind) if kind in QUANTISED else 0
    kinds = [kind, QUANTISED[number - 1], "F32"]
    layer = PackedLayer(POOL, kinds[number % 3 :] + kinds[: number % 3], 3, 256, 256)
    torch.manual_seed(1)
    loras = {1: layer.lora(5)}
    step = Step.draw(12, 2, layer, [1], F32, 1)
    want = run(layer.reference(), step, loras)
    assert_within(errors(run(layer.streamed(device), step, loras), want, step), 1e-5, 1e-5)


@DEVICES
@pytest.mark.parametrize("name", PLAIN)
def test_padding_touches_nothing(name: str, device: str) -> None:
    """Rows without a choice may hold anything; experts without rows get zeros."""
    layer, dtype = PLAIN[name]
    torch.manual_seed(3)
    loras = {1: layer.lora(8)}
    step = Step.draw(20, 2, layer, [1], dtype, 3)
    step.ids[step.ids == 5] = 4
    experts = layer.streamed(device, True, dtype)
    alone = run(experts, step, loras)
    more = torch.full((7, layer.hidden), torch.nan, dtype=dtype)
    padded = Step(
        torch.cat([step.hidden, more]),
        torch.cat([step.ids, torch.full((7, 2), -1)]),
        torch.cat([step.weights, torch.full((7, 2), torch.nan)]),
        torch.cat([step.slots, torch.ones(7, dtype=torch.int32)]),
        torch.cat([step.grad_out, more]),
    )
    got = run(experts, padded, loras)
    for key, value in alone.items():
        assert torch.equal(got[key][: len(value)], value), key
        assert not got[key][len(value) :].any(), key
    assert not got["1 gate_lora_a"][5].any() and not got["1 down_lora_b"][5].any()
    nothing = replace(step, ids=torch.full_like(step.ids, -1))
    assert not any(value.any() for value in run(experts, nothing, loras).values())


@DEVICES
def test_more_rows_than_a_chunk(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Chunks, of which some lack an adapter, add up; and a run has the bits of the one before."""
    layer, _ = PLAIN["f32"]
    torch.manual_seed(4)
    loras = {1: layer.lora(7), 2: layer.lora(20)}
    step = Step.draw(40, 3, layer, [0], F32, 4)
    step.slots[:9], step.slots[20:] = 1, 2
    whole = run(layer.streamed(device), step, loras)
    assert all(torch.equal(value, whole[key]) for key, value in run(layer.streamed(device), step, loras).items())
    monkeypatch.setattr(streamed_experts, "CHUNK_ROWS", 13)
    for keep in (True, False):
        assert_within(errors(run(layer.streamed(device, keep), step, loras), whole, step), 1e-6, 1e-6)


def test_small_batches_stay_on_the_cpu() -> None:
    layer, _ = PLAIN["f32"]
    torch.manual_seed(5)
    lora, step = {1: layer.lora(4)}, Step.draw(12, 2, layer, [0, 1], F32, 5)
    below, above = layer.streamed(threshold=13), layer.streamed(threshold=12)
    assert below.streams.stream.num_bytes == 0
    same = run(below, step, lora)
    assert all(torch.equal(value, same[key]) for key, value in run(layer.native(), step, lora).items())
    assert below.streams.stream.num_bytes == 0
    run(above, step, lora)
    sizes, stream = above.streams.sizes, above.streams.stream
    assert 0 < stream.num_bytes <= LayerStream.buffer_bytes(sizes, stream.layout(0).num_bytes)
    with pytest.raises(ValueError, match=r"hidden is torch.bfloat16; these experts are streamed in torch.float32"):
        run(above, replace(step, hidden=step.hidden.bfloat16()), lora)


def test_matrices_stay_where_they_are_placed() -> None:
    lora = PLAIN["f32"][0].lora(4)
    model = nn.Sequential(nn.Linear(2, 2), lora)
    model.to("meta")
    assert {p.device.type for p in lora.parameters()} == {"cpu"} and model[0].weight.is_meta
    model.to(torch.bfloat16)
    assert {p.dtype for p in lora.parameters()} == {torch.float32}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_next_layer_is_on_its_way(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Forward, back, and with each layer's forward again before its backward: nothing is ever waited for but the first
    layer of the first step, and the two at either end are copied once where the direction changes."""
    layer, _ = PLAIN["f32"]
    order, sizes = tuple(range(10, 10 + 2 * count, 2)), Sizes(layer.experts, 1, layer.hidden, layer.inner)
    source = PackedSource(PackedWeights(dict.fromkeys(order, layer.packed)), sizes, CPU)
    for number in order:
        source.add(number)
    stream = LayerStream(source, order, sizes, F32, CPU, plain=True)
    streams = Streams(stream, order, sizes, F32, CPU, 1)
    copied: list[int] = []
    copy, late = LayerStream._copy, []
    monkeypatch.setattr(LayerStream, "_copy", lambda self, b: (copied.append(b.layer), copy(self, b)))
    take = LayerStream.take
    monkeypatch.setattr(
        LayerStream, "take", lambda self, n: (late.append(n) if n not in held() else None, take(self, n))[1]
    )

    def held() -> set[int | None]:
        return {buffer.layer for buffer in stream._buffers}

    def use(number: int, back: bool) -> None:
        streams.begin(number, back=back)
        streams.end(number)

    for again in (False, False, True):
        copied.clear()
        for number in order:
            use(number, False)
        for number in reversed(order):
            if again:
                use(number, False)
            use(number, True)
        assert len(copied) <= (2 * count if late else max(2 * count - 4, 0) + 2 * again)
        assert late in ([], [order[0]])
        late.clear()


def streamed_maker(least: int | None, most: int, lines: list[str]) -> Any:
    """What `expert_maker` does beside a GPU, with the CPU in its place."""

    def make(source: WeightSource, dtype: torch.dtype) -> Any:
        backend = NativeExperts(source.config, dtype, POOL)
        for index in source.config.sparse_layers:
            backend.load_layer(index, source.experts(index))
        inner = trainable_layers(backend, source.config)
        packed = needed(backend, PackedWeights)
        made, line = Streaming(CPU, least, most).layers(inner, packed, source.config, dtype, keep=True)
        lines.append(line)
        return made

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(num_hidden_layers=3), path)
    return path


@pytest.mark.parametrize("again", [False, True])
def test_a_whole_model(folder: Path, again: bool) -> None:
    """Loss and every gradient are those of the CPU's kernels, with gradient checkpointing too."""
    ids = torch.randint(2, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for make in (expert_maker(TrainConfig(kt_num_threads=2)), streamed_maker(18, 18, [])):
        model = draw_b(ours(folder, make)).train()
        if again:
            checkpoint_layers(model)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append({"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(isinstance(m, StreamedTrainableExperts) for m in streamed_of(model))
    for key, value in results[0].items():
        assert (results[1][key] - value).abs().mean() <= 3e-5 * value.abs().mean() + 1e-9, key


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("least", [0, 1])
def test_a_run_beside_a_gpu(config: TrainConfig, least: int) -> None:
    """Experts on the CPU, and streamed: losses are those of a run on the CPU."""
    train(config)
    want = losses(config.output)
    train(replace(config, device="cuda", stream_min_tokens=least, overwrite_output_dir=True))
    assert losses(config.output) == pytest.approx(want, rel=1e-3)


def test_one_gpu_of_several(config: TrainConfig) -> None:
    arguments = TrainingArguments(**common_arguments(config, "cpu"))
    arguments._n_gpu = 2
    assert on_one_gpu(arguments).n_gpu == 1


def streamed_of(model: nn.Module) -> list[Any]:
    from training.model import routed_experts

    return routed_experts(model)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_gradient_checkpointing_frees_what_is_kept(streams: bool, again: bool) -> None:
    """Gate and up, and A x, go through autograd's saved tensors, which checkpointing drops."""
    layer, _ = PLAIN["f32"]
    step, lora = Step.draw(12, 2, layer, [1], F32, 6), {1: layer.lora(4)}
    experts = layer.streamed(keep=not again) if streams else layer.native(keep=not again)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        experts.forward(step.hidden, step.ids, step.weights.requires_grad_(), step.slots, lora)
    assert any(2 * layer.inner * 22 < size <= 2 * (layer.inner + 4) * 24 for size in saved) is not again


def test_the_choice(folder: Path) -> None:
    """By the setting, or measured; a run whose micro-batches are all too small has nothing of it."""
    lines: list[str] = []
    for least, most, streams in ((18, 64, True), (65, 64, False)):
        model = ours(folder, streamed_maker(least, most, lines))
        assert all(isinstance(m, StreamedTrainableExperts) is streams for m in streamed_of(model))
    assert "micro-batches of 18 tokens and more on cpu" in lines[0] and "the largest has 64" in lines[0]
    assert "every micro-batch on the CPU: the largest has 64 tokens, streaming to cpu begins at 65" in lines[1]
    model = ours(folder, streamed_maker(None, 200, lines))
    assert "measured: a layer's copy" in lines[2]
    threshold = {getattr(m, "streams", None) and m.streams.threshold for m in streamed_of(model)}
    assert len(threshold) == 1 and ("on the CPU:" in lines[2]) is (threshold == {None})


def test_without_a_gpu(folder: Path) -> None:
    config = TrainConfig(model_name_or_path=str(folder), kt_num_threads=2, stream_min_tokens=64)
    with pytest.raises(UserError, match="stream_min_tokens is 64, but there is no GPU to stream weights to"):
        ours(folder, expert_maker(config))
    ours(folder, expert_maker(replace(config, stream_min_tokens=0)))
