"""`ktserve check MODEL`: the embedding, the model layer by layer and the head, the chosen backends against float32
reference.

Both sides get the reference's own hidden states as input, so an error is found where it is made, not where it shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import Sparse
from engine.attention.base import BLOCK_SIZE, BatchLayout, CacheBackend
from engine.attention.delta import StateSlots
from engine.attention.latent import torch_attention
from engine.experts.base import ExpertBackend, ExpertBuffers, ExpertTask
from engine.experts.reference import ReferenceExperts
from engine.linear.embedding import TableEmbedding
from engine.linear.reference import ReferenceLinearBackend
from engine.model.causal_lm import CausalLM
from engine.model.layer import Layer
from engine.model.load import Backends, Loader
from engine.model.mlp import SharedExpert
from engine.model.step import StepInput
from engine.ops.base import TorchOps
from engine.ops.rope import Rope
from engine.weights.dequant import dequantise
from engine.weights.layout import EMBED, HEAD, NORM
from engine.weights.store import WeightSource, WeightTensor
from scheduler.plan import NO_STATE, RowState

# mean|d| / mean|ref| above which a backend diverges, by the coarsest type of the layer's weights. bf16 activations
# alone cost about 0.005; quantised activations (int8 per block) up to 0.03. Weights that --quantise makes smaller are
# compared with the file's: int8 costs up to 0.02 more, int4 up to 0.2.
TOLERANCE = {"bf16": 0.02, "quantised": 0.06, "int8": 0.06, "int4": 0.3}


@dataclass(frozen=True)
class Finding:
    """One compared place. `error` is mean|d| / mean|ref|; `note` says what is wrong, "" if nothing is."""

    place: str
    error: float
    reference_mean: float
    reference_max: float
    nonfinite: int
    note: str = ""

    def __str__(self) -> str:
        mark = "ok  " if not self.note else "BAD "
        sizes = f"mean|x| {self.reference_mean:9.4f}  max|x| {self.reference_max:9.3f}"
        text = f"{mark}{self.place:<34} error {self.error:8.5f}  {sizes}"
        return (
            text
            + (f"  {self.nonfinite} not finite" if self.nonfinite else "")
            + (f"  <- {self.note}" if self.note else "")
        )


def check_model(
    source: WeightSource,
    backends: Backends,
    tokens: list[int],
    report: Callable[[str], None],
    tolerance: float | None = None,
    quantise: str | None = None,
) -> Finding | None:
    """Compare all that serving loads on a prefill of `tokens`; returns the first divergence, or None. Closes the
    backends.

    Before anything is compared the statistics of its tensors are looked at: a tensor with values that are not finite,
    or all zero, is reported by name; nothing is compared from the first that is not finite on. One layer is loaded at
    a time, so no experts may be streamed to a GPU (`EnginePlan.without_streaming`). `quantise`: what the backends make
    of unquantised weights (`EnginePlan.expert_quantise`).
    """
    experts = {id(b): b for b in (backends.experts(layer) for layer in source.config.sparse_layers)}.values()
    try:
        return _check_layers(source, backends, tokens, report, lambda types: tolerance or _tolerance(types, quantise))
    finally:
        for backend in experts:
            backend.close()


def _check_layers(
    source: WeightSource,
    backends: Backends,
    tokens: list[int],
    report: Callable[[str], None],
    limit_of: Callable[[set[str]], float],
) -> Finding | None:
    config, n = source.config, len(tokens)
    loader = Loader(source, backends, n)
    first: Finding | None = None
    for finding in _tensor_findings(source, None):
        report(str(finding))
        first = first or finding
        if finding.nonfinite:
            return first
    hidden = _embedded(_reference_loader(source, n), tokens)
    finding = compare("model.embed_tokens", _embedded(loader, tokens), hidden, limit_of({source.tensor(EMBED).type}))
    report(str(finding))
    first = first or (finding if finding.note else None)
    for index in range(config.num_hidden_layers):
        for finding in _tensor_findings(source, index):
            report(str(finding))
            first = first or finding
            if finding.nonfinite:  # the layer cannot be loaded, nor can what follows be computed
                return first
        reference = _reference_loader(source, n)
        outputs = {}
        for side, made in (("reference", reference), ("chosen", loader)):
            outputs[side] = _run_layer(made, made.layer(index), hidden, config)
        limit = limit_of(_types(source, index))
        for place, ref in outputs["reference"].items():
            got = outputs["chosen"][place]
            if place.endswith(".mlp") and f"{place}.gate" in outputs["reference"]:
                same = _routed_alike(config, *(side[f"{place}.gate"] for side in outputs.values()))
                got, ref = got[same], ref[same]
            finding = compare(place, got, ref, limit)
            report(str(finding))
            if finding.note and place.endswith(".mlp") and config.is_sparse(index):
                for expert in _bad_experts(source, backends, index, hidden, limit):
                    report(str(expert))
                    first = first or expert
            first = first or (finding if finding.note else None)
        hidden = (
            hidden
            + outputs["reference"][f"model.layers.{index}.self_attn"]
            + outputs["reference"][f"model.layers.{index}.mlp"]
        )
    kind = source.tensor(HEAD if source.has(HEAD) else EMBED).type
    wanted = _logits(_reference_loader(source, n), hidden)
    finding = compare("lm_head", _logits(loader, hidden), wanted, limit_of({kind}))
    report(str(finding))
    source.check_unchanged()
    return first or (finding if finding.note else None)


def compare(place: str, got: torch.Tensor, ref: torch.Tensor, limit: float) -> Finding:
    """Relative error of `got` against `ref`, both of one shape."""
    if not ref.numel():
        return Finding(place, 1.0, 0.0, 0.0, 0, "no row chose the same experts on both sides")
    got, ref = got.float(), ref.float()
    nonfinite = int((~torch.isfinite(got)).sum())
    mean = float(ref.abs().mean())
    error = float((got - ref).abs().mean()) / max(mean, 1e-12)
    note = ""
    if nonfinite:
        note = "values that are not finite"
    elif error > limit:
        note = f"diverges (allowed {limit})"
    return Finding(place, error, mean, float(ref.abs().max()), nonfinite, note)


def _routed_alike(config: ModelConfig, reference: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows whose experts are the same on both sides: at a near-tie the smallest rounding chooses, and all differs."""
    sets = [logits.topk(config.num_experts_per_tok, dim=-1).indices.sort(-1).values for logits in (reference, chosen)]
    return (sets[0] == sets[1]).all(-1)


