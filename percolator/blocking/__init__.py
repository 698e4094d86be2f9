"""Percolator for programs without asyncio: the same names as in `percolator.aio`, without `await`.

Each public class wraps its asynchronous namesake and decides nothing itself. All databases
of a process share one event loop in one daemon thread.

`api.py` is generated from `percolator.aio` (tools/blocking_api.py). `loop_thread.py` says how a
call gets into the loop, and how its result gets back.

A method here makes one trip to the loop, not several: a trip costs about 40 microseconds. What can
be answered without the loop is answered in the caller's thread.
"""
