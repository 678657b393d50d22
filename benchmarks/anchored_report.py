"""The page and the figure of the anchored regressions, from their record (see anchored_regressions.py)."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from .intervals import Estimate, estimate, paired_difference
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
95 % t interval. Differences are from OPO in the same regime, or from the row that a
heading names, paired by seed; ▲ and ▼ mark those whose interval excludes 0, as one in twenty does by chance.
Entropy in nats per token and target fit are means over the last quarter of the steps."""

_READING = """\
## What makes the difference

**With replay, the bounded weight min(π/π_behaviour, 2); with passes over one rollout, a target whose mean is near 0.
OPO has both.** With the weight, a completion that the policy has left behind no longer pushes; without it only the χ²
term can hold that completion, and only towards the behaviour policy.

- *Weight and anchor.* In replay the weight decides: without it, the behaviour policy as anchor falls 9 points behind,
  to where its neighbours are, and the latest policy as anchor collapses. With it, the two anchors do not differ beyond
  noise. In four passes over one rollout, which end before the policy is far away, the weight makes no measurable
  difference.
- *Mean of the target.* Normalization in the log (E[exp Δ\\*] = 1), which asks for a negative mean, costs most: 22
  points in OPO, and it separates OAPL from Kimi k1.5, which differ in nothing else. Lowering the target by 0.5 costs
  9 points. Raising it by 0.5 costs nothing; a mean of 1/μ, which Algorithm 1 has without the projection, costs 9.
- *Shape.* Escort weights are a few points ahead of linear ones with passes, and level with them in replay: no interval
  excludes 0. Neither does that of the exact ratio.
- *Neighbours.* In replay, Kimi k1.5, REBEL and TPO are 11 to 15 points behind OPO, and not far from "behaviour policy,
  weight 1": like it, they have no weight. With passes, Kimi k1.5 is not separated from OPO.
- *Masks and clips.* M2PO and CISPO are more than 20 points behind, at settings that are not tuned for them; CISPO's
  seeds differ widely in replay."""

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
