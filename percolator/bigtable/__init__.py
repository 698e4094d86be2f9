"""Bigtable as a row store (`percolator.rowstore.port`): the one driver.

Open `store.py` first: the port's calls, and the bound on calls in flight. `messages.py` turns
selections and changes into Google's messages, and what is streamed into rows. `connection.py` calls
the service over gRPC, or through gateways; `account.py` has the tokens that prove who is calling,
and `errors.py` says what a failed call means. `admin.py` creates tables and checks an instance;
`place.py` parses its address.

The messages are percolator/v1/bigtable_pb2.py: own stubs of the public definitions, sent through
`percolator.world.Network`, so that the driver runs in the simulator, too. Nothing here knows
transactions. Only the model in memory and Google's emulator have ever answered it, and a server of
ours with TLS and tokens in tests (docs/bigtable.md).
"""
