"""The programs of a cluster: `python -m services.X`. What they decide with lives in `percolator`."""
