"""Tables of a cluster in Bigtable, and the app profile and roles that an instance needs."""

from __future__ import annotations

from contextlib import suppress

from percolator.bigtable.errors import ONE_CLUSTER, WITH_FAMILIES
from percolator.bigtable.messages import (
    CREATE_TABLE,
    DELETE_TABLE,
    GET_APP_PROFILE,
    GET_TABLE,
    TEST_IAM_PERMISSIONS,
)
from percolator.bigtable.place import Place
from percolator.errors import InvalidArgument, NotReady, SchemaError, UsageError
from percolator.rowstore.layout import FAMILIES
from percolator.v1.bigtable_pb2 import (
    BigtableAppProfile,
    BigtableCreateTableRequest,
    BigtableDeleteTableRequest,
    BigtableGetAppProfileRequest,
    BigtableGetTableRequest,
    BigtableTable,
    BigtableTestIamPermissionsRequest,
)
from percolator.world import Network

ROLES = {
    "roles/bigtable.user": (
        "bigtable.tables.readRows",
        "bigtable.tables.mutateRows",
        "bigtable.tables.sampleRowKeys",
    ),
    "roles/bigtable.admin": (
        "bigtable.tables.create",
        "bigtable.tables.get",
        "bigtable.tables.delete",
        "bigtable.appProfiles.get",
    ),
}
"""The predefined roles that a cluster's accounts need, with the permissions that are used of each:
clients and workers need the first; the master needs both."""


async def create_table(
    network: Network, place: Place, table_id: int, timeout_seconds: float
) -> None:
    """Creates a table with the families of a row store. They have no garbage-collection rule: the
    service would delete versions that snapshots need."""
    request = BigtableCreateTableRequest(parent=place.parent, table_id=place.table_name(table_id))
    for family in FAMILIES:
        request.table.column_families[family].SetInParent()
    await network.unary(place.tables_address, CREATE_TABLE)(request, timeout_seconds)


async def has_table(network: Network, place: Place, table_id: int, timeout_seconds: float) -> bool:
    """True if there is such a table. Raises `SchemaError` for one that was made by another program,
    or changed by hand."""
    request = BigtableGetTableRequest(name=place.table(table_id), view=WITH_FAMILIES)
    try:
        found = await network.unary(place.tables_address, GET_TABLE)(request, timeout_seconds)
    except SchemaError:
        return False
    _require_families(place.table_name(table_id), found)
    return True


async def require_table(
    network: Network, place: Place, table_id: int, timeout_seconds: float
) -> None:
    """Creates a table unless it exists. Several processes may do so at the same time."""
    if await has_table(network, place, table_id, timeout_seconds):
        return
    try:
        await create_table(network, place, table_id, timeout_seconds)
    except (InvalidArgument, SchemaError, NotReady):
        # Another process was faster, or an earlier attempt arrived late.
        if not await has_table(network, place, table_id, timeout_seconds):
            raise


async def delete_table(
    network: Network, place: Place, table_id: int, timeout_seconds: float
) -> None:
    """Deletes a table with all its cells, if it exists."""
    request = BigtableDeleteTableRequest(name=place.table(table_id))
    with suppress(SchemaError):
        await network.unary(place.tables_address, DELETE_TABLE)(request, timeout_seconds)


def _require_families(name: str, found: BigtableTable) -> None:
    families = set(found.column_families)
    if families != set(FAMILIES):
        raise SchemaError(
            f"the table {name} was made by another program, or changed by hand: it has the "
            f"families {_listed(families)}, and a table of a cluster has {_listed(set(FAMILIES))}"
        )
    for family in sorted(families):
        if found.column_families[family].HasField("gc_rule"):
            raise SchemaError(
                f"the family {family} of the table {name} has a garbage-collection rule, by which "
                "the service deletes versions that snapshots need: remove the rule"
            )


def _listed(families: set[str]) -> str:
    return ", ".join(sorted(families)) or "none"


async def missing_permissions(
    network: Network, place: Place, timeout_seconds: float
) -> dict[str, list[str]]:
    """By role, the permissions that the account does not have on the instance."""
    wanted = [permission for permissions in ROLES.values() for permission in permissions]
    request = BigtableTestIamPermissionsRequest(resource=place.parent, permissions=wanted)
    ask = network.unary(place.tables_address, TEST_IAM_PERMISSIONS)
    has = set((await ask(request, timeout_seconds)).permissions)
    missing = {
        role: [one for one in permissions if one not in has] for role, permissions in ROLES.items()
    }
    return {role: permissions for role, permissions in missing.items() if permissions}


async def require_profile(network: Network, place: Place, timeout_seconds: float) -> str:
    """The cluster to which the place's app profile routes. Raises `UsageError` for a profile that
    permits no transactions, or none that survive a fail-over."""
    name = place.app_profile or "default"
    request = BigtableGetAppProfileRequest(name=f"{place.parent}/appProfiles/{name}")
    found = await network.unary(place.tables_address, GET_APP_PROFILE)(request, timeout_seconds)
    why = _unusable(found)
    if why:
        raise UsageError(f"the app profile {name!r} {why}: {ONE_CLUSTER}")
    return found.single_cluster_routing.cluster_id


def _unusable(profile: BigtableAppProfile) -> str:
    """The reason; empty if the profile can be used."""
    if profile.WhichOneof("routing_policy") != "single_cluster_routing":
        return (
            "routes to several clusters, where another one takes over with data that are not "
            "up to date"
        )
    if not profile.single_cluster_routing.allow_transactional_writes:
        return "does not permit single-row transactions"
    if profile.HasField("data_boost_isolation_read_only"):
        return "can only read"
    return ""
