"""Files of the hub, into huggingface_hub's cache: only those that are needed, resumed, compared with their hashes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from tqdm import tqdm

from api.hub.cache import list_cached, note_revision, repo_folder, snapshot
from api.hub.listing import (
    INDEX,
    SAFETENSORS,
    HubFile,
    Listing,
    Option,
    adapter_option,
    beside_option,
    choose,
    needed_shards,
)
from api.hub.names import HubName
from api.hub.remote import Unreachable, hub_errors, list_remote
from api.hub.transfer import fetch_blob, part_path
from engine.errors import UserError
from engine.units import format_bytes


def fetch_model(listing: Listing, console: Console) -> Path:
    """The model's own path in the cache: a folder of safetensors, or the (first) GGUF file. What is missing is fetched.
    UserError for an ambiguous name, a full disk, a hub that refuses or cannot be reached."""
    name, option = listing.name, choose(listing)
    if option.label == SAFETENSORS and INDEX in listing.files:
        _download(listing, [listing.files[INDEX]], console, "model", quiet=True)
        option = needed_shards(option, (snapshot(listing) / INDEX).read_bytes(), str(name))
    _fetch(listing, option, console, "model")
    folder = snapshot(listing)
    return folder if option.label == SAFETENSORS else folder / option.main


def fetch_beside(listing: Listing, console: Console) -> Path:
    """The folder in the cache with a model's configuration and tokenizer alone. UserError as of `fetch_model`."""
    _fetch(listing, beside_option(listing), console, "model")
    return snapshot(listing)


def fetch_adapter(listing: Listing, console: Console) -> Path:
    """The adapter's folder in the cache. UserError as of `fetch_model`."""
    _fetch(listing, adapter_option(listing), console, "adapters")
    return snapshot(listing)


def listing_of(name: HubName, field: str, console: Console) -> Listing:
    """The hub's list; the cache's if the hub may not or cannot be asked. UserError."""
    cached = list_cached(name)
    if constants.HF_HUB_OFFLINE and cached is not None:
        return cached
    try:
        return list_remote(name, field)
    except Unreachable as error:
        if cached is None:
            raise
        console.print(f"note: {error}: the cache's {cached.commit[:12]} is used", markup=False, highlight=False)
        return cached


def _fetch(listing: Listing, option: Option, console: Console, field: str) -> None:
    missing = [file for file in option.files if not (snapshot(listing) / file.name).is_file()]
    _check_disk(listing, missing)
    _download(listing, missing, console, field)
    if not constants.HF_HUB_OFFLINE:
        note_revision(listing)


def _check_disk(listing: Listing, missing: list[HubFile]) -> None:
    """UserError if they do not fit on the cache's disk."""
    folder = repo_folder(listing.name.repo)
    needed = sum(max(file.size - _arrived(listing, file), 0) for file in missing)
    at = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(at).free
    if needed > free:
        raise UserError(
            f"{listing.name}: {format_bytes(needed)} are to be fetched, and {at} has {format_bytes(free)} free: "
            "set HF_HOME to a folder on a larger disk",
            "model",
        )


def _arrived(listing: Listing, file: HubFile) -> int:
    """Bytes of it that an earlier, interrupted run has left."""
    part = part_path(listing, file)
    return part.stat().st_size if file.sha256 is not None and part.is_file() else 0


def _download(listing: Listing, files: list[HubFile], console: Console, field: str, *, quiet: bool = False) -> None:
    if not files:
        return
    total = sum(file.size for file in files)
    with _Bar(console, str(listing.name), total, quiet) as bar:
        for file in files:
            if file.sha256 is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                try:
                    fetch_blob(listing, file, bar.add)
                except OSError as error:  # of the cache's folder
                    raise _unwritten(listing, file, error, field) from None
            _link(listing, file, bar, field)
            bar.ended(file)


def _link(listing: Listing, file: HubFile, bar: _Bar, field: str) -> None:
    """Have a file in its commit's folder; the library fetches what is not in the cache yet."""
    with hub_errors(listing.name, field):
        try:
            hf_hub_download(listing.name.repo, file.name, revision=listing.commit, tqdm_class=_counter(bar.add))
        except (OSError, ValueError) as error:
            of_disk = isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError | FileExistsError)
            if of_disk or type(error) in (OSError, ValueError):  # neither the hub's own nor the network's
                raise _unwritten(listing, file, error, field) from None
            raise
    path = snapshot(listing) / file.name
    if (size := path.stat().st_size) != file.size:
        path.unlink()
        raise UserError(
            f"{listing.name}: {file.name} has {size} bytes instead of {file.size}: run the same command again",
            field,
        )


def _unwritten(listing: Listing, file: HubFile, error: Exception, field: str) -> UserError:
    return UserError(f"{listing.name}: {file.name}: {str(error).splitlines()[0]}", field)


def _counter(add: Callable[[float], None]) -> type[tqdm[Any]]:
    """A progress bar for huggingface_hub that shows nothing and hands on what it is told."""

    class Counter(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            add(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            add(n or 0)
            return None

    return Counter


class _Bar:
    """Bytes, rate and time left over all files: a bar on a terminal, elsewhere a line for each file."""

    def __init__(self, console: Console, title: str, total: int, quiet: bool) -> None:
        self._console, self._total, self._done, self._quiet = console, total, 0, quiet
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task(f"fetching {title}", total=total)
        self._began = time.monotonic()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def add(self, num_bytes: float) -> None:
        self._progress.advance(self._task, num_bytes)

    def ended(self, file: HubFile) -> None:
        """A file is there: its size counts, whatever was said of it."""
        self._done += file.size
        self._progress.update(self._task, completed=self._done)
        if self._quiet or self._console.is_terminal:
            return
        rate = self._done / max(time.monotonic() - self._began, 1e-3)
        left = self._total - self._done
        line = f"fetched {file.name} ({format_bytes(file.size)}; {format_bytes(int(rate))}/s"
        line += f"; {format_bytes(left)} left, about {left / rate:.0f} s)" if left and rate else ")"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
