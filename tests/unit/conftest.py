"""The fixture `percolator_db`, as every program that uses the library may have it."""

from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]
