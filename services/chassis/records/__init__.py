"""What a cluster keeps about itself in a row store: who leads, who is alive, whose store it is.

Open `records.py` first: rows of small cells, each of which is changed if another cell of its row is
still as it was seen. The coordinator on rows (services/chassis/coordinator/row_coordinator.py)
stands on it.

Table 0 of the store holds them. Tables of the cluster have ids from 1 on.
"""
