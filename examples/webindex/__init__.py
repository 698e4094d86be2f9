"""The paper's document pipeline.

A crawl comes in; duplicates are found, links are inverted, and the result is what a search engine
serves. `definition.py` defines the result in plain Python; `batch.py` computes it from scratch with
Spark.
"""
