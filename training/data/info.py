"""Which files a data set is, and how its columns are named: LLaMA-Factory's dataset_info.json. Torch-free."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.config import TrainConfig
from training.data.files import SUFFIXES
from training.errors import DataError

_FORMATS = ("alpaca", "sharegpt", "openai")
_COLUMNS = ("prompt", "query", "response", "history", "messages", "system", "tools", "chosen", "rejected")
_TAGS = (
    "role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag",
)  # fmt: skip
_REFUSED = {
    "hf_hub_url": "download the data set, and give its file or folder as file_name",
    "ms_hub_url": "download the data set, and give its file or folder as file_name",
    "om_hub_url": "download the data set, and give its file or folder as file_name",
    "cloud_file_name": "download the file, and give it as file_name",
    "script_url": "code beside a data set is never run: write its rows into a file, and give that as file_name",
    "subset": "belongs to a data set on a hub: give the file as file_name",
    "split": "belongs to a data set on a hub: give the file as file_name",
    "folder": "belongs to a data set on a hub: give the folder as file_name",
}
_INFO = "dataset_info.json"


@dataclass(frozen=True)
class Source:
    """One data set. `formatting` None: told by the columns of its first row. `columns` and `tags`: those that were
    given. `limit`: rows that are read, from the first."""

    name: str
    path: Path
    formatting: str | None = None
    ranking: bool | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None


def find_sources(config: TrainConfig, names: tuple[str, ...]) -> list[Source]:
    """The data sets by name in dataset_info.json, or by file. DataError for one that is neither."""
    folder = Path(config.dataset_dir)
    info: dict[str, Any] | None = None
    sources = []
    for name in names:
        if Path(name).suffix in SUFFIXES or "/" in name:
            path = Path(os.path.expanduser(name))
            if not os.path.exists(path) and not path.is_absolute():
                path = folder / path
            if not os.path.exists(path):  # no error for a name that no file can have
                raise DataError(f"dataset {name}: no such file, neither here nor in {folder}", "dataset")
            sources.append(Source(name, path, limit=config.max_samples))
            continue
        info = _read_info(folder) if info is None else info
        if name not in info:
            close = difflib.get_close_matches(name, info, 1)
            near = f"; did you mean {close[0]}?" if close else ""
            raise DataError(f"dataset {name} is not in {folder / _INFO}{near}", "dataset")
        sources.append(_source(name, info[name], folder, config.max_samples))
    return sources


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / _INFO
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        message = f"{path}: no such file: give dataset_dir, or a data file ({', '.join(SUFFIXES)}) as dataset"
        raise DataError(message, "dataset_dir") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", "dataset_dir") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}", "dataset_dir") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}", "dataset_dir") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: an object is expected, with one entry per data set", "dataset_dir")
    return value


def _source(name: str, entry: Any, folder: Path, most: int | None) -> Source:
    where = f"{folder / _INFO}: {name}"

    def wrong(message: str) -> DataError:
        return DataError(f"{where}: {message}", "dataset_dir")

    if not isinstance(entry, dict):
        raise wrong("an object is expected, with file_name")
    for key in entry:
        if key in _REFUSED:
            raise wrong(f"{key} is refused: {_REFUSED[key]}")
        if key not in ("file_name", "formatting", "ranking", "columns", "tags", "num_samples"):
            raise wrong(f"unknown key {key}")
    file_name = entry.get("file_name")
    if not isinstance(file_name, str) or not file_name:
        raise wrong("file_name is missing")
    path = folder / file_name
    if not os.path.exists(path):  # no error for a name that no file can have
        raise wrong(f"{path}: no such file")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _FORMATS:
        raise wrong(f"formatting is {formatting!r}; allowed is {', '.join(_FORMATS)}")
    ranking = entry.get("ranking", False)
    if not isinstance(ranking, bool):
        raise wrong(f"ranking is {ranking!r}; allowed is true or false")
    count = entry.get("num_samples")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise wrong(f"num_samples is {count!r}; allowed is 1 or more")
    limit = min([number for number in (count, most) if number is not None], default=None)
    columns = _names(entry, "columns", _COLUMNS, wrong)
    return Source(name, path, formatting, ranking, columns, _names(entry, "tags", _TAGS, wrong), limit)


def _names(entry: dict[str, Any], key: str, allowed: tuple[str, ...], wrong: Any) -> dict[str, str]:
    names = entry.get(key, {})
    if not isinstance(names, dict):
        raise wrong(f"{key}: an object is expected")
    for name, value in names.items():
        if name in ("images", "videos", "audios", "image_tag", "video_tag", "audio_tag", "kto_tag"):
            raise wrong(f"{key}.{name} is refused: samples are text, or pairs of texts")
        if name not in allowed:
            raise wrong(f"{key}.{name} is unknown; allowed is {', '.join(allowed)}")
        if value is not None and not isinstance(value, str):
            raise wrong(f"{key}.{name}: a text is expected")
    return {name: value for name, value in names.items() if value is not None}
