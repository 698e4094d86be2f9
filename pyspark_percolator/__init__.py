"""The name by which Spark finds the data source `percolator`.

Spark imports every top-level module whose name begins with `pyspark_`, and one that fails hides
all the others: nothing is imported here but what Spark has imported already.
"""

from percolator.spark.data_source import PercolatorDataSource as DefaultSource

__all__ = ["DefaultSource"]
