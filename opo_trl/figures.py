"""
Figures of a run, drawn from its log and nothing else.

    opo-trl figures runs/arithmetic
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .run_folder import LOG, SUMMARY, read_json, read_lines


# Fixed identifiers and no date: the same log gives the same file.
_STYLE: Any = {"svg.hashsalt": "opo_trl", "figure.dpi": 120, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
_COLOR, _SECOND = "#1f5fa8", "#c8552d"

Row = dict[str, Any]

# Panel title, metric, which rows of the log it is read from.
_PANELS: tuple[tuple[str, str, Callable[[Row], bool]], ...] = (
    ("training reward (mean of a rollout)", "reward", lambda row: True),
    ("entropy per token (nats)", "entropy", lambda row: True),
    ("gradient norm", "grad_norm", lambda row: True),
    # In a rollout's first optimizer step the policy is its anchor, and the divergence 0 by construction.
    ("χ² to the anchor, reused rollouts", "opo/chi2", lambda row: row.get("opo/off_policy_steps", 0) > 0),
    ("gradient response efficiency", "opo/gradient_response_efficiency", lambda row: True),
)


def draw_run(folder: Path) -> list[Path]:
    """
    Draw the figures of a run into its `figures/`, each as PNG and SVG.

    Args:
        folder (`Path`):
            Folder of the run, with its `log.jsonl` and, for the figure of accuracies, `summary.json`.

    Returns:
        `list[Path]`: the files written: `training.*` (reward, validation accuracy, entropy, gradient norm, χ² and
        gradient response efficiency over optimizer steps) and `accuracy.*` (before and after, with 95 % intervals).

    Raises:
        `ValueError`: the folder has no log.
    """
    log = read_lines(folder / LOG)
    if not log:
        raise ValueError(f"{str(folder / LOG)!r} does not exist or is empty. Pass the folder of a run.")
    plt.switch_backend("Agg")  # files only: no display is needed
    with plt.rc_context(_STYLE):
        figures = {"training": _training_figure(log)}
        summary = read_json(folder / SUMMARY)
        if "after" in summary:
            figures["accuracy"] = _accuracy_figure(summary)
        return [path for name, figure in figures.items() for path in _save(figure, folder / "figures" / name)]


def _save(figure: Figure, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def _training_figure(log: list[Row]) -> Figure:
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.5), layout="constrained")
    reward, validation, *others = axes.flat
    for axis, (title, metric, chosen) in zip([reward, *others], _PANELS, strict=True):
        _curve(axis, [(row["step"], row[metric]) for row in log if row.get(metric) is not None and chosen(row)])
        axis.set_title(title)
    _validation_curve(validation, log)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    return figure


def _curve(axis: Axes, points: list[tuple[int, float]]):
    """Every value, and their mean over a window of a tenth of the run."""
    if not points:
        return _say_nothing_logged(axis)
    steps, values = np.array(points, dtype=float).T
    axis.plot(steps, values, color=_COLOR, alpha=0.35, linewidth=0.8)
    window = max(len(values) // 10, 1)
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    axis.plot(steps[window - 1 :], smooth, color=_COLOR, linewidth=1.8, label=f"mean of {window}")
    axis.legend(loc="best", frameon=False)


def _validation_curve(axis: Axes, log: list[Row]):
    axis.set_title("validation accuracy, 95 % interval")
    rows = [row for row in log if "validation/accuracy" in row]
    if not rows:
        return _say_nothing_logged(axis)
    steps = [row["step"] for row in rows]
    low, accuracy, high = ([row[f"validation/{name}"] for row in rows] for name in ("low", "accuracy", "high"))
    axis.fill_between(steps, low, high, color=_SECOND, alpha=0.2, linewidth=0)
    axis.plot(steps, accuracy, color=_SECOND, marker="o", markersize=3, linewidth=1.5)
    axis.set_ylim(0, 1.02)


def _say_nothing_logged(axis: Axes):
    axis.text(0.5, 0.5, "not logged in this run", ha="center", va="center", transform=axis.transAxes)


def _accuracy_figure(summary: dict[str, Any]) -> Figure:
    rows = [(level, decoding) for level, by_decoding in summary["after"].items() for decoding in by_decoding]
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.55 * len(rows)), layout="constrained")
    for time, offset, color in (("before", -0.17, "#8a8a8a"), ("after", 0.17, _COLOR)):
        results = [summary[time][level][decoding] for level, decoding in rows]
        accuracy = np.array([result["accuracy"] for result in results])
        errors = [accuracy - [r["low"] for r in results], [r["high"] for r in results] - accuracy]
        places = np.arange(len(rows)) + offset
        axis.barh(places, accuracy, height=0.3, color=color, label=time)
        axis.errorbar(accuracy, places, xerr=errors, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    axis.set_yticks(range(len(rows)), [f"{level}, {decoding}" for level, decoding in rows])
    axis.set_xlim(0, 1)
    axis.set_xlabel("accuracy (95 % Wilson interval)")
    axis.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure
