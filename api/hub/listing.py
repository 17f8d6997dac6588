"""What a repository holds, and which of its files a server needs. No network here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from api.hub.names import HubName
from engine.errors import UserError, shown
from engine.units import format_bytes

SAFETENSORS = "safetensors"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = (
    "adapter_model.safetensors",
    "fused_expert_lora.safetensors",
    "lora_experts.safetensors",
    "kt_adapter_manifest.json",
)
_ADAPTER_PICKLE = "adapter_model.bin"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:IQ\d\w*|Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP16|FP32|F16|F32))(?=$|[-._/])", re.IGNORECASE
)
_NOT_MODELS = re.compile(r"(?:.*[-._/])?(?:mmproj|imatrix)(?:[-._].*)?", re.IGNORECASE)  # an image encoder, a statistic
_CONFIG = "config.json"
_BESIDE = (
    _CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)


@dataclass(frozen=True)
class HubFile:
    """`sha256` is of the content, as the hub states it for large files; None for small ones."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    name: HubName
    commit: str
    files: Mapping[str, HubFile]


@dataclass(frozen=True)
class Option:
    """One form of a model. `files` are all that it needs, `main` the one whose path is its own (of safetensors
    the folder is), `missing` the splits that the repository lacks."""

    label: str
    main: str
    files: tuple[HubFile, ...]
    missing: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


def check_file_name(name: str) -> str:
    """UserError for a name that would lead out of a folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise UserError(f"the repository has a file named {shown(name)}: names must lie below its folder", "model")
    return name


def options(listing: Listing) -> list[Option]:
    """Every form in which the repository has the model, the smallest first. Splits belong together."""
    found = _gguf_options(listing)
    shards = sorted(name for name in listing.files if _is_shard(name))
    if _SINGLE in listing.files or INDEX in listing.files:
        parts = [*shards, INDEX] if INDEX in listing.files else [_SINGLE]  # beside it, other files are copies
        names = [*parts, *_beside(listing)]
        found.append(Option(SAFETENSORS, _SINGLE, tuple(listing.files[name] for name in names)))
    return sorted(found, key=lambda option: option.num_bytes)


def choose(listing: Listing) -> Option:
    """The form that the name asks for, or the only one. UserError with the list if there are several or none is
    meant."""
    found, name = options(listing), listing.name
    if not found:
        raise _without_model(listing)
    if name.quant is None:
        if len(found) == 1:
            return _whole(found[0], name)
        raise UserError(f"{name}: there are several forms, name one: {_shown_options(name, found)}", "model")
    wanted = name.quant.lower()
    for option in found:
        if wanted in (option.label.lower(), option.main.lower()):
            return _whole(option, name)
    raise UserError(f"{name}: there is no {name.quant}; name one of: {_shown_options(name, found)}", "model")


def needed_shards(option: Option, index: bytes, where: str) -> Option:
    """An option of safetensors with the shards that its index names, and no others. UserError if one is missing."""
    try:
        named = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: {INDEX} has no sound weight_map: {shown(error)}", "model") from None
    held = {file.name for file in option.files}
    if missing := sorted(str(name) for name in named - held):
        raise UserError(f"{where}: {missing[0]} is missing, which {INDEX} names", "model")
    kept = tuple(file for file in option.files if not _is_shard(file.name) or file.name in named)
    return Option(option.label, option.main, kept)


def beside_option(listing: Listing) -> Option:
    """What lies beside a model's weights: its configuration and tokenizer. UserError without a configuration."""
    if _CONFIG not in listing.files:
        raise UserError(f"{listing.name}: {_CONFIG} is missing, which goes with --gguf", "model")
    return Option("beside", _CONFIG, tuple(listing.files[name] for name in _beside(listing)))


def adapter_option(listing: Listing) -> Option:
    """An adapter's files. UserError if the repository holds none."""
    if listing.name.quant is not None:
        raise UserError(f"{listing.name}: an adapter has no quantisation: write hf:{listing.name.repo}", "adapters")
    if _ADAPTER_CONFIG not in listing.files:
        known = ", ".join(sorted(listing.files)[:6]) or "nothing"
        raise UserError(f"{listing.name}: {_ADAPTER_CONFIG} is missing: no adapter; it has {known}", "adapters")
    names = [_ADAPTER_CONFIG, *(name for name in _ADAPTER_FILES if name in listing.files)]
    if _ADAPTER_FILES[0] not in names and _ADAPTER_PICKLE in listing.files:
        names.append(_ADAPTER_PICKLE)
    return Option("adapter", _ADAPTER_CONFIG, tuple(listing.files[name] for name in names))


def is_adapter(listing: Listing) -> bool:
    return _ADAPTER_CONFIG in listing.files


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _beside(listing: Listing) -> list[str]:
    return [name for name in _BESIDE if name in listing.files]


def _gguf_options(listing: Listing) -> list[Option]:
    groups: dict[tuple[str, int], list[HubFile]] = {}
    for name in sorted(listing.files):
        if not name.endswith(".gguf") or _NOT_MODELS.fullmatch(name.removesuffix(".gguf")):
            continue
        split = _SPLIT.fullmatch(name)
        key = (name.removesuffix(".gguf"), 1) if split is None else (split["stem"], int(split["count"]))
        groups.setdefault(key, []).append(listing.files[name])
    labels = [_label(stem) for stem, _ in groups]
    found = []
    for (stem, count), label in zip(groups, labels, strict=True):
        files = groups[stem, count]
        own = label if labels.count(label) == 1 else stem
        folder = PurePosixPath(files[0].name).parent
        beside = str(folder / "generation_config.json")  # what is recommended for sampling
        more = [listing.files[beside]] if beside in listing.files else []
        found.append(Option(own, files[0].name, (*files, *more), count - len(files)))
    return found


def _whole(option: Option, name: HubName) -> Option:
    if option.missing:
        raise UserError(f"{name}: of {option.label} {option.missing} of the parts are missing", "model")
    return option


def _label(stem: str) -> str:
    found = _QUANT.findall(stem)
    return found[-1] if found else stem


def _shown_options(name: HubName, found: list[Option]) -> str:
    return ", ".join(f"{name.of_quant(option.label)} ({format_bytes(option.num_bytes)})" for option in found)


def _without_model(listing: Listing) -> UserError:
    if is_adapter(listing):
        what = f"it holds an adapter: --adapters NAME={listing.name}, beside its base model"
    elif any(name.endswith((".bin", ".pt", ".pth")) for name in listing.files):
        what = "its weights are pickled (.bin), which are not read; find a repository with safetensors or GGUF"
    else:
        what = f"it holds neither safetensors nor GGUF, but {', '.join(sorted(listing.files)[:6]) or 'nothing'}"
    return UserError(f"{listing.name}: {what}", "model")
