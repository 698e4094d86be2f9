"""Standard input, output and error, which a supervisor or a shell may have closed (`2>&-`).

Their numbers are given to the next files that are opened. Whatever then writes an error message to
"standard error", the C library of gRPC included, would write it into the oracle's mark.
"""

from __future__ import annotations

import os
import sys

_ERROR = 2


def occupy() -> None:
    """Puts the null device in place of those that are closed. To be called before all else."""
    for number in range(_ERROR + 1):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, so this very one.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
