"""At shutdown, the master moves this server's tablets, so that no client waits for a lease.

If anything goes wrong here, the only cost is a pause: the tablets are closed anyway, and their next
owners find everything.
"""

from __future__ import annotations

from structlog.stdlib import BoundLogger

from percolator.errors import NotReady, PercolatorError, Unavailable
from percolator.v1.master_pb2 import DrainServerRequest
from percolator.wire.methods import DRAIN_SERVER
from percolator.world import Network

_PART_OF_DRAIN = 0.75
"""The rest of the time is for closing tablets that could not be moved."""


async def hand_over(
    network: Network,
    masters: tuple[str, ...],
    server_id: str,
    log: BoundLogger,
    *,
    drain_seconds: float,
) -> None:
    """Returns when the tablets are served elsewhere, or when that is not possible."""
    request = DrainServerRequest(server=server_id)
    for address in masters:
        try:
            await network.unary(address, DRAIN_SERVER)(request, drain_seconds * _PART_OF_DRAIN)
        except (NotReady, Unavailable) as error:
            # A standby, or no master at all: the next address may be the leader's.
            log.info("not handed over by this master", master=address, reason=str(error))
        except PercolatorError as error:
            log.info("tablets are closed instead of moved", reason=str(error))
            return
        else:
            log.info("all tablets are served elsewhere")
            return
