"""What servers of older releases must not open.

They would ignore that values expire, and show them; a master would even forget it for good when it
next writes its map. So before the first value can expire, the format of the store is raised. From
then on, such a process refuses the store when it starts. Those that are running are asked for
first, and one that comes back after that may not register.
"""

from __future__ import annotations

from pathlib import Path

from percolator.errors import InvalidArgument, StoreUnusable, WrongCluster
from percolator.services.chassis.store.cluster_identity import (
    EXPIRING_FORMAT,
    FIRST_FORMAT,
    raise_format,
)
from percolator.services.chassis.store.files import Files, fault_of
from percolator.services.master.map.cluster_map import ClusterMap
from percolator.services.master.registry import Registry
from percolator.v1.cluster_pb2 import Server, ServiceKind
from percolator.world import World

_OPENING = {
    ServiceKind.SERVICE_KIND_MASTER: "master",
    ServiceKind.SERVICE_KIND_ORACLE: "oracle",
    ServiceKind.SERVICE_KIND_TABLET_SERVER: "tablet server",
}
"""Those that open the store, as errors name them."""


def needed_by(current: ClusterMap) -> int:
    """The format that a store with this map must have."""
    expires = any(table.ttls for table in current.tables.values())
    return EXPIRING_FORMAT if expires else FIRST_FORMAT


def opens(server: Server) -> int:
    """The highest format that the server opens."""
    return server.store_format or FIRST_FORMAT


class StoreFormat:
    """What the leading master does about the format of the store."""

    def __init__(
        self, world: World, files: Files, root: Path, registry: Registry, current: ClusterMap
    ) -> None:
        self._world = world
        self._files = files
        self._root = root
        self._registry = registry
        self.needed = needed_by(current)
        """The format that the store must have."""

    def require_opens(self, server: Server) -> None:
        """Raises `WrongCluster` if a server that reports would serve tablets wrongly."""
        is_older = opens(server) < self.needed
        if is_older and server.kind == ServiceKind.SERVICE_KIND_TABLET_SERVER:
            raise WrongCluster(
                f"values expire in this cluster, which release {server.version} ignores; its store "
                f"has format {self.needed}: use the release of the masters",
                expected=f"format {self.needed}",
                found=f"format {opens(server)}",
            )

    async def require_expiry(self, field: str) -> None:
        """Returns when values may expire: nothing that ignores it runs, or will start. Raises
        `InvalidArgument` about this field while a server of an older release runs."""
        for server in (*self._registry.masters, *self._registry.servers()):
            name = _OPENING.get(server.kind)
            if name is not None and opens(server) < EXPIRING_FORMAT and not server.leaving:
                raise InvalidArgument(
                    field,
                    f"the {name} at {server.address} runs release {server.version}, which ignores "
                    "that values expire: upgrade all masters, oracles and tablet servers first",
                )
        # From now on, none may register that could then be given a tablet of this table.
        self.needed = EXPIRING_FORMAT
        try:
            await raise_format(self._files, self._root, EXPIRING_FORMAT, self._world.random)
        except OSError as error:
            raise StoreUnusable(
                f"the format of {self._root} cannot be raised: {error}", fault=fault_of(error)
            ) from error
