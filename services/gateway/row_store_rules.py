"""What callers may ask a gateway to do in the row store, with the gateway's own account.

They run the protocol themselves, so a gateway cannot know whether a step is right: as a tablet
server, it takes any change of one row with any check. But it makes nothing that no step consists
of. What a step never does would harm others without a trace: a note of collection makes a row
unreadable for older snapshots; a field that we do not know may name another table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeVar

from percolator.bigtable.place import Place
from percolator.errors import InvalidArgument, PermissionDenied
from percolator.rowstore.identity import CLUSTER, TABLE_ID
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import DATA, FAMILIES, LOCK_ONLY, LOCKS, ROLLBACKS, WRITES
from percolator.rowstore.port import TIME_UNIT
from percolator.v1 import bigtable_pb2 as pb
from percolator.wire.roles import Role

_OF_THE_CLUSTER: Final = re.compile(r"percolator-(intents|[1-9][0-9]{0,9})")
"""As `Place.table_name` makes them."""
_OF_STEPS: Final = frozenset((LOCKS, WRITES, LOCK_ONLY, DATA, ROLLBACKS))
_OF_INTENTS: Final = frozenset((WRITES,))

RequestT = TypeVar(
    "RequestT",
    pb.BigtableCheckAndMutateRowRequest,
    pb.BigtableMutateRowsRequest,
    pb.BigtableReadRowsRequest,
    pb.BigtableSampleRowKeysRequest,
)


def own(place: Place, request: RequestT, *, reads_identity: bool = False) -> RequestT:
    """The request as a gateway at that place makes it. Raises unless the table is the cluster's."""
    parent, _, name = request.table_name.rpartition("/tables/")
    is_own = _OF_THE_CLUSTER.fullmatch(name) is not None or (
        reads_identity and name == place.table_name(TABLE_ID)
    )
    if parent != place.parent or not is_own:
        raise InvalidArgument(
            "table_name",
            f"expected a table of this cluster, {place.parent}/tables/percolator-NUMBER, found "
            f"{request.table_name[:200]!r}; of {place.table_name(TABLE_ID)}, only the row "
            f"{CLUSTER.decode()!r} can be read",
        )
    # What we do not know would be passed on as it is, such as the name of a view of another table.
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise InvalidArgument("request", "has fields that no client of this cluster sends")
    request.app_profile_id = place.app_profile
    return request


def require_known_families(one: pb.BigtableRowFilter, field: str) -> None:
    """Raises if a filter names a family that no table has: the store's answer would be taken for
    that of a table whose family somebody has removed."""
    match one.WhichOneof("filter"):
        case "column_range_filter":
            _require_known(one.column_range_filter.family_name, field)
        case "chain":
            for part in one.chain.filters:
                require_known_families(part, field)
        case "interleave":
            for part in one.interleave.filters:
                require_known_families(part, field)
        case _:
            pass


def _require_known(family: str, field: str) -> None:
    if family not in FAMILIES:
        raise InvalidArgument(
            field, f"names the family {family[:100]!r}; tables have {', '.join(sorted(FAMILIES))}"
        )


def require_step(request: pb.BigtableCheckAndMutateRowRequest) -> None:
    """Raises unless the changes are some that steps of transactions consist of."""
    require_known_families(request.predicate_filter, "predicate_filter")
    _require_changes(request.true_mutations, "true_mutations", _OF_STEPS)
    _require_changes(request.false_mutations, "false_mutations", _OF_STEPS)


def require_may_write(place: Place, request: pb.BigtableMutateRowsRequest, role: Role) -> None:
    """Raises unless the caller may write these rows without conditions: anybody writes intents, and
    whoever may load a table also the table's rows."""
    if request.table_name == place.table(INTENTS_TABLE):
        for number, entry in enumerate(request.entries):
            _require_changes(entry.mutations, f"entries[{number}].mutations", _OF_INTENTS)
    elif role < Role.ADMIN:
        raise PermissionDenied(
            f"the caller has the role {role.name}, but it needs ADMIN to load a table: all other "
            "changes of rows have conditions",
            where=request.table_name,
        )
    else:
        for number, entry in enumerate(request.entries):
            for change in entry.mutations:
                family = change.set_cell.family_name or change.delete_from_column.family_name
                _require_known(family, f"entries[{number}].mutations")


def _require_changes(
    changes: Iterable[pb.BigtableMutation], field: str, families: frozenset[str]
) -> None:
    """Single versions of cells are set and deleted, and nothing else."""
    for number, change in enumerate(changes):
        match change.WhichOneof("mutation"):
            case "set_cell":
                family = change.set_cell.family_name
                is_one = True
            case "delete_from_column":
                deleted = change.delete_from_column
                family, times = deleted.family_name, deleted.time_range
                start, end = times.start_timestamp_micros, times.end_timestamp_micros
                is_one = start + TIME_UNIT == end
            case _:
                family, is_one = "", False
        if not is_one or family not in families:
            raise InvalidArgument(
                f"{field}[{number}]",
                "expected one version of a cell to be set or deleted, in one of the families "
                f"{', '.join(sorted(families))}",
            )
