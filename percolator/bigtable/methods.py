"""The remote procedures of Bigtable that are used, as Google names them."""

from __future__ import annotations

from percolator.v1 import bigtable_pb2 as pb
from percolator.world import StreamMethod, UnaryMethod

READ_ROWS = StreamMethod(
    "/google.bigtable.v2.Bigtable/ReadRows",
    pb.BigtableReadRowsRequest,
    pb.BigtableReadRowsResponse,
)
SAMPLE_ROW_KEYS = StreamMethod(
    "/google.bigtable.v2.Bigtable/SampleRowKeys",
    pb.BigtableSampleRowKeysRequest,
    pb.BigtableSampleRowKeysResponse,
)
CHECK_AND_MUTATE_ROW = UnaryMethod(
    "/google.bigtable.v2.Bigtable/CheckAndMutateRow",
    pb.BigtableCheckAndMutateRowRequest,
    pb.BigtableCheckAndMutateRowResponse,
)
GET_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/GetTable",
    pb.BigtableGetTableRequest,
    pb.BigtableTable,
)
MUTATE_ROWS = StreamMethod(
    "/google.bigtable.v2.Bigtable/MutateRows",
    pb.BigtableMutateRowsRequest,
    pb.BigtableMutateRowsResponse,
)
CREATE_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable",
    pb.BigtableCreateTableRequest,
    pb.BigtableTable,
)
DELETE_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/DeleteTable",
    pb.BigtableDeleteTableRequest,
    pb.BigtableDeleteTableResponse,
)
GET_APP_PROFILE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableInstanceAdmin/GetAppProfile",
    pb.BigtableGetAppProfileRequest,
    pb.BigtableAppProfile,
)
TEST_IAM_PERMISSIONS = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableInstanceAdmin/TestIamPermissions",
    pb.BigtableTestIamPermissionsRequest,
    pb.BigtableTestIamPermissionsResponse,
)
