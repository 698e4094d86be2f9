"""The simulation finds bugs that are planted where tablet servers have the cells.

`make planted-bugs` plants the slower ones, too.
"""

from __future__ import annotations

import pytest

from tests.simulation.bug import FIRST_SEEDS, Bug
from tests.simulation.planted_bugs import BUGS, seeds_until_caught

# It only ends what hangs: virtual time takes as long as the machine needs for it.
pytestmark = pytest.mark.timeout(300)

_QUICKLY_CAUGHT = [bug for bug in BUGS if bug.is_quickly_caught and not bug.on_rows]


@pytest.mark.parametrize("bug", _QUICKLY_CAUGHT, ids=lambda bug: bug.name)
def test_the_simulation_finds(bug: Bug) -> None:
    _, verdict = seeds_until_caught(bug)
    assert verdict is not None


def test_every_first_seed_is_that_of_a_bug() -> None:
    """A bug that was renamed would be searched from seed 0 again."""
    assert FIRST_SEEDS.keys() <= {bug.name for bug in BUGS}
