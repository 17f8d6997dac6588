"""What one of several ranks holds of a model: some heads, a part of every MLP and of the vocabulary; the rest whole.

    q, k, v, gate, up, lm_head   divided by outputs: each rank computes some of them; sinks with their heads
    o, down                      divided by inputs: each rank computes a part of every output, and the parts are summed
    delta nets                   divided by key heads with their value heads (engine/ranks/heads.py)
    embedding, norms, routers    whole, on every rank
    biases                       divided with the outputs; what is added to a sum, rank 0 adds

An expert is divided like any MLP, so that ranks have the same work whichever experts the rows of a step choose. Where
it cannot be, or on request, each rank has some of the experts whole, and adds nothing for choices of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.architectures.config import LayerSpec, ModelConfig
from engine.architectures.parts.base import BY_HEADS, BY_INPUTS, BY_OUTPUTS, Divided
from engine.architectures.parts.delta import DeltaNet
from engine.architectures.parts.gqa import GroupedQuery
from engine.architectures.parts.mlp import Sparse
from engine.errors import UserError
from engine.files.gguf.types import GGMLType, by_name
from engine.files.model_file import MadeBytes, ModelFile, made_of, part
from engine.ranks.heads import column_spans, delta_of, row_spans
from engine.weights.layout import EMBED, HEAD
from engine.weights.scaled_blocks import BLOCKS
from engine.weights.store import ExpertStore, JoinedTensor, WeightSource, WeightTensor

MOST_RANKS = 64
_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`. `experts`: whether the routed experts are divided; otherwise rank 0 has all of them.
    `whole_experts`: they are divided into some for each rank, not each expert."""

    rank: int = 0
    size: int = 1
    experts: bool = True
    whole_experts: bool = False

    def span(self, total: int) -> slice:
        """This rank's part of what every rank has an equal part of."""
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def words(self, vocabulary: int) -> slice:
        """The same of the vocabulary, of which the last ranks may have less."""
        each = -(-vocabulary // self.size)
        return slice(min(self.rank * each, vocabulary), min((self.rank + 1) * each, vocabulary))


WHOLE = Shard()


class ShardedSource(WeightSource):
    """The tensors of one rank, as if they were a smaller model's: `config` describes that one, `whole` the whole one.

    UserError if the model cannot be divided so. `step`: what the parts of projections and experts must be multiples of.
    """

    def __init__(self, source: WeightSource, shard: Shard, step: int = 1) -> None:
        self.shard = shard
        self._source, self.left_out = source, source.left_out
        self.config = _divided(source.config, shard, step)

    @property
    def undivided(self) -> WeightSource:
        return self._source.undivided

    @property
    def whole(self) -> ModelConfig:
        return self._source.whole

    def check(self) -> None:
        """UserError if a quantised tensor cannot be divided between its blocks. Reads headers only."""
        for name in self.names():
            self.tensor(name)
        for layer in self.config.sparse_layers:
            self.experts(layer)

    def tensor(self, name: str) -> WeightTensor:
        if name == HEAD:
            stored = self._source.tensor(HEAD if self._source.has(HEAD) else EMBED)
            return by_outputs(replace(stored, name=HEAD), self.shard.words(stored.shape[0]))
        weight, shard = self._source.tensor(name), self.shard
        module, _, kind = name.rpartition(".")
        part = module if kind in ("weight", "bias") else name
        if (net := delta_of(self._source.config, part)) is not None:
            return _of_delta_net(weight, net, part, shard)
        if module.endswith(BY_OUTPUTS) or name.endswith(BY_HEADS) or self._norms_all_heads(module):
            return by_outputs(weight, shard.span(weight.shape[0]))
        if module.endswith(BY_INPUTS) and kind == "weight":
            return by_inputs(weight, shard.span(weight.shape[1]), size=shard.size)
        return weight

    def has(self, name: str) -> bool:
        """A tied head is a tensor of its own here. What is added to a sum, one rank adds."""
        if name == HEAD:
            return True
        module, _, kind = name.rpartition(".")
        added = kind == "bias" and module.endswith(BY_INPUTS)
        return self._source.has(name) and (self.shard.rank == 0 or not added)

    def experts(self, layer: int) -> ExpertStore:
        store, shard = self._source.experts(layer), self.shard
        if not shard.experts:
            return store
        if shard.whole_experts:
            return _some(store, shard.span(store.num_experts))
        parts: dict[str, list[WeightTensor]] = {}
        for projection, _ in store.projections():
            weights = [store.expert(projection, index) for index in range(store.num_experts)]
            if projection == "down":
                parts[projection] = [by_inputs(w, shard.span(w.shape[1]), size=shard.size) for w in weights]
            else:
                parts[projection] = [by_outputs(w, shard.span(w.shape[0])) for w in weights]
        biases = {name: self._bias_part(name, bias) for name, bias in store.biases.items()}
        return replace(store, gate=parts["gate"], up=parts["up"], down=parts["down"], biases=biases)

    def _norms_all_heads(self, module: str) -> bool:
        if not module.endswith(_NORMS):
            return False
        attention = self._source.config.layers[int(module.split(".")[2])].attention
        return isinstance(attention, GroupedQuery) and attention.qk_norm == "whole"

    def _bias_part(self, projection: str, bias: WeightTensor) -> WeightTensor:
        """Of [experts, outputs] of experts that are divided."""
        if projection != "down":
            return by_inputs(bias, self.shard.span(bias.shape[1]), size=self.shard.size)
        return bias if self.shard.rank == 0 else replace(bias, data=np.zeros(bias.num_bytes, np.uint8))

    def names(self) -> list[str]:
        names = [name for name in self._source.names() if self.has(name)]
        return names if HEAD in names else [*names, HEAD]

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    @property
    def files(self) -> list[ModelFile]:
        return self._source.files

    @property
    def identity(self) -> str:
        shard = self.shard
        experts = " some experts" if shard.whole_experts else "" if shard.experts else " whole experts"
        return f"{self._source.identity} rank {shard.rank} of {shard.size}{experts}"


def _some(store: ExpertStore, span: slice) -> ExpertStore:
    parts = {name: [store.expert(name, i) for i in range(span.start, span.stop)] for name, _ in store.projections()}
    biases = {name: by_outputs(bias, span) for name, bias in store.biases.items()}
    return replace(store, gate=parts["gate"], up=parts["up"], down=parts["down"], biases=biases)


def _of_delta_net(weight: WeightTensor, net: DeltaNet, module: str, shard: Shard) -> WeightTensor:
    rows = row_spans(net, module, shard.rank, shard.size)
    if rows is not None:
        return by_outputs(weight, *rows)
    columns = column_spans(net, module, shard.rank, shard.size)
    return weight if columns is None else by_inputs(weight, *columns, size=shard.size)


def by_outputs(weight: WeightTensor, *spans: slice) -> WeightTensor:
    """Some rows of [out, in], or values of [out], one span's behind the other's, not read yet; of latent keys and
    values those of some heads."""
    if isinstance(weight, JoinedTensor):
        head = weight.shape[0] // weight.keys.shape[0]
        heads = [slice(span.start // head, span.stop // head) for span in spans]
        weight = replace(weight, keys=by_outputs(weight.keys, *heads), values=by_outputs(weight.values, *heads))
    count = sum(span.stop - span.start for span in spans)
    shape, each = (count, *weight.shape[1:]), weight.num_bytes // weight.shape[0]
    wanted, data = [slice(span.start * each, span.stop * each) for span in spans], weight.data
    if len(wanted) == 1 and not isinstance(data, MadeBytes):
        return replace(weight, shape=shape, data=part(data, wanted[0]))

    def make() -> npt.NDArray[np.uint8]:
        held = data[:] if isinstance(data, MadeBytes) else data
        return np.concatenate([held[some] for some in wanted])

    if isinstance(data, np.ndarray):
        return replace(weight, shape=shape, data=make())
    ranges = data.ranges if isinstance(data, MadeBytes) else tuple(data.part(some) for some in wanted)
    return replace(weight, shape=shape, data=MadeBytes(ranges, count * each, make))


def by_inputs(weight: WeightTensor, *spans: slice, size: int) -> WeightTensor:
    """Some columns of [out, in], one span's behind the other's. UserError if a block would be cut."""
    kind = _blocks(weight.type)
    outer, inner = weight.shape
    if any(span.start % kind.block or span.stop % kind.block for span in spans):
        runs = f" in {len(spans)} runs" if len(spans) > 1 else ""
        raise UserError(
            f"--tensor-parallel {size}: {weight.name} is {weight.type}, blocks of {kind.block} values along its "
            f"{inner} inputs, and a rank's {inner // size}{runs} are no whole blocks; take other files of the model",
            "tensor_parallel",
        )
    cuts = [slice(span.start // kind.block, span.stop // kind.block) for span in spans]

    def make() -> npt.NDArray[np.uint8]:
        blocks = weight.data[:].reshape(outer, inner // kind.block, kind.size)
        return np.concatenate([blocks[:, cut] for cut in cuts], 1).reshape(-1)

    made = made_of(weight.data, outer * sum(cut.stop - cut.start for cut in cuts) * kind.size, make)
    return replace(weight, shape=(outer, sum(span.stop - span.start for span in spans)), data=made)


def _blocks(type: str) -> GGMLType:
    return BLOCKS[type] if type in BLOCKS else by_name(type)


def _divided(config: ModelConfig, shard: Shard, step: int) -> ModelConfig:
    """What a rank computes of a model; UserError if a size cannot be divided."""
    sizes = dict.fromkeys(_parts(config, shard, step))
    for held in sizes:
        if held.size % (shard.size * held.unit):
            counts = range(1, MOST_RANKS + 1)
            allowed = [n for n in counts if not any(each.size % (n * each.unit) for each in sizes)]
            whole = f", which does not make parts that are multiples of {held.unit}" if held.unit > 1 else ""
            raise UserError(
                f"--tensor-parallel {shard.size}: {held.name} is {held.size}{whole}; allowed for this model are "
                f"{', '.join(map(str, allowed or [1]))}",
                "tensor_parallel",
            )
    layers = tuple(_layer(layer, shard) for layer in config.layers)
    return replace(config, layers=layers, tie_word_embeddings=False)


def _layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    mlp = layer.mlp.of_rank(shard.size)
    if isinstance(mlp, Sparse) and isinstance(layer.mlp, Sparse) and (shard.whole_experts or not shard.experts):
        mlp = replace(mlp, intermediate=layer.mlp.intermediate)
        if shard.whole_experts:
            held = shard.span(layer.mlp.experts)
            mlp = replace(mlp, held=range(held.start, held.stop))
    return LayerSpec(layer.attention.of_rank(shard.size), mlp)


def _parts(config: ModelConfig, shard: Shard, step: int) -> Iterator[Divided]:
    """What is divided."""
    for layer in config.layers:
        yield from layer.attention.divided(step)
        if isinstance(layer.mlp, Sparse) and shard.whole_experts:
            yield from layer.mlp.divided_whole(step)
            continue
        whole = layer.mlp.size if isinstance(layer.mlp, Sparse) and not shard.experts else None
        yield from (held for held in layer.mlp.divided(step) if held.name != whole)
