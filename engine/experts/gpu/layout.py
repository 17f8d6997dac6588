"""How experts and their LoRA lie in GPU memory.

    an expert's slot     | gate [I, H] | up [I, H] | down [H, I] |                     one per resident expert
                         each as the file has it, in tiles (engine/weights/tiled), or rows of plain numbers
    LoRA of an expert    | A gate [r, H] | A up [r, H] | A down [r, I] | B gate [I, r] | B up [I, r] | B down [H, r] |

r is padded with zeros to a multiple of 16, the inner size of the smallest matrix instruction. Biases of all of a
layer's experts lie apart (`Elementwise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import SILU, Activation
from engine.errors import ExpertBackendError, UserError
from engine.lora.adapter import ExpertLora, padded_rank
from engine.weights.store import ExpertStore, WeightSource
from engine.weights.tiled.layout import Matrix, held_as, matrix_of

SIZE_STEP = 32
PROJECTIONS = ("gate", "up", "down")


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
    def expert_values(self) -> int:
        """Values of an expert's weights."""
        return 3 * self.hidden * self.inner

    def lora_block(self, rank: int) -> int:
        """Values of an expert's LoRA."""
        return padded_rank(rank) * 3 * (self.hidden + self.inner)


@dataclass(frozen=True)
class ExpertLayout:
    """An expert's matrices, one behind the other."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @classmethod
    def of(cls, sizes: Sizes, forms: Sequence[str], element_bytes: int) -> ExpertLayout:
        """`forms`: the CPU's packed formats of gate, up and down; `element_bytes`: of what is not quantised here."""
        h, i = sizes.hidden, sizes.inner
        shapes = zip(forms, ((i, h), (i, h), (h, i)), strict=True)
        return cls(*(Matrix(held_as(form, element_bytes), *shape) for form, shape in shapes))

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.gate, self.up, self.down

    @property
    def plain(self) -> bool:
        """Whether nothing is quantised."""
        return all(matrix.plain for matrix in self.matrices)

    @property
    def starts(self) -> tuple[int, int, int]:
        """First bytes of the matrices."""
        return 0, self.gate.num_bytes, self.gate.num_bytes + self.up.num_bytes

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self.matrices)


@dataclass(frozen=True)
class Elementwise:
    """What a layer's experts compute beside products. `biases`: float32 [E, 2 I + H], of gate, up and down; they stay
    on the device wherever the weights are."""

    activation: Activation = SILU
    biases: torch.Tensor | None = None

    @classmethod
    def of(cls, store: ExpertStore, sizes: Sizes, device: torch.device) -> Elementwise:
        """ExpertBackendError for biases of another shape, ModelFileError for values that are not finite."""
        if not store.biases:
            return cls(store.activation)
        parts = []
        for name, width in zip(PROJECTIONS, (sizes.inner, sizes.inner, sizes.hidden), strict=True):
            bias = store.biases[name]
            if bias.shape != (shape := (sizes.experts, width)):
                raise ExpertBackendError(f"{bias.name} is {bias.shape}; the model's {name} has biases {shape}")
            parts.append(bias.dequantise(torch.float32))
        return cls(store.activation, torch.cat(parts, 1).to(device))

    @staticmethod
    def planned_bytes(sizes: Sizes) -> int:
        """Of a layer with biases."""
        return 4 * sizes.experts * (2 * sizes.inner + sizes.hidden)

    @property
    def num_bytes(self) -> int:
        return 0 if self.biases is None else self.biases.numel() * self.biases.element_size()

    @property
    def constants(self) -> dict[str, float]:
        """The activation for kernels, to which a negative limit is none."""
        limit = self.activation.limit
        return {"LIMIT": -1.0 if limit is None else float(limit), "ALPHA": float(self.activation.alpha)}


SILU_ALONE = Elementwise()


def expert_layout(store: ExpertStore, element_bytes: int, quantise: str | None) -> ExpertLayout:
    """Of a stored layer's experts. `element_bytes` of what is not quantised; `quantise`: what becomes of weights that
    the file does not quantise."""
    return ExpertLayout(*(matrix_of(store.expert(name, 0), element_bytes, quantise) for name in PROJECTIONS))


def expert_bytes(source: WeightSource, element_bytes: int, quantise: str | None) -> int:
    """The largest expert on a GPU."""
    stores = (source.experts(layer) for layer in source.config.sparse_layers)
    return max((expert_layout(store, element_bytes, quantise).num_bytes for store in stores), default=0)


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
