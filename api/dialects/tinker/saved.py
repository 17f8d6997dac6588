"""What Tinker's runs have on disk: who made them, and the weights that were saved."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from api.errors import ApiError, bad_request, shortened
from api.tenants.record import Tenant
from api.tuning.service import Tuning
from engine.folders import settle

WEIGHTS, SAMPLER = "weights", "sampler_weights"
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN = re.compile("s-[0-9a-f]{16}:train:[0-9]{1,10}")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a run on disk."""

    id: str
    tenant: str
    base_model: str
    rank: int
    targets: tuple[str, ...]
    created_at: float


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept beside saved weights."""

    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


class Saved:
    """Of all tenants; what is another tenant's is as unknown."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.folder = tuning.batches.folder / "tinker"
        self._saving: dict[str, str] = {}  # tenants of weights that are being saved

    async def add(self, record: RunRecord) -> None:
        """Raises OSError."""
        place = self.folder / record.id / "run.json"
        await self.tuning.batches.in_thread(_write, place, msgspec.json.encode(record))

    async def sweep(self) -> None:
        """At a start, when no run is open: what ended with the last server goes."""

        def removed() -> None:
            for run in self.folder.glob("s-*"):
                for kind in (WEIGHTS, SAMPLER):
                    for path in (run / kind).glob(".*.part"):
                        shutil.rmtree(path, ignore_errors=True)
                    for path in (run / kind).glob(".*.old"):
                        settle(path.with_name(path.name[1:].removesuffix(".old")))
                        shutil.rmtree(path, ignore_errors=True)
                _forget_unsaved(run)

        await self.tuning.batches.in_thread(removed)

    async def forget_unsaved(self, run_id: str) -> None:
        """Of a run that has ended: what it had on disk to come back, and all of it if it has no saved weights."""
        await self.tuning.batches.in_thread(_forget_unsaved, self.folder / run_id)

    def place(self, run_id: str, kind: str, name: str) -> Path:
        """Raises ApiError 400 for a name that no folder has."""
        if not _NAME.fullmatch(name) or not _RUN.fullmatch(run_id):
            raise bad_request(f"path: 1 to 64 of A-Z a-z 0-9 . _ - are expected, got {shortened(name)}", "path")
        return self.folder / run_id / kind / name

    async def find(self, tenant: Tenant, path: str, kind: str) -> tuple[RunRecord, Path]:
        """The run of a tinker:// path and its folder. Raises ApiError 404, for another tenant's too."""
        parts = path.removeprefix("tinker://").split("/")
        if path.startswith("tinker://") and len(parts) == 3 and parts[1] == kind:
            record = await self.record(parts[0])
            folder = self.place(parts[0], kind, parts[2])
            await self.tuning.batches.in_thread(settle, folder)
            mine = record is not None and record.tenant == tenant.name
            if record is not None and mine and folder.is_dir() and not (await self.noted(folder)).expired:
                return record, folder
        raise ApiError(404, f"there are no weights {shortened(path)}", param="path", code="weights_not_found")

    async def record(self, run_id: str) -> RunRecord | None:
        if not _RUN.fullmatch(run_id):
            return None
        try:
            data = await self.tuning.batches.in_thread((self.folder / run_id / "run.json").read_bytes)
        except OSError:
            return None
        return msgspec.json.decode(data, type=RunRecord)

    async def records(self, tenant: Tenant) -> list[RunRecord]:
        """Newest first."""
        names = await self.tuning.batches.in_thread(lambda: sorted(path.name for path in self.folder.glob("s-*")))
        found = [record for name in names if (record := await self.record(name)) is not None]
        return sorted((r for r in found if r.tenant == tenant.name), key=lambda r: r.created_at, reverse=True)

    async def note(self, folder: Path, note: Note) -> None:
        """Beside saved weights, in the place of what was noted of others of this name. Raises OSError."""
        await self.tuning.batches.in_thread(_write, _beside(folder), msgspec.json.encode(note))

    async def noted(self, folder: Path) -> Note:
        note: Note = await self.tuning.batches.in_thread(_note, folder)
        return note

    async def remove(self, folder: Path) -> None:
        def removed() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            _beside(folder).unlink(missing_ok=True)

        await self.tuning.batches.in_thread(removed)

    async def expired(self) -> list[tuple[str, Path]]:
        """Paths and folders of weights of all tenants whose time is over."""

        def found() -> Iterator[tuple[str, Path]]:
            for beside in self.folder.glob("s-*/*/.*.note"):
                folder = beside.with_name(beside.name[1:].removesuffix(".note"))
                if _note(folder).expired:
                    yield f"tinker://{folder.parents[1].name}/{folder.parent.name}/{folder.name}", folder

        return await self.tuning.batches.in_thread(lambda: list(found()))

    async def reserve(self, tenant: Tenant, path: str) -> None:
        """Room for weights that are to be saved, until `release`. Raises ApiError 429 if the tenant has too many."""
        self._saving[path] = tenant.name
        if tenant.fine_tuned_models is None:
            return
        records = await self.records(tenant)
        names = await self.tuning.batches.in_thread(
            lambda: [c["tinker_path"] for r in records for c in self.checkpoints(r)]
        )
        kept = {*names, *(each for each, owner in self._saving.items() if owner == tenant.name)}
        if len(kept) > tenant.fine_tuned_models:
            self.release(path)
            message = f"{len(kept) - 1} weights are kept, {tenant.fine_tuned_models} are allowed: delete some"
            raise ApiError(429, message, code="model_quota")

    def release(self, path: str) -> None:
        self._saving.pop(path, None)

    @staticmethod
    def check_base(record: RunRecord, base: str) -> None:
        """Raises ApiError 400 for weights of another model than this server's."""
        if record.base_model != base:
            message = f"the weights of {record.id} are of {shortened(record.base_model)}, and {base!r} is served here"
            raise ApiError(400, f"path: {message}", param="path", code="wrong_base_model")

    def checkpoints(self, record: RunRecord) -> list[dict[str, Any]]:
        """Newest first."""
        found = []
        for kind, label in ((WEIGHTS, "training"), (SAMPLER, "sampler")):
            for folder in (self.folder / record.id / kind).glob("*"):
                note = _note(folder)
                if not _NAME.fullmatch(folder.name) or note.expired:  # one that is being written, or goes
                    continue
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{folder.name}",
                        "checkpoint_type": label,
                        "time": timestamp(folder.stat().st_mtime),
                        "tinker_path": f"tinker://{record.id}/{kind}/{folder.name}",
                        "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
                        "public": False,
                        "user_metadata": note.user_metadata,
                        "expires_at": None if note.expires_at is None else timestamp(note.expires_at),
                    }
                )
        return sorted(found, key=lambda each: str(each["time"]), reverse=True)


def timestamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _forget_unsaved(run: Path) -> None:
    for name in ("idle", ".idle.part", ".idle.old"):
        shutil.rmtree(run / name, ignore_errors=True)
    names = [path.name for kind in (WEIGHTS, SAMPLER) for path in (run / kind).glob("*")]
    if not any(name.endswith(".part") or _NAME.fullmatch(name) for name in names):
        shutil.rmtree(run, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.note")


def _note(folder: Path) -> Note:
    try:
        return msgspec.json.decode(_beside(folder).read_bytes(), type=Note)
    except FileNotFoundError:
        return Note()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(data)
