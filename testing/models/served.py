"""A tiny random model as a server takes it, with the demo's tokenizer and template, and an adapter on its attention:
python -m testing.models.served FAMILY FOLDER"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from api.text.tokenizer import load_tokenizer
from demo.paths import demo_model
from testing.models.tiny import ALIKE, FAMILIES, STATEFUL, save_hf, tiny_model

_RANK = 4


def save_served(family: str, folder: Path) -> None:
    """`folder/model` and `folder/adapter`."""
    demo = load_tokenizer(demo_model())
    words, template = demo.vocabulary(), demo.template
    assert words is not None and template is not None
    model = tiny_model(family=family, vocab_size=demo.vocab_size, max_position_embeddings=2048)
    save_hf(model, folder / "model")
    (folder / "model" / "tokenizer.json").write_text(words.definition)
    settings = {"chat_template": template.source, "eos_token": "<|im_end|>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    _save_adapter(model, folder / "adapter")


def _save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """On every projection of attention, drawn so that answers change."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".self_attn." in name:
            for half, shape in (("A", (_RANK, module.in_features)), ("B", (module.out_features, _RANK))):
                drawn = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = drawn
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="testing.models.served")
    parser.add_argument("family", choices=[*FAMILIES, *STATEFUL, *ALIKE])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    save_served(args.family, args.folder)


if __name__ == "__main__":
    main()
