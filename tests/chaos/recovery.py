"""How soon everything works again, by kind of fault and by how many others occur meanwhile.

    make recovery       # after `make chaos`, on the reference machine

Each run of `make chaos` leaves its figures in var/chaos. `make recovery` moves them into
recovery.json in this folder, prints the table, and puts it into docs/operating.md. A test compares
the two, so the document never shows what was not measured.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "var" / "chaos"
"""Where a run leaves its figures; git does not look there."""
RECORDED = Path(__file__).parent / "recovery.json"
DOCUMENT = ROOT / "docs" / "operating.md"
_PLACE = re.compile(r"(?<=<!-- recovery -->\n).*?(?=<!-- end of recovery -->)", re.DOTALL)
_COLUMNS = (("alone", 0, 0), ("beside 1 or 2 others", 1, 2), ("beside 3 or more", 3, 1_000))


@dataclass(frozen=True)
class Injection:
    """One fault. Instants are seconds since the run began."""

    kind: str
    began: float
    ended: float
    """When it was repaired, and everything worked again."""
    seconds: float
    """How long it took until everything worked again."""


@dataclass(frozen=True)
class Figure:
    """One fault, as it counts in the table."""

    kind: str
    beside: int
    """How many other faults were in effect at some time while it was."""
    seconds: float


def figures(injected: Sequence[Injection]) -> list[Figure]:
    return [
        Figure(
            one.kind,
            sum(
                other.began < one.ended and one.began < other.ended
                for other in injected
                if other is not one
            ),
            round(one.seconds, 2),
        )
        for one in injected
    ]


def write_run(name: str, injected: Sequence[Injection], directory: Path = RUNS) -> Path:
    """Leaves the figures of a run where `make recovery` finds them."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps([asdict(one) for one in figures(injected)], indent=1) + "\n")
    return path


def record_of(path: Path = RECORDED) -> list[Figure]:
    """Figures recorded in a file, or not yet recorded."""
    return [Figure(**one) for one in json.loads(path.read_text())] if path.exists() else []


def record(runs: Path = RUNS, recorded: Path = RECORDED) -> list[Figure]:
    """Replaces what is recorded by the waiting runs, if there are any. Returns what is recorded."""
    waiting = sorted(runs.glob("*.json"))
    if waiting:
        found = [figure for path in waiting for figure in record_of(path)]
        found.sort(key=lambda one: (one.kind, one.beside, one.seconds))
        lines = ",\n".join(json.dumps(asdict(one)) for one in found)
        recorded.write_text(f"[\n{lines}\n]\n")
        for path in waiting:
            path.unlink()
    return record_of(recorded)


def table(found: Iterable[Figure]) -> str:
    """Rows of the kinds; in each cell, the median and the worst time in seconds."""
    cells: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        for column, least, most in _COLUMNS:
            if least <= one.beside <= most:
                cells[one.kind][column].append(one.seconds)
    names = [column for column, _, _ in _COLUMNS]
    lines = [f"| fault | times | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for kind in sorted(cells):
        times = sum(map(len, cells[kind].values()))
        shown = [_median_and_worst(cells[kind][name]) for name in names]
        lines.append(f"| {kind} | {times} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _median_and_worst(seconds: list[float]) -> str:
    return f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""


def shown(document: Path = DOCUMENT) -> str:
    """The table in the document."""
    found = _PLACE.search(document.read_text())
    return found[0] if found else ""


def main() -> None:
    made = table(record())
    print(made, end="")
    DOCUMENT.write_text(_PLACE.sub(lambda _: made, DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
