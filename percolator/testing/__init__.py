"""For tests of programs that use Percolator: a database in the process itself.

    import percolator.testing

    def test_transfer():
        with percolator.testing.connect() as db:
            ...

With pytest, `pytest_plugins = ["percolator.testing.pytest_plugin"]` in conftest.py gives every test
that asks for `percolator_db` an empty one. Observers are run until nothing is left to do:

    def test_index(percolator_db):
        ...
        percolator.testing.run_observers(percolator_db, [index])

`row_database.py` has databases over a model of Bigtable.
"""

from percolator.testing.local_database import connect, connect_async
from percolator.testing.until_quiet import run_observers, run_observers_async

__all__ = ["connect", "connect_async", "run_observers", "run_observers_async"]
