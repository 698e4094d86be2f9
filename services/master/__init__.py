"""The master: the cluster's identity, and who is there."""
