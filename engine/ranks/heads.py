"""Which parts of a gated delta net's tensors belong to a rank: some key heads, and the value heads that use them.

    by key heads (qkvz_proj, in_proj_ba)   one run
    [q | k | v] (qkv_proj, conv1d)         three: some of the queries, of the keys, of the values
    by value heads, one behind the other   one where heads that share a key follow one another, else (`tiled`: value
                                           head h has key h % key_heads) one for each head that shares a key

The parts of a rank, one behind the other, are the tensors of a smaller delta net with the same order of heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.architectures.config import ModelConfig
from engine.architectures.parts.delta import DeltaNet

Spans = tuple[slice, ...]

_BY_KEY_HEADS = ("qkvz_proj", "in_proj_ba")
_BY_KIND = ("qkv_proj", "conv1d")
_BY_VALUE_HEADS = ("z_proj", "in_proj_b", "in_proj_a", "decay", "dt_bias")


def delta_of(config: ModelConfig, module: str) -> DeltaNet | None:
    """The delta net that a module ("model.layers.0.self_attn.z_proj") belongs to; None of all others."""
    words = module.split(".")
    if words[:2] != ["model", "layers"] or words[3] != "self_attn":
        return None
    net = config.layers[int(words[2])].attention
    return net if isinstance(net, DeltaNet) else None


def row_spans(net: DeltaNet, module: str, rank: int, ranks: int) -> Spans | None:
    """Outputs, channels or values of a module of a delta net that `rank` of `ranks` has; None: all of them. The key
    heads are a multiple of the ranks."""
    part = module.rpartition(".")[2]
    keys, values = _key_heads(net, rank, ranks), _value_heads(net, rank, ranks)
    if part in _BY_KEY_HEADS:
        rows = 2 * (net.key_dim * net.key_heads + net.value_width) if part == "qkvz_proj" else 2 * net.value_heads
        return _scaled((keys,), rows // net.key_heads)
    if part in _BY_KIND:
        queries, same = _scaled((keys,), net.key_dim), _scaled((keys,), net.key_dim, net.key_width)
        return queries + same + _scaled(values, net.value_dim, 2 * net.key_width)
    if part in _BY_VALUE_HEADS:
        return _scaled(values, net.value_dim if part == "z_proj" else 1)
    return None


def column_spans(net: DeltaNet, module: str, rank: int, ranks: int) -> Spans | None:
    """The same of the inputs of a projection."""
    if module.rpartition(".")[2] != "out_proj":
        return None
    return _scaled(_value_heads(net, rank, ranks), net.value_dim)


def _key_heads(net: DeltaNet, rank: int, ranks: int) -> slice:
    each = net.key_heads // ranks
    return slice(rank * each, (rank + 1) * each)


def _value_heads(net: DeltaNet, rank: int, ranks: int) -> Spans:
    keys, shared = _key_heads(net, rank, ranks), net.value_heads // net.key_heads
    if not net.tiled:
        return _scaled((keys,), shared)
    return tuple(slice(turn * net.key_heads + keys.start, turn * net.key_heads + keys.stop) for turn in range(shared))


def _scaled(spans: Iterable[slice], size: int, first: int = 0) -> Spans:
    """Spans of heads as those of their rows, `size` each, behind the `first` rows."""
    return tuple(slice(first + size * span.start, first + size * span.stop) for span in spans)
