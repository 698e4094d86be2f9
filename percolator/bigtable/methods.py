"""The remote procedures of Bigtable that are used, as Google names them."""

from __future__ import annotations

from percolator.v1 import bigtable_pb2 as wire
from percolator.world import StreamMethod, UnaryMethod

READ_ROWS = StreamMethod(
    "/google.bigtable.v2.Bigtable/ReadRows",
    wire.BigtableReadRowsRequest,
    wire.BigtableReadRowsResponse,
)
CHECK_AND_MUTATE_ROW = UnaryMethod(
    "/google.bigtable.v2.Bigtable/CheckAndMutateRow",
    wire.BigtableCheckAndMutateRowRequest,
    wire.BigtableCheckAndMutateRowResponse,
)
CREATE_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable",
    wire.BigtableCreateTableRequest,
    wire.BigtableTable,
)
