"""The metrics of the lock service, read when they are asked for: no call pays for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from percolator.services.lockservice.handler import LockServiceHandler

_PREFIX = "percolator_lockservice_"


class LockServiceMetrics(Collector):
    """Collects `percolator_lockservice_*`."""

    def __init__(self, handler: LockServiceHandler) -> None:
        self._handler = handler

    def collect(self) -> Iterator[Metric]:
        sessions, locks = self._handler.sessions, self._handler.locks
        yield _gauge("sessions", "Living sessions, pins included.", len(sessions))
        yield _gauge("locks", "Advisory locks remembered.", len(locks))
        yield _gauge("lock_name_bytes", "Bytes of their names.", locks.name_bytes)
        yield _counter("sessions_opened", "Sessions opened.", sessions.counts.opened)
        yield _counter("sessions_renewed", "Renewals of sessions.", sessions.counts.renewed)
        yield _counter("sessions_ended", "Sessions ended by their owners.", sessions.counts.ended)
        yield _counter(
            "pins_ended",
            "Pins ended because they had become older than the cluster allows.",
            sessions.counts.ended_too_old,
        )
        yield _counter(
            "takeovers", "Sessions taken over after a restart.", sessions.counts.taken_over
        )
        yield _counter("locks_acquired", "Locks taken.", locks.counts.acquired)
        yield _counter("locks_extended", "Locks extended by their holders.", locks.counts.extended)
        yield _counter(
            "locks_contended", "Locks that another session held.", locks.counts.contended
        )
        yield _counter("locks_unlocked", "Locks released by their holders.", locks.counts.unlocked)
        yield self._expirations()
        yield self._refused()

    def _expirations(self) -> Metric:
        family = CounterMetricFamily(
            _PREFIX + "expirations", "What was not renewed in time.", labels=["kind"]
        )
        family.add_metric(["session"], self._handler.sessions.counts.expired)
        family.add_metric(["lock"], self._handler.locks.counts.expired)
        return family

    def _refused(self) -> Metric:
        family = CounterMetricFamily(_PREFIX + "refused", "Calls refused.", labels=["reason"])
        family.add_metric(["session_expired"], self._handler.sessions.counts.refused_expired)
        family.add_metric(["pin_too_old"], self._handler.sessions.counts.refused_too_old)
        family.add_metric(["sessions_full"], self._handler.sessions.counts.refused_full)
        family.add_metric(["locks_full"], self._handler.locks.counts.refused_full)
        return family


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, documentation, value=value)
