"""How experts and their LoRA lie in GPU memory.

    frame of an expert   | gate [I, H] | up [I, H] | down [H, I] |                     one frame per resident expert
    LoRA of an expert    | A gate [r, H] | A up [r, H] | A down [r, I] | B gate [I, r] | B up [I, r] | B down [H, r] |

r is padded with zeros to a multiple of 16, the inner size of the smallest matrix instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import ExpertBackendError, UserError
from engine.lora.adapter import ExpertLora
from engine.lora.ranks import padded_rank
from engine.model.config import ModelConfig
from engine.weights.store import ExpertStore

SIZE_STEP = 32


@dataclass(frozen=True)
class Sizes:
    """E experts, k of them a row, hidden size H, intermediate size I."""

    experts: int
    top_k: int
    hidden: int
    inner: int

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        sizes = cls(config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size)
        for name, value in (("hidden_size", sizes.hidden), ("moe_intermediate_size", sizes.inner)):
            if value % SIZE_STEP:
                raise UserError(
                    f"{name} {value}: experts on a GPU need a multiple of {SIZE_STEP}", field="expert_backend"
                )
        return sizes

    @property
    def frame(self) -> int:
        """Values of a frame."""
        return 3 * self.hidden * self.inner

    def lora_block(self, rank: int) -> int:
        """Values of an expert's LoRA."""
        return padded_rank(rank) * 3 * (self.hidden + self.inner)


def frames_of(store: ExpertStore, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """All of a layer's experts as frames [E, frame], on the CPU."""
    h, i = sizes.hidden, sizes.inner
    frames = torch.empty(sizes.experts, sizes.frame, dtype=dtype)
    for at, (name, shape) in enumerate((("gate", (i, h)), ("up", (i, h)), ("down", (h, i)))):
        for expert in range(sizes.experts):
            weight = store.expert(name, expert)
            if weight.shape != shape:
                raise ExpertBackendError(f"{weight.name} is {weight.shape}; the model's {name} is {shape}")
            frames[expert, at * h * i : (at + 1) * h * i] = weight.dequantise(dtype).flatten()
    return frames


def lora_blocks(
    lora: ExpertLora, sizes: Sizes, dtype: torch.dtype, rank: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks [E, lora_block(rank)], present bool [E]): an expert whose B are all zero has no LoRA. On the CPU.
    `rank`: a larger one to pad to, since an adapter has one rank in all layers."""
    e, h, i, r = sizes.experts, sizes.hidden, sizes.inner, lora.rank
    expected = {
        "gate_a": (e, r, h), "up_a": (e, r, h), "down_a": (e, r, i),
        "gate_b": (e, i, r), "up_b": (e, i, r), "down_b": (e, h, r),
    }  # fmt: skip
    parts = []
    for name, shape in expected.items():
        tensor: torch.Tensor = getattr(lora, name)
        if tuple(tensor.shape) != shape:
            raise ExpertBackendError(f"expert LoRA {name} is {tuple(tensor.shape)}; the model's is {shape}")
        more = padded_rank(max(rank or 0, r)) - r
        pad = (0, 0, 0, more) if name.endswith("_a") else (0, more)
        parts.append(torch.nn.functional.pad(tensor.to("cpu", dtype), pad).flatten(1))
    present = torch.stack([part.ne(0).any(1) for part in parts[3:]]).any(0)
    return torch.cat(parts, 1), present
