"""The map of a cluster: its tables, their tablets, and the server and epoch of each.

Open `cluster_map.py` first: the map and its checks. `map_record.py` encodes it, `map_store.py`
makes a change durable before anyone learns of it, and `locations.py` answers where rows are.

A map is never changed in place: a change makes a new one.
"""
