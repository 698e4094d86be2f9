"""The lock service's flags and environment variables, checked."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from percolator.services.chassis.settings.loading import ListenAddress, ServiceSettings
from percolator.services.lockservice.limits import LockServiceLimits

_DEFAULTS = LockServiceLimits()


class LockServiceSettings(ServiceSettings):
    """The settings of the lock service."""

    service: ClassVar[str] = "lockservice"

    listen: ListenAddress = "127.0.0.1:7102"
    """host:port to serve on; port 0 is any free one."""

    request_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 20)] = 1 << 20
    """The size of the largest request that is accepted."""

    request_bytes_total_max: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 64 << 20
    """The memory for requests that arrive or are being answered. One connection may use a quarter
    of it, one client half; administrators and servers have as much of their own."""

    ttl_milliseconds_min: Annotated[int, Field(ge=500, le=3_600_000)] = (
        _DEFAULTS.ttl_milliseconds_min
    )
    """The shortest time to live that a session or a lock may ask for."""

    ttl_milliseconds_max: Annotated[int, Field(ge=500, le=3_600_000)] = (
        _DEFAULTS.ttl_milliseconds_max
    )
    """The longest time to live. After a restart, no session is declared dead for this long."""

    sessions_max: Annotated[int, Field(ge=1, le=10_000_000)] = _DEFAULTS.sessions_max
    """Sessions open at once, pins included. About 1 KiB each."""

    locks_max: Annotated[int, Field(ge=1, le=100_000_000)] = _DEFAULTS.locks_max
    """Advisory locks held at once. About 250 bytes each, plus their names."""

    lock_name_bytes_total_max: Annotated[int, Field(ge=1_024, le=1 << 36)] = (
        _DEFAULTS.lock_name_bytes_total_max
    )
    """Bytes of the names of all locks together."""

    request_items_max: Annotated[int, Field(ge=1, le=100_000)] = _DEFAULTS.request_items_max
    """Lock names or session ids in one request."""

    page_sessions_max: Annotated[int, Field(ge=1, le=100_000)] = _DEFAULTS.page_sessions_max
    """Sessions on one page of a listing."""

    @model_validator(mode="after")
    def _some_ttl_is_allowed(self) -> LockServiceSettings:
        if self.ttl_milliseconds_min > self.ttl_milliseconds_max:
            raise ValueError(
                f"ttl_milliseconds_min: {self.ttl_milliseconds_min} is above "
                f"ttl_milliseconds_max, {self.ttl_milliseconds_max}"
            )
        return self

    def limits(self) -> LockServiceLimits:
        """The bounds as the cores take them."""
        return LockServiceLimits(
            ttl_milliseconds_min=self.ttl_milliseconds_min,
            ttl_milliseconds_max=self.ttl_milliseconds_max,
            sessions_max=self.sessions_max,
            locks_max=self.locks_max,
            lock_name_bytes_total_max=self.lock_name_bytes_total_max,
            request_items_max=self.request_items_max,
            page_sessions_max=self.page_sessions_max,
        )
