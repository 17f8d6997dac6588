"""The MLP of a layer: dense, or routed experts, with a shared one perhaps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.architectures.parts.mlp import Router
from engine.experts.base import ExpertBackend, ExpertTask
from engine.linear.base import Linear, LoraBatch
from engine.lora.adapter import ExtraMlp
from engine.model.step import StepInput, Trace
from engine.ops.base import Ops


class Mlp(ABC):
    """`delta = output(enter(residual, delta))`. T tokens; an executor may enter by kernels of its own."""

    @abstractmethod
    def enter(
        self, ops: Ops, norm: torch.Tensor, residual: torch.Tensor, delta: torch.Tensor, step: StepInput
    ) -> torch.Tensor:
        """Adds `delta` to residual [T, H] in place; returns its norm (weight `norm` [H]) [T, H]. Experts are routed
        and their buffers filled."""

    @abstractmethod
    def keep(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Of what was entered, the tokens `keep` (int64 [K]) alone: [K, H]."""

    @abstractmethod
    def output(self, ops: Ops, x: torch.Tensor, lora: LoraBatch | None, trace: Trace | None) -> torch.Tensor:
        """What the MLP adds to the residual stream [T, H], from the x that was entered."""


@dataclass
class DenseMlp(Mlp):
    """down(silu(gate(x)) * up(x)), of layers without routed experts."""

    gate: Linear
    up: Linear
    down: Linear

    def enter(
        self, ops: Ops, norm: torch.Tensor, residual: torch.Tensor, delta: torch.Tensor, step: StepInput
    ) -> torch.Tensor:
        return ops.add_rms_norm(residual, delta, norm)

    def keep(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x[keep]

    def output(self, ops: Ops, x: torch.Tensor, lora: LoraBatch | None, trace: Trace | None) -> torch.Tensor:
        return self.down(ops.silu_mul(self.gate(x, lora), self.up(x, lora)), lora)


@dataclass
class SharedExpert:
    """An expert that takes every token, behind a sigmoid gate in float32 if it has one."""

    mlp: DenseMlp
    gate: Linear | None

    def output(self, ops: Ops, x: torch.Tensor, lora: LoraBatch | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values [T, H] and the gate's logits, float32 [T, 1]: what `add` adds."""
        return self.mlp.output(ops, x, lora, None), None if self.gate is None else self.gate(x.float(), lora)

    @staticmethod
    def add(ops: Ops, base: torch.Tensor, values: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """To base [T, H]; a fresh tensor."""
        return base + values if gate is None else ops.add_gated(base, values, gate)


@dataclass
class SparseMlp(Mlp):
    """`gate` computes the router's logits, in float32; `bias` float32 [E], where the router has one. `held`: the
    experts of this rank, where each has some; its backend counts them from 0. `extra`: adapters' own MLPs by slot."""

    layer: int
    router: Router
    gate: Linear
    backend: ExpertBackend
    task: ExpertTask
    bias: torch.Tensor | None = None
    shared: SharedExpert | None = None
    held: range | None = None
    extra: dict[int, list[ExtraMlp]] = field(default_factory=dict)

    def enter(
        self, ops: Ops, norm: torch.Tensor, residual: torch.Tensor, delta: torch.Tensor, step: StepInput
    ) -> torch.Tensor:
        n, b, device = residual.shape[0], self.task.buffers, residual.device
        x, weights, ids = b.hidden[:n], b.weights[:n], b.ids[:n]
        here = x.device == device  # then written where the experts read
        if not here:
            x, weights, ids = (torch.empty_like(part, device=device) for part in (x, weights, ids))
        into = x, weights, ids
        adapters = None if step.lora is None else self.gate.adapters_of(step.lora)
        alone = step.observe is not None or (step.lora is not None and adapters is None)
        gate = None if alone else self.gate.plain
        if gate is None or not ops.norm_route(residual, delta, norm, gate, self.router, into, adapters):
            ops.add_rms_norm(residual, delta, norm, x)
            logits = self.gate(x.float(), step.lora)
            ops.route(logits, ids.shape[1], self.router, self.bias, (weights, ids))
            if step.observe is not None:
                step.observe(f"model.layers.{self.layer}.mlp.gate", logits)
        if self.held is not None:
            ids -= self.held.start
            ids.masked_fill_((ids < 0) | (ids >= len(self.held)), -1)
        if not here:
            for to, values in zip((b.hidden, b.weights, b.ids), into, strict=True):
                to[:n].copy_(values, non_blocking=self.backend.follows_stream)
        return x

    def keep(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        b, n = self.task.buffers, keep.shape[0]
        b.hidden[:n], b.ids[:n], b.weights[:n] = x[keep], b.ids[keep], b.weights[keep]
        return b.hidden[:n]

    def output(self, ops: Ops, x: torch.Tensor, lora: LoraBatch | None, trace: Trace | None) -> torch.Tensor:
        n, b, started = x.shape[0], self.task.buffers, time.perf_counter()
        on_stream = self.backend.follows_stream and x.device.type == "cuda"
        stream = torch.cuda.current_stream(x.device).cuda_stream if on_stream else None
        self.backend.post(self.task, stream)
        extra = self._extra(x, lora)
        shared = None if self.shared is None else self.shared.output(ops, x, lora)
        self.backend.wait(self.task, stream)
        if trace is not None:
            trace.experts_s += time.perf_counter() - started
            trace.ids.append(b.ids[:n].clone())
        out = b.out[:n].to(x.device, non_blocking=on_stream)
        out = out if extra is None else out + extra
        return out if shared is None else SharedExpert.add(ops, out, *shared)

    def _extra(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor | None:
        """The mean of an adapter's own dense MLPs, for its rows; None if no row has any."""
        if lora is None or not any(slot in self.extra for slot, _ in lora.groups):
            return None
        out = torch.zeros_like(x)
        for slot, rows in lora.groups:
            for m in self.extra.get(slot, []):
                h = x[rows]
                out[rows] += F.linear(F.silu(F.linear(h, m.gate)) * F.linear(h, m.up), m.down) / len(self.extra[slot])
        return out
