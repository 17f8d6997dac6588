"""Multi-LoRA training: a step of each of several adapters is a part of one forward and backward pass.

micro-batch     rows of adapter 1 | rows of adapter 2 | ...     padded to the longest
forward         base once over all; LoRA of each on its own rows, in attention (RowsLinear) and experts (slots)
loss            of each over its own targets; the sum has each adapter's own gradients
step            of each: clip, AdamW, schedule. One that has done its steps leaves the batch

The loop is not transformers' Trainer's: that has one optimiser, schedule, epoch, number of steps, sampler, loss and
log, and here each adapter has its own. Micro-batches of a step differ in number where an epoch ends. A loop below
Trainer would have to replace its batches, loss, clipping, step, log, checkpoint and end. What both loops do is shared:
parts of checkpoints (`loop.resume`, `loop.trainer`), clipping, optimiser, log.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, set_seed

from training.config import TrainConfig
from training.data import IGNORED, Dataset, PackedDataset
from training.data.build import Item
from training.data.collate import PackingCollator, PaddingCollator
from training.layer import RowsLinear, lora_config, with_lora
from training.loop.meter import Meter
from training.loop.optimizer import expert_loras
from training.loop.progress import StopOnSignal
from training.loop.resume import STATE, TrainingError, check_identity, seal, written
from training.loop.trainer import PAD, check_loss, checkpoints, remove_folder, sync_tree
from training.model import batch_rows, checkpoint_layers
from training.multi_lora.member import Member

_MEMBERS = "members.pt"
_STAGE = ".partial"


class Group:
    """The adapters of `config.adapters` over one base."""

    def __init__(self, config: TrainConfig, base: PreTrainedModel, data: Sequence[Dataset], meter: Meter) -> None:
        self.config = config
        self.model, self.meter = _with_adapters(config, base), meter
        self.rows = batch_rows(base)
        keys = [_key(i) for i in range(len(config.adapters))]
        self.members = [
            Member(
                run,
                rows,
                key,
                _parameters(self.model, key),
                expert_loras(self.model, key),
                meter,
                base.config.vocab_size,
            )
            for run, rows, key in zip(config.adapters, data, keys, strict=True)
        ]
        packed = isinstance(data[0], PackedDataset)
        attention = "eager" if config.flash_attn == "disabled" else "sdpa"
        self._collate: Any = PackingCollator(PAD, attention, base.dtype) if packed else PaddingCollator(PAD)
        self.step = 0

    def train(self, stop: StopOnSignal) -> None:
        """All steps of all adapters, or up to the one in which `stop` was asked for, which is saved. TrainingError for
        a loss that is no number."""
        if self.config.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.model.train()
        for member in self.members:
            member.begin()
        while left := [member for member in self.members if member.left]:
            self._step(left)
            self.step += 1
            done = not any(member.left for member in left)
            stop.stopped = stop.asked and not done
            if stop.stopped or (self.config.save_strategy == "steps" and (done or not self.step % self._every)):
                self.save()
            if stop.stopped:
                break
        self.model.eval()

    @property
    def _every(self) -> int:
        return self.config.save_steps

    def _step(self, members: Sequence[Member]) -> None:
        drawn = [member.draw() for member in members]
        learnt = [max(member.learnt(batches), 1) for member, batches in zip(members, drawn, strict=True)]
        losses, tokens = [0.0] * len(members), [0] * len(members)
        for batches in zip_longest(*drawn, fillvalue=()):
            for i, (loss, count) in enumerate(self._micro_step(members, batches, learnt)):
                losses[i] += loss
                tokens[i] += count
        for member, loss, count in zip(members, losses, tokens, strict=True):
            check_loss(loss, f"{member.config.adapter_name}, step {member.state.global_step + 1}")
            member.step(loss, count)

    def _micro_step(
        self, members: Sequence[Member], batches: Sequence[Sequence[Item]], learnt: Sequence[int]
    ) -> list[tuple[float, int]]:
        """Forward and backward of one micro-batch of each; per member its part of the step's loss, and its tokens."""
        batch = self._collate([item for items in batches for item in items])
        labels, width = batch.pop("labels"), batch["input_ids"].shape[1]
        counts = dict(zip((member.key for member in members), map(len, batches), strict=True))
        self.rows.divide([counts.get(member.key, 0) * width for member in self.members])
        inputs = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        logits = self.model(**inputs).logits[:, :-1].float()
        found, first = [], 0
        for items, targets in zip(batches, learnt, strict=True):
            part = slice(first, first + len(items))
            wanted = labels[part, 1:].to(logits.device).flatten()
            found.append(
                cross_entropy(logits[part].flatten(0, 1), wanted, ignore_index=IGNORED, reduction="sum") / targets
            )
            first += len(items)
        torch.stack(found).sum().backward()  # type: ignore[no-untyped-call]
        lengths = [_lengths(items) for items in batches]
        tokens = [sum(each) for each in lengths]
        for member, each in zip(members, lengths, strict=True):
            self.meter.count(each, member.config.lora_rank)
        return list(zip((float(loss.detach()) for loss in found), tokens, strict=True))

    def save(self) -> Path:
        """Writes output_dir/checkpoint-N: whole, or not there. TrainingError if the disk is full."""
        output, name = self.config.output, f"checkpoint-{self.step}"
        stage = output / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        try:
            with written(output, self.step):
                stage.mkdir()
                state = {
                    member.config.adapter_name: {**member.state_dict(), "parameters": _values(member)}
                    for member in self.members
                }
                torch.save({"step": self.step, "members": state}, stage / _MEMBERS)
                (stage / STATE).write_text(f'{{"global_step": {self.step}}}\n')
                seal(stage, {})
                sync_tree(stage)
                remove_folder(output / name)
                stage.replace(output / name)
                sync_tree(output, deep=False)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        for old in checkpoints(output)[: -self.config.save_total_limit] if self.config.save_total_limit else ():
            remove_folder(old)
        return output / name

    @torch.no_grad()
    def load(self, checkpoint: Path) -> None:
        """TrainingError if it is not one of these adapters; DataError if it is of other data."""
        path = checkpoint / _MEMBERS
        if not path.is_file():
            message = f"{checkpoint} is not a checkpoint of several adapters: leave out `adapters`, or name another"
            raise TrainingError(message, "resume_from_checkpoint")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        names = [member.config.adapter_name for member in self.members]
        if sorted(saved["members"]) != sorted(names):
            raise TrainingError(
                f"{checkpoint} is of the adapters {', '.join(saved['members'])}, the configuration's are "
                f"{', '.join(names)}: resume with the same",
                "resume_from_checkpoint",
            )
        for member in self.members:
            _load(member, saved["members"][member.config.adapter_name], checkpoint)
        self.step = saved["step"]


