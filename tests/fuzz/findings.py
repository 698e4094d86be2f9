"""Findings and counts of a run, and how a failing input is kept: var/fuzz/*.json."""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

FOUND = Path("var/fuzz")
_SHOWN_CHARACTERS_MAX = 600
_FINDINGS_MAX = 20
_LATEST_MAX = 300


@dataclass(frozen=True)
class Input:
    """One input of one target: enough to replay it."""

    target: str
    """Its target: "calls", or one of the targets in targets.py."""
    kind: str
    """How it was made."""
    data: bytes
    method: str = ""
    """For a call: the path of the method."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def as_json(self) -> str:
        metadata = [
            [key, value if isinstance(value, str) else base64.b64encode(value).decode()]
            for key, value in self.metadata
        ]
        return json.dumps(
            {
                "target": self.target,
                "kind": self.kind,
                "method": self.method,
                "metadata": metadata,
                "data": base64.b64encode(self.data).decode(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Input:
        found = json.loads(text)
        metadata = tuple(
            (key, base64.b64decode(value) if key.endswith("-bin") else value)
            for key, value in found["metadata"]
        )
        data = base64.b64decode(found["data"])
        return cls(found["target"], found["kind"], data, found["method"], metadata)


class Record:
    """Everything that a run has counted and found."""

    def __init__(self) -> None:
        self.latest: deque[Input] = deque(maxlen=_LATEST_MAX)
        """The latest calls, in the order in which they were sent."""
        self.sent: Counter[tuple[str, str]] = Counter()
        """Inputs by target or method, and kind."""
        self.accepted: Counter[str] = Counter()
        """Inputs that got past all checks, by target or method."""
        self.refused: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Inputs that were refused, by target or method and the kind of error."""
        self.found: dict[str, Input | None] = {}
        """One input for each thing that is wrong."""
        self._suspects: list[Input] = []

    def count(self, of: str, kind: str, outcome: str) -> None:
        self.sent[of, kind] += 1
        if outcome == "accepted":
            self.accepted[of] += 1
        else:
            self.refused[of][outcome] += 1

    def broke(self, what: str) -> None:
        """Notes that something broke, which one of the latest calls must have caused."""
        if what not in self.found:
            self.found[what] = None
            self._suspects = list(self.latest)

    def wrong(self, what: str, by: Input | None = None) -> None:
        """Notes something that must not be, once, and keeps the input."""
        what = what[:_SHOWN_CHARACTERS_MAX]
        if what not in self.found and len(self.found) < _FINDINGS_MAX:
            self.found[what] = by

    def keep(self) -> dict[str, Path | None]:
        """Writes the failing inputs. Returns the file for each finding."""
        kept: dict[str, Path | None] = {}
        if self._suspects:
            FOUND.mkdir(parents=True, exist_ok=True)
            lines = [one.as_json() + "\n" for one in self._suspects]
            (FOUND / "suspects.json").write_text("".join(lines))
            kept["one of the latest calls before something broke"] = FOUND / "suspects.json"
        for what, one in self.found.items():
            kept[what] = None
            if one is not None:
                FOUND.mkdir(parents=True, exist_ok=True)
                text = one.as_json()
                name = f"{one.target}-{sha256(text.encode()).hexdigest()[:12]}.json"
                kept[what] = FOUND / name
                (FOUND / name).write_text(text + "\n")
        return kept
