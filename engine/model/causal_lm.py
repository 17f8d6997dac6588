"""A decoder with routed experts over a flat token batch: requests of any adapter, prefill chunks beside decode rows.

embed -> L x [norm, attention, norm, router, experts (+ shared) | dense MLP] -> norm -> lm_head
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from engine.architectures.config import ModelConfig
from engine.attention.base import BatchLayout
from engine.attention.delta import DeltaBackend
from engine.errors import ExpertBackendError
from engine.experts.capabilities import ExpertCounters, ExpertPlaces
from engine.linear.base import Adapted, Linear, LoraBatch
from engine.linear.embedding import Embedding
from engine.lora.adapter import AdapterWeights, ExtraMlp
from engine.model.layer import Layer
from engine.model.mlp import SparseMlp
from engine.model.mtp import MtpLayer
from engine.model.step import OutputKind, StepInput, StepOutput
from engine.ops.base import Ops
from engine.ops.greedy import greedy_tokens
from engine.ranks.group import ALONE, Group
from engine.ranks.head import Head


class CausalLM:
    """Built by `engine.model.load`. `linears` maps module names to projections, for adapters. `group`: of the ranks of
    which each has a part of the model; all run the same steps. `mtp`: a layer behind the others that predicts further
    tokens (`predict`), if it was loaded.

    A step: `begin_step`, `plan`, `forward` (this one or another executor's), and `check` when it has ended.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Embedding,
        layers: list[Layer],
        final_norm: torch.Tensor,
        lm_head: Linear,
        linears: dict[str, Adapted],
        group: Group = ALONE,
        mtp: MtpLayer | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head  # this rank's part
        self.head = Head(lm_head, group, config.vocab_size)
        self.linears = linears
        self.group = group
        self.mtp = mtp
        self.device = embedding.device
        self.dtype = final_norm.dtype  # of activations; the embedding may be held otherwise
        self.slots_with_extra_mlps: set[int] = set()
        every = layers if mtp is None else [*layers, mtp.layer]
        attentions = [layer.attention.backend for layer in every]
        self.attention_backends = list({id(backend): backend for backend in attentions}.values())
        self.keeps_states = any(isinstance(backend, DeltaBackend) for backend in self.attention_backends)
        self.sparse = {layer.index: layer.mlp for layer in layers if isinstance(layer.mlp, SparseMlp)}
        mlps = [layer.mlp for layer in every if isinstance(layer.mlp, SparseMlp)]
        self.expert_backends = list({id(mlp.backend): mlp.backend for mlp in mlps}.values())
        buffers = [mlp.task.buffers for mlp in mlps]
        self.expert_buffers = list({id(b): b for b in buffers}.values())

    # ---- a step

    def begin_step(self, rows: int, *, lora: bool, eager: bool, slots: Collection[int] | None = None) -> None:
        """Before a step is launched or captured: `ExpertBackend.begin_step` of all."""
        for backend in self.expert_backends:
            backend.begin_step(rows, lora=lora, eager=eager, slots=slots)

    def plan(self, batch: BatchLayout) -> None:
        """The host's part of a step, whose inputs are there or on their way."""
        for backend in self.attention_backends:
            backend.plan(batch)
        for experts in self.expert_backends:
            experts.prefetch()

    def forward(self, step: StepInput) -> StepOutput:
        """The device's part of a planned step."""
        self.fill_slots(step.ids.shape[0], step.lora, step.bsz)
        residual = self.embed(self.group.from_first(step.ids))
        delta: torch.Tensor | None = None
        for layer in self.layers:
            delta = layer.forward(self.ops, residual, delta, step, self.group)
        hidden = self.ops.add_rms_norm(residual, delta, self.final_norm)
        return self.output(hidden if step.keep is None else hidden[step.keep], step.output_kind)

    def predict(
        self, ids: torch.Tensor, hidden: torch.Tensor, batch: BatchLayout, bsz: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The MTP layer over T positions, between steps: `check` follows when it has ended, as of a step. `ids` int64
        [T]: the token after each position. `hidden` [T, H] and what returns: as in `MtpLayer.forward`. `bsz`: as in
        `StepInput`. Only where there is such a layer."""
        if self.mtp is None:
            raise RuntimeError("no layer of multi-token prediction was loaded")
        step = StepInput(ids, batch, bsz=bsz)
        self.begin_step(batch.num_tokens, lora=False, eager=True, slots=())
        self.mtp.layer.attention.backend.plan(batch)
        self.fill_slots(batch.num_tokens, None, bsz)
        return self.mtp.forward(self.ops, self.embed(ids), hidden, step)

    def check(self) -> None:
        """Once for each begun step, when it has ended: raises the first of its experts' errors."""
        errors = []
        for backend in self.expert_backends:
            try:
                backend.check()
            except ExpertBackendError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # ---- its parts

    def fill_slots(self, rows: int, lora: LoraBatch | None, bsz: torch.Tensor | None = None) -> None:
        """Fill what the expert buffers hold for all layers of a step: the row count and the rows' adapter slots."""
        for b in self.expert_buffers:
            b.rows = rows
            self._put(b.bsz, rows if bsz is None else bsz)
            self._put(b.slots[:rows], 0 if lora is None else lora.slots)

    def _put(self, to: torch.Tensor, value: int | torch.Tensor) -> None:
        """In the order of the device's stream, wherever `to` is: the step before may still be reading it."""
        if isinstance(value, torch.Tensor):
            to.copy_(value, non_blocking=True)
        elif to.device == self.device:
            to.fill_(value)
        else:
            to.copy_(torch.full(to.shape, value, dtype=to.dtype, device=self.device), non_blocking=True)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> fresh [T, H] in the activations' dtype."""
        return self.embedding(ids).to(self.dtype)

    def output(self, hidden: torch.Tensor, kind: OutputKind) -> StepOutput:
        """From the hidden states after the final norm, [K, H]."""
        if kind is OutputKind.HIDDEN:
            return StepOutput(hidden)
        logits = self.logits(hidden)
        return (
            StepOutput(hidden, logits)
            if kind is OutputKind.LOGITS
            else StepOutput(hidden, greedy=greedy_tokens(logits))
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> float32 [rows, V]."""
        return self.head(hidden).float()

    @property
    def expert_counters(self) -> list[ExpertCounters]:
        """Of those expert backends that count."""
        found = (backend.capability(ExpertCounters) for backend in self.expert_backends)
        return [counters for counters in found if counters is not None]

    @property
    def expert_places(self) -> list[ExpertPlaces]:
        """Of those expert backends that say where their weights are."""
        found = (backend.capability(ExpertPlaces) for backend in self.expert_backends)
        return [places for places in found if places is not None]

    # ---- adapters

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        """Make a slot hold an adapter, or nothing. No step in flight may use the slot. On a GPU it is there when this
        returns; what other threads launch meanwhile is not held up."""
        pairs = adapter.linears if adapter else {}
        for name, linear in self.linears.items():
            linear.set_adapter(slot, pairs.get(name))
        extra = adapter.extra_mlps if adapter else {}
        for index, mlp in self.sparse.items():
            mlp.extra.pop(slot, None)
            if index in extra:
                mlp.extra[slot] = [_to(m, self.final_norm) for m in extra[index]]
        if extra:
            self.slots_with_extra_mlps.add(slot)
        else:
            self.slots_with_extra_mlps.discard(slot)
        for backend in self.expert_backends:
            backend.set_adapter(slot, adapter.experts if adapter else None)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        for backend in self.expert_backends:
            backend.close()
        self.group.close()


def _to(mlp: ExtraMlp, like: torch.Tensor) -> ExtraMlp:
    """A copy: the one in host memory may be evicted."""
    return ExtraMlp(*(t.to(like.device, like.dtype, copy=True) for t in (mlp.gate, mlp.up, mlp.down)))
