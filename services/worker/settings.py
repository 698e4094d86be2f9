"""The worker's flags and environment variables, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from percolator.observers.worker import WorkerLimits
from percolator.services.chassis.settings.loading import (
    DialAddress,
    ListenAddress,
    Seconds,
    ServiceSettings,
)

_DEFAULTS = WorkerLimits()


class WorkerSettings(ServiceSettings):
    """The settings of a worker."""

    service: ClassVar[str] = "worker"

    listen: ListenAddress = "127.0.0.1:7104"
    """host:port to serve health on; port 0 is any free one."""

    observers: tuple[str, ...] = ()
    """Lists of observers, as module:name, separated by commas."""

    observer_concurrency_max: Annotated[int, Field(ge=1, le=100_000)] = _DEFAULTS.concurrency_max
    """Runs in progress at once, for all observers together."""

    observer_threads_max: Annotated[int, Field(ge=1, le=10_000)] = _DEFAULTS.threads_max
    """Threads for blocking observers."""

    queue_rows_max: Annotated[int, Field(ge=1, le=10_000_000)] = _DEFAULTS.queue_rows_max
    """How many changes may wait that were found but not yet handled."""

    queue_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 34)] = _DEFAULTS.queue_bytes_max
    """About how much memory these waiting changes may take."""

    scan_pause_seconds_max: Seconds = _DEFAULTS.scan_pause_seconds_max
    """The pause between two passes over all tablets when the last passes found nothing."""

    trace_file: Path | None = None
    """Where to append a line for each run, for `percolator observers trace`."""

    @field_validator("masters")
    @classmethod
    def _has_a_cluster(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        if not masters:
            raise ValueError("is missing: a worker needs the address of at least one master")
        return masters

    @field_validator("observers")
    @classmethod
    def _has_observers(cls, observers: tuple[str, ...]) -> tuple[str, ...]:
        if not observers:
            raise ValueError("is missing: expected module:name")
        return observers

    def limits(self) -> WorkerLimits:
        """The bounds as the library takes them."""
        return WorkerLimits(
            concurrency_max=self.observer_concurrency_max,
            threads_max=self.observer_threads_max,
            queue_rows_max=self.queue_rows_max,
            queue_bytes_max=self.queue_bytes_max,
            scan_pause_seconds_max=self.scan_pause_seconds_max,
        )
