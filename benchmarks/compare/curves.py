"""Curves of a comparison: each method's mean over seeds, with a band."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from benchmarks.compare.methods import method_of
from opo_trl.metrics.log import Points

from ..figures import legible, style, write
from ..intervals import estimate
from .measures import WINDOW, Comparison, clock, completions, efficiency, reward, seconds, series, smooth
from .runs import Run


# Okabe and Ito's colours, for curves that cannot have their method's; and line styles, which differ without colour.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_LINES = ("solid", "dashed", "dashdot", "dotted")
_MOST_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """A panel of the figure."""

    title: str
    points: Callable[[Run], Points]
    over: Callable[[Run], Points] | None = None  # what it is drawn over at each step, if not over the run's clock
    x_label: str = ""
    smoothed: bool = True  # whether to draw the mean of each value and the nine before it


_GENERATED = "completions generated"
_VALIDATION = "Validation accuracy"
CURVES = (
    Curve("Reward", reward),
    Curve(_VALIDATION, lambda run: series(run, "validation/accuracy"), smoothed=False),
    Curve("Gradient norm", lambda run: series(run, "grad_norm")),
    Curve("Gradient response efficiency", efficiency),
    Curve("Entropy per token (nats)", lambda run: series(run, "entropy")),
    Curve("Completion length (tokens)", lambda run: series(run, "completions/mean_length")),
    Curve(f"Reward against {_GENERATED}", reward, completions, _GENERATED),
    Curve("Reward against time", reward, seconds, "seconds of training steps"),
)
_COLUMNS = 2


def draw(comparison: Comparison, file: Path) -> str:
    """
    Draw every curve that some run has logged as a panel of one figure, the same runs always as the same PNG file.
    Returns the figure's caption.
    """
    plt.switch_backend("Agg")  # files only: no display is needed
    of_clock = _GENERATED if comparison.over_completions else "optimizer step"
    panels = []
    for curve in CURVES:
        points = [[_points(curve, run) for run in runs] for runs in comparison.methods.values()]
        is_logged = any(all(runs) for runs in points)
        repeats_reward = curve.x_label == of_clock
        if is_logged and not repeats_reward:
            panels.append((curve, points))
    rows = math.ceil(len(panels) / _COLUMNS)
    bands: list[str] = []
    with style():
        figure, grid = plt.subplots(rows, _COLUMNS, figsize=(10, 3 * rows), layout="constrained", squeeze=False)
        for axis in grid.flat[len(panels) :]:
            axis.remove()
        for axis, (curve, points) in zip(grid.flat, panels, strict=False):
            axis.set(title=curve.title, xlabel=curve.x_label or of_clock)
            if curve.title == _VALIDATION:
                axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            methods = zip(comparison.methods, points, colors(comparison), cycle(_LINES), strict=False)
            bands += [_plot(axis, *method, curve.smoothed) for method in methods if all(method[1])]
        grid[0, 0].legend(frameon=False)
        write(figure, file, Software=None)  # otherwise the file names matplotlib's version
        plt.close(figure)
    lines = f"Lines: means over seeds, of trailing means of {WINDOW} entries; {_VALIDATION.lower()} as measured."
    return f"{lines} Bands: {'; '.join(dict.fromkeys(bands))}."


def _points(curve: Curve, run: Run) -> Points:
    """The points of a curve. Steps on the same completions make one: their mean, or the last of a validation."""
    at = dict(curve.over(run)).get if curve.over else clock(run)
    found: dict[float, list[float]] = {}
    for step, value in curve.points(run):
        found.setdefault(at(step), []).append(value)
    found.pop(None, None)
    return [(x, float(np.mean(values)) if curve.smoothed else values[-1]) for x, values in found.items()]


def colors(comparison: Comparison) -> list[str]:
    """A colour for each curve: its method's, or a free one of the palette if another curve has that."""
    found: dict[str, str] = {}
    for label, runs in comparison.methods.items():
        method = method_of(runs[0].settings)
        if method and method.color not in found.values():
            found[label] = method.color
    free = cycle([color for color in _COLORS if color not in found.values()] or _COLORS)
    return [found.get(label) or next(free) for label in comparison.methods]


def _plot(axis: Axes, label: str, runs: list[Points], color: str, linestyle: str, smoothed: bool) -> str:
    """Draw one method; returns what its band shows."""
    x, values = on_common_grid(runs, smoothed)
    marker = None if smoothed else "o"
    name = f"{legible(label)} ({len(runs)} {'seed' if len(runs) == 1 else 'seeds'})"
    style: Any = {"color": color, "linestyle": linestyle, "linewidth": 1.6, "marker": marker, "markersize": 3}
    axis.plot(x, values.mean(axis=0), label=name, **style)
    if len(runs) == 1:
        return "none for a single seed"
    low, high = band(values)
    axis.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    return "95 % t interval" if len(runs) > 2 else "both seeds' values"


def on_common_grid(runs: list[Points], smoothed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Places `[points]`, and the values `[runs, points]` of all runs there, interpolated but never extrapolated."""
    curves = [np.array(points, dtype=float).T for points in runs]
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    x = np.unique(np.concatenate([x for x, _ in curves]))
    x = x[(x >= low) & (x <= high)]
    if len(x) > _MOST_POINTS:
        x = np.linspace(low, high, _MOST_POINTS)
    return x, np.stack([np.interp(x, own, smooth(y) if smoothed else y) for own, y in curves])


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper edge over runs: the t interval, or the extremes for two runs, whose t interval is useless."""
    if len(values) < 3:
        return values.min(axis=0), values.max(axis=0)
    low, high = np.array([estimate(column).interval for column in values.T]).reshape(-1, 2).T
    return low, high