def _types(source: WeightSource, layer: int) -> set[str]:
    modules = source.config.layers[layer].attention.modules(source.config.hidden_size)
    names = (f"model.layers.{layer}.{module.name}.weight" for module in modules if module.kind == "linear")
    types = {stored.type for name in names for stored in source.tensor(name).stored}
    if source.config.is_sparse(layer):
        types |= {source.experts(layer).type(p) for p in ("gate", "up", "down")}
    return types


def _tolerance(types: set[str], quantise: str | None) -> float:
    plain = types & {"BF16", "F16", "F32"}
    held = {quantise or "bf16"} if plain else set()
    return max(TOLERANCE[kind] for kind in held | ({"quantised"} if types > plain else set()))


def _layout(n: int, device: torch.device) -> BatchLayout:
    blocks = array("i", range((n + BLOCK_SIZE - 1) // BLOCK_SIZE))
    positions = torch.arange(n, device=device)
    fresh = RowState(0, NO_STATE)
    return BatchLayout([0, n], [n], [blocks], positions, positions.clone(), states=[fresh])


def _reference_loader(source: WeightSource, n: int) -> Loader:
    """A fresh float32 reference: only one layer of it is ever in memory."""
    config, cpu = source.config, torch.device("cpu")
    linear = ReferenceLinearBackend(torch.float32, cpu)
    blocks = len(_layout(n, cpu).block_tables[0])

    def attention(layer: int) -> CacheBackend:
        return torch_attention(config.layers[layer].attention, [layer], blocks, StateSlots(1), torch.float32, cpu)

    experts = ReferenceExperts(torch.float32, cpu)
    ops = TorchOps(config.rms_norm_eps)
    made = Backends(
        ops, lambda _: linear, linear, lambda rotation: Rope(rotation, n, cpu), attention, lambda _: experts,
        torch.float32, cpu,
    )  # fmt: skip
    return Loader(source, made, n)


def _embedded(loader: Loader, tokens: list[int]) -> torch.Tensor:
    """float32 [T, H] on the CPU."""
    ids = torch.tensor(tokens, device=loader.backends.device)
    with torch.inference_mode():
        return loader.embedding(loader.head())(ids).float().cpu()


def _logits(loader: Loader, hidden: torch.Tensor) -> torch.Tensor:
    """float32 [T, H] before the final norm -> float32 [T, V] on the CPU, V: of a rank's part of the vocabulary."""
    made = loader.backends
    x = hidden.to(made.device, made.dtype, copy=True)
    with torch.inference_mode():
        return loader.head()(made.ops.add_rms_norm(x, None, loader.vector(NORM)), None).float().cpu()


def _run_layer(loader: Loader, layer: Layer, hidden: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    """What the layer's attention and MLP add, in float32 on the CPU, from float32 input."""
    seen: dict[str, torch.Tensor] = {}
    device, n = loader.backends.device, hidden.shape[0]
    ops, table = loader.backends.ops, hidden.to(device, loader.backends.dtype)
    no_head = next(iter(loader.projections.values()))  # none is asked for
    model = CausalLM(config, ops, TableEmbedding(table, ops.embed), [layer], layer.input_norm, no_head, {})

    def observe(place: str, value: torch.Tensor) -> None:
        seen[place] = value.float().cpu().clone()

    with torch.inference_mode():
        if layer.index in model.sparse and (shared := model.sparse[layer.index].shared):
            x = ops.add_rms_norm(table.clone(), None, layer.post_norm)
            values, gate = shared.output(ops, x, None)
            added = SharedExpert.add(ops, torch.zeros_like(x), values, gate)
            held = config.layers[layer.index].mlp
            if isinstance(held, Sparse) and held.shared is not None:
                observe(f"model.layers.{layer.index}.{held.shared.mlp.name}", added)
        batch = _layout(n, device)
        model.begin_step(n, lora=False, eager=True)
        model.plan(batch)
        model.forward(StepInput(torch.arange(n, device=device), batch, observe=observe))
        model.check()  # `observe` has waited for a GPU
    return seen


def _bad_experts(
    source: WeightSource, backends: Backends, layer: int, hidden: torch.Tensor, limit: float
) -> Iterator[Finding]:
    """Every expert alone on every row, chosen backend against reference; yields those that diverge."""
    config, n = source.config, hidden.shape[0]
    reference, chosen = ReferenceExperts(torch.float32, torch.device("cpu")), backends.experts(layer)
    reference.load_layer(layer, source.experts(layer))
    x = torch.nn.functional.rms_norm(hidden, (config.hidden_size,))
    outs: list[torch.Tensor] = []
    sides: list[tuple[ExpertBuffers, Callable[[], None]]] = []
    for loader, backend in ((_reference_loader(source, n), reference), (Loader(source, backends, n), chosen)):
        buffers = loader.buffers(backend)
        buffers.bsz.fill_(n)
        buffers.hidden.copy_(x)
        sides.append((buffers, _expert_call(loader.backends.device, backend, backend.bind(layer, buffers))))
    for expert in range(config.num_experts):
        outs = []
        for buffers, run in sides:
            buffers.ids.fill_(-1)
            buffers.ids[:, 0], buffers.weights[:, 0] = expert, 1.0
            run()
            outs.append(buffers.out.float().cpu().clone())
        finding = compare(f"model.layers.{layer}.mlp.experts.{expert}", outs[1], outs[0], limit)
        if finding.note:
            yield finding


def _expert_call(device: torch.device, backend: ExpertBackend, task: ExpertTask) -> Callable[[], None]:
    """Computes the task once and waits for it."""

    def run() -> None:
        on_stream = device.type == "cuda" and backend.follows_stream
        stream = torch.cuda.current_stream(device).cuda_stream if on_stream else None
        backend.begin_step(task.buffers.max_rows, lora=False, eager=True)
        backend.post(task, stream)
        backend.wait(task, stream)
        if on_stream:
            torch.cuda.synchronize(device)
        backend.check()

    return run


def _tensor_findings(source: WeightSource, layer: int | None) -> Iterator[Finding]:
    """Tensors of a layer, or of none (None), whose values cannot be right, whatever computes with them."""
    prefix = "model.layers." if layer is None else f"model.layers.{layer}."
    for name in source.names():
        if name.startswith(prefix) != (layer is None):
            yield from _judge(name, source.tensor(name))
    if layer is not None and source.config.is_sparse(layer):
        store = source.experts(layer)
        for expert in range(store.num_experts):
            for projection in ("gate", "up", "down"):
                yield from _judge(f"{prefix}mlp.experts.{expert}.{projection}_proj", store.expert(projection, expert))


def _judge(name: str, tensor: WeightTensor) -> Iterator[Finding]:
    values = dequantise(tensor.data, tensor.type, tensor.shape, torch.float32)
    bad = int((~torch.isfinite(values)).sum())
    mean, most = float(values.abs().mean()), float(values.abs().max())
    if bad:
        yield Finding(name, 0.0, mean, most, bad, f"{tensor.type} tensor with values that are not finite")
    elif most == 0.0 and not name.endswith("bias"):
        yield Finding(name, 0.0, mean, most, 0, f"{tensor.type} tensor is all zero")
    elif most > 1e4:
        yield Finding(
            name, 0.0, mean, most, 0, f"{tensor.type} tensor has values up to {most:.3g}: scales look corrupt"
        )
