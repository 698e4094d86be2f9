"""Who leads, who is alive, and what a leader has recorded, through one small interface.

`interface` is what services know; `directory` is the back end on the store root. Every back end
has to pass tests/contracts/test_coordinator.py.
"""
