"""A table that lacks one of its families: somebody has removed it in the store itself.

The service deletes the cells of the family with it, and refuses all calls that name it, without
saying which one it was; so the table is asked for those that it has. The emulator keeps the cells,
goes on reading them, and refuses changes only.
"""

from __future__ import annotations

import re
from typing import Final

from percolator.bigtable.methods import GET_TABLE
from percolator.bigtable.place import Place, table_name
from percolator.errors import InvariantViolation, PercolatorError
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import FAMILIES
from percolator.v1.bigtable_pb2 import BigtableGetTableRequest
from percolator.world import Network

WITH_FAMILIES: Final = 2
"""The view of a table that has its families, and no more."""
_OF_SERVICE: Final = "column family not found"
_OF_EMULATOR: Final = re.compile(r'unknown family "([^"]*)"')
_ASK_SECONDS: Final = 5.0
_REMOVED: Final = "somebody has removed it in the store itself, and its cells with it"
_WHAT_TO_DO: Final = "`percolator tables delete` the table, and import it from an export"
_WHAT_ELSE_TO_DO: Final = {
    table_name(TABLE_ID): "it says what tables there are, so restore it from a backup of the "
    "instance, or create another cluster and import an export",
    table_name(INTENTS_TABLE): "create the family again there; changes that waited for observers "
    "are forgotten, so `percolator observers backfill` afterwards",
}
"""For tables that no program has created, and that no command deletes."""


class FamilyMissing(InvariantViolation):
    """A call names a family that the table does not have. It was not executed."""

    def __init__(self, table: str, families: str, *, where: str) -> None:
        """`table` is the full name; `families` is empty if it is not known which are missing."""
        name = table.rpartition("/")[2]
        what = f"the family {families}" if families else "a family that it needs"
        to_do = _WHAT_ELSE_TO_DO.get(name, _WHAT_TO_DO)
        super().__init__(f"the table {name} lacks {what}: {_REMOVED}: {to_do}", where=where)
        self.table = table
        self.families = families


def missing_family(said: str, where: str) -> FamilyMissing | None:
    """What an answer means that says so; None for any other. `where` ends with the table's name."""
    named = _OF_EMULATOR.search(said)
    if named is None and _OF_SERVICE not in said.lower():
        return None
    table = where.rpartition(" ")[2]
    return FamilyMissing(table, "" if named is None else named[1], where=where)


async def named(network: Network, place: Place, error: FamilyMissing) -> InvariantViolation:
    """The error with the names of the families, if the table can be asked."""
    if error.families:
        return InvariantViolation(error.message, where=error.where)
    request = BigtableGetTableRequest(name=error.table, view=WITH_FAMILIES)
    try:
        found = await network.unary(place.tables_address, GET_TABLE)(request, _ASK_SECONDS)
    except PercolatorError:
        families = ""  # without the right to ask, this is all that is known
    else:
        families = ", ".join(sorted(set(FAMILIES) - set(found.column_families)))
    told = FamilyMissing(error.table, families, where=error.where)
    return InvariantViolation(told.message, where=told.where)
