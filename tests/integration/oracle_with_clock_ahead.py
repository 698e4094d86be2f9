"""The real oracle, on a machine whose wall clock is two hours ahead."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import load
from percolator.services.oracle.service import OracleSettings, build
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.world import MachineClock

AHEAD_MILLISECONDS = 2 * 3_600_000


class ClockAhead(MachineClock):
    def wall_milliseconds(self) -> int:
        return super().wall_milliseconds() + AHEAD_MILLISECONDS


@asynccontextmanager
async def build_ahead(host: Host[OracleSettings]) -> AsyncIterator[list[Exposed]]:
    host.world = dataclasses.replace(host.world, clock=ClockAhead())
    async with build(host) as exposed:
        yield exposed


if __name__ == "__main__":
    sys.exit(run(load(OracleSettings), ServiceKind.SERVICE_KIND_ORACLE, build_ahead))
