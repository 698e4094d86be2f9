"""How a service is called: over gRPC and in frames, by whom, up to which limits; health, metrics.

Open `rpc.py` first: it serves a handler's methods, maps its errors and counts its calls; `gate.py`
has the limits that each call has to pass. `server.py` puts the server together with `health.py`,
`metrics_endpoint.py` and `server_tls.py`.
`frame_server.py` takes calls in frames, on a port of its own, and passes them to the same methods.
`access.py` decides who is calling, once per call and before the call is decoded; `tokens.py` keeps
the tokens.

Handlers know nothing of this room: they take and return messages, and raise errors of
`percolator.errors`.
"""
