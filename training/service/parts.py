"""The served model's projections and attention, differentiable, over the very weights that serving reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from engine.architectures.parts.mla import Latent
from engine.attention.base import AttentionBackend, BatchLayout
from engine.errors import EngineError, UserError
from engine.linear.base import LatentUp, Linear, LoraBatch
from engine.linear.gpu import GpuLinear
from engine.linear.latent import TorchLatentUp
from engine.linear.native import NativeLatentUp, NativeLinear
from engine.lora.adapter import LoraPair
from engine.memory.costs import LOGIT_ROWS
from training.service.adapter import TrainableAdapter
from training.sinks import sink_attention

if TYPE_CHECKING:
    from native import _native

_CHUNK = 1 << 20  # weights that are unpacked at once
_GPU_CHUNK = 1 << 25


@dataclass(frozen=True)
class TrainedRows(LoraBatch):
    """T rows of several adapters: `ranges` of rows and the adapter that acts on them. `slots` number the adapters from
    1; 0: the base."""

    ranges: Sequence[tuple[slice, TrainableAdapter | None]] = field(default_factory=tuple)
    lengths: Sequence[int] = ()  # of the texts, one behind the other

    @property
    def adapters(self) -> Mapping[int, TrainableAdapter]:
        return {slot: adapter for slot, (_, adapter) in enumerate(self.ranges, 1) if adapter is not None}


class TrainedLinear(Linear):
    """y = x W^T (+ bias) by the served projection; backward unpacks W some rows at a time. The LoRA of each row's
    adapter is float32 and added before rounding. UserError for a projection whose weights cannot be read."""

    def __init__(self, name: str, served: Linear, pool: _native.WorkerPool) -> None:
        self.name, self._served = name, served
        self._rows: Callable[[int, int], torch.Tensor]  # [count, in]: numbers of the weights from a first row on
        if isinstance(served, NativeLinear):
            self.shape, self._chunk = (served.out_features, served.in_features), _CHUNK
            self._rows = partial(unpacked, served, pool)
        elif isinstance(served, GpuLinear):
            self.shape, self._chunk, self._rows = served.shape, _GPU_CHUNK, served.numbers
        else:
            raise _unreadable(name, served)

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(self, x)  # type: ignore[no-untyped-call]
        if not isinstance(lora, TrainedRows):
            return y
        parts = [self._added(y[rows], x[rows], adapter) for rows, adapter in lora.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _added(self, y: torch.Tensor, x: torch.Tensor, adapter: TrainableAdapter | None) -> torch.Tensor:
        pair = None if adapter is None else adapter.served(self.name)
        if pair is None:
            return y
        return (y.float() + pair.scale * (x.float() @ pair.a.T @ pair.b.T)).to(y.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Without gradients and adapters."""
        return self._served(x.contiguous(), None)

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        """grad [T, out] -> grad W, float32 [T, in]."""
        size_out, size_in = self.shape
        out = torch.zeros(grad.shape[0], size_in, device=grad.device)
        step = max(1, self._chunk // size_in)
        for first in range(0, size_out, step):
            weights = self._rows(first, min(step, size_out - first))
            out += grad[:, first : first + len(weights)].to(weights.dtype) @ weights
        return out

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        raise EngineError(f"{self.name}: an adapter in training is in no slot")


def _unreadable(name: str, served: object) -> UserError:
    message = f"{name}: --fine-tuning needs the native projections, or on a GPU the gpu ones; {type(served).__name__}"
    return UserError(f"{message} is none (leave --linear-backend out)", "fine_tuning")


def unpacked(linear: NativeLinear, pool: _native.WorkerPool, first: int, count: int) -> torch.Tensor:
    """float32 [count, in]: rows of its weights."""
    ids = torch.arange(first, first + count)
    out = torch.empty(count, linear.in_features)
    linear.packed.rows(pool, ids.data_ptr(), count, out.data_ptr())
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: TrainedLinear, x: torch.Tensor) -> torch.Tensor:
        ctx.linear, ctx.dtype = linear, x.dtype
        return linear.product(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.linear.back(grad).to(ctx.dtype)


class TrainedLatentUp(LatentUp):
    """As `TrainedLinear`, of kv_b: an adapter's B [H x (nope + value), r] acts on keys and values of each head.
    UserError for a projection whose weights cannot be read."""

    def __init__(self, name: str, served: LatentUp, spec: Latent, pool: _native.WorkerPool) -> None:
        if not isinstance(served, NativeLatentUp | TorchLatentUp):
            raise _unreadable(name, served)
        self.name, self.served, self.pool = name, served, pool
        self._heads, self._nope = spec.heads, spec.nope_dim
        self.shape = spec.heads * spec.expanded_dim, spec.kv_rank

    def absorb(self, q: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        def more(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.einsum("thn,hnr->thr", rows, b[:, : self._nope]) @ a

        return self._added(_HeadsProduct.apply(self, 0, q), q, lora, more)  # type: ignore[no-untyped-call]

    def values(self, mixed: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        def more(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.einsum("thr,hvr->thv", rows @ a.T, b[:, self._nope :])

        return self._added(_HeadsProduct.apply(self, 1, mixed), mixed, lora, more)  # type: ignore[no-untyped-call]

    def _added(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora: LoraBatch | None,
        more: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        if not isinstance(lora, TrainedRows):
            return y
        parts = []
        for rows, adapter in lora.ranges:
            pair = None if adapter is None else adapter.served(self.name)
            if pair is None:
                parts.append(y[rows])
            else:
                found = pair.scale * more(x[rows].float(), pair.a, pair.b.view(self._heads, -1, pair.b.shape[1]))
                parts.append((y[rows].float() + found).to(y.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def product(self, half: int, x: torch.Tensor) -> torch.Tensor:
        """Without gradients and adapters: `absorb` (0) or `values` (1)."""
        run = self.served.values if half else self.served.absorb
        return run(x.contiguous(), None)

    def back(self, half: int, grad: torch.Tensor) -> torch.Tensor:
        """grad [T, H, out] -> [T, H, in], float32 of packed weights, by each head's part of a half's weights."""
        if isinstance(self.served, TorchLatentUp):
            weights = self.served.halves[half]
            return torch.bmm(grad.to(weights.dtype).transpose(0, 1), weights).transpose(0, 1)
        linear = self.served.halves[half]
        rows, out = linear.out_features // self._heads, torch.empty(*grad.shape[:2], linear.in_features)
        step = max(1, _CHUNK // (rows * linear.in_features))
        for first in range(0, self._heads, step):
            heads = slice(first, min(first + step, self._heads))
            count = heads.stop - first
            weights = unpacked(linear, self.pool, first * rows, count * rows).view(count, rows, -1)
            out[:, heads] = torch.einsum("tho,hoi->thi", grad[:, heads].float(), weights)
        return out

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        raise EngineError(f"{self.name}: an adapter in training is in no slot")


class _HeadsProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: TrainedLatentUp, half: int, x: torch.Tensor) -> torch.Tensor:
        ctx.up, ctx.half, ctx.dtype = up, half, x.dtype
        return up.product(half, x.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, ctx.up.back(ctx.half, grad).to(ctx.dtype)


class Logprobs(torch.autograd.Function):
    """hidden [R, H], targets int64 [R] -> float32 [R], bool [R]: log-softmax of the head's logits at the targets, and
    whether these have the largest one. Logits are made for some rows at a time, again in backward."""

    @staticmethod
    def forward(
        ctx: Any, head: TrainedLinear, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.head = head
        ctx.save_for_backward(hidden, targets)
        found, hits = [], []
        for rows, ids in zip(torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True):
            logits = head.product(rows).float()
            found.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
            hits.append(logits.argmax(-1) == ids)
        hit = torch.cat(hits)
        ctx.mark_non_differentiable(hit)
        return torch.cat(found), hit

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[None, torch.Tensor, None]:
        hidden, targets = ctx.saved_tensors
        found = []
        parts = (torch.split(tensor, LOGIT_ROWS) for tensor in (hidden, targets, grad))
        for rows, ids, of in zip(*parts, strict=True):
            shares = ctx.head.product(rows).float().softmax(-1).mul_(-of[:, None])
            shares.scatter_add_(1, ids[:, None], of[:, None])
            found.append(ctx.head.back(shares))
        return None, torch.cat(found).to(hidden.dtype), None


class TrainedAttention(AttentionBackend):
    """Causal attention within each text of a micro-batch; keeps nothing. `window`: positions that a query sees."""

    def __init__(self, window: int | None, scale: float) -> None:
        self._window, self._scale = window, scale
        self._lengths: Sequence[int] = ()
        self._sinks: dict[int, torch.Tensor] = {}

    def set_sinks(self, layer: int, sinks: torch.Tensor) -> None:
        self._sinks[layer] = sinks

    def plan(self, batch: BatchLayout) -> None:
        self._lengths = [end - start for start, end in pairwise(batch.row_starts)]

    @property
    def kv_bytes_per_token(self) -> int:
        return 0

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lengths = list(self._lengths)
        texts = zip(*(torch.split(part, lengths) for part in (q, k, v)), strict=True)
        sinks = self._sinks.get(layer)
        return torch.cat([self._attended(asked, held, given, sinks) for asked, held, given in texts])

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """q [T, H, D], k [T, G, D], v [T, G, E], E <= D -> [T, H, E]."""
        length, width = len(q), v.shape[-1]
        v = F.pad(v, (0, k.shape[-1] - width))  # torch keeps all scores where values are narrower than keys
        asked, held, given = (part.transpose(0, 1)[None] for part in (q, k, v))
        mask = None
        if self._window is not None and length > self._window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - self._window)
        if sinks is not None:
            within = None if mask is None else mask[None, None]
            return sink_attention(asked, held, given, sinks, scale=self._scale, mask=within)[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            asked,
            held,
            given,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)[..., :width]
