"""Frames: a faster way than gRPC to call a server that offers it, for the calls made most often.

Open `choosing.py` first: it decides, call by call, whether frames or gRPC are used. `connection.py`
is the connection to one server, and `layout.py` the bytes, which both sides share. The server's
side is in `services/chassis/frames.py`. docs/internals.md describes them.
"""
