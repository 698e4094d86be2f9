"""`percolator serve lockservice`: which processes are alive, and which rows they work on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar

from prometheus_client.metrics_core import Metric
from pydantic import Field, model_validator

from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.metrics import ServiceMetrics
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import ListenAddress, ServiceSettings, load
from percolator.services.lockservice.handler import LockServiceHandler
from percolator.services.lockservice.sessions import LockServiceLimits
from percolator.v1 import lockservice_pb2
from percolator.v1.cluster_pb2 import ServiceKind

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
    """The longest time to live; a lock that asks for more gets this. After a restart, no session is
    declared dead for this long."""

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


class LockServiceMetrics(ServiceMetrics):
    """Collects `percolator_lockservice_*`."""

    prefix = "percolator_lockservice_"

    def __init__(self, handler: LockServiceHandler) -> None:
        self._handler = handler

    def collect(self) -> Iterator[Metric]:
        sessions, locks = self._handler.sessions, self._handler.locks
        yield self.gauge("sessions", "Living sessions, pins included.", len(sessions))
        yield self.gauge("locks", "Advisory locks remembered.", len(locks))
        yield self.gauge("lock_name_bytes", "Bytes of their names.", locks.name_bytes)
        yield self.counter("sessions_opened", "Sessions opened.", sessions.counts.opened)
        yield self.counter("sessions_renewed", "Renewals of sessions.", sessions.counts.renewed)
        yield self.counter(
            "sessions_ended", "Sessions ended by their owners.", sessions.counts.ended
        )
        yield self.counter(
            "pins_ended",
            "Pins ended because they had become older than the cluster allows.",
            sessions.counts.ended_too_old,
        )
        yield self.counter(
            "takeovers", "Sessions taken over after a restart.", sessions.counts.taken_over
        )
        yield self.counter("locks_acquired", "Locks taken.", locks.counts.acquired)
        yield self.counter(
            "locks_extended", "Locks extended by their holders.", locks.counts.extended
        )
        yield self.counter(
            "locks_contended", "Locks that another session held.", locks.counts.contended
        )
        yield self.counter(
            "locks_unlocked", "Locks released by their holders.", locks.counts.unlocked
        )
        expired = {"session": sessions.counts.expired, "lock": locks.counts.expired}
        yield self.counters("expirations", "What was not renewed in time.", "kind", expired)
        refused = {
            "session_expired": sessions.counts.refused_expired,
            "pin_too_old": sessions.counts.refused_too_old,
            "sessions_full": sessions.counts.refused_full,
            "locks_full": locks.counts.refused_full,
        }
        yield self.counters("refused", "Calls refused.", "reason", refused)


@asynccontextmanager
async def build(host: Host[LockServiceSettings]) -> AsyncIterator[list[Exposed]]:
    """A lock service that knows no session yet."""
    handler = LockServiceHandler(
        host.world.clock, host.world.random, host.settings.limits(), host.quotas
    )
    host.metrics_registry.register(LockServiceMetrics(handler))
    host.background("expiry", handler.expire_forever())
    yield [Exposed(lockservice_pb2.DESCRIPTOR.services_by_name["LockService"], handler)]


def main(arguments: Sequence[str]) -> int:
    """`percolator serve lockservice`: returns the exit code."""
    return run(load(LockServiceSettings, arguments), ServiceKind.SERVICE_KIND_LOCK_SERVICE, build)
