"""Which cluster a row store belongs to: one record, which is never changed.

    row "cluster", column "identity":
    {"cluster_id": "9f…", "format": 1, "created_by": "0.3.0", "epoch_milliseconds": 1790000000000}

If several masters start at once on an empty store, exactly one writes it; all read the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from percolator.errors import InvalidArgument, PercolatorError, StoreFault, StoreUnusable
from percolator.rowstore.identity import CLUSTER, IDENTITY
from percolator.services.chassis.records.records import NoRecords, Records, Seen
from percolator.services.chassis.store.cluster_identity import (
    FIRST_FORMAT,
    ClusterIdentity,
    parse_identity,
    require_same_cluster,
)
from percolator.services.chassis.version import version
from percolator.world import World

EPOCH_BEFORE_MILLISECONDS = 30 * 86_400_000
"""How far before the first master's clock times are counted from: a margin for an oracle whose
clock is right where that master's is fast. Emulators allow two years at most."""
_ATTEMPTS_MAX = 5


@dataclass(frozen=True)
class RowIdentity(ClusterIdentity):
    """What a row store says about itself."""

    epoch_milliseconds: int = 0
    """What the times of its cells are counted from (percolator/rowstore/times.py)."""


async def establish(records: Records, name: str, world: World) -> RowIdentity:
    """The identity of the store, created if there is none."""
    epoch = max(world.clock.wall_milliseconds() - EPOCH_BEFORE_MILLISECONDS, 0)
    content = {
        "cluster_id": f"{world.random.getrandbits(128):032x}",
        "format": FIRST_FORMAT,
        "created_by": version(),
        "epoch_milliseconds": epoch,
    }
    for _ in range(_ATTEMPTS_MAX):
        found = await read(records, name)
        if found is not None:
            return found
        try:
            # Whether this was the first one does not matter: the next look tells what there is.
            await records.change(
                CLUSTER, Seen(IDENTITY, None), {IDENTITY: json.dumps(content).encode()}
            )
        except StoreUnusable:
            raise
        except PercolatorError:
            continue  # perhaps written
    raise StoreUnusable(
        f"store: {name} does not keep the identity of a new cluster", fault=StoreFault.INPUT_OUTPUT
    )


async def require(records: Records, name: str, cluster_id: str) -> RowIdentity:
    """The identity of a store that has one. `WrongCluster` unless it is that of this cluster."""
    found = await read(records, name)
    if found is None:
        raise InvalidArgument(
            "store", f"{name} belongs to no cluster yet: start a master on it first"
        )
    if cluster_id:
        require_same_cluster(found, name, cluster_id)
    return found


async def read(records: Records, name: str) -> RowIdentity | None:
    """None if the store has no identity."""
    try:
        data = (await records.read(CLUSTER, [IDENTITY])).get(IDENTITY)
    except NoRecords:
        return None  # an emulator that was started again has not even the table
    if data is None:
        return None
    where = f"the identity in {name}"
    known = parse_identity(data, where, f"store: {name}")
    epoch = json.loads(data).get("epoch_milliseconds")
    if type(epoch) is not int or epoch < 0:
        raise StoreUnusable(
            f"store: {where} is damaged: epoch_milliseconds is {epoch!r}", fault=StoreFault.DAMAGED
        )
    return RowIdentity(known.cluster_id, known.format, epoch)
