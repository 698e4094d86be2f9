"""Percolator for programs without asyncio: the same names as in `percolator.aio`, without `await`.

Each public class wraps its asynchronous namesake and decides nothing itself. All databases
of a process share one event loop in one daemon thread.

Open `loop_thread.py` first: how a call gets into the loop, and how its result gets back.
`rounds.py` handles the calls of threads that were woken together in one go. All other files are
wrappers, each of the file of its name in `aio`, and `worker.py` of that in `observers`.

A method here makes one trip to the loop, not several: a trip costs about 40 microseconds. What can
be answered without the loop is answered in the caller's thread.
"""
