"""Where a row store says which cluster it belongs to: one cell, which is never changed."""

from __future__ import annotations

import json

from percolator.errors import WrongCluster
from percolator.rowstore.layout import DATA
from percolator.rowstore.port import RowStore, Selection

TABLE_ID = 0
"""The table of what a cluster knows about itself. Tables of the cluster have ids from 1 on."""
CLUSTER = b"cluster"
"""The row."""
IDENTITY = b"identity"
"""The column: a JSON object with a "cluster_id"."""


async def require_cluster(store: RowStore, cluster_id: str, timeout_seconds: float) -> None:
    """Reads the identity, so that it is known that this store can be read, and is the cluster's."""
    wanted = Selection(DATA, IDENTITY, IDENTITY + b"\0")
    rows = await store.read(TABLE_ID, [CLUSTER], [wanted], timeout_seconds)
    try:
        found = str(json.loads(rows[0].cells[0].value)["cluster_id"]) if rows else "no cluster"
    except (ValueError, KeyError, TypeError):
        found = "an unreadable identity"
    if found != cluster_id:
        raise WrongCluster(
            f"it belongs to {found}, not to cluster {cluster_id}", expected=cluster_id, found=found
        )
