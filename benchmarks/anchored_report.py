"""The page and the figure of the anchored regressions, from their record (see anchored_regressions.py)."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from opo_trl.report.intervals import estimate, paired_difference

from .anchored_design import BASELINE
from .pages import table


Run = Mapping[str, Any]
Rows = dict[tuple[str, str], list[Run]]  # part and name of a cell → its runs, by seed

_MARKS = {"higher": " ▲", "lower": " ▼", "undecided": ""}
_HEADER = ("", "sampled", "difference", "greedy", "difference", "T = 0.6", "half-way", "entropy", "target fit")

_INTRODUCTION = """\
# The family of anchored regressions

`python -m benchmarks.anchored_regressions report` makes this page from `anchored_regressions.json.gz`;
`benchmarks/anchored_methods.py` defines the methods and says how they are related.

Embedded arithmetic task, Level 3, {budget:,} completions and {steps} optimizer steps of 48 completions in every run,
learning rate {rate:g}, constant, no gradient clipping, no dynamic sampling; seeds {seeds}. No method is tuned here:
μ = 0.3 is OPO's default, and Kimi's τ, OAPL's β and REBEL's η have the same value, so that these three ask for the
same differences of log-ratios in a group. TPO's u is the standardized reward, M2PO's threshold 0.04, CISPO's upper
bound 5.

Accuracies in % on 250 test problems (before: sampled {before:.1f}): two samples each at temperature 1 ("sampled") and
0.6, and greedy; "half-way" is the sampled accuracy after {half:,} completions. ± is half of the 95 % t interval.
Differences are from OPO's defaults in the same regime, paired by seed; ▲ and ▼ mark those whose interval excludes 0.
Entropy in nats per token and target fit are means over the last quarter of the steps."""

_REGIMES = {
    "passes": """\
## Passes: four over rollouts of 192

Four optimizer steps a pass; the policy that wrote a rollout is the anchor in all of its passes. So Δ moves away from 0
over 16 steps, and the regression acts.""",
    "replay": """\
## Replay: rollouts of 48, four passes, groups up to 16 rollouts old

A pass is one optimizer step, and OPO's anchor is the policy that takes a completion up: Δ is 0 in every step *by
construction*. So μ and the form of the ratio have no effect there; only the drive acts, times the weight
min(π/π_behaviour, 2). With two-valued rewards, drives of zero mean differ only in how much each group counts
([group_weights.md](group_weights.md)). Kimi k1.5, OAPL, REBEL, TPO and the rows "behaviour policy" keep the policy
that wrote a completion as its anchor, up to 64 steps later: there the regression acts.""",
}


def write_report(record: Mapping[str, Any], folder: Path, reading: str) -> None:
    """Write `anchored_regressions.md`, with the text of what it says, and `anchored_regressions.png`."""
    runs, settings = record["runs"], record["settings"]
    regimes = {name: _rows([run for run in runs if run["regime"] == name]) for name in _REGIMES}
    points = [run["points"] for run in runs]
    introduction = _INTRODUCTION.format(
        budget=settings["budget"],
        steps=points[0][-1]["optimizer_steps"],
        rate=settings["learning_rate"],
        seeds=", ".join(map(str, settings["seeds"])),
        before=100 * statistics.fmean(own[0]["sampled"] for own in points),
        half=points[0][1]["completions"],
    )
    lines = [introduction, "", reading, "", "![Sampled accuracy of each method](anchored_regressions.png)"]
    for name, rows in regimes.items():
        lines += ["", _REGIMES[name], "", _table(rows)]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += ["", f"Measured {record['date'][:10]} with {versions}."]
    (folder / "anchored_regressions.md").write_text("\n".join(lines) + "\n")
    plt.switch_backend("Agg")
    _draw(regimes, folder / "anchored_regressions.png")


def _rows(runs: Sequence[Run]) -> Rows:
    rows: Rows = {}
    for run in runs:
        rows.setdefault((run["part"], run["name"]), []).append(run)
    return {cell: sorted(own, key=lambda run: run["seed"]) for cell, own in rows.items()}


def accuracies(runs: Sequence[Run], name: str, point: int = -1) -> list[float]:
    """An accuracy of each run, in %."""
    return [100 * run["points"][point][name] for run in runs]


def _baseline(rows: Rows) -> list[Run]:
    return next(runs for (_, name), runs in rows.items() if name == BASELINE)


def difference(runs: Sequence[Run], baseline: Sequence[Run], name: str) -> str:
    """The paired difference from other runs, with half of its interval."""
    if runs is baseline:
        return ""
    seeds = [run["seed"] for run in runs]
    others = [run for run in baseline if run["seed"] in seeds]
    found = paired_difference(accuracies(runs, name), accuracies(others, name))
    low, high = found.estimate.interval or (0.0, 0.0)
    return f"{found.estimate.mean:+.1f} ± {(high - low) / 2:.1f}{_MARKS[found.verdict]}"


def _table(rows: Rows) -> str:
    baseline = _baseline(rows)
    lines = []
    for part, cells in itertools.groupby(rows, key=lambda cell: cell[0]):
        lines.append([f"*{part}*"] + [""] * (len(_HEADER) - 1))
        lines += [_line(name, rows[part, name], baseline) for part, name in cells]
    return table(_HEADER, lines)


def _line(name: str, runs: list[Run], baseline: list[Run]) -> list[str]:
    sampled = estimate(accuracies(runs, "sampled"))
    low, high = sampled.interval or (0.0, 0.0)
    return [
        name,
        f"{sampled.mean:.1f} ± {(high - low) / 2:.1f}",
        difference(runs, baseline, "sampled"),
        f"{statistics.fmean(accuracies(runs, 'greedy')):.1f}",
        difference(runs, baseline, "greedy"),
        f"{statistics.fmean(accuracies(runs, 'sharp')):.1f}",
        f"{statistics.fmean(accuracies(runs, 'sampled', 1)):.1f}",
        _mean(runs, "entropy", ".3f"),
        _mean(runs, "target_fit", ".2f"),
    ]


def _mean(runs: list[Run], name: str, digits: str) -> str:
    values = [run[name] for run in runs if run[name] is not None]
    return format(statistics.fmean(values), digits) if values else "–"


def _draw(regimes: Mapping[str, Rows], path: Path) -> None:
    height = 0.27 * max(map(len, regimes.values())) + 0.9
    figure, axes = plt.subplots(1, len(regimes), figsize=(11.5, height), layout="constrained", sharex=True)
    for axis, (regime, rows) in zip(axes, regimes.items(), strict=True):
        for place, ((_, name), runs) in enumerate(rows.items()):
            values = accuracies(runs, "sampled")
            color = "#d55e00" if name == BASELINE else "#0072b2"
            axis.plot(values, [place] * len(values), "o", color=color, alpha=0.4, markersize=4, markeredgewidth=0)
            axis.plot(statistics.fmean(values), place, "D", color=color, markersize=6)
        axis.axvline(statistics.fmean(accuracies(_baseline(rows), "sampled")), color="#d55e00", linewidth=0.8)
        axis.set_yticks(range(len(rows)), [name for _, name in rows], fontsize=8)
        axis.set(title=regime, xlabel="sampled accuracy, %", ylim=(len(rows) - 0.5, -0.5))
        axis.grid(axis="x", linewidth=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
