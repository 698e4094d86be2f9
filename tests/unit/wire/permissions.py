"""Changes of a file that touch nothing of its content."""

from __future__ import annotations

from pathlib import Path


def change_mode(path: Path) -> None:
    """Gives the file another mode, as often as it takes: a file system's clock may stand still for
    some milliseconds, and until it goes on, the time of the change is the same as before."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.chmod(0o600)
        path.chmod(0o640)
