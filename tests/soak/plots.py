"""All series of a run on one page: an SVG with a small chart for each, and one column per quantity.

A chart shows the series from zero, where its thirds are, and the medians that were compared. What
grows is red; what was too short to be judged is grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tests.soak.series import QUANTITIES, Judged

_WIDTH, _HEIGHT = 210, 96
_LEFT, _TOP, _RIGHT, _BOTTOM = 8, 28, 8, 8
_UNITS = {"memory": "MiB", "bytes": "MiB", "median": "ms", "p99": "ms"}
_GROWS, _LEVEL, _NOT_JUDGED = "#c62828", "#1565c0", "#9e9e9e"


def page(title: str, judged: Sequence[Judged]) -> str:
    """The text of the SVG."""
    sources = sorted({one.key.source for one in judged})
    columns = [name for name in QUANTITIES if any(one.key.quantity == name for one in judged)]
    parts = [f'<text x="8" y="18" font-size="14">{escape(title)}</text>']
    for one in judged:
        x = columns.index(one.key.quantity) * _WIDTH
        y = 28 + sources.index(one.key.source) * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_chart(one)}</g>')
    width, height = max(1, len(columns)) * _WIDTH, 28 + len(sources) * _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def write(path: Path, title: str, judged: Sequence[Judged]) -> None:
    path.write_text(page(title, judged))


def _chart(one: Judged) -> str:
    judgement = one.judgement
    colour = _GROWS if judgement.grows else _LEVEL if judgement.is_judged else _NOT_JUDGED
    first, last = one.points[0][0], one.points[-1][0]
    top = max(value for _, value in one.points) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(seconds: float, value: float) -> str:
        x = _LEFT + width * (seconds - first) / max(last - first, 1e-9)
        return f"{x:.1f},{_TOP + height * (1 - value / top):.1f}"

    unit = _UNITS.get(one.key.quantity, "")
    figures = f"up to {top:,.1f} {unit}"
    if judgement.is_judged:
        figures = f"{judgement.middle:,.1f} → {judgement.last:,.1f} {unit}, {figures}"
    parts = [
        f'<text x="{_LEFT}" y="11" fill="{colour}">{escape(str(one.key))}</text>',
        f'<text x="{_LEFT}" y="23" fill="#555">{escape(figures)}</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="#f5f5f5"/>',
    ]
    for third in (1, 2):
        x = _LEFT + width * third / 3
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + height}" stroke="#ddd"/>'
        )
    line = " ".join(place(seconds, value) for seconds, value in one.points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
    if judgement.is_judged:
        seconds = (last - first) / 3
        for number, level in ((1, judgement.middle), (2, judgement.last)):
            start = place(first + number * seconds, level)
            end = place(first + (number + 1) * seconds, level)
            parts.append(f'<polyline points="{start} {end}" stroke="black" stroke-width="1.5"/>')
    return "".join(parts)
