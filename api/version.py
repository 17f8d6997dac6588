"""The version that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def project_version() -> str:
    try:
        return version("ktserve")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
