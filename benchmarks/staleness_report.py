"""The page and the figure of the benchmark of staleness, from its record (see staleness.py)."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from .intervals import Estimate, estimate, paired_difference
from .pages import table
from .staleness_methods import METHODS


Run = Mapping[str, Any]
Cells = Mapping[tuple[str, int, int], Sequence[Run]]  # method, lag, passes → its runs, by seed

BASELINE = "OPO"
_MARKS = {"higher": " ▲", "lower": " ▼", "undecided": ""}

_INTRODUCTION = """\
# Stale completions

`python -m benchmarks.staleness report` makes this page from `staleness.json.gz`; `benchmarks/staleness_methods.py`
defines the methods.

Embedded arithmetic task, Level 3; {steps} optimizer steps, each on a rollout of 48 completions (8 prompts × 6) that
the policy of L versions ago has written. A worker in the training process generates, so that L is exact and nothing
depends on time. L is the age when the trainer takes a rollout; TRL fetches one ahead, so that in training every
completion is one version older. With L = 64, all rollouts are the base model's.

Every method has the same trials at L = 0, 4 and 16: four learning rates × three values of its own field, on one seed;
the best three on two more. L = 1 takes the settings of L = 0, L = 64 those of L = 16. Constant learning rate, no
gradient clipping. Then {n} seeds that no choice was based on. Some choices are at an end of their grid: AsyncGRPO's
clip range at L = 4 and 16, M2PO's threshold at 4 and learning rate at 16, GSPO's clip range at 0, OPO's μ at 0 and 4.
Trials and runs are measured on the same problems; the intervals are those of training seeds.

Accuracies in % on 500 test problems, sampled at temperature 1 and greedy, ± half of the 95 % t interval. Differences
are paired by seed; ▲ and ▼ mark those whose interval excludes 0, as one in twenty does by chance."""


def write_report(record: Mapping[str, Any], folder: Path) -> None:
    """Write `staleness.md` and `staleness.png`."""
    cells: dict[tuple[str, int, int], list[Run]] = {}
    for run in sorted(record["runs"], key=lambda run: run["seed"]):
        cells.setdefault((run["method"], run["lag"], run["passes"]), []).append(run)
    lags = sorted({lag for _, lag, _ in cells})
    everywhere = [name for name in METHODS if all((name, lag, 1) in cells for lag in lags)]
    (at,) = {lag for name, lag, _ in cells if name not in everywhere}
    lines = [
        _INTRODUCTION.format(steps=record["steps"], n=len({run["seed"] for run in record["runs"]})),
        "\n![Sampled and greedy accuracy over staleness](staleness.png)",
        "\n## By staleness",
        *(f"\n{_by_lag(cells, everywhere, lags, name)}" for name in ("sampled", "greedy")),
        f"\nDifferences of {BASELINE} from the others, sampled and greedy:",
        f"\n{_differences(cells, everywhere, lags)}",
        f"\nWhat L = {at} costs: {_costs(cells, everywhere, lags[0], at)}.",
        f"\n## OPO's anchors and weights, L = {at}",
        f"\n{_rows(cells, [(name, at, 1) for name in METHODS if name.startswith(BASELINE)])}",
        f"\n## Several optimizer steps over each rollout, L = {at}",
        "\nWith the settings that are best for one; weights are sent after the last.",
        f"\n{_passes(cells)}",
        "\n## Trials",
        f"\n{_trials(record['tuning'])}",
    ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines.append(f"\nMeasured {record['date'][:10]} with {versions}.")
    (folder / "staleness.md").write_text("\n".join(lines) + "\n")
    plt.switch_backend("Agg")
    _draw(cells, everywhere, lags, folder / "staleness.png")


def _values(runs: Sequence[Run], name: str) -> list[float]:
    return [100 * run[name] for run in runs]


def _accuracy(runs: Sequence[Run], name: str) -> str:
    found = estimate(_values(runs, name))
    return f"{found.mean:.1f} ± {_half(found):.1f}"


def _half(found: Estimate) -> float:
    assert found.interval is not None
    return (found.interval[1] - found.interval[0]) / 2


def _difference(runs: Sequence[Run], others: Sequence[Run], name: str) -> str:
    found = paired_difference(_values(runs, name), _values(others, name))
    return f"{found.estimate.mean:+.1f} ± {_half(found.estimate):.1f}{_MARKS[found.verdict]}"


def _by_lag(cells: Cells, methods: Sequence[str], lags: Sequence[int], name: str) -> str:
    header = (name, *(f"L = {lag}" for lag in lags))
    return table(header, [[m, *(_accuracy(cells[m, lag, 1], name) for lag in lags)] for m in methods])


def _differences(cells: Cells, methods: Sequence[str], lags: Sequence[int]) -> str:
    rows = [
        [f"{other}, {name}", *(_difference(cells[BASELINE, lag, 1], cells[other, lag, 1], name) for lag in lags)]
        for name in ("sampled", "greedy")
        for other in methods
        if other != BASELINE
    ]
    return table(("", *(f"L = {lag}" for lag in lags)), rows)


def _costs(cells: Cells, methods: Sequence[str], fresh: int, stale: int) -> str:
    return ", ".join(
        f"{name} {_difference(cells[name, stale, 1], cells[name, fresh, 1], 'sampled')} sampled and "
        f"{_difference(cells[name, stale, 1], cells[name, fresh, 1], 'greedy')} greedy"
        for name in methods
    )


def _rows(cells: Cells, wanted: Sequence[tuple[str, int, int]]) -> str:
    baseline = cells[wanted[0]]
    rows = []
    for cell in wanted:
        row = [cell[0]]
        for name in ("sampled", "greedy"):
            row.append(_accuracy(cells[cell], name))
            row.append("" if cells[cell] is baseline else _difference(cells[cell], baseline, name))
        rows.append(row)
    return table(("", "sampled", "difference", "greedy", "difference"), rows)


def _passes(cells: Cells) -> str:
    rows = []
    for method, lag, passes in cells:
        if passes > 1:
            runs, one = cells[method, lag, passes], cells[method, lag, 1]
            measured = [(_accuracy(runs, name), _difference(runs, one, name)) for name in ("sampled", "greedy")]
            rows.append([method, str(passes), *measured[0], *measured[1]])
    return table(("", "steps", "sampled", "difference from one", "greedy", "difference from one"), rows)


def _trials(tuning: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            trial["method"],
            str(trial["lag"]),
            f"{trial['learning_rate']:g}",
            f"{METHODS[trial['method']].meaning} {trial['own']:g}",
            f"{100 * statistics.fmean(trial['sampled']):.1f}",
            str(len(trial["sampled"])),
            "✓" if trial["chosen"] else "",
        ]
        for trial in tuning
    ]
    return table(("", "L", "learning rate", "own field", "sampled", "seeds", "chosen"), rows)


def _draw(cells: Cells, methods: Sequence[str], lags: Sequence[int], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for axis, name in zip(axes, ("sampled", "greedy"), strict=True):
        for i, method in enumerate(methods):
            found = [estimate(_values(cells[method, lag, 1], name)) for lag in lags]
            places = [place + 0.06 * (i - (len(methods) - 1) / 2) for place in range(len(lags))]
            axis.errorbar(
                places,
                [each.mean for each in found],
                [_half(each) for each in found],
                label=method,
                color=METHODS[method].color,
                marker="o",
                markersize=4,
                capsize=2,
                linewidth=1.3,
            )
        axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
        axis.set(title=f"{name} accuracy, %", xlabel="versions of the policy behind, when taken")
        axis.grid(axis="y", linewidth=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
