"""Where a cluster keeps what must last: a directory that its servers share, or a row store.

Open `cluster_store.py` first: what masters and oracles need of either. `opening.py` opens the one
that `--store` names; nothing else asks which it is. `row_identity.py` is what cluster.json is in a
directory, and `row_store_watch.py` notices that a row store is silent, or not the same any more.
"""
