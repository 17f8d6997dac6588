"""The gated delta rule over the states of sequences: what a backend gives, and one in plain torch on any device.

A state is a slot of two tensors a layer: the last positions that the convolution looks back at, and S of each head.
Both are float32, whatever the activations are: a state sums over the whole sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.architectures.parts.delta import DeltaNet
from engine.attention.base import BatchLayout, CacheBackend, unit_bytes
from engine.errors import EngineError

CHUNK = 64  # positions that are computed at once
_EPS = 1e-6  # beside the squares of a query or key


@dataclass(frozen=True)
class DeltaVectors:
    """A layer's own weights, contiguous float32: `conv` [kernel, channels], `decay` (-exp(A_log)) and `dt_bias`
    [value_heads], `norm` [value_dim]."""

    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float


@dataclass(frozen=True)
class DeltaInputs:
    """What the projections give of T tokens, fused or not as `DeltaNet` says: `wide` [T, q, k, v, z] or [T, q, k, v]
    and [T, z] in the activations' dtype, `gates` [T, b, a] or two of [T, value_heads] in float32."""

    wide: list[torch.Tensor]
    gates: list[torch.Tensor]


@dataclass(frozen=True)
class StateSlots:
    """`count` slots. The first `own` are those of running sequences, each of which may keep the inputs of `kept`
    positions: a token and its drafts."""

    count: int
    own: int = 0
    kept: int = 0


class DeltaBackend(CacheBackend):
    """States of the layers that it was made for, all of one spec."""

    @property
    def kv_bytes_per_token(self) -> int:
        return 0

    @abstractmethod
    def mix(self, layer: int, given: DeltaInputs, vectors: DeltaVectors) -> torch.Tensor:
        """Convolution, delta rule and gated norm: [T, value_width] in the activations' dtype. The states of the planned
        step are changed. EngineError without a plan."""


def check_layout(batch: BatchLayout) -> None:
    """EngineError unless each row has a state."""
    if len(batch.states) != batch.num_rows:
        raise EngineError(f"a step of {batch.num_rows} rows has {len(batch.states)} states; wanted one for each row")


@dataclass(frozen=True)
class Ruled:
    """Of T tokens, float32: `qkv` [T, channels] before the convolution, `decay` [T, heads] (g, below 0) and `rate`
    [T, heads] (sigmoid(b))."""

    qkv: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor

    def cut(self, part: slice | int) -> Ruled:
        return Ruled(self.qkv[part], self.decay[part], self.rate[part])

    def copy_(self, other: Ruled) -> None:
        self.qkv.copy_(other.qkv)
        self.decay.copy_(other.decay)
        self.rate.copy_(other.rate)


