"""Calls of gRPC over HTTP/2, on asyncio alone, for a third of the CPU that gRPC's client takes.

Open `lane.py` first: the way to one address, which connects when a call needs it. `connection.py`
is one connection (RFC 9113): `streams.py` has its calls, `call.py` one of them, and what arrives
for it, `sending.py` what is sent, and how much the peer permits, and `signs_of_life.py` notices a
peer that is gone.
`frames.py` and `headers.py` (RFC 7541) are the bytes, `settings.py` what both sides have announced,
`status.py` how a call failed, and whether it is certain that it was not executed. `dialling.py`
opens sockets, with TLS.

Only what our calls need: a client, one request message, no push, no compression. It knows gRPC's
protocol, and nothing of Bigtable.
"""
