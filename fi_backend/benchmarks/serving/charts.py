# SPDX-License-Identifier: Apache-2.0
"""Small charts as inline SVG: nothing is loaded, text stays text, colours follow the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 46
_Place = Callable[[float], float]
COLOURS = 6  # classes s0 .. s5 of the style sheet


@dataclass(frozen=True)
class Point:
    """x, y, and the bounds of y; note: shown under the pointer."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line. colour: index of a colour class; dashed: for a second percentile of the same thing."""

    label: str
    points: tuple[Point, ...]
    colour: int
    dashed: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    limit: tuple[float, str] | None = None,
    log: bool = False,
    diagonal: bool = False,
) -> str:
    """Return an SVG of lines with bounds. limit: a horizontal line and its label; log: scale of y.

    diagonal: also draw y = x. Points that a logarithmic scale cannot show are left out.
    """
    points = [point for each in series for point in each.points if not log or point.y > 0]
    if not points:
        return '<p class="none">nothing measured</p>'
    ends = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    ends += [limit[0]] if limit else []
    ends = [value for value in ends if not log or value > 0]
    x_max = max(point.x for point in points) * 1.06 or 1.0
    y_range = _log_range(min(ends), max(ends)) if log else (0.0, max(max(ends) * 1.08, 1e-9))

    def place_x(x: float) -> float:
        return _LEFT + x / x_max * (WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        low, high = y_range
        share = (math.log(y) - math.log(low)) / (math.log(high) - math.log(low)) if log else y / high
        return HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - _TOP - _BOTTOM)

    body = []
    for tick in _log_ticks(*y_range) if log else _ticks(y_range[1]):
        body.append(_grid(place_y(tick), tick))
    for tick in _ticks(x_max):
        body.append(_text(place_x(tick), HEIGHT - _BOTTOM + 17, _short(tick), "tick mid"))
    if diagonal:
        end = min(x_max, y_range[1])
        body.append(_line((place_x(0), place_y(0)), (place_x(end), place_y(end)), "ideal"))
    if limit:
        y = place_y(limit[0])
        body.append(_line((_LEFT, y), (WIDTH - _RIGHT, y), "limit"))
        body.append(_text(WIDTH - _RIGHT - 4, y - 5, limit[1], "limit-text end"))
    for each in series:
        body.append(_series(each, place_x, place_y, log))
    return _frame(body, x_label, y_label)


def bar_chart(groups: Sequence[tuple[str, Sequence[tuple[int, float, str]]]], *, y_label: str) -> str:
    """Return an SVG of bars side by side. groups: label and, for each bar, colour, height and note."""
    heights = [height for _, bars in groups for _, height, _ in bars]
    if not heights or not max(heights):
        return '<p class="none">nothing measured</p>'
    top = max(heights) * 1.08
    inner = HEIGHT - _TOP - _BOTTOM
    slot = (WIDTH - _LEFT - _RIGHT) / len(groups)
    body = [_grid(HEIGHT - _BOTTOM - tick / top * inner, tick) for tick in _ticks(top)]
    for index, (label, bars) in enumerate(groups):
        width = min(slot * 0.8 / max(len(bars), 1), 46)
        left = _LEFT + slot * (index + 0.5) - width * len(bars) / 2
        for number, (colour, height, note) in enumerate(bars):
            tall = height / top * inner
            body.append(
                f'<rect class="fill s{colour % COLOURS}" x="{left + number * width:.1f}" '
                f'y="{HEIGHT - _BOTTOM - tall:.1f}" width="{max(width - 2, 1):.1f}" height="{tall:.1f}">'
                f"<title>{escape(note)}</title></rect>"
            )
        body.append(_text(_LEFT + slot * (index + 0.5), HEIGHT - _BOTTOM + 17, label, "tick mid"))
    return _frame(body, "", y_label)


def legend(entries: Iterable[tuple[int, bool, str]]) -> str:
    """Return the key: colour, whether dashed, and label."""
    items = []
    for colour, dashed, label in entries:
        style = f"line s{colour % COLOURS}" + (" dashed" if dashed else "")
        swatch = f'<svg viewBox="0 0 26 8" class="key" aria-hidden="true"><path class="{style}" d="M1 4H25"/>'
        items.append(f"<li>{swatch}</svg> {escape(label)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _series(each: Series, place_x: _Place, place_y: _Place, log: bool) -> str:
    shown = [point for point in each.points if not log or point.y > 0]
    spots = [(place_x(point.x), place_y(point.y)) for point in shown]
    style = f"line s{each.colour % COLOURS}" + (" dashed" if each.dashed else "")
    parts = (
        [f'<path class="{style}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in spots)}"/>'] if spots else []
    )
    for point, (x, y) in zip(shown, spots, strict=True):
        if point.low is not None and point.high is not None and (not log or point.low > 0):
            low, high = place_y(point.low), place_y(point.high)
            parts.append(
                f'<path class="bound s{each.colour % COLOURS}" '
                f'd="M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"/>'
            )
        note = f"{each.label}: {point.note or f'{_short(point.y)} at {_short(point.x)}'}"
        parts.append(
            f'<circle class="fill s{each.colour % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{escape(note)}</title></circle>"
        )
    return "".join(parts)


def _frame(body: Sequence[str], x_label: str, y_label: str) -> str:
    middle = _TOP + (HEIGHT - _TOP - _BOTTOM) / 2
    turned = f"translate(14 {middle:.0f}) rotate(-90)"
    labels = [
        _text(_LEFT + (WIDTH - _LEFT - _RIGHT) / 2, HEIGHT - 8, x_label, "label mid"),
        f'<text class="label mid" transform="{turned}">{escape(y_label)}</text>',
    ]
    title = escape(f"{y_label} against {x_label}" if x_label else y_label)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join(body)}{''.join(labels)}</svg>"
    )


def _grid(y: float, value: float) -> str:
    return _line((_LEFT, y), (WIDTH - _RIGHT, y), "grid") + _text(_LEFT - 7, y + 4, _short(value), "tick end")


def _line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    return f'<path class="{style}" d="M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ticks(top: float) -> list[float]:
    """Round steps from 0 to `top`, four to eight of them."""
    size = 10 ** math.floor(math.log10(top))
    step = next(size * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5) if top / (size * part) <= 7)
    return [round(step * index, 10) for index in range(int(top / step) + 1)]


def _log_range(low: float, high: float) -> tuple[float, float]:
    return low / 1.25, max(high * 1.25, low * 2)


def _log_ticks(low: float, high: float) -> list[float]:
    parts = (1, 2, 5) if high / low < 1000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for decade in decades for part in parts if low <= (tick := part * 10.0**decade) <= high]
