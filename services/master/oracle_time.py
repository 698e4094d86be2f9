"""The oracle's time, as the leading master knows it and passes it on to the tablet servers.

Otherwise a tablet server that has just started and cannot reach the oracle would know no timestamp,
and would have to refuse all of them.
"""

from __future__ import annotations

import structlog

from percolator.errors import NotReady, PercolatorError
from percolator.services.chassis.trouble import Trouble
from percolator.services.master.registry import Registry
from percolator.timestamps import Timestamp
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.v1.oracle_pb2 import AdvanceEpochRequest
from percolator.wire.methods import ADVANCE_EPOCH
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import World

_ASK_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
_AGAIN_SECONDS = 0.2
_SECONDS_MIN = 0.001

_log = structlog.get_logger("percolator.master")


class OracleTime:
    """`run` has to run while this master leads."""

    def __init__(self, world: World, registry: Registry) -> None:
        self._world = world
        self._registry = registry
        self._addresses: list[str] = []
        self._source: TimestampSource | None = None
        self._trouble = Trouble(
            _log, "the oracle does not answer this master", "the oracle answers again"
        )
        self.newest = 0
        """A timestamp about a second old at most; 0 before the oracle has answered."""
        self._heard_at = 0.0

    @property
    def lead_milliseconds(self) -> int | None:
        """How far timestamps are ahead of this master's wall clock; None before they are known."""
        if not self.newest:
            return None
        clock = self._world.clock
        elapsed = (clock.monotonic_seconds() - self._heard_at) * 1000
        now = Timestamp(self.newest).physical_milliseconds + elapsed
        return round(now - clock.wall_milliseconds())

    def source(self) -> TimestampSource:
        """Timestamps for this master. Raises `NotReady` while no oracle is known."""
        self._addresses[:] = [
            one.address
            for one in self._registry.servers()
            if one.kind == ServiceKind.SERVICE_KIND_ORACLE
        ] or self._addresses
        if not self._addresses:
            raise NotReady("no oracle is known")
        if self._source is None:
            self._source = TimestampSource(self._world, self._addresses)
        return self._source

    async def raise_epoch(self, deadline: float) -> None:
        """Returns when the catalogue's epoch is higher than any that a client can have seen before
        this call. Raises `NotReady` if no oracle says so in time.

        The epoch is asked for only now. So whoever has seen a higher one, be it because of another
        call, has seen it after what this call's caller has made durable.
        """
        clock, problem = self._world.clock, "none has answered"
        source = self.source()
        await source.get(timeout_seconds=max(deadline - clock.monotonic_seconds(), _SECONDS_MIN))
        request = AdvanceEpochRequest(catalogue_epoch=source.catalogue_epoch + 1)
        while clock.monotonic_seconds() < deadline:
            for address in list(self._addresses):
                advance = self._world.network.unary(address, ADVANCE_EPOCH)
                left = max(deadline - clock.monotonic_seconds(), _SECONDS_MIN)
                try:
                    await advance(request, min(left, _ANSWER_SECONDS))
                except PercolatorError as error:  # a standby, or one that is gone
                    problem = str(error)
                else:
                    return
            await clock.sleep(_AGAIN_SECONDS)
            self.source()  # others may have been reported meanwhile
        raise NotReady(f"the oracle was not told of the change: {problem}")

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                try:
                    await self._ask()
                except PercolatorError as error:
                    self._trouble.lasts(error)
                else:
                    self._trouble.is_over()
                await self._world.clock.sleep(_ASK_SECONDS)
        finally:
            if self._source is not None:
                await self._source.close()

    async def _ask(self) -> None:
        self.newest = await self.source().get(timeout_seconds=_ANSWER_SECONDS)
        self._heard_at = self._world.clock.monotonic_seconds()
