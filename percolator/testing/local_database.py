"""A database for tests: no servers, no sockets, ready in milliseconds, gone at the end.

    with percolator.testing.connect() as db:
        db.create_table(accounts)
        transfer(db, "bob", "joe", 7)

It is the real client over the real tablet. Only what is between and below is replaced: the network
by calls, the disk by memory, the oracle by a counter. It passes the same tests as a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

from percolator import aio
from percolator.aio.connecting import Connecting, connect_to
from percolator.blocking.api import Database
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import MachineClock, World

PATIENT_SECONDS = 600.0
LOCK_WAIT_SECONDS = 30.0
"""Not as patient: the lock may be of a shared transaction, which the test itself is to end."""
PATIENT_LIMITS = Limits(
    call_seconds=PATIENT_SECONDS,
    attempt_seconds_max=PATIENT_SECONDS,
    lock_ttl_seconds=PATIENT_SECONDS,
    lock_wait_seconds=LOCK_WAIT_SECONDS,
    background_seconds=PATIENT_SECONDS,
)
PATIENT_RETRIES = RetryPolicy(deadline_seconds=PATIENT_SECONDS)
"""Nothing in this process fails to answer. If time passes, the machine has something else to do."""


def connect_async(*, limits: Limits | None = None, retry: RetryPolicy | None = None) -> Connecting:
    """Like `connect`, for asyncio."""
    return Connecting(_starting(limits, retry))


def connect(*, limits: Limits | None = None, retry: RetryPolicy | None = None) -> Database:
    """A new, empty database in this process.

    Unless `limits` and `retry` say otherwise, it is patient: a busy machine fails no test.
    """
    return Database.over(_starting(limits, retry))


def _starting(
    limits: Limits | None, retry: RetryPolicy | None
) -> Callable[[], Coroutine[Any, Any, aio.Database]]:
    async def start() -> aio.Database:
        clock = MachineClock()
        cluster = ClusterInMemory(clock)
        network = InProcessNetwork({ADDRESS: cluster})
        world = World(clock=clock, network=network, random=random.Random())  # noqa: S311 - for a test
        return await connect_to(
            world,
            [ADDRESS],
            limits or PATIENT_LIMITS,
            retry or PATIENT_RETRIES,
            timeout_seconds=PATIENT_SECONDS,
        )

    return start
