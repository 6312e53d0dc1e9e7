"""Which version this is."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    try:
        return metadata.version("bequest")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0.1.0"
