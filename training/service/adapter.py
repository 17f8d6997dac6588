"""An adapter in training: float32 masters, AdamW's moments, and what serving gets of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import ROUTERS
from engine.errors import UserError
from engine.folders import replace_folder, settle
from engine.lora.adapter import AdapterWeights, LoraPair
from engine.lora.adapter import ExpertLora as ServedExpertLora
from engine.lora.order import stored_modules
from engine.memory.costs import TARGETS
from engine.tuning import OptimStep
from training.experts.base import ExpertLora

STATE_FILE = "state.safetensors"
CANNOT_WRITE = (OSError, SafetensorError, RuntimeError)  # torch says RuntimeError where a disk is full
_PARTS = ("master", "first", "second")  # in a state's names; the last two are AdamW's moments


@dataclass(frozen=True)
class Pair:
    """y += scaling * (x A^T) B^T; float32 A [r, in] and B [out, r]."""

    a: nn.Parameter
    b: nn.Parameter


class TrainableAdapter:
    """A is drawn uniformly within 1 / sqrt(in), as PEFT draws it; B is zero. `linears`: shapes [out, in] by module
    name, modules and rows as adapter files have them, whatever form the served model has (`engine/lora/order.py`).
    `device`: of all but the routed experts, which stay on the CPU. UserError for targets that are not known."""

    def __init__(
        self,
        config: ModelConfig,
        linears: Mapping[str, tuple[int, int]],
        *,
        rank: int,
        alpha: float,
        targets: tuple[str, ...],
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        if unknown := [name for name in targets if name not in TARGETS]:
            raise UserError(f"targets: {unknown[0]!r}; allowed are {', '.join(TARGETS)}", "targets")
        if not targets:
            raise UserError(f"targets: none; allowed are {', '.join(TARGETS)}", "targets")
        self.rank, self.scaling, self.targets = rank, alpha / rank, targets
        self.steps = 0
        self._others = stored_modules(config)
        self.linears: dict[str, Pair] = {}
        self.experts: dict[int, ExpertLora] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, (size_out, size_in) in linears.items():
            if _target_of(name) in targets:
                bound = 1 / math.sqrt(size_in)
                a = torch.empty(rank, size_in).uniform_(-bound, bound, generator=generator)
                b = torch.zeros(size_out, rank, device=device)
                self.linears[name] = Pair(nn.Parameter(a.to(b.device)), nn.Parameter(b))
        if "mlp" in targets:
            sizes = (config.num_experts, rank, config.hidden_size, config.moe_intermediate_size)
            for layer in config.sparse_layers:
                self.experts[layer] = ExpertLora(*sizes, self.scaling, generator)
        self.parameters = dict(self._named())
        self._moments = {
            name: (torch.zeros_like(parameter), torch.zeros_like(parameter))
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def begin_with(self, given: AdapterWeights) -> None:
        """The matrices of an adapter of at most this rank; another scale is multiplied into B, and what it does not
        adapt is as drawn. UserError for an adapter of more than is trained here."""
        left = [name for name in given.linears if name not in self.linears]
        left += [f"the experts of layer {layer}" for layer in given.experts if layer not in self.experts]
        left += [f"an MLP beside the experts of layer {layer}" for layer in given.extra_mlps]
        if left:
            raise UserError(f"adapter: it has LoRA on {left[0]}, which is not trained here", "adapter")
        for name, pair in given.linears.items():
            _fill(self.linears[name].a, self.linears[name].b, pair.a, pair.b, pair.scale / self.scaling)
        for layer, lora in given.experts.items():
            for part in ("gate", "up", "down"):
                own_a, own_b = (getattr(self.experts[layer], f"{part}_lora_{half}") for half in "ab")
                a, b, scale = (getattr(lora, f"{part}_{name}") for name in ("a", "b", "scale"))
                _fill(own_a, own_b, a, b, scale / self.scaling)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, pair in self.linears.items():
            yield f"{name}.lora_a", pair.a
            yield f"{name}.lora_b", pair.b
        for layer, lora in self.experts.items():
            for name, parameter in lora.named_parameters():
                yield f"model.layers.{layer}.mlp.experts.{name}", parameter

    # ---- a step

    def step(self, order: OptimStep) -> Iterator[float]:
        """AdamW with decoupled decay (Loshchilov and Hutter, 2019), a parameter at each `next`. Each time the norm of
        the gradients, multiplied by the order's scale, before they are clipped."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        squares = sum((float(gradient.square().sum()) for gradient in gradients), 0.0)
        norm = abs(order.scale) * math.sqrt(squares)
        scale = order.scale * (min(1.0, order.clip / (norm + 1e-6)) if order.clip else 1.0)
        self.steps += 1
        first_bias, second_bias = 1 - order.beta1**self.steps, 1 - order.beta2**self.steps
        for name, parameter in self.parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.mul_(scale)
            first, second = self._moments[name]
            with torch.no_grad():
                first.lerp_(gradient, 1 - order.beta1)
                second.mul_(order.beta2).addcmul_(gradient, gradient, value=1 - order.beta2)
                parameter.mul_(1 - order.learning_rate * order.weight_decay)
                size = (second / second_bias).sqrt_().add_(order.eps)
                parameter.addcdiv_(first, size, value=-order.learning_rate / first_bias)
            parameter.grad = None
            yield norm

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def missing_gradient_bytes(self, device: str) -> int:
        """Of gradients that the next batch allocates on "cpu" or "cuda"."""
        missing = (parameter for parameter in self.parameters.values() if parameter.grad is None)
        return sum(parameter.nbytes for parameter in missing if parameter.device.type == device)

    # ---- what serving gets

    def served(self, module: str) -> LoraPair | None:
        """Of a module of the served model, with gradients; None: nothing is trained there."""
        other = self._others.get(module)
        pair = self.linears.get(module if other is None else other.name)
        if pair is None:
            return None
        trained = LoraPair(pair.a, pair.b, self.scaling)
        return trained if other is None else other.taken(trained)

    def weights(self, name: str, path: str = "") -> AdapterWeights:
        """A copy of the adapter as it is now, on the CPU, in float32, and as its file would be."""
        found = AdapterWeights(name, "trained here", path=path)
        for module, pair in self.linears.items():
            found.linears[module] = LoraPair(_copy(pair.a), _copy(pair.b), self.scaling)
        for layer, lora in self.experts.items():
            ga, ua, da, gb, ub, db = (_copy(matrix) for matrix in lora.matrices())
            found.experts[layer] = ServedExpertLora(ga, gb, ua, ub, da, db, self.scaling, self.scaling, self.scaling)
        return found

    # ---- on disk

    def save(self, folder: Path) -> None:
        """Replaces `folder` as a whole: whenever the process ends, it is the old one or the new one. UserError if it
        cannot be written."""
        tensors = {f"master.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, (first, second) in self._moments.items():
            tensors |= {f"first.{name}": first, f"second.{name}": second}

        def write(part: Path) -> None:
            save_file(tensors, part / STATE_FILE, metadata={"steps": str(self.steps)})

        try:
            replace_folder(folder, write)
        except CANNOT_WRITE as error:
            raise UserError(f"{folder} cannot be written: {error}", "state") from error

    @torch.no_grad()
    def load(self, folder: Path, *, optimizer: bool = True) -> None:
        """UserError for a state of another shape, or none; then nothing has changed."""
        try:
            settle(folder)
            with safe_open(folder / STATE_FILE, "pt") as file:
                steps = int((file.metadata() or {}).get("steps", "0"))
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{folder}: no state of a tuning run: {error}", "state") from None
        wanted = {f"{part}.{name}": p.shape for name, p in self.parameters.items() for part in _PARTS}
        if {name: tensor.shape for name, tensor in found.items()} != wanted:
            raise UserError(f"{folder}: the state of an adapter of another rank, targets or model", "state")
        for name, parameter in self.parameters.items():
            parameter.copy_(found[f"master.{name}"])
            for moment, part in zip(self._moments[name], _PARTS[1:], strict=True):
                moment.copy_(found[f"{part}.{name}"]) if optimizer else moment.zero_()
        self.steps = steps if optimizer else 0
        self.drop_gradients()


def _fill(a: torch.Tensor, b: torch.Tensor, given_a: torch.Tensor, given_b: torch.Tensor, scale: float) -> None:
    """A [..., r, in], B [..., out, r], of a smaller rank or the same."""
    rank = given_a.shape[-2]
    a[..., :rank, :].copy_(given_a)
    b[..., :rank].copy_(given_b.float() * scale)


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True)


def _target_of(name: str) -> str:
    if name.endswith(ROUTERS):
        return "router"
    return "attention" if ".self_attn." in name else "mlp"
