"""The remote procedures of Bigtable that are used, as Google names them."""

from __future__ import annotations

from percolator.v1 import bigtable_pb2 as wire
from percolator.world import StreamMethod, UnaryMethod

READ_ROWS = StreamMethod(
    "/google.bigtable.v2.Bigtable/ReadRows",
    wire.BigtableReadRowsRequest,
    wire.BigtableReadRowsResponse,
)
SAMPLE_ROW_KEYS = StreamMethod(
    "/google.bigtable.v2.Bigtable/SampleRowKeys",
    wire.BigtableSampleRowKeysRequest,
    wire.BigtableSampleRowKeysResponse,
)
CHECK_AND_MUTATE_ROW = UnaryMethod(
    "/google.bigtable.v2.Bigtable/CheckAndMutateRow",
    wire.BigtableCheckAndMutateRowRequest,
    wire.BigtableCheckAndMutateRowResponse,
)
GET_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/GetTable",
    wire.BigtableGetTableRequest,
    wire.BigtableTable,
)
MUTATE_ROWS = StreamMethod(
    "/google.bigtable.v2.Bigtable/MutateRows",
    wire.BigtableMutateRowsRequest,
    wire.BigtableMutateRowsResponse,
)
CREATE_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable",
    wire.BigtableCreateTableRequest,
    wire.BigtableTable,
)
DELETE_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/DeleteTable",
    wire.BigtableDeleteTableRequest,
    wire.BigtableDeleteTableResponse,
)
GET_APP_PROFILE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableInstanceAdmin/GetAppProfile",
    wire.BigtableGetAppProfileRequest,
    wire.BigtableAppProfile,
)
TEST_IAM_PERMISSIONS = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableInstanceAdmin/TestIamPermissions",
    wire.BigtableTestIamPermissionsRequest,
    wire.BigtableTestIamPermissionsResponse,
)
