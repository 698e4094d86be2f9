"""Resolves every lock that is older than what is about to be collected.

The cells that show the outcome of a lock's transaction may be among those that are collected. A
lock that was left would then be rolled back by the next reader, although its transaction committed.

Owners are not asked whether they are alive: a session that needs history holds the safe point back.
An owner that is alive, but has said nothing of the transaction, or has used it for too long, could
otherwise stop the collection of the whole cluster for as long as it likes. Its primary decides, as
always: either it has committed, or it gets a marker and never will.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from percolator.errors import NotReady
from percolator.protocol.environment import Environment
from percolator.protocol.met_lock import MetLock
from percolator.protocol.resolving.cleanup import Cleanup

LOCKS_AT_A_TIME: Final = 1_000
_SETTLE_SECONDS = 30.0
_ROUNDS_MAX = 1_000


async def resolve_older_locks(
    env: Environment,
    cleanup: Cleanup,
    scan: Callable[[], Awaitable[list[MetLock]]],
    below: int,
    where: str,
) -> int:
    """Returns how many locks were resolved, once `scan` finds none that is older than `below`.

    `scan` returns up to `LOCKS_AT_A_TIME` of them; `where` says what it scans. Raises `NotReady` if
    a primary does not answer, and the errors of the store.
    """
    resolved = 0
    for _ in range(_ROUNDS_MAX):
        found = await scan()
        if not found:
            return resolved
        await cleanup.resolve(
            found,
            deadline=env.now() + _SETTLE_SECONDS,
            known_now=await env.timestamps.get(),
            waited_seconds=0.0,
            ended_below=below,
        )
        left = {(lock.address, lock.lock.start_timestamp) for lock in await scan()}
        gone = sum((one.address, one.lock.start_timestamp) not in left for one in found)
        resolved += gone
        if not gone:
            raise NotReady(
                f"a lock of transaction {found[0].lock.start_timestamp} in {where} is still held, "
                f"below {below}"
            )
    raise NotReady(f"{where} has too many old locks to resolve in one round")
