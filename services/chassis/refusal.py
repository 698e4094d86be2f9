"""The one line that says why a service did not start, for somebody who reads nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from services.chassis.service_settings import ServiceSettings

_PATH_SETTINGS = ("store", "ready_file")
_TEMPORARY = ".new"
"""Ends the name of a file that is about to replace another one."""


def one_line(error: Exception, settings: ServiceSettings) -> str:
    """What is wrong and, for a file, the setting to change."""
    if isinstance(error, OSError) and error.filename is not None:
        name = os.fsdecode(error.filename)
        return f"{_setting_of(name, settings)}{name}: {error.strerror}"
    return " ".join(str(error).split())


def _setting_of(name: str, settings: ServiceSettings) -> str:
    path = Path(name.removesuffix(_TEMPORARY))
    for setting in _PATH_SETTINGS:
        value: str = getattr(settings, setting, "")
        if value and path.is_relative_to(value):
            return f"{setting}: "
    return ""
