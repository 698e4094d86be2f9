"""The version of what runs here."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The version of the installed distribution: "1.4.2"."""
    return metadata.version("percolator-store")
