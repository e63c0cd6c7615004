"""Line charts as SVG, which takes its colors from the page that it is in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

import pygal
from pygal.style import Style

from orchestrate.pages.curves import Curve

COLORS = 6  # that the page defines, as --color-0 and so on
# For its plugins, pygal adds a finder of a kind that Python 3.11 warns about at every import.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != pygal.__name__]
LARGEST = 1e15
SMALLEST, CLOSEST = 1e-30, 1e-9  # a smaller number is drawn as 0; the least difference, as a part of the largest number
pygal.etree.etree.to_etree()  # it prefers lxml, if that is installed
STYLE = Style(
    background="transparent",
    plot_background="transparent",
    foreground="currentColor",
    foreground_strong="currentColor",
    foreground_subtle="currentColor",
    opacity="1",
    opacity_hover="1",
    transition="0s",
    font_family="inherit",
    label_font_size=12,
    major_label_font_size=12,
    legend_font_size=12,
    title_font_size=12,
    colors=tuple(f"var(--color-{number})" for number in range(COLORS)),
)


class Chart(NamedTuple):
    """A chart as pages show it."""

    title: str
    svg: str
    data: str  # labels and points of its curves, as JSON
    axis: str


def charts(curves: Mapping[str, Mapping[str, Curve]], axis: str) -> list[Chart]:
    """Return a chart for each title, with curves by label."""
    found = []
    for title, each in curves.items():
        data = json.dumps([{"label": label, "points": curve} for label, curve in each.items()])
        found.append(Chart(title, lines(each, axis), data, axis))
    return found


def lines(curves: Mapping[str, Curve], axis: str = "step") -> str:
    """Return an SVG element with curves by label, over what `axis` says; a legend if there is more than one."""
    chart = pygal.XY(
        style=STYLE,
        width=640,
        height=280,
        margin=8,
        show_dots=False,
        stroke_style={"width": 2},
        show_legend=len(curves) > 1,
        legend_at_bottom=True,
        truncate_legend=40,
        truncate_label=-1,
        x_labels_major_count=6,
        show_minor_x_labels=False,
        x_title=axis,
        x_value_formatter=_short,
        value_formatter=_short,
        include_x_axis=False,
    )
    xs = _spread([x for curve in curves.values() for x, _ in curve])
    ys = _spread([y for curve in curves.values() for _, y in curve])
    for label, curve in curves.items():
        chart.add(label, [(next(xs), next(ys)) for _ in curve])
    tree = chart.render_tree()
    for parent in tree.iter():
        for child in [child for child in parent if child.tag in ("script", "title") or not isinstance(child.tag, str)]:
            parent.remove(child)  # scripts for tooltips, the name of the library, and comments
    tree.set("role", "img")
    tree.set(
        "aria-label", " and ".join(f"{label}, last value {_short(curve[-1][1])}" for label, curve in curves.items())
    )
    return ElementTree.tostring(tree, encoding="unicode")


def _spread(values: Sequence[float]) -> Iterator[float]:
    """Yield values, or the first one for all if they are too close together: pygal would look for labels forever.

    That one is at most LARGEST, which differs from its neighbors.
    """
    values = [value if abs(value) > SMALLEST else 0.0 for value in values]
    largest = max(map(abs, values))
    if max(values) - min(values) > CLOSEST * largest:
        return iter(values)
    return iter([max(-LARGEST, min(values[0], LARGEST))] * len(values))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 and value == int(value) else f"{value:.4g}"
