"""Standard input, output and error, which a supervisor or a shell may have closed (`2>&-`).

Their numbers go to the next files that are opened. Any code that then writes an error message to
"standard error", such as the C library of gRPC, could write it into the oracle's mark.
"""

from __future__ import annotations

import os
import sys

_ERROR = 2


def occupy() -> None:
    """Puts the null device in place of those that are closed. Call it before anything else."""
    for number in range(_ERROR + 1):
        try:
            os.fstat(number)
        except OSError:
            # Opening takes the lowest free number, which is this very one.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
