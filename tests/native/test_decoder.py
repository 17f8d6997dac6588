"""A step, and the attention half of a layer, in one native call equal the same parts called one by one, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import Router
from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.errors import EngineError, ExpertBackendError
from engine.experts.base import ExpertBuffers
from engine.experts.reference import ReferenceExperts
from engine.linear.base import LoraBatch
from engine.linear.native import NativeLinear, NativeLinearBackend
from engine.linear.reference import ReferenceLinear
from engine.lora.adapter import LoraPair
from engine.model.attention import GroupedQueryAttention
from engine.model.layer import Layer
from engine.model.mlp import DenseMlp, SparseMlp
from engine.model.native_decoder import NativeDecoder, all_native
from engine.model.native_executor import NativeExecutor
from engine.model.step import Executor, OutputKind, StepInput, StepOutput, Trace
from engine.ops.native import NativeOps
from engine.ops.rope import Rope
from engine.weights.store import WeightTensor
from native import _native
from testing.harness import Harness
from testing.models.shapes import config
from testing.models.tiny import FAMILIES
from tests.engine.family import Family
from tests.native.batches import batch, batch_of
from tests.native.isas import ISAS

POOL = _native.WorkerPool([[0, 1, 2]])


class TorchExperts(ReferenceExperts):
    """Experts that are not native."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"))


