"""Direct preference optimisation: TRL's trainer on pairs that are tokens already. The reference is the same model with
its adapters switched off, so nothing is held twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow
import tokenizers
from datasets import Dataset
from peft import LoraConfig
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from training.config import TrainConfig
from training.data import PreferenceDataset
from training.layer import unwarned
from training.loop.arguments import common_arguments, on_one_gpu
from training.loop.trainer import PAD, Run


def make_trainer(
    config: TrainConfig, base: PreTrainedModel, lora: LoraConfig, device: str, data: dict[str, Any]
) -> PairTrainer:
    """TRL itself puts the adapter on: one that is there already it would copy as the reference."""
    words = tokenizers.Tokenizer(WordLevel({"<pad>": PAD}, unk_token="<pad>"))  # TRL asks it for the padding alone
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    data = {name: None if rows is None else _dataset(rows) for name, rows in data.items()}
    with unwarned():
        return PairTrainer(
            base, args=dpo_arguments(config, device), peft_config=lora, processing_class=tokenizer, **data
        )


def _dataset(rows: PreferenceDataset) -> Dataset:
    """By its digest, where datasets would pickle all of it for one."""
    return Dataset(pyarrow.Table.from_pylist([rows[i] for i in range(len(rows))]), fingerprint=rows.digest)


def dpo_arguments(config: TrainConfig, device: str) -> DPOConfig:
    """TRL's arguments of `stage: dpo`."""
    losses, weights = [config.pref_loss], [1.0]
    if config.pref_ftx:
        losses, weights = [config.pref_loss, "sft"], [1.0, config.pref_ftx]
    arguments = DPOConfig(
        **common_arguments(config, device),
        beta=config.pref_beta,
        loss_type=losses,
        loss_weights=weights,
        label_smoothing=config.dpo_label_smoothing,
        max_length=None,  # the data was cut, or refused, when it was read
        disable_dropout=False,
        router_aux_loss_coef=0.0,
    )
    return on_one_gpu(arguments)


class PairTrainer(Run, DPOTrainer):  # type: ignore[misc]  # transformers and TRL have no types
    """Samples have `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def unlogged(self) -> dict[str, Any]:
        return {**super().unlogged(), "metrics": dict(self._metrics["train"]), "tokens": self._total_train_tokens}

    def restore(self, unlogged: Mapping[str, Any]) -> None:
        super().restore(unlogged)
        self._metrics["train"].update(unlogged["metrics"])
        self._total_train_tokens = unlogged["tokens"]

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """TRL writes one into each checkpoint."""
