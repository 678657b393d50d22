"""The page and the figure of the anchored regressions, from their record (see anchored_regressions.py)."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from opo_trl.report.intervals import Estimate, estimate, paired_difference

from .pages import table


Run = Mapping[str, Any]
Rows = dict[tuple[str, str], list[Run]]  # part and name of a cell → its runs, by seed

BASELINE = "OPO"
UNWEIGHTED, LATEST = "behaviour policy, weight 1", "latest policy, weight ≤ 2"
TARGET = f'The target, all with weight 1; differences from "{UNWEIGHTED}"'
RATIO = f'The ratio, with weight 1; difference from "{UNWEIGHTED}"'
DRIVE = f'The drive, all with the latest policy as anchor; differences from "{LATEST}"'
_BASELINES = {TARGET: UNWEIGHTED, RATIO: UNWEIGHTED, DRIVE: LATEST}  # of the parts whose baseline is not OPO

_MARKS = {"higher": " ▲", "lower": " ▼", "undecided": ""}
_HEADER = ("", "n", "sampled", "difference", "greedy", "difference", "T = 0.6", "half-way", "entropy", "target fit")

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
0.6, and greedy; "half-way" is the sampled accuracy after {half:,} completions. n is the number of seeds, ± half of the
95 % t interval, which one seed does not have. Differences are from OPO in the same regime, or from the row that a
heading names, paired by seed; ▲ and ▼ mark those whose interval excludes 0.
Entropy in nats per token and target fit are means over the last quarter of the steps.

The runs are older than OPO's present default for several passes, which follows from them: they set what the name of
their row says, and `fields` in the record has the names of that version."""

_READING = """\
## What makes the difference

**The bounded weight min(π/π_behaviour, 2) makes the difference, together with a target of zero mean, and this is what
OPO does now when it passes over completions more than once.** A completion that the policy has left behind then no
longer pushes; without the weight only the χ² term can hold it, and only towards the behaviour policy.

These are directions, not results: passes have two seeds at most, replay has *one*, and of the sampled differences only
those of Kimi k1.5 and of normalization in the log exclude 0. What replay says rests on a single seed. As far as it
goes:

- *Weight and anchor.* The weight decides, not the anchor. With it, the behaviour policy as anchor is about as good as
  the latest one in both regimes. Without it, the behaviour policy falls behind, in replay to what its neighbours
  reach, and the latest policy collapses.
- *Mean of the target.* Normalization in the log (E[exp Δ\\*] = 1), which asks for a negative mean, costs most of all
  targets in OPO, and some points between Kimi k1.5 and OAPL, which differ in nothing else. Lowering the target by a
  constant costs as well. *Raising* it does not, and one of its two seeds is the best of the regime: zero is safe, it
  is not shown to be best.
- *Shape.* Escort weights are ahead of linear ones at the same χ² radius by a few points; for replay hardly.
- *Projection.* Algorithm 1 without it loses a few points in both regimes; its mean of 1/μ is positive.
- *Whole groups.* REBEL, which leaves the mean of Δ free, is where Kimi k1.5 is, and TPO below: both keep the behaviour
  policy as anchor and have no weight, as the row "behaviour policy, weight 1", which is there, too.
- *Masks and clips.* M2PO and CISPO bear replay better than passes; both are behind OPO."""

_REGIMES = {
    "passes": """\
## Passes: four over rollouts of 192

Four optimizer steps a pass; the policy that wrote a rollout is the anchor in all of its passes, except in the row
"latest policy". So Δ moves away from 0 over 16 steps, and the regression acts. OPO and the row "latest policy" weigh
completions; all other anchored regressions have weight 1.""",
    "replay": """\
## Replay: rollouts of 48, four passes, groups up to 16 rollouts old

A pass is one optimizer step. The policy that wrote a completion stays its anchor, up to some 64 steps later: there the
regression acts. In the rows "latest policy" and in those of the drive, the policy that begins a pass is the anchor: Δ
is 0 in every step *by construction*. So μ and the form of the ratio have no effect there; only the drive acts, times
the weight, which compares that policy with the one that wrote the completion. With two-valued rewards, drives of zero
mean then differ only in how much each group counts ([group_weights.md](group_weights.md)).""",
}


def write_report(record: Mapping[str, Any], folder: Path) -> None:
    """Write `anchored_regressions.md` and `anchored_regressions.png`."""
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
    lines = [introduction, "", _READING, "", "![Sampled accuracy of each method](anchored_regressions.png)"]
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


def _baseline(rows: Rows, part: str = "") -> list[Run]:
    """The runs that those of a part are compared with."""
    wanted = _BASELINES.get(part, BASELINE)
    return next(runs for (_, name), runs in rows.items() if name == wanted)


def difference(runs: Sequence[Run], baseline: Sequence[Run], name: str) -> str:
    """The paired difference from other runs, with half of its interval."""
    if runs is baseline:
        return ""
    seeds = [run["seed"] for run in runs]
    others = [run for run in baseline if run["seed"] in seeds]
    found = paired_difference(accuracies(runs, name), accuracies(others, name))
    return f"{found.estimate.mean:+.1f}{_half(found.estimate)}{_MARKS[found.verdict]}"


def _half(value: Estimate) -> str:
    """Half of an interval; nothing for a single seed."""
    return "" if value.interval is None else f" ± {(value.interval[1] - value.interval[0]) / 2:.1f}"


def _table(rows: Rows) -> str:
    lines = []
    for part, cells in itertools.groupby(rows, key=lambda cell: cell[0]):
        lines.append([f"*{part}*"] + [""] * (len(_HEADER) - 1))
        lines += [_line(name, rows[part, name], _baseline(rows, part)) for part, name in cells]
    return table(_HEADER, lines)


def _line(name: str, runs: list[Run], baseline: list[Run]) -> list[str]:
    sampled = estimate(accuracies(runs, "sampled"))
    return [
        name,
        str(len(runs)),
        f"{sampled.mean:.1f}{_half(sampled)}",
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
