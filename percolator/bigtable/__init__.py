"""Bigtable as a row store (`percolator.rowstore.port`): the one driver.

Open `store.py` first. `methods.py` names Google's procedures; `filters.py` turns selections and
changes into its messages; `chunks.py` puts rows together from what it streams. `tables.py` creates
the tables. The messages are percolator/v1/bigtable_pb2.py: own stubs of the public definitions,
sent through `percolator.world.Network`, so that all of this runs in a simulation, too;
`channel.py` is the real one.

Nothing here knows transactions. It speaks to Google's emulator; the service itself also wants
TLS and credentials, which are not here yet (docs/bigtable.md).
"""
