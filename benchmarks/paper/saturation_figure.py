"""
The figure of gradient saturation: |∂ℒ/∂z| of every method on the toy of `saturation.py`.

    python -m benchmarks.paper.saturation_figure [--output FILE]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from benchmarks.compare.methods import METHODS
from benchmarks.figures import STYLE, write
from benchmarks.paper.saturation import gradient, on_policy_gradient


_COLOR = {method.label: method.color for method in METHODS}
# Colours for colour-blind readers (Okabe and Ito), and widths that show lines below others.
_METHOD_STYLES: dict[str, dict[str, Any]] = {
    "SFT": {"color": "#000000", "linewidth": 1.2},
    "DPO": {"color": "#e69f00", "linewidth": 1.8},
    "GRPO": {"color": _COLOR["GRPO"], "linewidth": 6, "alpha": 0.45},
    "DAPO": {"color": _COLOR["DAPO"], "linewidth": 3.2},
    "GSPO": {"color": _COLOR["GSPO"], "linewidth": 1.2},
    "OPO": {"color": _COLOR["OPO"], "linewidth": 3},
    "OPO, exact": {"color": "#009e73", "linewidth": 1.4},
}
_LOWERS_P = (0, (3, 1.5))  # dashes


def draw(output: Path) -> Path:
    """
    Draw |∂ℒ/∂z| of every method on the toy of `benchmarks/paper/saturation.py`, dashed where a step lowers p.

    Args:
        output (`Path`):
            File to write; its suffix is the format (`.png`, `.svg`, `.pdf`).

    Returns:
        `Path`: the file written.

    Raises:
        `ValueError`: if the suffix is not a known format.
    """
    known = FigureCanvasBase.get_supported_filetypes()
    if output.suffix.removeprefix(".") not in known:
        raise ValueError(
            f"--output {output} is not allowed: {output.suffix!r} is not a figure format. Use one of "
            f"{', '.join(f'.{ending}' for ending in sorted(known))}."
        )
    z = torch.linspace(-7, 9.22, 16_221, dtype=torch.float64)
    every_tenth = z[::10]
    fixed = {method: gradient(method, z).numpy() for method in _METHOD_STYLES}
    with_groups = [method for method in _METHOD_STYLES if method not in ("SFT", "DPO")]
    on_policy = {method: on_policy_gradient(method, every_tenth).numpy() for method in with_groups}
    plt.switch_backend("Agg")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(10, 4.4), layout="constrained")
        for axis, curves, logits in zip(axes, (fixed, fixed, on_policy), (z, z, every_tenth), strict=True):
            for method, values in curves.items():
                _magnitude(axis, logits.sigmoid().numpy(), values, method)
            axis.set_xlabel("p = σ(z), of the rewarded completion")
        _finish(*axes)
        _legend(figure, axes[0])
        write(figure, output)
        plt.close(figure)
    return output


def _magnitude(axis: Axes, p: np.ndarray, gradient: np.ndarray, method: str):
    """The magnitude of a gradient: solid where a descent step raises p, dashed where it lowers p."""
    style = _METHOD_STYLES[method]
    axis.plot(p, np.where(gradient <= 0, -gradient, np.nan), label=method, **style)
    axis.plot(p, np.where(gradient > 0, gradient, np.nan), linestyle=_LOWERS_P, **style)


def _finish(linear: Axes, log: Axes, on_policy: Axes):
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
    # Mark the end of the clip range, since a logarithmic axis cannot show a gradient of 0.
    for method, edge in (("GSPO", 0.5002), ("GRPO", 0.6), ("DAPO", 0.64)):
        log.plot(edge, 1e-4, marker="v", markersize=7, color=_METHOD_STYLES[method]["color"], clip_on=False, zorder=5)
    log.text(0.86, 1.4e-4, "▼ clipped: exactly 0\n    from here on")


def _legend(figure: Figure, axis: Axes):
    handles, labels = axis.get_legend_handles_labels()
    for style, label in (("-", "a step raises p"), (_LOWERS_P, "a step lowers p")):
        handles += axis.plot([], [], color="#8a8a8a", linestyle=style, linewidth=2)
        labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Draw the figure of gradient saturation.")
    parser.add_argument("--output", type=Path, default=Path("saturation.png"), help="file; its suffix is the format")
    try:
        print(draw(parser.parse_args(argv).output))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
