"""`python -m tests.simulation.planting [--slow] [WORD ...]` plants bugs, and says which are found.

Without words, plants all of them, otherwise those with one of the words in their names; with
`--slow`, leaves out those that every test run plants. The exit code is 1 if one was not found.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.planted_bugs import BUGS, seeds_until_caught

_SLOW = "--slow"


def main() -> int:
    """Runs several at a time, each in its own process: a bug is planted into a whole process."""
    only_slow = _SLOW in sys.argv
    wanted = [word for word in sys.argv[1:] if word != _SLOW]
    places = [
        place
        for place, bug in enumerate(BUGS)
        if not (only_slow and bug.is_quickly_caught)
        and (not wanted or any(word in bug.name for word in wanted))
    ]
    if not places:
        print(f"no bug to plant has one of these words in its name: {', '.join(wanted)}")
        return 1
    missed = 0
    # The modules are imported once, by the process from which the others are forked.
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.simulation.planted_bugs"])
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        for caught, line in pool.map(_planted, places):
            missed += not caught
            print(line, flush=True)
    return 1 if missed else 0


def _planted(place: int) -> tuple[bool, str]:
    """Runs one planted bug. Returns whether it was caught, and the line to print."""
    bug = BUGS[place]
    began = time.process_time()
    seeds, verdict = seeds_until_caught(bug)
    seconds = time.process_time() - began
    if verdict is None:
        return False, f"NOT CAUGHT in {seeds:4} seeds  {seconds:6.1f} s  {bug.name}"
    # What was logged comes first, but says less.
    seen = max(verdict.problems, key=lambda one: not one.startswith("logged"))
    seen = seen.split(": ")[0]
    found = f"{bug.name}, seed {verdict.scenario.seed}: {seen}"
    return True, f"caught in {seeds:4} seeds  {seconds:6.1f} s  {found}"


if __name__ == "__main__":
    sys.exit(main())
