"""One adapter of several that are trained in one batch: its data, optimiser, schedule and log."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_callback import TrainerState

from training.config import TrainConfig
from training.data import IGNORED, Dataset, ShuffledSampler
from training.data.build import Item
from training.experts.base import ExpertLora
from training.loop.clipping import clip
from training.loop.meter import Meter
from training.loop.optimizer import SkippingAdamW
from training.loop.progress import Progress
from training.loop.resume import as_configured, check_left, identity


class Member:
    """Steps, learning rate and losses are those of a run of `config` alone."""

    def __init__(
        self,
        config: TrainConfig,
        rows: Dataset,
        key: str,
        parameters: dict[str, nn.Parameter],
        loras: list[ExpertLora],
        meter: Meter,
        vocabulary: int,
    ) -> None:
        """`key`: the adapter's name within the model; `parameters`: all that is trained of it, by name; `loras`: those
        of experts among it; `meter`: of all adapters together; `vocabulary`: of the model."""
        self.config, self.key, self.rows, self.parameters = config, key, rows, parameters
        self.output = config.output / config.adapter_name
        self.about = identity(config, rows)
        per_epoch = math.ceil(len(rows) / config.per_device_train_batch_size)
        steps = math.ceil(per_epoch / config.gradient_accumulation_steps)
        most = config.max_steps or math.ceil((config.num_train_epochs or 0) * steps)
        self.state = TrainerState(max_steps=most, epoch=0.0)
        settings: dict[str, Any] = {
            "lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon,
            "weight_decay": config.weight_decay, "fused": True,
        }  # fmt: skip
        self.optimizer: torch.optim.AdamW = (
            SkippingAdamW(parameters.values(), loras, **settings)
            if config.idle_experts == "skip"
            else torch.optim.AdamW(parameters.values(), **settings)
        )
        warm = config.warmup_steps or math.ceil(most * config.warmup_ratio)
        self.schedule: Any = get_scheduler(config.lr_scheduler_type, self.optimizer, warm, most)
        self._sampler = ShuffledSampler(len(rows), config.order_seed)
        self._progress = Progress(self.output, meter, config.adapter_name, vocabulary)
        self._losses: list[float] = []
        self.total = 0.0  # of all steps' losses

    @property
    def left(self) -> bool:
        return int(self.state.global_step) < int(self.state.max_steps)

    def begin(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        self._progress.on_train_begin(None, self.state, None)

    def draw(self) -> list[list[Item]]:
        """The micro-batches of the next step: an epoch's last ones may be fewer, and smaller."""
        order: Iterator[int] = iter(self._sampler)
        size = self.config.per_device_train_batch_size
        found: list[list[Item]] = []
        while len(found) < self.config.gradient_accumulation_steps:
            indices = [index for _, index in zip(range(size), order, strict=False)]
            if not indices:
                break
            found.append([self.rows[index] for index in indices])
        return found

    @staticmethod
    def learnt(batches: list[list[Item]]) -> int:
        """Targets in the micro-batches of a step: labels that count, beside the first of a row."""
        return sum(label != IGNORED for items in batches for item in items for label in item["labels"][1:])

    def step(self, loss: float, tokens: int) -> None:
        """Clip, step, log. `loss`: the step's; `tokens`: of its rows, without padding."""
        parameters = list(self.parameters.values())
        limit = self.config.max_grad_norm or math.inf
        norm = float(clip(parameters, limit))
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        state = self.state
        state.global_step += 1
        state.num_input_tokens_seen += tokens
        state.epoch = self._sampler.state_dict()["samples"] / len(self.rows)
        self.total += loss
        self._losses.append(loss)
        first = self.config.logging_first_step and state.global_step == 1
        if first or state.global_step % self.config.logging_steps == 0 or not self.left:
            mean = sum(self._losses) / len(self._losses)
            self._losses.clear()
            self._progress.on_log(None, state, None, {"loss": mean, "grad_norm": norm, "learning_rate": rate})

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, beside the parameters."""
        return {
            "about": self.about,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "data": self._sampler.state_dict(),
            "step": self.state.global_step,
            "tokens": self.state.num_input_tokens_seen,
            "losses": self._losses,
            "total": self.total,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """DataError if the state is that of other data."""
        self._sampler.load_state_dict(state["data"])
        with as_configured(self.optimizer, self.schedule):
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
        self.state.global_step, self.state.num_input_tokens_seen = state["step"], state["tokens"]
        check_left(self.state)
        self._losses, self.total = state["losses"], state["total"]
