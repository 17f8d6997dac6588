"""Greedy answers from transformers' own Qwen3MoE: what is measured is the published model code, not the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from demo.evaluate import Answerer
from demo.nn.network import Shape, State
from demo.texts.world import Message
from demo.tokenizer import END_OF_TEXT, IM_END, render, token_id


def hf_model(shape: Shape, state: State, device: str) -> Any:
    """A Qwen3MoeForCausalLM in float32 with these parameters. Raises RuntimeError if a name or a shape does not fit."""
    config = Qwen3MoeConfig(**{k: v for k, v in shape.config(0, 0, "float32").items() if k != "architectures"})
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
    return model.to(device).eval()


def answerer(model: Any, tokenizer: Tokenizer, device: str, batch: int = 512, max_new_tokens: int = 96) -> Answerer:
    """Batched greedy decoding with left padding through `model.generate`."""
    end, pad = token_id(tokenizer, IM_END), token_id(tokenizer, END_OF_TEXT)

    def answer(conversations: Sequence[Sequence[Message]]) -> list[str]:
        texts = [render(messages, True) for messages in conversations]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        replies = [""] * len(texts)
        for at in range(0, len(order), batch):
            part = order[at : at + batch]
            prompts = [tokenizer.encode(texts[i], add_special_tokens=False).ids for i in part]
            width = max(map(len, prompts))
            ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False,
                    eos_token_id=end, pad_token_id=pad,
                )  # fmt: skip
            for i, row in zip(part, out[:, width:].tolist(), strict=True):
                replies[i] = tokenizer.decode(row[: row.index(end)] if end in row else row)
        return replies

    return answer
