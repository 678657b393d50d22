"""
Figures: of a run, drawn from its log and nothing else; and of the toy of gradient saturation.

    opo-trl figures runs/arithmetic
    opo-trl figures saturation --output saturation.png
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from .run_folder import LOG, SUMMARY, number, read_json, read_lines, validations


# Fixed identifiers and no date: the same log gives the same file.
_STYLE: Any = {"svg.hashsalt": "opo_trl", "figure.dpi": 120, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
_COLOR, _SECOND = "#1f5fa8", "#c8552d"

Row = dict[str, Any]

_PHASE_COLORS = {
    "generate": "#0072b2",
    "score": "#56b4e9",
    "anchor": "#e69f00",
    "update": "#d55e00",
    "sync": "#009e73",
}

# Panel title, metric, which rows of the log it is read from.
_PANELS: tuple[tuple[str, str, Callable[[Row], bool]], ...] = (
    ("training reward (mean of a rollout)", "reward", lambda row: True),
    ("entropy per token (nats)", "entropy", lambda row: True),
    ("gradient norm", "grad_norm", lambda row: True),
    # In a rollout's first optimizer step the policy is its anchor, and the divergence 0 by construction.
    ("χ² to the anchor, reused rollouts", "opo/chi2", lambda row: number(row, "opo/off_policy_steps") > 0),
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
        gradient response efficiency over optimizer steps), `time.*` (seconds of an optimizer step by phase) and
        `accuracy.*` (before and after, with 95 % intervals).

    Raises:
        `ValueError`: the folder has no log.
    """
    log = read_lines(folder / LOG)
    if not log:
        raise ValueError(f"{str(folder / LOG)!r} does not exist or is empty. Pass the folder of a run.")
    plt.switch_backend("Agg")  # files only: no display is needed
    with plt.rc_context(_STYLE):
        figures = {"training": _training_figure(log)}
        if timed := [row for row in log if math.isfinite(number(row, "opo/time/update"))]:
            figures["time"] = _time_figure(timed)
        summary = read_json(folder / SUMMARY)
        if summary.get("after"):
            figures["accuracy"] = _accuracy_figure(summary)
        return [path for name, figure in figures.items() for path in _save(figure, folder / "figures" / name)]


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        _write(figure, path)
    plt.close(figure)
    return paths


