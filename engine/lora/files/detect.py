"""Sorts an adapter's keys by what they are. Whatever has no place is refused here, with the list."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from engine.architectures.base import Architecture
from engine.architectures.config import ModelConfig
from engine.errors import AdapterError
from engine.lora.files.folder import EXTRA_FILE, FUSED_FILE, AdapterFiles, Entry, refusal
from engine.lora.files.settings import LANGUAGE_MODEL

PREFIX = "base_model.model."
PROJECTIONS = ("gate", "up", "down")
GATE_UP = "gate_up"  # both in one
FUSED_NAMES = tuple(f"{projection}_lora_{half}" for projection in PROJECTIONS for half in "ab")

# Containers of other programs around a model or its layers: compiled, sharded, checkpointed, replicated, of a
# multimodal model.
WRAPPERS = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", LANGUAGE_MODEL])
WHOLE = ("model.embed_tokens", "lm_head")  # modules that are stored whole though nothing has trained them

_LAYER = r"model\.layers\.(\d+)\."
_HALF = r"lora_([AB])(?:(?:\.\w+)?\.weight)?"  # with the name that PEFT has for the adapter, or without
_LINEAR = re.compile(_LAYER + r"([\w.]+)\." + _HALF)
_EXPERT = re.compile(_LAYER + r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\." + _HALF)
_FUSED_3D = re.compile(_LAYER + r"mlp\.experts\.(base_layer\.|)" + _HALF)
_STACKED = re.compile(_LAYER + rf"mlp\.experts\.(gate|up|down|{GATE_UP})_proj\." + _HALF)
_WHOLE = re.compile(rf"({'|'.join(map(re.escape, WHOLE))})(?:\.base_layer)?\.weight")
_EXTRA = re.compile(_LAYER + r"mlp\.lora_experts\.(\d+)\.le_(gate|up|down)\.weight")
_KT_FUSED = re.compile(r"layers\.(\d+)\.experts\.(\w+)")

_NAMED = (
    (re.compile(r"lora_magnitude_vector"), "DoRA is not supported"),
    (re.compile(r"lora_embedding_[AB]|embed_tokens"), "LoRA on embed_tokens is not supported"),
    (re.compile(r"(^|\.)lm_head\."), "LoRA on lm_head is not supported"),
    (re.compile(r"modules_to_save"), "modules_to_save is not supported"),
    (re.compile(r"lora_[AB](\.\w+)?\.bias$"), "LoRA biases are not supported"),
)


@dataclass(slots=True)
class Halves:
    """The A and the B of one module."""

    a: Entry | None = None
    b: Entry | None = None

    @property
    def both(self) -> tuple[Entry, Entry]:
        if self.a is None or self.b is None:
            raise AdapterError("a lora_A without its lora_B, or the reverse", [e.key for e in self.entries])
        return self.a, self.b

    @property
    def entries(self) -> list[Entry]:
        return [entry for entry in (self.a, self.b) if entry is not None]


@dataclass
class Layout:
    """Every tensor of an adapter, by kind."""

    prefixed: bool = True  # keys begin with base_model.model.
    linears: dict[str, Halves] = field(default_factory=dict)  # by module
    per_expert: dict[int, dict[int, dict[str, Halves]]] = field(default_factory=dict)  # layer, expert, projection
    stacked: dict[int, dict[str, Halves]] = field(default_factory=dict)  # layer, projection or "gate_up"
    fused_3d: dict[int, dict[str, Halves]] = field(default_factory=dict)  # layer, "base_layer." or ""
    kt_fused: dict[int, dict[str, Halves]] = field(default_factory=dict)  # layer, projection
    extra: dict[int, dict[int, dict[str, Entry]]] = field(default_factory=dict)  # layer, index, projection
    whole: dict[str, Entry] = field(default_factory=dict)  # by module, one of `WHOLE`

    def expert_halves(self) -> Iterator[tuple[int, Halves]]:
        """(layer, halves) of the expert LoRA that lies in adapter_model.*."""
        for layer, experts in self.per_expert.items():
            yield from ((layer, halves) for projections in experts.values() for halves in projections.values())
        for form in (self.stacked, self.fused_3d):
            for layer, nested in form.items():
                yield from ((layer, halves) for halves in nested.values())

    def halves(self) -> Iterator[Halves]:
        yield from self.linears.values()
        yield from (halves for _, halves in self.expert_halves())
        yield from (halves for projections in self.kt_fused.values() for halves in projections.values())


def sort_keys(files: AdapterFiles, families: Collection[Architecture]) -> Layout:
    """Give each tensor its place; keys name modules as one of `families` does, here or in its files. AdapterError lists
    keys that have none, come twice or lack their partner."""
    layout = Layout()
    main = files.main or {}
    layout.prefixed = not main or any(_unwrapped(key).startswith(PREFIX) for key in main)
    leftovers, twice = [], []
    for entry in main.values():
        placed = _place(layout, entry, families)
        if placed is None:
            leftovers.append(entry.key)
        elif not placed:
            twice.append(entry.key)
    if files.fused is not None and not files.fused:
        raise AdapterError(f"{FUSED_FILE} holds no tensor", [FUSED_FILE])
    for entry in (files.fused or {}).values():
        if not _place_fused(layout, entry):
            leftovers.append(entry.key)
    extra = Layout()
    for entry in (files.extra or {}).values():
        placed = next((p for f in families if (p := _place_extra(extra, entry, f)) is not None), None)
        if placed is None:
            leftovers.append(entry.key)
        elif not placed:
            twice.append(entry.key)
    if shadowed := _put_over(layout, extra):
        files.warnings.append(f"{shadowed} tensors of {EXTRA_FILE} count instead of those in {files.main_file}")
    _refuse_leftovers(leftovers)
    if twice:
        raise refusal("the same tensor is there twice", twice)
    _deal_shared(layout)
    lonely = [entry.key for halves in layout.halves() if len(halves.entries) == 1 for entry in halves.entries]
    if lonely:
        raise refusal("a lora_A without its lora_B, or the reverse", lonely)
    return layout


def check_places(layout: Layout, config: ModelConfig) -> None:
    """Layers and experts that the base does not have."""
    layers, experts = range(config.num_hidden_layers), range(config.num_experts)
    sparse = set(config.sparse_layers)
    wrong = [e.key for m, h in layout.linears.items() if int(m.split(".")[2]) not in layers for e in h.entries]
    wrong += [e.key for layer, h in layout.expert_halves() if layer not in layers for e in h.entries]
    if wrong:
        raise refusal(f"layers that the base does not have (it has {len(layers)})", wrong)
    wrong = [e.key for layer, h in layout.expert_halves() if layer not in sparse for e in h.entries]
    wrong += [e.key for la, ps in layout.kt_fused.items() if la not in sparse for h in ps.values() for e in h.entries]
    wrong += [e.key for la, js in layout.extra.items() if la not in sparse for ps in js.values() for e in ps.values()]
    if wrong:
        raise refusal("expert LoRA on layers that have no experts in the base", wrong)
    wrong = [
        entry.key
        for by_expert in layout.per_expert.values()
        for expert, projections in by_expert.items()
        if expert not in experts
        for halves in projections.values()
        for entry in halves.entries
    ]
    if wrong:
        raise refusal(f"experts that the base does not have (it has {len(experts)})", wrong)


def _place(layout: Layout, entry: Entry, families: Collection[Architecture]) -> bool | None:
    """True: placed; False: its place is taken; None: it has none."""
    return next((p for f in families if (p := _place_in(layout, entry, f)) is not None), None)


def _place_in(layout: Layout, entry: Entry, family: Architecture) -> bool | None:
    key = _canonical(entry, family)
    if (match := _LINEAR.fullmatch(key)) and match[2] in family.lora_targets:
        module = f"model.layers.{int(match[1])}.{match[2]}"
        return _put(layout.linears.setdefault(module, Halves()), match[3], entry)
    if match := _EXPERT.fullmatch(key):
        projections = layout.per_expert.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})
        return _put(projections.setdefault(match[3], Halves()), match[4], entry)
    if match := _STACKED.fullmatch(key):
        return _put(layout.stacked.setdefault(int(match[1]), {}).setdefault(match[2], Halves()), match[3], entry)
    if match := _WHOLE.fullmatch(key):
        return layout.whole.setdefault(match[1], entry) is entry
    if match := _FUSED_3D.fullmatch(key):
        return _put(layout.fused_3d.setdefault(int(match[1]), {}).setdefault(match[2], Halves()), match[3], entry)
    return _place_extra(layout, entry, family)


def _place_extra(layout: Layout, entry: Entry, family: Architecture) -> bool | None:
    match = _EXTRA.fullmatch(_canonical(entry, family))
    if match is None:
        return None
    projections = layout.extra.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})
    return projections.setdefault(match[3], entry) is entry


def _put_over(layout: Layout, extra: Layout) -> int:
    """Let the extra MLPs of the file of their own count; how many tensors they replace."""
    replaced = 0
    for layer, mlps in extra.extra.items():
        for index, projections in mlps.items():
            held = layout.extra.setdefault(layer, {}).setdefault(index, {})
            replaced += len(held.keys() & projections.keys())
            held.update(projections)
    return replaced


def _canonical(entry: Entry, family: Architecture) -> str:
    return family.canonical(_unwrapped(entry.key).removeprefix(PREFIX))


def _unwrapped(key: str) -> str:
    """Without the containers of other programs."""
    return ".".join(word for word in key.split(".") if word not in WRAPPERS)


def _deal_shared(layout: Layout) -> None:
    """An A or B that all experts share, [1, ...] or without that axis, becomes that of each expert beside it."""
    for layer, projections in layout.stacked.items():
        for projection, halves in list(projections.items()):
            entries, experts = halves.entries, layout.per_expert.get(layer, {})
            if len(entries) == 2 or not (len(entries[0].shape) == 2 or entries[0].shape[:1] == (1,)):
                continue
            half = "a" if halves.a is not None else "b"
            theirs = [pairs[projection] for pairs in experts.values() if projection in pairs]
            if not theirs or any(getattr(pair, half) is not None for pair in theirs):
                continue
            for pair in theirs:
                _put(pair, half, _shared(entries[0]))
            del projections[projection]
    layout.stacked = {layer: projections for layer, projections in layout.stacked.items() if projections}


def _shared(shared: Entry) -> Entry:
    """The one slice of [1, ...]."""
    if len(shared.shape) == 2:
        return shared
    return Entry(shared.key, shared.shape[1:], shared.dtype, lambda: shared.load()[0])


def _place_fused(layout: Layout, entry: Entry) -> bool:
    match = _KT_FUSED.fullmatch(entry.key)
    if match is None or match[2] not in FUSED_NAMES:
        return False
    projection, _, half = match[2].split("_")
    halves = layout.kt_fused.setdefault(int(match[1]), {}).setdefault(projection, Halves())
    return _put(halves, half.upper(), entry)


def _put(halves: Halves, half: str, entry: Entry) -> bool:
    if getattr(halves, half.lower()) is not None:
        return False
    setattr(halves, half.lower(), entry)
    return True


def _refuse_leftovers(leftovers: list[str]) -> None:
    for pattern, reason in _NAMED:
        keys = [key for key in leftovers if pattern.search(key)]
        if keys:
            raise refusal(reason, keys)
    if leftovers:
        raise refusal("tensors that have no place in an adapter of this model family", leftovers)
