"""`python -m tests.simulation.planting [WORD ...]`: plants the bugs, and reports which were found.

Without words all of them, else those with one of the words in their names. Ends with 1 when one was
not found.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.planted_bugs import BUGS, seeds_until_caught


def main() -> int:
    """Several at a time, each in a process of its own: a bug is planted into a whole process."""
    wanted = sys.argv[1:]
    places = [
        place
        for place, bug in enumerate(BUGS)
        if not wanted or any(word in bug.name for word in wanted)
    ]
    missed = 0
    # The modules are read once, by the process from which the others are forked.
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.simulation.planted_bugs"])
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        for caught, line in pool.map(_planted, places):
            missed += not caught
            print(line, flush=True)
    return 1 if missed else 0


def _planted(place: int) -> tuple[bool, str]:
    """Whether it was caught, and the line that says so."""
    bug = BUGS[place]
    began = time.process_time()
    seeds, verdict = seeds_until_caught(bug)
    seconds = time.process_time() - began
    if verdict is None:
        return False, f"NOT CAUGHT in {seeds:4} seeds  {seconds:6.1f} s  {bug.name}"
    # What was logged comes first in time, and says less.
    seen = max(verdict.problems, key=lambda one: not one.startswith("logged"))
    seen = seen.split(": ")[0]
    return True, f"caught in {seeds:4} seeds  {seconds:6.1f} s  {bug.name}: {seen}"


if __name__ == "__main__":
    sys.exit(main())
