"""Bigtable as a row store (`percolator.rowstore.port`): the one driver.

Open `store.py` first. `methods.py` names Google's procedures; `filters.py` turns selections and
changes into its messages; `chunks.py` puts rows together from what it streams. `tables.py` creates
the tables. The messages are percolator/v1/bigtable_pb2.py: own stubs of the public definitions,
sent through `percolator.world.Network`, so that all of this runs in a simulation, too;
`channel.py` is the real one, with `lanes.py` (connections), `tokens.py` and `google_account.py`
(who calls), and `meanings.py` (what a failed call means). Its calls go through `http2`, our own
client of HTTP/2; `grpc_lane.py` uses gRPC's instead. `admission.py` bounds the calls in
flight. `place.py` parses the address of an instance, and `connection.py` connects to it.

Nothing here knows transactions. Only the model in memory and Google's emulator have ever answered
it, and a server of ours with TLS and tokens in tests (docs/bigtable.md).
"""
