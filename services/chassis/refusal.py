"""A service that did not start: the line that says why, and whether another attempt may succeed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from percolator.errors import PercolatorError, Retry, StoreFault, StoreUnusable
from percolator.services.chassis.settings.service_settings import ServiceSettings

_PATH_SETTINGS = ("store", "ready_file", "trace_file")
_TEMPORARY = ".new"
"""The suffix of a file that is about to replace another one."""

_MAY_PASS = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
_LASTING_FAULTS = (StoreFault.DAMAGED, StoreFault.READ_ONLY)


def may_pass(error: Exception) -> bool:
    """Whether the same start may succeed later with unchanged settings.

    A full disk may be cleared, and another service may become ready. A port in use, a wrong path, a
    damaged file or another cluster's store stay as they are.
    """
    if isinstance(error, StoreUnusable):
        return error.fault not in _LASTING_FAULTS
    if isinstance(error, PercolatorError):
        return error.retry is not Retry.USELESS
    return isinstance(error, OSError) and error.errno in _MAY_PASS


def one_line(error: Exception, settings: ServiceSettings) -> str:
    """What is wrong and, for a file, the setting to change."""
    if isinstance(error, OSError) and error.filename is not None:
        name = os.fsdecode(error.filename)
        return f"{_setting_of(name, settings)}{name}: {error.strerror}"
    return " ".join(str(error).split())


def _setting_of(name: str, settings: ServiceSettings) -> str:
    path = Path(name.removesuffix(_TEMPORARY)).absolute()
    for setting in _PATH_SETTINGS:
        value: str | Path | None = getattr(settings, setting, None)
        if value and path.is_relative_to(Path(value).absolute()):
            return f"{setting}: "
    return ""
