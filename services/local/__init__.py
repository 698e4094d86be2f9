"""A whole cluster as processes on one machine: for demos, tests, benchmarks and chaos runs.

`python -m services.local --data DIR` starts one. Open `cluster.py` first: it starts the processes
in order and waits until each is ready; `process.py` is one of them. `link.py` is a connection that
tests can cut, and `authority.py` makes certificates for development.

There is no other launcher: whatever needs a local cluster uses this one. It ends only processes
that it started.
"""