class Parts:
    """Two layers, the second dense, with an adapter in slot 1 on all projections; fresh KV."""

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, isa: str = "", weights: torch.dtype | None = None
    ) -> None:
        """`weights`: type of plain weights and of the KV cache, by default `dtype`."""
        self.model, self.dtype = model, dtype
        self.random = torch.Generator().manual_seed(7)
        self.backend = NativeLinearBackend(dtype, POOL, isa, plain=weights)
        self.router = NativeLinearBackend(torch.float32, POOL, isa)
        self.ops, self.spec = NativeOps(1e-6, POOL, isa), model.layers[0].attention
        self.rope = Rope(self.spec.rotation, 512, torch.device("cpu"))
        self.attention = NativeAttention(self.spec, [0, 1], 32, dtype, POOL, isa, kv_dtype=weights)
        self.layers = [self.layer(0, sparse=True), self.layer(1, sparse=False)]
        self.buffers = ExpertBuffers.allocate(64, model.num_experts_per_tok, model.hidden_size, dtype)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def linear(self, n: int, k: int, backend: NativeLinearBackend | None = None) -> NativeLinear:
        data = (self.draw(n, k) / k**0.5).view(torch.uint8).numpy().ravel()
        made = (backend or self.backend).load("w", WeightTensor("w", (n, k), "F32", data), None)
        made.set_adapter(1, LoraPair(self.draw(4, k) / k**0.5, self.draw(n, 4), 0.5))
        return made

    def layer(self, index: int, sparse: bool) -> Layer:
        m = self.model
        hidden, q, kv, dim = m.hidden_size, self.spec.q_width, self.spec.kv_width, self.spec.head_dim
        linears = [self.linear(n, hidden) for n in (q, kv, kv)] + [self.linear(hidden, q)]
        norms = [self.draw(n).to(self.dtype) for n in (hidden, dim, dim, hidden)]
        nothing: Any = None
        mlp: SparseMlp | DenseMlp = DenseMlp(nothing, nothing, nothing)
        if sparse:
            mlp = SparseMlp(index, Router(), self.linear(m.num_experts, hidden, self.router), TorchExperts(), nothing)
        q_proj, k_proj, v_proj, o_proj = linears
        attention = GroupedQueryAttention(
            spec=self.spec,
            layer=index,
            q=q_proj,
            k=k_proj,
            v=v_proj,
            o=o_proj,
            q_norm=norms[1],
            k_norm=norms[2],
            norm_eps=m.rms_norm_eps,
            rope=self.rope,
            backend=self.attention,
            joined=self.backend.join(linears[:3]),
        )
        return Layer(index, norms[0], attention, norms[3], mlp)

    def decoder(self) -> NativeDecoder:
        return NativeDecoder(self.model, self.ops, self.layers, self.buffers, self.dtype)

    def one_by_one(
        self, index: int, residual: torch.Tensor, delta: torch.Tensor | None, batch: BatchLayout, lora: LoraBatch
    ) -> list[torch.Tensor]:
        layer, m = self.layers[index], self.model
        x = self.ops.add_rms_norm(residual, delta, layer.input_norm)
        held: Any = layer.attention
        q, k, v = (part.view(len(x), -1, self.spec.head_dim) for part in held.joined(x, lora))
        q, k = self.ops.qk_norm_rope(q, k, held.q_norm, held.k_norm, self.rope, batch.positions)
        delta = held.o(self.attention.forward(index, q, k, v).flatten(1), lora)
        x = self.ops.add_rms_norm(residual, delta, layer.post_norm)
        if not isinstance(layer.mlp, SparseMlp):
            return [residual, x]
        return [residual, x, *self.ops.route(layer.mlp.gate(x.float(), lora), m.num_experts_per_tok, Router())]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["bf16", "float32", "float32 over bf16"],
)
@settings(max_examples=10)
@given(
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([32, 48]),
    hidden=st.sampled_from([32, 96]),
    experts=st.sampled_from([5, 16]),
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    with_delta=st.booleans(),
)
def test_equals_its_parts(
    isa: str,
    dtype: torch.dtype,
    weights: torch.dtype,
    group: int,
    head_dim: int,
    hidden: int,
    experts: int,
    rows: list[tuple[int, int]],
    with_delta: bool,
) -> None:
    model = config(
        hidden_size=hidden,
        num_attention_heads=2 * group,
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_tok=3,
    )
    parts = Parts(model, dtype, isa, weights)
    decoder = parts.decoder()
    batch = batch_of([(tokens, tokens + before) for tokens, before in rows])
    tokens = batch.num_tokens
    slots = torch.arange(tokens, dtype=torch.int32) % 2
    lora = LoraBatch(slots, [(1, (slots == 1).nonzero()[:, 0])])
    residual = parts.draw(tokens, hidden).to(dtype)
    delta = parts.draw(tokens, hidden).to(dtype) if with_delta else None
    parts.attention.plan(batch)
    for index in (0, 1):
        ours = residual.clone()
        out = decoder.attend(index, ours, delta, batch, lora)
        got = [ours, out.clone()]
        if index == 0:
            got += [parts.buffers.weights[:tokens].clone(), parts.buffers.ids[:tokens].clone()]
            assert out.data_ptr() == parts.buffers.hidden.data_ptr()
        expected = parts.one_by_one(index, residual.clone(), delta, batch, lora)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


# Which layers are dense, where a family's configuration can say it; as many as are named, where only the first may be.
DENSE = {
    "qwen3_moe": [[], [1], [2], [0, 1, 2]],
    "qwen2_moe": [[], [1], [2], [0, 1, 2]],
    "glm4_moe": [[], [0], [0, 1, 2]],
}
MODELS = [(name, dense) for name in FAMILIES for dense in DENSE.get(name, [[]])]
IDS = torch.arange(25) * 5 % 128


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Family]:
    @functools.cache
    def make(name: str, *dense: int) -> Family:
        return Family(tmp_path_factory.mktemp("family"), count=2, mlp_only_layers=list(dense), family=name)

    return lambda dense, name="qwen3_moe": make(name, *dense)


class Loaded:
    """The model with adapter 0 in slot 1 and adapter 1, which has MLPs of its own, in slot 2; `lora` is a batch of the
    former."""

    def __init__(self, harness: Harness) -> None:
        runner = harness.core.runner
        assert isinstance(runner.executor, NativeExecutor)
        self.model, self.executor = runner.model, runner.executor
        slots = torch.arange(25, dtype=torch.int32) % 2
        self.lora = LoraBatch(slots, [(1, slots.nonzero()[:, 0])])

    def step(self, lora: LoraBatch | None, executor: Executor | None = None, **fields: Any) -> StepOutput:
        """By the native executor, if no other is given."""
        given = StepInput(IDS, fields.pop("batch", batch()), lora, **fields)
        self.model.plan(given.batch)
        return (executor or self.executor).forward(given)


@contextmanager
def loaded(family: Family, **config: Any) -> Iterator[Loaded]:
    harness = family.engine(rules=None, pack_cache="off", **config)
    model, adapters = harness.core.runner.model, harness.core.adapters
    for slot, name in enumerate(family.paths, 1):
        model.set_adapter(slot, adapters.weights(adapters.resolve(name)))
    with torch.inference_mode():
        yield Loaded(harness)
    harness.close()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize(("name", "dense"), MODELS, ids=str)
def test_a_step_in_one_call_has_the_bits_of_its_parts(
    family: Callable[..., Family], name: str, dense: list[int], dtype: str
) -> None:
    with loaded(family(dense, name), dtype=dtype) as on:
        for lora in (None, on.lora):
            for keep in (None, [4], [4, 5, 6, 24]):
                check_parts(on, None if keep is None else torch.tensor(keep), lora)


def check_parts(on: Loaded, kept: torch.Tensor | None, used: LoraBatch | None) -> None:
    traces, sparse = [Trace(), Trace()], len(on.model.sparse)
    assert on.executor.runs_in_one_call(used)
    outs = [
        on.step(used, keep=kept, output_kind=OutputKind.GREEDY, trace=traces[0]),
        on.step(used, keep=kept, output_kind=OutputKind.LOGITS),
        on.step(used, on.model, keep=kept, output_kind=OutputKind.LOGITS),
        on.step(used, keep=kept, observe=lambda place, value: None),
    ]
    on.executor._whole_steps = False
    outs.append(on.step(used, keep=kept, output_kind=OutputKind.GREEDY, trace=traces[1]))
    on.executor._whole_steps = True
    greedy, logits, plain, observed, by_layers = outs
    assert torch.isfinite(greedy.hidden).all() and all(torch.equal(greedy.hidden, other.hidden) for other in outs)
    assert logits.logits is not None and plain.logits is not None and torch.equal(logits.logits, plain.logits)
    assert greedy.greedy is not None and torch.equal(greedy.greedy, logits.logits.argmax(-1))
    assert by_layers.greedy is not None and torch.equal(greedy.greedy, by_layers.greedy)
    assert observed.logits is None and observed.greedy is None
    assert len(traces[0].ids) == len(traces[1].ids) == sparse
    assert all(torch.equal(a, b) for a, b in zip(traces[0].ids, traces[1].ids, strict=True))
    assert traces[0].experts_touched == traces[1].experts_touched and (traces[0].experts_s > 0) == (sparse > 0)


def test_what_needs_python_between_layers_is_not_one_call(family: Callable[..., Family]) -> None:
    slots = torch.full((25,), 2, dtype=torch.int32)
    with loaded(family([1])) as on:
        own_mlps = LoraBatch(slots, [(2, torch.arange(25))])
        assert on.executor.runs_in_one_call(on.lora) and not on.executor.runs_in_one_call(own_mlps)
        by_layers = on.step(own_mlps, keep=torch.arange(25))
        assert torch.equal(by_layers.hidden, on.step(own_mlps, on.model).hidden)
    for other, native in (({"expert_backend": "reference"}, True), ({"linear_backend": "reference"}, False)):
        runner = Harness(family([1]).model_path, rules=None, pack_cache="off", **other).core.runner
        assert isinstance(runner.executor, NativeExecutor) == native and (native or runner.executor is runner.model)
        assert not isinstance(runner.executor, NativeExecutor) or not runner.executor.runs_in_one_call(None)


def test_an_error_in_one_call_names_its_layer_and_ends_that_step_only(
    family: Callable[..., Family],
) -> None:
    with loaded(family([0])) as on:
        lora, expected = on.lora, on.step(on.lora).hidden
        far = LoraBatch(torch.full((25,), 70000, dtype=torch.int32), [(70000, torch.arange(25))])
        with pytest.raises(ExpertBackendError, match="layer 1, native experts: slots: 70000; allowed are 0 to 65535"):
            on.step(far)
        with pytest.raises(EngineError, match="keep: 4; allowed is rising, 5 to 24"):
            on.step(lora, keep=torch.tensor([4, 4]))
        with pytest.raises(EngineError, match="kept: 26"):
            on.step(lora, keep=torch.arange(26))
        with pytest.raises(EngineError, match=r"keep: torch\.int32"):
            on.step(lora, keep=torch.tensor([4], dtype=torch.int32))
        with pytest.raises(EngineError, match="positions: 99999 of token 0"):
            on.step(lora, batch=dataclasses.replace(batch(), positions=torch.full((25,), 99999)))
        with pytest.raises(EngineError, match=r"slots: torch.int64 \(25,\)"):
            on.step(LoraBatch(lora.slots.long(), lora.groups))
        assert torch.equal(on.step(lora).hidden, expected)


def test_a_step_before_the_head_is_known_is_refused() -> None:
    parts = Parts(config(), torch.bfloat16)
    with pytest.raises(EngineError, match="only if every part is native"):
        parts.decoder().run(torch.zeros(2, 64).bfloat16(), batch_of([(2, 2)]), None, None, greedy=False, trace=None)
    assert not parts.decoder().complete(parts.layers[0].input_norm, parts.linear(128, 64))
    kernel = parts.decoder()._kernel
    names = ("tokens", "residual", "positions", "slots", "keep", "kept", "hidden", "greedy", "seen")
    nothing = dict.fromkeys(names, 0)
    with pytest.raises(ValueError, match="run: allowed behind set_head"):
        kernel.run(**nothing)
    with pytest.raises(ValueError, match=r"lm_head: \[128, 32\]; allowed is \[any, 64\]"):
        kernel.set_head(0, parts.linear(128, 32).packed)
    kernel.set_head(0, parts.linear(128, 64).packed)
    with pytest.raises(ValueError, match="layer 0: no MLP; allowed is run where every layer has one"):
        kernel.run(**nothing)


def test_refusals() -> None:
    parts = Parts(config(), torch.bfloat16)
    decoder = parts.decoder()
    batch = batch_of([(2, 2)])
    parts.attention.plan(batch)
    good = torch.zeros(2, 64).bfloat16()
    with pytest.raises(EngineError, match="residual"):
        decoder.attend(0, good.float(), None, batch, None)
    with pytest.raises(EngineError, match="delta"):
        decoder.attend(0, good, good[:1], batch, None)
    with pytest.raises(EngineError, match="positions"):
        decoder.attend(0, good[:1], None, batch, None)
    with pytest.raises(EngineError, match="layer 1: tokens: 1"):
        decoder.attend(1, good[:1], None, dataclasses.replace(batch, positions=torch.zeros(1, dtype=torch.int64)), None)
    with pytest.raises(EngineError, match="experts' buffers hold 64"):
        decoder.attend(0, torch.zeros(65, 64).bfloat16(), None, batch, None)
    first: Any = parts.layers[0].attention
    first.q = ReferenceLinear(torch.zeros(128, 64), None)
    assert not all_native(parts.layers, parts.ops)
    with pytest.raises(EngineError, match="native"):
        parts.decoder()
    with pytest.raises(EngineError, match=r"computes in torch.float32, its attention in torch.bfloat16"):
        mixed = Parts(config(), torch.bfloat16)
        NativeDecoder(mixed.model, mixed.ops, mixed.layers, mixed.buffers, torch.float32)
    first.q = parts.linear(64, 64)
    with pytest.raises(EngineError, match=r"layer 0: q_proj: \[64, 64\]; allowed is \[128, 64\]"):
        parts.decoder()
