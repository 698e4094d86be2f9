"""Objects in a bucket: the port, the driver for S3, and the check whether a store can be trusted.

A later release keeps tablets there. Until then, `percolator store check` is all that uses it.
"""
