"""The worker: runs observers as a service, with health checks, metrics and an orderly shutdown.

All of the work is done by `percolator.observers`; here are only the process, its settings and its
metrics.

What an observer does, and when it is run again, is no business of this folder: a worker embedded
in a program (`Database.run_observers`) has to behave the same.
"""
