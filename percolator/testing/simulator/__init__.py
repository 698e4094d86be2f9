"""A simulated world: processes, a network and time that pass as one seed says.

Open `simulated_process.py` first: a process that can be killed, paused and restarted.
`simulated_loop.py` is the event loop of all processes, in virtual time; `simulated_wire.py` and
`simulated_call.py` carry its calls, and `network_faults.py` and `network_links.py` decide what
happens to them. `virtual_time.py` alone makes time pass at once, for tests that need no faults.

Everything random comes from the seed, and nothing may depend on addresses, hash order or real time:
the same seed has to take the same course on every machine.
"""
