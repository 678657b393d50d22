"""The tables and figures of the regime map, from its collected runs (see regime.py)."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .intervals import Estimate, estimate, paired_difference
from .regime_design import BEST_RATE, CONFIRMATION_SEEDS


# Baselines of the confirmation.
_BASELINES = ("GRPO", "GRPO, epsilon = 0.4", "GSPO, epsilon = 0.02", "DAPO")

Run = dict[str, Any]
Cells = dict[tuple[str, int, float], list[Run]]  # method, optimizer steps per rollout, learning rate → seeds

_COLORS = {
    "GRPO": "#0072b2",
    "GSPO": "#b03a86",
    "DAPO": "#56b4e9",
    "OPO": "#e69f00",
    "OPO mean": "#009e73",
    "OPO, μ = 0.3": "#d55e00",
}


def write_report(runs: list[Run], folder: Path) -> None:
    """Write `regime.md` and `regime_reuse.png`."""
    cells: Cells = defaultdict(list)
    variants: dict[tuple[int, float], dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    confirmation: dict[int, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: run["seed"]):
        if run["seed"] in CONFIRMATION_SEEDS:
            name = f"OPO, {run['variant']}" if run["method"] == "OPO" else run["variant"] or run["method"]
            confirmation[run["steps_per_rollout"]][name].append(run)
        elif run["variant"]:
            variants[run["steps_per_rollout"], run["learning_rate"]][run["variant"]].append(run)
        else:
            cells[run["method"], run["steps_per_rollout"], run["learning_rate"]].append(run)
    lines = _introduction(runs)
    plt.switch_backend("Agg")
    softer = {("OPO", k, rate): runs["mu = 0.3"] for (k, rate), runs in variants.items() if rate == BEST_RATE}
    _draw_reuse(cells, softer, folder / "regime_reuse.png")
    lines += [*_map_tables(cells), *_best_table(cells)]
    for k, rate in sorted(variants, key=lambda place: (place[1], place[0])):
        map_cells = {name: cells[method, k, rate] for name, method in (("GRPO", "GRPO"), ("mu = 1", "OPO"))}
        lengths = {name: runs for name, runs in variants[k, rate].items() if name.startswith("Level")}
        lines += _variant_table(k, rate, map_cells | {n: r for n, r in variants[k, rate].items() if n not in lengths})
        lines += _length_table(lengths) if lengths else []
    lines += _confirmation_table(confirmation)
    (folder / "regime.md").write_text("\n".join(lines) + "\n")


def _axis(cells: Cells, position: int) -> list:
    return list(dict.fromkeys(cell[position] for cell in cells))


def _accuracies(runs: list[Run]) -> list[float]:
    return [100 * run["accuracy"] for run in runs]


def _text(value: Estimate) -> str:
    if value.interval is None:
        return f"{value.mean:.1f}"
    low, high = value.interval
    return f"{value.mean:.1f} ± {(high - low) / 2:.1f}"


def _introduction(runs: list[Run]) -> list[str]:
    seeds = sorted({run["seed"] for run in runs} - set(CONFIRMATION_SEEDS))
    before = np.mean([100 * run["before"] for run in runs if not run["variant"].startswith("Level")])
    return [
        "# Regime map",
        "",
        "`python -m benchmarks.regime report` makes this page from `regime.jsonl.gz`; the script defines a run.",
        f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}. Sampled accuracy in % on 250 test problems after 64",
        f"optimizer steps (before: {before:.1f}), mean over seeds ± half of the 95 % t interval.",
    ]


def _map_tables(cells: Cells) -> list[str]:
    methods, steps, rates = (_axis(cells, position) for position in range(3))
    lines = [
        "",
        "![Accuracy over steps per rollout, each method at its best learning rate](regime_reuse.png)",
    ]
    for method in methods:
        lines += [
            "",
            f"## {method}",
            "",
            "| steps per rollout | " + " | ".join(f"lr {rate:g}" for rate in rates) + " |",
        ]
        lines.append("| ---: |" + " ---: |" * len(rates))
        for k in steps:
            row = [_text(estimate(_accuracies(cells[method, k, rate]))) for rate in rates]
            lines.append(f"| {k} | " + " | ".join(row) + " |")
    return lines


def best_cell(cells: Cells, method: str, k: int) -> list[Run]:
    """Runs of the learning rate with the highest mean accuracy, for a method and a number of steps per rollout."""
    rates = [rate for m, steps, rate in cells if (m, steps) == (method, k)]
    return cells[method, k, max(rates, key=lambda rate: np.mean(_accuracies(cells[method, k, rate])))]


def _best_table(cells: Cells) -> list[str]:
    methods, steps, _ = (_axis(cells, position) for position in range(3))
    lines = [
        "",
        "## Each method at its best learning rate",
        "",
        "Accuracy, with the learning rate in brackets. It is chosen on the same seeds for every method, so all are",
        "slightly optimistic. Below, the difference from GRPO at its best rate, paired by seed: ▲ and ▼ mark those",
        "whose 95 % t interval excludes 0.",
        "",
        "| steps per rollout | " + " | ".join(methods) + " |",
        "| ---: |" + " ---: |" * len(methods),
    ]
    for k in steps:
        best = {method: best_cell(cells, method, k) for method in methods}
        row = [f"{_text(estimate(_accuracies(runs)))} ({runs[0]['learning_rate']:g})" for runs in best.values()]
        lines.append(f"| {k} | " + " | ".join(row) + " |")
        lines.append("| | " + " | ".join(_against(runs, best["GRPO"]) for runs in best.values()) + " |")
    return lines


def _against(runs: list[Run], baseline: list[Run], *, half: bool = False) -> str:
    if runs is baseline:
        return ""
    others = {run["seed"]: run for run in baseline}
    paired = [(run, others[run["seed"]]) for run in runs if run["seed"] in others]
    difference = paired_difference(*(_accuracies(list(side)) for side in zip(*paired, strict=True)))
    mark = {"higher": " ▲", "lower": " ▼", "undecided": ""}[difference.verdict]
    low, high = difference.estimate.interval or (0, 0)
    return f"{difference.estimate.mean:+.1f}" + (f" ± {(high - low) / 2:.1f}" if half else "") + mark


def _variant_table(k: int, rate: float, variants: dict[str, list[Run]]) -> list[str]:
    lines = [
        "",
        f"## OPO's fields one by one: {k} optimizer steps per rollout, learning rate {rate:g}",
        "",
        "All other fields at their defaults, with μ = 1 unless `chi2_radius` is set. The difference is to μ = 1",
        "alone, paired by seed.",
        "",
        "| | accuracy | difference | largest gradient norm | entropy at the end |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in variants.items():
        largest = max(max(run["grad_norm"]) for run in runs)
        entropy = np.mean([run["entropy"][-1] for run in runs])
        cells = (_text(estimate(_accuracies(runs))), _against(runs, variants["mu = 1"]))
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {largest:.3g} | {entropy:.3f} |")
    return lines


def _confirmation_table(confirmation: dict[int, dict[str, list[Run]]]) -> list[str]:
    lines = [
        "",
        "## Many off-policy steps, on other seeds",
        "",
        f"Seeds {CONFIRMATION_SEEDS[0]} to {CONFIRMATION_SEEDS[-1]}, on which no choice was based, at learning rate",
        f"{BEST_RATE:g}. Differences are paired by seed, ± half of the 95 % t interval.",
        "",
        "| steps per rollout | | accuracy | completions | from " + " | from ".join(_BASELINES) + " |",
        "| ---: | --- | ---: | ---: |" + " ---: |" * len(_BASELINES),
    ]
    for k, methods in sorted(confirmation.items()):
        for name, runs in methods.items():
            completions = np.mean([run["completions"] for run in runs])
            cells = [_text(estimate(_accuracies(runs))), f"{completions:,.0f}"]
            cells += [_against(runs, methods[baseline], half=True) for baseline in _BASELINES]
            lines.append(f"| {k} | {name} | {' | '.join(cells)} |")
    return lines


def _length_table(variants: dict[str, list[Run]]) -> list[str]:
    """A row per level, a column per radius; a variant's name has both."""
    table: dict[str, dict[str, list[Run]]] = defaultdict(dict)
    for name, runs in variants.items():
        level, radius = name.split(", ")
        table[level][radius] = runs
    lines = [
        "",
        "### Completions of other lengths",
        "",
        "The same on levels with completions of 9, 18, 30 and 45 tokens: accuracy on the trained level.",
        "",
        "| | before | " + " | ".join(next(iter(table.values()))) + " |",
        "| --- | ---: |" + " ---: |" * len(next(iter(table.values()))),
    ]
    for level, by_radius in table.items():
        before = np.mean([100 * run["before"] for runs in by_radius.values() for run in runs])
        cells = [_text(estimate(_accuracies(runs))) for runs in by_radius.values()]
        lines.append(f"| {level} | {before:.1f} | " + " | ".join(cells) + " |")
    return lines


def _draw_reuse(cells: Cells, softer: Cells, path: Path) -> None:
    """Accuracy over steps per rollout: methods at their best rate, and OPO with a smaller μ at `BEST_RATE`."""
    methods, steps, _ = (_axis(cells, position) for position in range(3))
    curves = {method: [(k, best_cell(cells, method, k)) for k in steps] for method in methods}
    curves["OPO, μ = 0.3"] = [(k, runs) for (_, k, _), runs in sorted(softer.items())]
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for i, (name, points) in enumerate(curves.items()):
        means = [estimate(_accuracies(runs)) for _, runs in points]
        spread = [(e.interval[1] - e.interval[0]) / 2 if e.interval else 0 for e in means]
        places = [k * 1.03 ** (i - 2.5) for k, _ in points]  # side by side
        heights, label = [e.mean for e in means], name if name not in ("OPO", "OPO mean") else f"{name}, μ = 1"
        axis.errorbar(places, heights, spread, label=label, color=_COLORS[name], marker="o", markersize=4, capsize=2)
    axis.set(xscale="log", xlabel="optimizer steps per rollout", ylabel="accuracy after training, %", ylim=(60, 96))
    axis.set_xticks(steps, [str(k) for k in steps])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
