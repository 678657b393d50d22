"""
Figures of a run, drawn from its log alone.

    opo-trl figures runs/arithmetic
"""

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..checks import files
from ..checks.text import one_line
from ..metrics.log import PHASES, Entry, Points, finite, number, off_policy, seconds_by_phase, validations
from .run_folder import LOG, by_decoding, read_log, read_summary


# Fixed identifiers and no date: the same log gives the same file.
STYLE: Any = {"svg.hashsalt": "opo_trl", "figure.dpi": 120, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
_COLOR, _SECOND = "#1f5fa8", "#c8552d"
_PHASE_COLORS = dict(zip(PHASES, ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73"), strict=True))

# Metric → title of its panel.
_VALIDATION, _CHI2 = "validation/accuracy", "opo/chi2"
_PANELS = {
    "reward": "training reward (mean of a rollout)",
    _VALIDATION: "validation accuracy, 95 % interval",
    "entropy": "entropy per token (nats)",
    "grad_norm": "gradient norm",
    _CHI2: "χ², off-policy steps",
    "opo/gradient_response_efficiency": "gradient response efficiency",
}


def style() -> AbstractContextManager[None]:
    """Our style alone: no `matplotlibrc`, which may be in the current folder, and no formulas in texts of others."""
    return plt.style.context({**STYLE, "text.parse_math": False}, after_reset=True)


def legible(text: str) -> str:
    """A text of others in a figure: matplotlib would leave out one that begins with an underscore."""
    line = one_line(text, 80)
    return f" {line}" if line.startswith("_") else line


def draw_run(folder: Path) -> dict[Path, bytes]:
    """
    Draw the figures of a run into its `figures/`, as PNG and SVG; returns the files with their contents.

    They are `training.*` (six metrics by optimizer step), `passes.*` (target fit by pass over a rollout, if there are
    several), `time.*` (seconds per optimizer step, by phase) and `accuracy.*` (before and after, with 95 % intervals).
    A `ValueError` if the folder has no log.
    """
    log = read_log(folder)
    if not log:
        raise ValueError(f"{str(folder / LOG)!r} does not exist or is empty. Pass the folder of a run.")
    plt.switch_backend("Agg")  # files only: no display is needed
    summary, into = read_summary(folder), folder / "figures"
    if into.is_symlink():
        raise ValueError(f"{str(into)!r} is a link. Remove it: figures would be written elsewhere.")
    written: dict[Path, bytes] = {}
    with style():
        figures = {"training": _panels([*_PANELS], log, (11, 5.5))}
        if len(fits := fits_by_pass(log)) > 1:
            figures["passes"] = _passes_figure(fits)
        if finite(log, "opo/time/update"):
            figures["time"] = _time_figure(log)
        if summary.get("after"):
            figures["accuracy"] = _accuracy_figure(summary)
        for name, figure in figures.items():
            written |= {path: write(figure, path) for path in (into / f"{name}.png", into / f"{name}.svg")}
            plt.close(figure)
    return written


def write(figure: Figure, path: Path, **metadata: str | None) -> bytes:
    """Write a figure into a file, whose content is returned; `metadata` of a PNG."""
    image = io.BytesIO()
    is_svg = path.suffix == ".svg"
    figure.savefig(image, format=path.suffix[1:], metadata={"Date": None} if is_svg else metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, image.getvalue())
    return image.getvalue()


def draw_progress(log: Sequence[Entry], max_steps: int) -> Figure:
    """
    Draw reward, entropy, χ² and gradient response efficiency over the `max_steps` optimizer steps of a training.

    `log` holds the entries so far, such as a trainer's `state.log_history`. The caller closes the figure.
    """
    with style():
        figure = _panels([metric for metric in _PANELS if metric not in ("grad_norm", _VALIDATION)], log, (9, 5))
        plt.setp(figure.axes, xlim=(0, max_steps))
    return figure


def _panels(metrics: Sequence[str], log: Sequence[Entry], size: tuple[float, float]) -> Figure:
    figure, axes = plt.subplots(2, len(metrics) // 2, figsize=size, layout="constrained")
    for axis, metric in zip(axes.flat, metrics, strict=True):
        axis.set_title(_PANELS[metric])
        entries = validations(log) if metric == _VALIDATION else log
        points = finite(entries, metric, off_policy if metric == _CHI2 else lambda entry: True)
        if not points:
            axis.text(0.5, 0.5, "not logged in this run", ha="center", va="center", transform=axis.transAxes)
        elif metric == _VALIDATION:
            _validation_curve(axis, entries)
        else:
            _curve(axis, points)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    return figure


def _curve(axis: Axes, points: Points):
    """Every value, and the moving mean over a tenth of the run."""
    steps, values = np.array(points, dtype=float).T
    axis.plot(steps, values, color=_COLOR, alpha=0.35, linewidth=0.8)
    window = max(len(values) // 10, 1)
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    axis.plot(steps[window - 1 :], smooth, color=_COLOR, linewidth=1.8, label=f"mean of {window}")
    if window > 1:
        axis.legend(loc="best", frameon=False)


def _validation_curve(axis: Axes, rows: Sequence[Entry]):
    steps = [row["step"] for row in rows]
    low, accuracy, high = ([number(row, f"validation/{name}") for row in rows] for name in ("low", "accuracy", "high"))
    axis.fill_between(steps, low, high, color=_SECOND, alpha=0.2, linewidth=0)
    axis.plot(steps, accuracy, color=_SECOND, marker="o", markersize=3, linewidth=1.5)
    axis.set_ylim(0, 1.02)


def fits_by_pass(log: Sequence[Entry]) -> dict[int, list[float]]:
    """By pass, the target fit at its end in each rollout; entries over several passes are left out."""
    found: dict[int, list[float]] = {}
    steps = [entry for entry in log if "grad_norm" in entry and number(entry, "opo/pass").is_integer()]
    for passed, of_pass in groupby(steps, lambda entry: int(entry["opo/pass"])):
        *_, last = of_pass
        if math.isfinite(fit := number(last, "opo/target_fit")):
            found.setdefault(passed, []).append(fit)
    return dict(sorted(found.items()))


def _passes_figure(fits: Mapping[int, Sequence[float]]) -> Figure:
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axis.plot([*fits], [np.mean(values) for values in fits.values()], color=_COLOR, marker="o", markersize=3)
    axis.set(xlabel="pass over a rollout", title="target fit at the end of a pass (mean over rollouts)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _time_figure(log: Sequence[Entry]) -> Figure:
    figure, axis = plt.subplots(figsize=(8, 1.9), layout="constrained")
    left = 0.0
    for phase, seconds in seconds_by_phase(log).items():
        if seconds > 0:
            axis.barh(0, seconds, left=left, color=_PHASE_COLORS[phase], label=f"{phase}, {seconds:.3g} s")
            left += seconds
    axis.set(yticks=[], xlabel="seconds per optimizer step")
    if speed := finite(log, "opo/tokens_per_second"):
        axis.set_title(f"{speed[-1][1]:,.0f} tokens per second")
    figure.legend(loc="outside lower center", ncols=len(_PHASE_COLORS), frameon=False)
    return figure


def _accuracy_figure(summary: dict[str, Any]) -> Figure:
    before, after = by_decoding(summary.get("before", {})), by_decoding(summary["after"])
    names = [name for name in after if name in before]  # a resumed run may report on other levels
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.55 * len(names)), layout="constrained")
    for label, results, offset, color in (("before", before, -0.17, "#8a8a8a"), ("after", after, 0.17, _COLOR)):
        low, accuracy, high = (np.array([results[name][key] for name in names]) for key in ("low", "accuracy", "high"))
        places = np.arange(len(names)) + offset
        axis.barh(places, accuracy, height=0.3, color=color, label=label)
        errors = np.maximum([accuracy - low, high - accuracy], 0)  # an interval may be wrong
        axis.errorbar(accuracy, places, xerr=errors, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    axis.set_yticks(range(len(names)), [*map(legible, names)])
    axis.set(xlim=(0, 1), xlabel="accuracy (95 % interval)")
    axis.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure
