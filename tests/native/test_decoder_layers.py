"""A decoder of layers that differ in one native call equals the same parts called one by one, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from engine.architectures.parts.mlp import Router
from engine.architectures.parts.rotation import Rotation
from engine.attention.base import BatchLayout
from engine.attention.native import NativeAttention
from engine.experts.base import ExpertBuffers
from engine.experts.capabilities import NativeTasks
from engine.experts.native import NativeExperts
from engine.linear.base import LoraBatch
from engine.linear.native import NativeLinear, NativeLinearBackend
from engine.lora.adapter import LoraPair
from engine.model.mlp import DenseMlp, SharedExpert, SparseMlp
from engine.ops.native import NativeOps, native_router
from engine.ops.rope import Rope
from engine.weights.store import ExpertStore, WeightTensor
from native import _native
from testing.models.shapes import config
from tests.native.batches import batch
from tests.native.isas import ISAS

POOL = _native.WorkerPool([[0, 1, 2]])


class Mixed:
    """Layers that differ in all that layers may, as kernels' parts and as the calls that these are made of: heads,
    rotation, QK-norm (of a head, none, whole), window, sinks and biases, dense or sparse, router, shared expert (gated,
    not). Adapters in slot 1, fresh KV."""

    EXPERTS, TOP_K, HIDDEN = 12, 3, 64

    def __init__(self, dtype: torch.dtype, isa: str, order: list[int]) -> None:
        self.dtype, self.random = dtype, torch.Generator().manual_seed(11)
        self.linears = NativeLinearBackend(dtype, POOL, isa)
        self.gates = NativeLinearBackend(torch.float32, POOL, isa)
        self.final_norm, self.head = self.norm(self.HIDDEN), self.linear(50, self.HIDDEN)
        self.buffers = ExpertBuffers.allocate(64, self.TOP_K, self.HIDDEN, dtype)
        self.memory = _native.ExpertMemory(
            **{
                name: getattr(self.buffers, name).data_ptr()
                for name in ("bsz", "ids", "weights", "slots", "hidden", "out")
            },
            max_rows=64,
        )
        sizes = config(
            hidden_size=self.HIDDEN, moe_intermediate_size=32, num_experts=self.EXPERTS,
            num_experts_per_tok=self.TOP_K, num_hidden_layers=len(order),
        )  # fmt: skip
        self.experts = NativeExperts(sizes, dtype, POOL, isa=isa)
        self.plans: list[Callable[[BatchLayout], None]] = []
        self.plain_ops = NativeOps(1e-6, POOL, isa)
        first = self.linear(32, self.HIDDEN)
        self.kernel = _native.Decoder(
            self.plain_ops.kernel, first.runner, hidden=self.HIDDEN, eps=1e-6,
            is_bf16=dtype == torch.bfloat16, weight_bf16=dtype == torch.bfloat16,
        )  # fmt: skip
        self.layers: list[Callable[..., tuple[torch.Tensor, torch.Tensor | None]]] = []
        for place, kind in enumerate(order):
            input_norm, post_norm = self.norm(self.HIDDEN), self.norm(self.HIDDEN)
            attention, attend = self.attention(kind, isa)
            mlp, output = self.mlp(kind, place)
            self.kernel.add_layer(input_norm.data_ptr(), attention, post_norm.data_ptr(), mlp)
            self.layers.append(functools.partial(self.layer, input_norm, attend, post_norm, output))
        self.kernel.set_head(self.final_norm.data_ptr(), self.head.packed)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def weight(self, *shape: int) -> WeightTensor:
        return WeightTensor("w", shape, "F32", (self.draw(*shape) / shape[-1] ** 0.5).view(torch.uint8).numpy().ravel())

    def norm(self, size: int) -> torch.Tensor:
        return self.draw(size).to(self.dtype)

    def linear(self, n: int, k: int, backend: NativeLinearBackend | None = None, *, bias: bool = False) -> NativeLinear:
        made = (backend or self.linears).load("w", self.weight(n, k), self.weight(n) if bias else None)
        made.set_adapter(1, LoraPair(self.draw(4, k) / k**0.5, self.draw(n, 4), 0.5))
        return made

    def attention(self, kind: int, isa: str) -> tuple[_native.AttentionPart, Callable[..., torch.Tensor]]:
        heads, kv_heads, dim, rotated, norm = [(4, 2, 32, 32, "head"), (2, 1, 48, 16, "none"), (4, 4, 16, 8, "whole")][
            kind
        ]
        sizes = config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, num_hidden_layers=1)
        spec = sizes.layers[0].attention
        if kind == 1:
            spec = dataclasses.replace(spec, window=3, sinks=True)
        backend, table = NativeAttention(spec, [0], 32, self.dtype, POOL, isa), rope(rotated)
        if kind == 1:
            backend.set_sinks(0, self.draw(heads))
        ops = NativeOps(1e-6, POOL, isa)
        q, k, v, o = (
            self.linear(n, inner, bias=kind == 1)
            for n, inner in ((heads * dim, 64), (kv_heads * dim, 64), (kv_heads * dim, 64), (64, heads * dim))
        )
        size = {"head": (dim, dim), "whole": (heads * dim, kv_heads * dim)}.get(norm)
        q_norm, k_norm = (None, None) if size is None else (self.norm(n) for n in size)
        part = _native.GroupedQueryPart(
            backend.kernel,
            0,
            _native.Rotation(table.cos.data_ptr(), table.sin.data_ptr(), rows=512, dim=rotated),
            q=q.packed, k=k.packed, v=v.packed, o=o.packed,
            qk_norm=norm,
            q_norm=0 if q_norm is None else q_norm.data_ptr(),
            k_norm=0 if k_norm is None else k_norm.data_ptr(),
        )  # fmt: skip

        def attend(x: torch.Tensor, batch: BatchLayout, lora: LoraBatch) -> torch.Tensor:
            backend.plan(batch)
            flat, weights = [q(x, lora), k(x, lora)], (q_norm, k_norm)
            if norm == "whole" and q_norm is not None and k_norm is not None:
                flat = [ops.add_rms_norm(flat[0], None, q_norm), ops.add_rms_norm(flat[1], None, k_norm)]
                weights = (None, None)
            turned = ops.qk_norm_rope(*(part.view(len(x), -1, dim) for part in flat), *weights, table, batch.positions)
            values = v(x, lora).view(len(x), -1, dim)
            return o(backend.forward(0, *turned, values).flatten(1), lora)

        self.plans.append(backend.plan)
        return part, attend

    def mlp(self, kind: int, place: int) -> tuple[_native.MlpPart, Callable[..., torch.Tensor]]:
        hidden, ops = self.HIDDEN, self.plain_ops
        gate, up, down = (self.linear(n, k) for n, k in ((96, hidden), (96, hidden), (hidden, 96)))
        dense_part = _native.DensePart(gate.packed, up.packed, down.packed)
        dense = DenseMlp(gate, up, down)
        if kind == 0:
            return dense_part, lambda x, lora: (dense.output(ops, x, lora, None), None)
        router = [
            Router(normalise=None),
            Router("sigmoid", 1e-20, 2.5, bias=True, groups=4, top_groups=2, group_score="top2"),
        ][kind - 1]
        bias = self.draw(self.EXPERTS) if router.bias else None
        choose = self.linear(self.EXPERTS, hidden, self.gates)
        own = self.linear(1, hidden, self.gates) if kind == 1 else None
        weights = [self.weight(self.EXPERTS, n, k) for n, k in ((32, hidden), (32, hidden), (hidden, 32))]
        self.experts.load_layer(place, ExpertStore(place, *weights))
        task, tasks = self.experts.bind(place, self.buffers), self.experts.capability(NativeTasks)
        assert tasks is not None
        sparse = SparseMlp(place, router, choose, self.experts, task, bias, SharedExpert(dense, own))
        part = _native.SparsePart(
            choose.packed,
            native_router(router, self.EXPERTS, self.TOP_K, bias),
            self.memory,
            tasks.native_task(task),
            shared=dense_part,
            shared_gate=None if own is None else own.packed,
        )

        def output(x: torch.Tensor, lora: LoraBatch) -> tuple[torch.Tensor, torch.Tensor]:
            b, n = self.buffers, len(x)
            b.hidden[:n], b.bsz[0], b.slots[:n] = x, n, lora.slots
            ops.route(choose(x.float(), lora), self.TOP_K, router, bias, (b.weights[:n], b.ids[:n]))
            return sparse.output(ops, x, lora, None), b.ids[:n].clone()

        return part, output

    def layer(
        self,
        input_norm: torch.Tensor,
        attend: Callable[..., torch.Tensor],
        post_norm: torch.Tensor,
        output: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        batch: BatchLayout,
        lora: LoraBatch,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ops = self.plain_ops
        delta = attend(ops.add_rms_norm(residual, delta, input_norm), batch, lora)
        return output(ops.add_rms_norm(residual, delta, post_norm), lora)


def rope(dim: int) -> Rope:
    return Rope(Rotation(dim, 10000.0, 4096), 512, torch.device("cpu"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("keep", [None, [4, 5, 6, 24]], ids=str)
def test_layers_that_differ(isa: str, dtype: torch.dtype, order: list[int], keep: list[int] | None) -> None:
    model, rows, tokens = Mixed(dtype, isa, order), batch(), 25
    slots = torch.arange(tokens, dtype=torch.int32) % 2
    lora = LoraBatch(slots, [(1, slots.nonzero()[:, 0])])
    embedded = model.draw(tokens, model.HIDDEN).to(dtype)
    residual, delta, seen = embedded.clone(), None, []
    for layer in model.layers:
        delta, chosen = layer(residual, delta, rows, lora)
        seen += [] if chosen is None else [chosen]
    kept = torch.arange(tokens) if keep is None else torch.tensor(keep)
    expected = model.plain_ops.add_rms_norm(residual, delta, model.final_norm)[kept]
    if order[-1] != 0:
        seen[-1] = seen[-1][kept]

    for plan in model.plans:
        plan(rows)
    hidden = torch.empty(len(kept), model.HIDDEN, dtype=dtype)
    greedy = torch.empty(len(kept), dtype=torch.int64)
    ids = torch.empty(sum(map(len, seen)), model.TOP_K, dtype=torch.int64)
    seconds = model.kernel.run(
        tokens=tokens,
        residual=embedded.data_ptr(),
        positions=rows.positions.data_ptr(),
        slots=slots.data_ptr(),
        keep=0 if keep is None else kept.data_ptr(),
        kept=len(kept),
        hidden=hidden.data_ptr(),
        greedy=greedy.data_ptr(),
        seen=ids.data_ptr(),
    )
    assert torch.equal(hidden, expected) and torch.isfinite(hidden).all() and seconds > 0
    assert torch.equal(ids, torch.cat(seen))
    assert torch.equal(greedy, model.head(hidden, None).argmax(-1))
