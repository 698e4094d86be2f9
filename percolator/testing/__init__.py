"""For tests of programs that use Percolator: a database in the process itself.

    import percolator.testing

    def test_transfer():
        with percolator.testing.connect() as db:
            ...

With pytest, `pytest_plugins = ["percolator.testing.pytest_plugin"]` in conftest.py gives every test
that asks for `percolator_db` an empty one.
"""

from percolator.testing.local_database import connect, connect_async

__all__ = ["connect", "connect_async"]
