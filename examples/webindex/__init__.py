"""The paper's document pipeline.

A crawl comes in, duplicates are found, links are inverted, and what a search would serve comes out.
`definition.py` says in plain Python what that is; `batch.py` computes it from scratch, with Spark.
"""