class ReferenceDeltaNet(DeltaBackend):
    """States of each of `layers`."""

    def __init__(self, spec: DeltaNet, layers: Sequence[int], slots: StateSlots, device: torch.device) -> None:
        self._spec = spec
        self._on_gpu = device.type != "cpu"
        heads = (slots.count, spec.value_heads, spec.key_dim, spec.value_dim)
        past = (slots.count, spec.kernel - 1, spec.channels)
        own = (slots.own, slots.kept)
        self._kept = {
            layer: Ruled(*(torch.zeros((*own, n), device=device) for n in (spec.channels, *[spec.value_heads] * 2)))
            for layer in layers
        }
        self.states = {layer: torch.zeros(heads, device=device) for layer in layers}
        self.past = {layer: torch.zeros(past, device=device) for layer in layers}
        self._batch: BatchLayout | None = None

    def plan(self, batch: BatchLayout) -> None:
        check_layout(batch)
        self._batch = batch

    def host_planes(self) -> list[NDArray[np.uint8]]:
        return super().host_planes() if self._on_gpu else [plane.numpy()[None] for plane in self._planes()]

    def device_planes(self) -> list[torch.Tensor]:
        return self._planes() if self._on_gpu else super().device_planes()

    def _planes(self) -> list[torch.Tensor]:
        return [unit_bytes(each) for each in (*self.states.values(), *self.past.values())]

    def mix(self, layer: int, given: DeltaInputs, vectors: DeltaVectors) -> torch.Tensor:
        if self._batch is None:
            raise EngineError("plan() comes before mix()")
        batch, spec, w = self._batch, self._spec, vectors
        ruled, z = ruled_inputs(given, w, spec)
        out = ruled.qkv.new_empty((len(ruled.qkv), spec.value_heads, spec.value_dim))
        starts, single = batch.row_starts, []
        for row, state in enumerate(batch.states):
            plain = state.source == state.slot and not (state.saves or state.replayed or state.keeps)
            if plain and starts[row + 1] - starts[row] == 1:
                single.append(row)
            else:
                self._row(layer, row, batch, ruled, w.conv, out)
        if single:
            self._single(layer, single, batch, ruled, w.conv, out)
        return gated_norm(out, z, w).to(given.wide[0].dtype)

    def _row(
        self, layer: int, row: int, batch: BatchLayout, given: Ruled, conv: torch.Tensor, out: torch.Tensor
    ) -> None:
        """A row's tokens, behind the accepted drafts of the row before."""
        states, past, state = self.states[layer], self.past[layer], batch.states[row]
        begin, end = batch.row_starts[row], batch.row_starts[row + 1]
        s, seen = states[state.slot], past[state.slot]
        if state.source < 0:
            s, seen = torch.zeros_like(s), torch.zeros_like(seen)
        elif state.source != state.slot:
            s, seen = states[state.source], past[state.source]
        first = batch.context_lens[row] - (end - begin)  # position of the row's first token
        early = [each for each in state.saves if each[0] <= first]
        if state.replayed or state.keeps:
            accepted, replayed = self._kept[layer].cut(state.slot), state.replayed
            _, s, seen = self._through(layer, accepted.cut(slice(replayed)), first - replayed, early, s, seen, conv)
            states[state.slot], past[state.slot] = s, seen
        own = given.cut(slice(begin, end))
        out[begin:end], s, seen = self._through(layer, own, first, state.saves[len(early) :], s, seen, conv)
        if state.keeps:
            self._kept[layer].cut(state.slot).cut(slice(end - begin)).copy_(own)
        else:
            states[state.slot], past[state.slot] = s, seen

    def _through(
        self,
        layer: int,
        given: Ruled,
        first: int,
        saves: Sequence[tuple[int, int]],
        s: torch.Tensor,
        seen: torch.Tensor,
        conv: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions from `first` on, in the parts between which the state is saved: outputs [T, heads, value_dim], and
        the state and the inputs behind them."""
        out = given.qkv.new_empty((len(given.qkv), self._spec.value_heads, self._spec.value_dim))
        at = 0
        for stop, slot in (*((position - first, slot) for position, slot in saves), (len(out), None)):
            if stop > at:
                part = given.cut(slice(at, stop))
                mixed, seen = _convolved(part.qkv, seen, conv)
                q, k, v = _heads(mixed, self._spec)
                out[at:stop], s = delta_chunks(q, k, v, part.decay, part.rate, s)
                at = stop
            if slot is not None:
                self.states[layer][slot], self.past[layer][slot] = s, seen
        return out, s, seen

    def _single(
        self,
        layer: int,
        rows: list[int],
        batch: BatchLayout,
        given: Ruled,
        conv: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """One token each of rows that go on from their own states, all at once."""
        device = given.qkv.device
        tokens = torch.tensor([batch.row_starts[row] for row in rows], device=device)
        slots = torch.tensor([batch.states[row].slot for row in rows], device=device)
        seen = torch.cat((self.past[layer][slots], given.qkv[tokens][:, None]), dim=1)
        self.past[layer][slots] = seen[:, 1:]
        q, k, v = _heads(F.silu((seen * conv).sum(1)), self._spec)
        s = self.states[layer][slots] * given.decay[tokens].exp()[..., None, None]
        change = (v - (k[:, :, None] @ s)[:, :, 0]) * given.rate[tokens][..., None]
        s += k[..., None] * change[:, :, None]
        self.states[layer][slots] = s
        out[tokens] = (q[:, :, None] @ s)[:, :, 0]


def ruled_inputs(given: DeltaInputs, vectors: DeltaVectors, spec: DeltaNet) -> tuple[Ruled, torch.Tensor]:
    """What the convolution and the rule get, and z [T, value_width]; float32."""
    wide = [part.float() for part in given.wide]
    qkv, z = split_wide(wide[0], spec) if spec.fused else wide
    b, a = split_gates(given.gates[0], spec) if spec.fused_gates else given.gates
    return Ruled(qkv, vectors.decay * F.softplus(a + vectors.dt_bias), torch.sigmoid(b)), z


def gated_norm(out: torch.Tensor, z: torch.Tensor, vectors: DeltaVectors) -> torch.Tensor:
    """out [T, heads, value_dim], z [T, value_width] -> [T, value_width], float32."""
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + vectors.norm_eps) * vectors.norm
    return normed.flatten(1) * F.silu(z)


def whole_sequence(given: Ruled, conv: torch.Tensor, spec: DeltaNet) -> torch.Tensor:
    """Convolution and rule over a sequence from its first position on: [T, heads, value_dim]. Differentiable; there is
    no state before the first chunk, and none is made behind the last."""
    seen = F.pad(given.qkv, (0, 0, len(conv) - 1, 0))
    # tap by tap: conv1d would keep its input, which is a copy, for backward
    taps = (seen[tap : tap + len(given.qkv)] * weight for tap, weight in enumerate(conv))
    q, k, v = _heads(F.silu(sum(taps, seen.new_zeros(()))), spec)
    found, s = [], None
    for at in range(0, len(q), CHUNK):
        part = slice(at, at + CHUNK)
        chunk = (q[part], k[part], v[part], given.decay[part], given.rate[part])
        out, written = _chunk(*chunk, s)
        found.append(out)
        if at + CHUNK < len(q):
            s = _behind(k[part], given.decay[part], written, s)
    return torch.cat(found)


def split_wide(fused: torch.Tensor, spec: DeltaNet) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, key_heads x (q, k, v, z of the head)] -> [q | k | v], z."""
    values = spec.value_width // spec.key_heads
    heads = fused.view(len(fused), spec.key_heads, -1)
    q, k, v, z = (part.flatten(1) for part in torch.split(heads, [spec.key_dim, spec.key_dim, values, values], -1))
    return torch.cat((q, k, v), dim=-1), z


def split_gates(fused: torch.Tensor, spec: DeltaNet) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, key_heads x (b, a of its value heads)] -> b, a [T, value_heads]."""
    b, a = fused.view(len(fused), spec.key_heads, -1).chunk(2, dim=-1)
    return b.flatten(1), a.flatten(1)


def _convolved(qkv: torch.Tensor, seen: torch.Tensor, conv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv [T, channels] behind the positions `seen` [kernel - 1, channels]: silu of the convolution, and what the next
    one is to see."""
    joined = torch.cat((seen, qkv))
    out = F.conv1d(joined.T[None], conv.T[:, None], groups=conv.shape[1])[0].T
    return F.silu(out), joined[len(qkv) :]


