"""Steps where attention, projections and row operations are all native: few calls each, with the model's own bits."""

from __future__ import annotations

import torch

from engine.experts.base import ExpertBuffers
from engine.linear.base import LoraBatch
from engine.model.causal_lm import CausalLM
from engine.model.native_decoder import NativeDecoder, all_native
from engine.model.step import Executor, OutputKind, StepInput, StepOutput


class NativeExecutor:
    """A step is three native calls: the attention's plan, the embedding, all layers. Where experts, dense MLPs or the
    head are not native, or an adapter brings MLPs of its own, a layer is two calls (the attention half, the MLP).
    What is observed goes the model's own way. EngineError if the model is not `all_native`."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        buffers = model.expert_buffers or [ExpertBuffers.allocate(1, 1, model.config.hidden_size, model.dtype)]
        self._decoder = NativeDecoder(model.config, model.ops, model.layers, buffers[0], model.dtype)
        self._whole_steps = self._decoder.complete(model.final_norm, model.lm_head)

    def runs_in_one_call(self, lora: LoraBatch | None) -> bool:
        """Whether a step with these adapters needs nothing between its layers."""
        extra = self._model.slots_with_extra_mlps
        return self._whole_steps and (lora is None or not extra or not any(slot in extra for slot, _ in lora.groups))

    def forward(self, step: StepInput) -> StepOutput:
        model = self._model
        if step.observe is not None:
            return model.forward(step)
        if step.bsz is not None or not self.runs_in_one_call(step.lora):
            return model.output(self._by_layers(step), step.output_kind)
        greedy = step.output_kind is OutputKind.GREEDY
        hidden, tokens = self._decoder.run(
            model.embed(step.ids), step.batch, step.lora, step.keep, greedy=greedy, trace=step.trace
        )
        return StepOutput(hidden, greedy=tokens) if greedy else model.output(hidden, step.output_kind)

    def _by_layers(self, step: StepInput) -> torch.Tensor:
        """Behind the last attention nothing but the kept tokens is needed: the last MLP runs on them alone."""
        model, lora = self._model, step.lora
        model.fill_slots(step.ids.shape[0], lora, step.bsz)
        residual = model.embed(step.ids)
        delta: torch.Tensor | None = None
        for place, layer in enumerate(model.layers, 1):
            x = self._decoder.attend(layer.index, residual, delta, step.batch, lora)
            if step.keep is not None and place == len(model.layers):
                x, residual = layer.mlp.keep(x, step.keep), residual[step.keep]
                lora = None if lora is None else lora.rows(step.keep)
                model.fill_slots(step.keep.shape[0], lora)
            delta = layer.mlp.output(model.ops, x, lora, step.trace)
        return model.ops.add_rms_norm(residual, delta, model.final_norm)


def choose_executor(model: CausalLM) -> Executor:
    """Once, when the engine is built. Ranks meet between the parts of a layer, inside which native calls stay."""
    if model.group.size > 1:
        return model
    on_cpu = len(model.expert_buffers) <= 1 and all(b.hidden.device.type == "cpu" for b in model.expert_buffers)
    return NativeExecutor(model) if on_cpu and all_native(model.layers, model.ops) else model
