"""The plot of `benchmarks/incremental.py`: latency of a changed document by crawl rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 730, 20, 350
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


@dataclass(frozen=True)
class Point:
    """Measurements at one crawl rate."""

    per_second: float
    median_seconds: float
    p99_seconds: float


@dataclass(frozen=True)
class Curve:
    """The measurements of one repository."""

    documents: int
    batch_seconds: float
    crossover_per_second: float
    points: Sequence[Point]


class _Axis:
    """A logarithmic axis between whole powers of ten."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = floor(log10(min(values))), ceil(log10(max(values)))
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (log10(value) - self.low) / max(self.high - self.low, 1)
        return self._start + share * (self._end - self._start)

    def powers(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Writes the plot as SVG."""
    points = [point for curve in curves for point in curve.points]
    rates = [point.per_second for point in points]
    x = _Axis([*rates, *(one.crossover_per_second for one in curves)], LEFT, RIGHT)
    seconds = [one.p99_seconds for one in points] + [one.median_seconds for one in points]
    y = _Axis([*seconds, *(one.batch_seconds for one in curves)], BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_grid(x, y),
    ]
    for number, curve in enumerate(curves):
        parts += _curve(curve, COLOURS[number % len(COLOURS)], x, y)
        parts += _legend(curve, COLOURS[number % len(COLOURS)], BOTTOM + 55 + 18 * number)
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _grid(x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for power in x.powers():
        at = x.at(power)
        parts.append(f'<path d="M{at:.1f} {TOP}V{BOTTOM}" stroke="#ddd"/>')
        parts.append(_text(at, BOTTOM + 16, f"{power:g}", "middle"))
    for power in y.powers():
        at = y.at(power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{power:g} s", "end"))
    title = "changed documents per second; vertical: time until a changed document is served"
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 34, title, "middle"))
    return parts


def _curve(curve: Curve, colour: str, x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for name, dashes in (("median_seconds", ""), ("p99_seconds", ' stroke-dasharray="6 4"')):
        places = [(x.at(one.per_second), y.at(getattr(one, name))) for one in curve.points]
        line = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        parts += [
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>'
            for across, up in places
        ]
    batch, crossover = y.at(curve.batch_seconds), x.at(curve.crossover_per_second)
    dots = f'stroke="{colour}" stroke-dasharray="2 3"'
    parts.append(f'<path d="M{LEFT} {batch:.1f}H{RIGHT}" {dots}/>')
    parts.append(f'<path d="M{crossover:.1f} {TOP}V{BOTTOM}" {dots}/>')
    return parts


def _legend(curve: Curve, colour: str, at: float) -> list[str]:
    text = (
        f"{curve.documents:,} documents: median, 99 of 100 (dashed), batch pass of "
        f"{curve.batch_seconds:.0f} s and crossover at {curve.crossover_per_second:.0f}/s (dotted)"
    )
    line = f'<path d="M{LEFT} {at - 4}h24" stroke="{colour}" stroke-width="2"/>'
    return [line, _text(LEFT + 32, at, text, "start")]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
