"""Calls over a network: methods, errors, connections, credentials, and clients of small services.

    calls        methods.py (every remote procedure), status.py (errors), channels.py (gRPC)
    frames       frames.py: cheaper than gRPC, for the calls made most often
    addresses    addresses.py, cluster.py, through.py (by way of a gateway)
    credentials  tls.py, credentials.py, renewal.py, tokens.py, roles.py
    oracle       timestamp_source.py: many callers share one request
    lock service lock_service.py, sessions.py, liveness.py, advisory_locks.py

Open `methods.py` first. Finding tablets is the business of `percolator.routing`. Calls that may
have been executed are sent again here only where that is harmless, as for timestamps and sessions.
"""
