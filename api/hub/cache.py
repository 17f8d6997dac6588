"""huggingface_hub's cache on this machine: what a name means there, and what is in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from api.hub.listing import INDEX, SAFETENSORS, HubFile, Listing, Option, is_adapter, needed_shards, options
from api.hub.names import HubName

_MODELS = "models--"


@dataclass(frozen=True)
class Held:
    """A form of a model, or an adapter, in the cache. `path` is a model's own, None of what is none; `why` then says
    what it is, or what it lacks."""

    name: HubName
    num_bytes: int
    path: Path | None
    why: str = ""


def cache_folder() -> Path:
    """HF_HUB_CACHE, or as HF_HOME says."""
    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo: str) -> Path:
    return cache_folder() / (_MODELS + repo.replace("/", "--"))


def snapshot(listing: Listing) -> Path:
    """Where the files of its commit are, or will be."""
    return repo_folder(listing.name.repo) / "snapshots" / listing.commit


def list_cached(name: HubName) -> Listing | None:
    """The files of the revision that are in the cache, None if there are none."""
    folder = repo_folder(name.repo)
    try:
        commit = (folder / "refs" / name.revision).read_text().strip()
    except OSError:
        commit = name.revision
    at = folder / "snapshots" / commit
    files = {}
    for path in _files_below(at):
        file = str(path.relative_to(at))
        files[file] = HubFile(file, path.stat().st_size)
    return Listing(name, commit, files) if files else None


def whole_in_cache(listing: Listing, option: Option) -> Path | None:
    """The option's own path, if all of it is in the cache."""
    folder = snapshot(listing)
    if option.label == SAFETENSORS and (folder / INDEX).is_file():
        option = needed_shards(option, (folder / INDEX).read_bytes(), str(listing.name))
    if not all((folder / file.name).is_file() for file in option.files):
        return None
    return folder / option.main if option.main.endswith(".gguf") else folder


def note_revision(listing: Listing) -> None:
    """Record which commit the revision means, as huggingface_hub does, so that the name is found offline."""
    if listing.name.revision == listing.commit:
        return
    path = repo_folder(listing.name.repo) / "refs" / listing.name.revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(listing.commit)


def held_models() -> list[Held]:
    """Everything in the cache that a server could be asked for, by name."""
    found: list[Held] = []
    for folder in sorted(cache_folder().glob(f"{_MODELS}*--*")):
        repo = folder.name.removeprefix(_MODELS).replace("--", "/", 1)
        refs = folder / "refs"
        named = [str(ref.relative_to(refs)) for ref in sorted(refs.rglob("*")) if ref.is_file()]
        listings = [listing for name in named if (listing := list_cached(HubName(repo, None, name))) is not None]
        known = {listing.commit for listing in listings}
        for at in sorted((folder / "snapshots").glob("*")):  # of a commit that no branch here means
            if at.name not in known and (listing := list_cached(HubName(repo, None, at.name))) is not None:
                listings.append(listing)
        for listing in listings:
            found += _held_of(listing)
    return found


def _held_of(listing: Listing) -> Iterator[Held]:
    found = options(listing)
    for option in found:
        name = listing.name if len(found) == 1 else listing.name.of_quant(option.label)
        if option.missing:
            yield Held(name, option.num_bytes, None, f"{option.missing} parts are missing: ktserve pull {name}")
        else:
            folder = snapshot(listing)
            yield Held(name, option.num_bytes, folder if option.label == SAFETENSORS else folder / option.main)
    if not found:
        size = sum(file.size for file in listing.files.values())
        serve = f"an adapter: ktserve serve MODEL --adapters NAME={listing.name}"
        yield Held(listing.name, size, None, serve if is_adapter(listing) else "no safetensors and no GGUF")


def _files_below(folder: Path) -> Iterator[Path]:
    """Files whose content is there; a link to a blob that has been deleted is none."""
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # of ours: .ktserve
        for name in names:
            path = Path(at, name)
            if path.is_file():
                yield path
