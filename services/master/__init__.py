"""The master: tables, which server serves which tablet, and the cluster's processes.

- `master.py` is one process: a candidate, the leader of a term (`leader.py`), a candidate again.
- `map/` holds what the leader decides, and makes it durable.
- `tablets/` brings the tablet servers into line with the map, and changes it. Open
  `tablets/assignment.py` first.
- `rows/` is in the place of `tablets/` where a row store has the cells.
- `history/` collects old versions.
- `master_handler.py` serves `MasterService`; `cluster_handler.py` serves `ClusterService`.
- `registry.py` lists the servers that report; `kind_check.py` asks one what it is.

No answer or order of a leader may leave without a check that it still leads, and no change may be
told to others before it is durable.
"""
