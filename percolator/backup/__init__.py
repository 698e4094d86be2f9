"""Exports: a consistent copy of tables as Parquet files, and what is made of one again."""