def _heads(mixed: torch.Tensor, spec: DeltaNet) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, channels] -> queries, keys [T, heads, key_dim], of length 1 (queries scaled), and values [T, heads,
    value_dim]; heads are the value heads."""
    keys, shared = spec.key_width, spec.value_heads // spec.key_heads

    def repeated(part: torch.Tensor) -> torch.Tensor:
        heads = _unit(part.reshape(-1, spec.key_heads, spec.key_dim))
        return heads.repeat(1, shared, 1) if spec.tiled else heads.repeat_interleave(shared, dim=1)

    q, k = repeated(mixed[:, :keys]), repeated(mixed[:, keys : 2 * keys])
    return q * spec.key_dim**-0.5, k, mixed[:, 2 * keys :].reshape(-1, spec.value_heads, spec.value_dim)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def delta_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule over T tokens, `CHUNK` at a time: q, k [T, H, D], v [T, H, E], decay and rate [T, H], from the
    state s [H, D, E]. Returns [T, H, E] and the state behind them, a fresh tensor.

    With G the sum of decays from the chunk's beginning, what token i writes is
        u_i = rate_i (v_i - exp(G_i) k_i.S - sum over j < i of exp(G_i - G_j) (k_i.k_j) u_j)
    a triangular system in all u of the chunk: u = A^-1 (rate v) - A^-1 (rate exp(G) k) S.
    """
    out = torch.empty_like(v)
    for at in range(0, len(q), CHUNK):
        part = slice(at, at + CHUNK)
        out[part], written = _chunk(q[part], k[part], v[part], decay[part], rate[part], s)
        s = _behind(k[part], decay[part], written, s)
    return out, s


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    s: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_chunks` of one chunk of C tokens: outputs [C, H, E], and what they write, u [H, C, E]. s None: zero."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, C, ...]
    sums, beta = decay.T.cumsum(-1), rate.T[..., None]
    later = torch.ones((q.shape[1],) * 2, dtype=torch.bool, device=q.device).triu(1)
    between = (sums[:, :, None] - sums[:, None]).masked_fill(later, -torch.inf).exp()  # [H, C, C]
    grown = sums.exp()[..., None]
    system = (beta * k @ k.transpose(1, 2) * between).tril(-1)
    known = beta * v if s is None else torch.cat((beta * v, beta * grown * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    written = solved if s is None else solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ s
    out = (q @ k.transpose(1, 2) * between) @ written
    return (out if s is None else q * grown @ s + out).transpose(0, 1), written


def _behind(k: torch.Tensor, decay: torch.Tensor, written: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
    """The state behind a chunk that began with s: [H, D, E], a fresh tensor."""
    sums = decay.T.cumsum(-1)
    last = sums[:, -1:]
    change = (k.transpose(0, 1) * (last - sums).exp()[..., None]).transpose(1, 2) @ written
    return change if s is None else s * last.exp()[..., None] + change
