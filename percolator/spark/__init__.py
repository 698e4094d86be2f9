"""Percolator in Spark: tables as DataFrames, and DataFrames into tables.

    catalog = '''{"key": {"name": "url", "type": "text"},
                  "columns": {"title": {"type": "text"}, "visits": {"type": "integer"}}}'''
    pages = spark.read.format("percolator").options(table="pages", catalog=catalog).load()
    pages.write.format("percolator").options(table="copy", catalog=catalog).mode("append").save()

Spark finds the data source by itself (`pyspark_percolator`), in driver and executors, when
`percolator-store[spark]` is installed there. What the options say: `percolator/spark/options.py`.
"""
