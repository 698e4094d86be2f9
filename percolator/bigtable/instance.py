"""What an instance has to be before a cluster can live there: a profile, and an account's roles."""

from __future__ import annotations

from percolator.bigtable.meanings import ONE_CLUSTER
from percolator.bigtable.methods import GET_APP_PROFILE, TEST_IAM_PERMISSIONS
from percolator.bigtable.place import Place
from percolator.errors import UsageError
from percolator.v1.bigtable_pb2 import (
    BigtableAppProfile,
    BigtableGetAppProfileRequest,
    BigtableTestIamPermissionsRequest,
)
from percolator.world import Network

_DEFAULT_PROFILE = "default"

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
    """The cluster to which the place's app profile routes. Raises `UsageError` for a profile by
    which no transaction can be made, or only such as do not survive a fail-over."""
    name = place.app_profile or _DEFAULT_PROFILE
    request = BigtableGetAppProfileRequest(name=f"{place.parent}/appProfiles/{name}")
    found = await network.unary(place.tables_address, GET_APP_PROFILE)(request, timeout_seconds)
    why = _unusable(found)
    if why:
        raise UsageError(f"the app profile {name!r} {why}: {ONE_CLUSTER}")
    return found.single_cluster_routing.cluster_id


def _unusable(profile: BigtableAppProfile) -> str:
    """Why; empty if it can be used."""
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
