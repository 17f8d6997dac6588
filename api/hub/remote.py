"""Requests to the hub, through `huggingface_hub`: its tokens, HF_ENDPOINT, HF_HUB_OFFLINE. What goes wrong is a
UserError that says what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported in its documentation alone
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from api.hub.listing import HubFile, Listing, check_file_name
from api.hub.names import HubName
from engine.errors import UserError

# its transport's base class: httpx's or httpx2's, by release
_TRANSPORT: type[BaseException] = HfHubHTTPError.__bases__[0]
_PARTIAL_CONTENT = 206
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Unreachable(UserError):
    """No answer came, or not all of it."""


class NoRanges(UserError):
    """A server that sends files only as a whole."""


@contextlib.contextmanager
def hub_errors(name: HubName, field: str = "model") -> Iterator[None]:
    """What huggingface_hub raises, as a UserError with the next step."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"{name}: HF_HUB_OFFLINE is set, and the cache lacks it: unset it to fetch", field) from None
    except GatedRepoError:
        page = f"{constants.ENDPOINT}/{name.repo}"
        raise UserError(f"{name}: accept its terms at {page}, then type: hf auth login", field) from None
    except RevisionNotFoundError:
        raise UserError(f"{name}: {name.repo} has no branch, tag or commit {name.revision}", field) from None
    except RepositoryNotFoundError:
        advice = "check the spelling; if it is private, type: hf auth login"
        raise UserError(f"{name}: {constants.ENDPOINT} shows no such repository: {advice}", field) from None
    except LocalEntryNotFoundError as error:
        raise Unreachable(f"{name}: {constants.ENDPOINT} cannot be reached: {_first_line(error)}", field) from None
    except EntryNotFoundError as error:
        raise UserError(f"{name}: a file is missing: {_first_line(error)}", field) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "type: hf auth login" if status in (401, 403) else "try again later"
        raise UserError(f"{name}: {constants.ENDPOINT} answered {status}: {advice}", field) from None
    except _TRANSPORT as error:
        again = "what has arrived is kept: run the same command again"
        raise Unreachable(f"{name}: {constants.ENDPOINT}: {_first_line(error)}; {again}", field) from None


def list_remote(name: HubName, field: str = "model") -> Listing:
    """The repository's files at the revision's commit. UserError."""
    with hub_errors(name, field):
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    files: dict[str, HubFile] = {}
    for sibling in info.siblings or ():
        large = sibling.lfs
        size = sibling.size if large is None else large.size
        files[sibling.rfilename] = HubFile(
            check_file_name(sibling.rfilename), size or 0, None if large is None else large.sha256
        )
    if not info.sha:
        raise UserError(f"{name}: {constants.ENDPOINT} names no commit", field)
    return Listing(name, info.sha, files)


def read_range(listing: Listing, file: HubFile, start: int, num_bytes: int) -> bytes:
    """Exactly these bytes of a file. UserError, also if the server ignores ranges: nothing more is read then."""
    with open_range(listing, file, start, start + num_bytes) as chunks:
        return b"".join(chunks)


@contextlib.contextmanager
def open_range(listing: Listing, file: HubFile, start: int, end: int) -> Iterator[Iterator[bytes]]:
    """The bytes from `start` to `end` of a file, as they come. NoRanges if the server would send other bytes,
    Unreachable if it breaks off before the last."""
    url = hf_hub_url(listing.name.repo, file.name, revision=listing.commit)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with (
        hub_errors(listing.name),
        http_stream_backoff(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, retry_on_exceptions=()
        ) as response,
    ):
        hf_raise_for_status(response)
        partial = response.status_code == _PARTIAL_CONTENT
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if partial and (found is None or int(found[1]) != start):
            raise UserError(f"{listing.name}: {constants.ENDPOINT} answered another range of {file.name}", "model")
        if not partial and (start, end) != (0, file.size):
            raise NoRanges(
                f"{listing.name}: {constants.ENDPOINT} cannot send parts of files: type: ktserve pull {listing.name}",
                "model",
            )
        yield _exactly(response.iter_bytes(), end - start, f"{listing.name}: {file.name}")


def _exactly(chunks: Iterable[bytes], num_bytes: int, what: str) -> Iterator[bytes]:
    left = num_bytes
    for chunk in chunks:
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            return
    if left:
        raise Unreachable(f"{what}: {left} of {num_bytes} bytes did not come", "model")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