def _write(figure: Figure, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_progress(log: list[Row], max_steps: int) -> Figure:
    """
    Draw how far a training has come: reward, entropy, χ² and gradient response efficiency.

    Args:
        log (`list[dict]`):
            The entries logged so far, such as a trainer's `state.log_history`.
        max_steps (`int`):
            Optimizer steps of the whole training.

    Returns:
        `matplotlib.figure.Figure`: four panels over optimizer steps, to be closed by the caller.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(9, 5), layout="constrained")
        shown = [panel for panel in _PANELS if panel[1] != "grad_norm"]
        for axis, (title, metric, chosen) in zip(axes.flat, shown, strict=True):
            _curve(axis, _points(log, metric, chosen))
            axis.set(title=title, xlim=(0, max_steps))
        for axis in axes[-1]:
            axis.set_xlabel("optimizer step")
    return figure


def _points(log: list[Row], metric: str, chosen: Callable[[Row], bool]) -> list[tuple[int, float]]:
    return [(row["step"], number(row, metric)) for row in log if math.isfinite(number(row, metric)) and chosen(row)]


def _training_figure(log: list[Row]) -> Figure:
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.5), layout="constrained")
    reward, validation, *others = axes.flat
    for axis, (title, metric, chosen) in zip([reward, *others], _PANELS, strict=True):
        _curve(axis, _points(log, metric, chosen))
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
    if window > 1:
        axis.legend(loc="best", frameon=False)


def _validation_curve(axis: Axes, log: list[Row]):
    axis.set_title("validation accuracy, 95 % interval")
    rows = validations(log)
    if not rows:
        return _say_nothing_logged(axis)
    steps = [row["step"] for row in rows]
    low, accuracy, high = ([row[f"validation/{name}"] for row in rows] for name in ("low", "accuracy", "high"))
    axis.fill_between(steps, low, high, color=_SECOND, alpha=0.2, linewidth=0)
    axis.plot(steps, accuracy, color=_SECOND, marker="o", markersize=3, linewidth=1.5)
    axis.set_ylim(0, 1.02)


def _time_figure(steps: list[Row]) -> Figure:
    """Mean seconds of an optimizer step by phase, those that generate and those that reuse a rollout together."""
    figure, axis = plt.subplots(figsize=(8, 1.9), layout="constrained")
    left = 0.0
    for phase, color in _PHASE_COLORS.items():
        points = _points(steps, f"opo/time/{phase}", lambda row: True)
        seconds = float(np.mean([value for _, value in points])) if points else 0.0
        if seconds > 0:
            axis.barh(0, seconds, left=left, color=color, label=f"{phase}, {seconds:.3g} s")
            left += seconds
    axis.set_yticks([])
    axis.set_xlabel("seconds per optimizer step")
    axis.set_title(f"{number(steps[-1], 'opo/tokens_per_second'):,.0f} tokens per second")
    figure.legend(loc="outside lower center", ncols=len(_PHASE_COLORS), frameon=False)
    return figure


def _say_nothing_logged(axis: Axes):
    axis.text(0.5, 0.5, "not logged in this run", ha="center", va="center", transform=axis.transAxes)


def _accuracy_figure(summary: dict[str, Any]) -> Figure:
    before = summary.get("before", {})  # a run that was resumed may report on other levels
    rows = [
        (level, way) for level, by_way in summary["after"].items() for way in by_way if way in before.get(level, {})
    ]
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


# Colours that most colour-blind readers can tell apart (Okabe and Ito), and widths that show a line beneath another.
_METHOD_STYLES: dict[str, dict[str, Any]] = {
    "SFT": {"color": "#000000", "linewidth": 1.2},
    "DPO": {"color": "#e69f00", "linewidth": 1.8},
    "GRPO": {"color": "#0072b2", "linewidth": 6, "alpha": 0.45},
    "DAPO": {"color": "#56b4e9", "linewidth": 3.2},
    "GSPO": {"color": "#b03a86", "linewidth": 1.2},
    "OPO": {"color": "#d55e00", "linewidth": 3},
    "OPO, exact": {"color": "#009e73", "linewidth": 1.4},
}
_LOWERS_P = (0, (3, 1.5))  # dashes


def draw_saturation(output: Path) -> Path:
    """
    Draw |∂ℒ/∂z| of every method on the toy of `opo_trl/saturation.py`, dashed where a step lowers p.

    Args:
        output (`Path`):
            File to write; its suffix is the format (`.png`, `.svg`, `.pdf`).

    Returns:
        `Path`: the file written.

    Raises:
        `ValueError`: the suffix is no format.
    """
    known = FigureCanvasBase.get_supported_filetypes()
    if output.suffix.removeprefix(".") not in known:
        raise ValueError(
            f"--output {output} is not allowed: {output.suffix!r} is no format of figures. End it in one of "
            f"{', '.join(f'.{ending}' for ending in sorted(known))}."
        )
    import torch

    from .saturation import gradient, on_policy_gradient

    z = torch.linspace(-7, 9.22, 16_221, dtype=torch.float64)
    every_tenth = z[::10]
    fixed = {method: gradient(method, z).numpy() for method in _METHOD_STYLES}
    with_groups = [method for method in _METHOD_STYLES if method not in ("SFT", "DPO")]
    on_policy = {method: on_policy_gradient(method, every_tenth).numpy() for method in with_groups}
    plt.switch_backend("Agg")
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(10, 4.4), layout="constrained")
        for axis, curves, logits in zip(axes, (fixed, fixed, on_policy), (z, z, every_tenth), strict=True):
            for method, values in curves.items():
                _magnitude(axis, logits.sigmoid().numpy(), values, method)
            axis.set_xlabel("p = σ(z), of the rewarded completion")
        _finish_saturation(*axes)
        _saturation_legend(figure, axes[0])
        _write(figure, output)
        plt.close(figure)
    return output


def _magnitude(axis: Axes, p: np.ndarray, gradient: np.ndarray, method: str):
    """The magnitude of a gradient: solid where a step of descent raises p, dashed where it lowers it."""
    style = _METHOD_STYLES[method]
    axis.plot(p, np.where(gradient <= 0, -gradient, np.nan), label=method, **style)
    axis.plot(p, np.where(gradient > 0, gradient, np.nan), linestyle=_LOWERS_P, **style)


def _finish_saturation(linear: Axes, log: Axes, on_policy: Axes):
    linear.set(title="(a) off-policy: anchor stays at p = ½", ylabel="|∂ℒ/∂z|", xlim=(0, 1), ylim=(0, 1.6))
    log.set_title("(b) the same from p = ½, log scale")
    on_policy.set_title("(c) on-policy: anchor moves with p")
    ticks = (0.5, 0.9, 0.99, 0.999, 0.9999)
    for axis in (log, on_policy):
        axis.set(xscale="logit", yscale="log", xlim=(0.5, 0.9999), ylim=(1e-4, 10))
        axis.set_xticks(ticks, [f"{p:g}" for p in ticks])
        axis.minorticks_off()
    for axis, p, height in ((linear, 0.91, 1.1), (log, 0.99, 2.7)):
        axis.text(p, height, "OPO pulls p back", ha="right", color=_METHOD_STYLES["OPO"]["color"])
    on_policy.text(0.97, 0.17, "GRPO = DAPO = GSPO", color=_METHOD_STYLES["GRPO"]["color"])
    on_policy.text(0.55, 0.006, "OPO, both forms", color=_METHOD_STYLES["OPO"]["color"])
    # Where the clip range ends: a gradient of 0 has no place on a logarithmic axis.
    for method, edge in (("GSPO", 0.5002), ("GRPO", 0.6), ("DAPO", 0.64)):
        log.plot(edge, 1e-4, marker="v", markersize=7, color=_METHOD_STYLES[method]["color"], clip_on=False, zorder=5)
    log.text(0.86, 1.4e-4, "▼ clipped: exactly 0\n    from here on")


def _saturation_legend(figure: Figure, axis: Axes):
    handles, labels = axis.get_legend_handles_labels()
    for style, label in (("-", "a step raises p"), (_LOWERS_P, "a step lowers p")):
        handles += axis.plot([], [], color="#8a8a8a", linestyle=style, linewidth=2)
        labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
