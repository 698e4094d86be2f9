"""A whole cluster as processes on one machine: `percolator dev`, tests, benchmarks and chaos runs.

`command.py` has the commands of `percolator dev`. `cluster.py` starts the processes in order and
waits until each is ready; `process.py` is one of them, `directory.py` what they leave on disk, and
`launcher.py` what the launcher does while they run. `link.py` is a connection that tests can cut,
and `authority.py` makes certificates for development.

There is no other launcher: whatever needs a local cluster uses this one. It ends only processes
that it started.
"""
