"""The master: tables, which server serves which tablet, and the cluster's processes.

- `master.py` is one process: a candidate, the leader of a term (`term.py`, `leader.py`), a
  candidate again. `handlers.py` answers its callers.
- `cluster_map.py` is what the leader decides, and `map_store.py` makes it durable.
- `assignment.py` brings the tablet servers into line with the map; `tablet_changes.py` moves,
  splits and balances tablets, and `server_watch.py` notices which servers live.
- `row_term.py` is in their place where a row store has the cells.
- `collection.py` collects old versions; `tablet_collection.py` does it on tablet servers.
- `registry.py` lists the servers that report, and asks an address which kind it is.

No answer or order of a leader may leave without a check that it still leads, and no change may be
told to others before it is durable.
"""