def _lengths(items: Sequence[Item]) -> list[int]:
    """Tokens of each sample."""
    return [count for item in items for count in Counter(item.get("segments", [0] * len(item["input_ids"]))).values()]


def _values(member: Member) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in member.parameters.items()}


def _load(member: Member, saved: Mapping[str, Any], checkpoint: Path) -> None:
    check_identity(saved["about"], member.about, checkpoint)
    for name, parameter in member.parameters.items():
        parameter.copy_(saved["parameters"][name])
    member.load_state_dict(dict(saved))


def _key(index: int) -> str:
    """What an adapter is called within the model: torch allows no dots in names of modules."""
    return f"adapter_{index}"


def _with_adapters(config: TrainConfig, base: PreTrainedModel) -> PeftModel:
    """All adapters, each with the values that it is drawn if it is trained alone."""
    configs = [
        lora_config(base, run.lora_target, rank=run.lora_rank, alpha=run.lora_alpha, by_rows=True)
        for run in config.adapters
    ]
    rows = batch_rows(base)
    set_seed(config.seed)
    model = with_lora(base, configs[0], _key(0))
    for i, each in enumerate(configs[1:], 1):
        set_seed(config.seed)
        model.add_adapter(_key(i), each)
    model.base_model.set_adapter([_key(i) for i in range(len(configs))])
    for module in model.modules():
        if isinstance(module, RowsLinear):
            module.rows = rows
    return model


def _parameters(model: PeftModel, key: str) -> dict[str, torch.nn.Parameter]:
    return {
        name.replace(f".{key}", ""): parameter
        for name, parameter in model.named_parameters()
        if f".{key}." in name and parameter.requires_grad
    }
