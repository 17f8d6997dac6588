"""The served decoder, forward and back: its own layers, with parts that autograd can go through.

Of a micro-batch, forward keeps each layer's input, and what the backward of the last layers needs, as far as memory is
planned for that; backward computes the others again from their inputs, with gradients. Between two layers other work
may run: nothing here is in the memory of serving steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

import torch

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout, CacheBackend
from engine.errors import UserError
from engine.experts.capabilities import NativeKernels, needed
from engine.linear.base import Linear
from engine.memory.costs import layers_kept
from engine.model.attention import Attention, GroupedQueryAttention
from engine.model.causal_lm import CausalLM
from engine.model.delta import DeltaNetAttention
from engine.model.latent import LatentAttention
from engine.model.layer import Layer
from engine.model.mlp import DenseMlp, Mlp, SharedExpert, SparseMlp
from engine.model.step import StepInput
from engine.ops.base import TorchOps, rms_norm
from engine.tuning import Sample
from native import _native
from training.experts.base import TrainableExperts
from training.experts.native import trainable_layers
from training.service.adapter import TrainableAdapter
from training.service.delta import TrainedDelta
from training.service.losses import Numbers, counted, loss_of
from training.service.parts import Logprobs, TrainedAttention, TrainedLatentUp, TrainedLinear, TrainedRows


@dataclass
class Part:
    """Samples of one run in a micro-batch, whole groups of its loss. `adapter` None: the base. Filled: `loss`, their
    sum; `hits`, how many targets that it counts are the model's first choice; `logprobs` of each sample's targets, 0
    where `all_targets` is False and the loss does not count them."""

    adapter: TrainableAdapter | None
    samples: Sequence[Sample]
    loss_fn: str
    settings: dict[str, float]
    learn: bool
    group: int = 1
    all_targets: bool = True
    loss: float = 0.0
    hits: int = 0
    logprobs: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)


@dataclass
class _Sparse:
    mlp: SparseMlp
    experts: TrainableExperts
    top_k: int

    def output(self, ops: TorchOps, x: torch.Tensor, rows: TrainedRows) -> torch.Tensor:
        mlp = self.mlp
        weights, ids = ops.route(mlp.gate(x.float(), rows), self.top_k, mlp.router, mlp.bias)
        loras = {slot: adapter.experts[mlp.layer] for slot, adapter in rows.adapters.items() if adapter.experts}
        slots = rows.slots
        if len(loras) < len(rows.adapters):
            slots = torch.where(torch.isin(slots, torch.tensor(list(loras), dtype=slots.dtype)), slots, 0)
        there = self.experts.device(len(x))
        given, ids, weights = (part.contiguous().to(there) for part in (x, ids, weights))
        out = self.experts.forward(given, ids, weights, slots, loras).to(x.device)
        if mlp.shared is None:
            return out
        return SharedExpert.add(ops, out, *mlp.shared.output(ops, x, rows))


@dataclass
class _Layer:
    """As `engine.model.layer.Layer`."""

    served: Layer
    attention: Attention
    mlp: DenseMlp | _Sparse

    def __call__(self, ops: TorchOps, residual: torch.Tensor, step: StepInput, rows: TrainedRows) -> torch.Tensor:
        x = rms_norm(residual, self.served.input_norm, ops.eps)
        residual = residual + self.attention.output(ops, x, step)
        x = rms_norm(residual, self.served.post_norm, ops.eps)
        if isinstance(self.mlp, _Sparse):
            return residual + self.mlp.output(ops, x, rows)
        return residual + self.mlp.output(ops, x, rows, None)


class ServedModel:
    """`linears`: shapes [out, in] of the projections that an adapter can be trained on, by module name, as adapter
    files have them. UserError for a model that cannot be trained; its backends are as planning has checked."""

    def __init__(self, model: CausalLM) -> None:
        self._model, self._ops = model, TorchOps(model.config.rms_norm_eps)
        self.device = model.device
        self._experts, self._pool = _experts_of(model)
        self._names = {id(linear): name for name, linear in model.linears.items()}
        self._attention: dict[tuple[int | None, float], TrainedAttention] = {}
        self._nets: dict[DeltaNet, TrainedDelta] = {}
        self.linears: dict[str, tuple[int, int]] = {}
        self._layers = [self._layer(layer) for layer in model.layers]
        self._head = self._linear(model.lm_head, "lm_head")
        del self.linears["lm_head"]

    @property
    def vocabulary(self) -> int:
        return self._model.config.vocab_size

    @property
    def threads(self) -> int:
        """Of the pool that computes the experts."""
        return self._pool.threads

    # ---- a micro-batch

    def compute(self, parts: Sequence[Part], kept: int) -> Iterator[None]:
        """Fills the parts, and adds gradients to those adapters that learn. A piece at each `next`: a layer, or the
        head. A part whose loss is no number adds none. `kept`: bytes for what layers keep for their backward."""
        ids, step, rows = self._step(parts)
        x = self._model.embed(ids)
        again = len(self._layers)  # so many are
        if any(part.learn for part in parts):
            again -= layers_kept(self._model.config, len(ids), kept)
        held: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # inputs, and outputs that have a graph
        for index, layer in enumerate(self._layers):
            keeps = index >= again
            x = x.detach().requires_grad_(keeps)
            with torch.set_grad_enabled(keeps):
                self._plan(step)
                y = layer(self._ops, x, step, rows)
            held.append((x, y if keeps else None))
            x = y.detach()
            yield
        gradient = self._losses(parts, x)
        yield
        if gradient is None:
            return
        for layer in reversed(self._layers):
            x, output = held.pop()
            if output is None:
                x.requires_grad_()
                with torch.enable_grad():
                    self._plan(step)
                    output = layer(self._ops, x, step, rows)
            torch.autograd.backward(output, gradient)
            del output
            assert x.grad is not None
            gradient = x.grad
            yield

    def _step(self, parts: Sequence[Part]) -> tuple[torch.Tensor, StepInput, TrainedRows]:
        samples = [sample for part in parts for sample in part.samples]
        lengths = [len(sample.tokens) for sample in samples]
        ids = torch.tensor([token for sample in samples for token in sample.tokens])
        positions = torch.cat([torch.arange(length) for length in lengths])
        ranges, slots, start = [], [], 0
        for slot, part in enumerate(parts, 1):
            ranges.append((slice(start, start + part.tokens), part.adapter))
            slots += [slot if part.adapter is not None else 0] * part.tokens
            start += part.tokens
        rows = TrainedRows(torch.tensor(slots, dtype=torch.int32), [], None, ranges, lengths)
        starts = [0, *accumulate(lengths)]
        ids, positions = ids.to(self.device), positions.to(self.device)
        batch = BatchLayout(starts, lengths, [], positions, torch.empty(0, dtype=torch.int64))
        return ids, StepInput(ids, batch, rows), rows

    def _plan(self, step: StepInput) -> None:
        backends: list[CacheBackend] = [*self._attention.values(), *self._nets.values()]
        for backend in backends:
            backend.plan(step.batch)

    def _losses(self, parts: Sequence[Part], x: torch.Tensor) -> torch.Tensor | None:
        """The gradient of all losses by the last layer's output [T, H]; None if nobody learns."""
        final = x.detach().requires_grad_()
        with torch.enable_grad():
            hidden = rms_norm(final, self._model.final_norm, self._ops.eps)
            places, targets, start = [], [], 0
            kept: list[list[int]] = []
            for part in parts:
                for sample in part.samples:
                    where = range(len(sample.tokens)) if part.all_targets else counted(sample, part.loss_fn)
                    kept.append(list(where))
                    places += [start + place for place in kept[-1]]
                    targets += [sample.targets[place] for place in kept[-1]]
                    start += len(sample.tokens)
            found, hits = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
            if places:
                asked = torch.tensor(targets, device=self.device)
                values = Logprobs.apply(self._head, hidden[places], asked)  # type: ignore[no-untyped-call]
                found, hits = (part.cpu() for part in values)
            sizes = [len(where) for where in kept]
            of_sample = zip(torch.split(found, sizes), torch.split(hits, sizes), kept, strict=True)
            total = torch.zeros(())
            for part in parts:
                loss = self._loss(part, list(islice(of_sample, len(part.samples))))
                part.loss = float(loss.detach())
                if part.learn and part.loss == part.loss and abs(part.loss) != float("inf"):
                    total = total + loss
            if not total.requires_grad:
                return None
            return torch.autograd.grad(total, final)[0]

    @staticmethod
    def _loss(part: Part, found: Sequence[tuple[torch.Tensor, torch.Tensor, list[int]]]) -> torch.Tensor:
        """`found`: of each sample the log-probabilities and hits at some places."""
        numbers: list[Numbers] = []
        for sample, (logprobs, hits, where) in zip(part.samples, found, strict=True):
            whole, hit = torch.zeros(len(sample.tokens)), torch.zeros(len(sample.tokens), dtype=torch.bool)
            whole[where], hit[where] = logprobs.detach(), hits
            part.logprobs.append(whole)
            part.hits += int(hit[counted(sample, part.loss_fn)].sum())
            numbers.append({name: torch.tensor(values)[where] for name, values in sample.numbers.items()})
        loss = torch.zeros(())
        for first in range(0, len(part.samples), part.group):
            group = slice(first, first + part.group)
            loss = loss + loss_of(part.loss_fn, part.settings, [lp for lp, _, _ in found[group]], numbers[group])
        return loss

    # ---- its parts

    def _layer(self, layer: Layer) -> _Layer:
        return _Layer(layer, self._attention_of(layer.attention), self._mlp(layer.mlp))

    def _attention_of(self, attention: Attention) -> Attention:
        if isinstance(attention, LatentAttention):
            return self._latent(attention)
        if isinstance(attention, DeltaNetAttention):
            return self._delta(attention)
        if not isinstance(attention, GroupedQueryAttention):
            raise UserError(
                "--fine-tuning trains attention over keys and values or latents, and delta nets; this model has others",
                "fine_tuning",
            )
        spec = attention.spec
        backend = self._backend(spec.window, 1 / math.sqrt(spec.head_dim))
        if attention.sinks is not None:
            backend.set_sinks(attention.layer, attention.sinks)
        q, k, v, o = (self._linear(linear) for linear in (attention.q, attention.k, attention.v, attention.o))
        return replace(attention, q=q, k=k, v=v, o=o, backend=backend, joined=None)

    def _latent(self, attention: LatentAttention) -> LatentAttention:
        """Absorbed, as it is served."""
        up = TrainedLatentUp(self._names[id(attention.kv_b)], attention.kv_b, attention.spec, self._pool)
        self.linears[up.name] = up.shape
        return replace(
            attention,
            q_a=None if attention.q_a is None else self._linear(attention.q_a),
            q=self._linear(attention.q),
            kv_a=self._linear(attention.kv_a),
            kv_b=up,
            o=self._linear(attention.o),
            backend=self._backend(None, attention.spec.scale),
        )

    def _delta(self, attention: DeltaNetAttention) -> DeltaNetAttention:
        config, layer = self._model.config, attention.layer
        net = config.layers[layer].attention
        assert isinstance(net, DeltaNet)
        for module in net.of_safetensors.modules(config.hidden_size):
            if module.kind == "linear":
                self.linears[f"model.layers.{layer}.{module.name}"] = module.shape[0], module.shape[1]
        return replace(
            attention,
            wide=[self._trained(linear) for linear in attention.wide],
            gates=[self._trained(linear) for linear in attention.gates],
            out=self._trained(attention.out),
            backend=self._nets.setdefault(net, TrainedDelta(net)),
        )

    def _backend(self, window: int | None, scale: float) -> TrainedAttention:
        return self._attention.setdefault((window, scale), TrainedAttention(window, scale))

    def _mlp(self, mlp: Mlp) -> DenseMlp | _Sparse:
        if isinstance(mlp, DenseMlp):
            return self._dense(mlp)
        assert isinstance(mlp, SparseMlp)
        shared = mlp.shared
        if shared is not None:
            gate = None if shared.gate is None else self._linear(shared.gate)
            shared = SharedExpert(self._dense(shared.mlp), gate)
        made = replace(mlp, gate=self._linear(mlp.gate), shared=shared)
        return _Sparse(made, self._experts[mlp.layer], mlp.task.buffers.ids.shape[1])

    def _dense(self, mlp: DenseMlp) -> DenseMlp:
        return DenseMlp(*(self._linear(linear) for linear in (mlp.gate, mlp.up, mlp.down)))

    def _linear(self, served: Linear, name: str | None = None) -> TrainedLinear:
        made = self._trained(served, name)
        self.linears[made.name] = made.shape
        return made

    def _trained(self, served: Linear, name: str | None = None) -> TrainedLinear:
        return TrainedLinear(name or self._names[id(served)], served, self._pool)


def _experts_of(model: CausalLM) -> tuple[dict[int, TrainableExperts], _native.WorkerPool]:
    """By layer, over the packed weights that serving reads, and the pool that computes them."""
    (backend,) = model.expert_backends
    kernels = needed(backend, NativeKernels)
    on_gpu = model.device.type != "cpu"
    return dict(trainable_layers(backend, model.config, locked=on_gpu)), kernels.pool
