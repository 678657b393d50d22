"""The tables and the figure of the benchmark of reuse, from its record (see reuse.py)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .intervals import Estimate, estimate, paired_difference
from .learning_curves import SHARP, at, completions_to, smoothed
from .pages import table
from .reuse_design import CHECKS, CONTENDERS, FIGURE, GOALS, PARTS, TIMED_COMPLETIONS, TRANSFERS, Row, Transfer


Curves = Mapping[str, Mapping[str, Any]]  # seed → what a run has measured
Rows = Mapping[str, Curves]

_COUNTS = {3: "three", 5: "five"}
_RIVALS = ("GRPO", "DAPO", "GSPO")
_WINDOW = 200  # completions over which the entropy is averaged
_MEASURED = {"sampled": "sampled", "sharp": f"at temperature {SHARP:g}", "greedy": "greedy", "pass@2": "pass@2"}


def write_report(record: Mapping[str, Any], folder: Path) -> None:
    """Write `reuse.md` and `reuse.png`."""
    rows: Rows = record["rows"]
    plt.switch_backend("Agg")
    _draw(rows, folder / "reuse.png")
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    sections = [
        "# Reuse of completions\n\n`python -m benchmarks.reuse report` makes this page from `reuse.json.gz`; "
        "`reuse_design.py` has the fields of each run.\nThe task is Level 3 of the embedded arithmetic, with rollouts "
        "of 48 completions (8 prompts × 6). Accuracies are in % on 250\ntest problems: sampled at temperature 1 (two "
        f"completions each) and {SHARP:g}, and greedy. A curve's place at a goal is that of its\nisotonic regression. "
        "± and brackets are 95 % intervals over seeds.",
        _tuning(record["tuning"]),
        "## To the same sampled accuracy\n\n![Accuracy over completions generated](reuse.png)\n\n"
        "Each method with its best trial, on ten seeds that no choice was based on.\n\n" + _goals(FIGURE, rows),
        "## What does it\n\nFive of these seeds. A row has the fields that were tuned for its method, but for what "
        "its name says.\n\n" + _goals(PARTS, rows),
        "## Does it hold\n\nAccuracies after 1,500 completions, with the number of seeds. A row has the fields that "
        "were tuned for its method, but for\nwhat its name says.\n\n" + _ends((*FIGURE, *PARTS, *CHECKS), rows, 1500),
        *(_transfer(transfer, rows) for transfer in TRANSFERS),
        _seconds(record, rows),
        f"Measured {record['date'][:10]} with {versions}.",
    ]
    (folder / "reuse.md").write_text("\n\n".join(section for section in sections if section) + "\n")


def _show(value: Estimate, digits: int = 1) -> str:
    if value.interval is None:
        return f"{value.mean:,.{digits}f}"
    return f"{value.mean:,.{digits}f} ± {(value.interval[1] - value.interval[0]) / 2:,.{digits}f}"


def _tuning(tuning: Mapping[str, Any]) -> str:
    lines = []
    for contender in CONTENDERS:
        found = tuning[contender.name]
        for number, (fields, costs) in enumerate(zip(contender.trials, found["costs"], strict=True)):
            name = ", ".join(f"{name} {value:g}" for name, value in fields.items())
            best = " **(best)**" if number == found["best"] else ""
            lines.append([f"{contender.name}: {name}{best}", *(f"{c:,}" for c in costs.values())])
            lines[-1] += [""] * (4 - len(lines[-1]))
    return (
        "## Tuning\n\nSixteen trials for each method. The cost is the number of completions to "
        f"{' and '.join(f'{goal:.0%}' for goal in GOALS)} together; a goal that is not reached\ncounts 1.5 budgets. "
        "Trials at most twice as costly as their method's best on the first seed run on two more.\n\n"
        + table(("trial", "seed 41", "seed 42", "seed 43"), lines)
    )


def places(curves: Curves, goal: float) -> dict[str, float | None]:
    """Completions to a goal, by seed."""
    return {seed: completions_to(goal, curve["points"]) for seed, curve in curves.items()}


def ratio(own: Curves, other: Curves, goal: float, *, budget: int, other_budget: int) -> Estimate | None:
    """
    Ratio of the completions to a goal, paired by seed: geometric mean and its interval; `None` if no run of one's own
    reaches the goal. A run that does not counts with 1.5 budgets on one's own side, as in tuning, and with one budget
    on the other, which favours the other.
    """
    mine, reference = places(own, goal), places(other, goal)
    if not any(mine.values()):
        return None
    pairs = [(place or 1.5 * budget, reference[seed] or other_budget) for seed, place in mine.items()]
    found = estimate([math.log(place / theirs) for place, theirs in pairs])
    interval = None if found.interval is None else (math.exp(found.interval[0]), math.exp(found.interval[1]))
    return Estimate(math.exp(found.mean), interval, found.n)


def _ratio_text(value: Estimate | None) -> str:
    if value is None or value.interval is None:
        return "–"
    return f"{value.mean:.2f} [{value.interval[0]:.2f}, {value.interval[1]:.2f}]"


def measured_at(curve: Mapping[str, Any], completions: float, name: str) -> float:
    """An accuracy or pass rate of a run after some completions, in %."""
    points = [{**point, "pass@2": point["pass_at"]["2"]} for point in curve["points"]]
    return 100 * at(completions, points, name)


def entropy_at(curve: Mapping[str, Any], completions: float) -> float:
    """Mean entropy in nats per token of the fresh completions just before a place."""
    steps = curve["steps"]
    passes = steps.get("opo/pass", [1.0] * len(steps["entropy"]))
    generated = np.maximum.accumulate([value or 0 for value in steps["completions/generated"]])
    fresh = [
        (n, value) for n, value, number in zip(generated, steps["entropy"], passes, strict=True) if number in (1, None)
    ]
    near = [value for n, value in fresh if completions - _WINDOW <= n <= completions + 48]
    return statistics.fmean(near) if near else fresh[0][1]


def _goals(rows: Sequence[Row], all_rows: Rows) -> str:
    tables = []
    budgets = {row.name: row.budget for row in FIGURE}
    for goal in GOALS:
        lines = []
        for row in rows:
            if row.name not in all_rows:
                continue
            curves = all_rows[row.name]
            found = places(curves, goal)
            reached = {seed: place for seed, place in found.items() if place is not None}
            count = "" if len(reached) == len(found) else f" ({len(reached)} of {len(found)})"
            if not reached:
                lines.append([row.name, f"none of {len(found)}", *["–"] * (5 + len(_RIVALS))])
                continue
            against = [
                ""
                if row.name == name
                else _ratio_text(ratio(curves, all_rows[name], goal, budget=row.budget, other_budget=budgets[name]))
                for name in _RIVALS
            ]
            at_place = [
                _show(estimate([measured_at(curves[seed], place, name) for seed, place in reached.items()]))
                for name in ("greedy", "sharp", "pass@2")
            ]
            entropy = estimate([entropy_at(curves[seed], place) for seed, place in reached.items()])
            lines.append(
                [
                    row.name,
                    _show(estimate(list(reached.values())), 0) + count,
                    *against,
                    *at_place,
                    f"{entropy.mean:.3f}",
                    _greedy_difference(row.name, curves, all_rows, goal),
                ]
            )
        header = (
            f"to {goal:.0%} sampled",
            "completions",
            *(f"ratio to {name}" for name in _RIVALS),
            "greedy there",
            f"at T = {SHARP:g}",
            "pass@2",
            "entropy",
            "greedy − GRPO's",
        )
        tables.append(table(header, lines))
    return "\n\n".join(tables)


def _greedy_difference(name: str, curves: Curves, rows: Rows, goal: float) -> str:
    if name == "GRPO":
        return ""
    own, other = places(curves, goal), places(rows["GRPO"], goal)
    seeds = [seed for seed, place in own.items() if place is not None and other.get(seed) is not None]
    if len(seeds) < 2:
        return "–"
    sides = [
        [measured_at(source[seed], found[seed] or 0, "greedy") for seed in seeds]
        for source, found in ((curves, own), (rows["GRPO"], other))
    ]
    found = paired_difference(*sides).estimate
    low, high = found.interval or (found.mean, found.mean)
    return f"{found.mean:+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def _ends(rows: Sequence[Row], all_rows: Rows, completions: int) -> str:
    lines = []
    for row in rows:
        if row.name not in all_rows:
            continue
        curves = all_rows[row.name].values()
        values = [
            _show(estimate([measured_at(curve, completions, name) for curve in curves]))
            for name in ("sampled", "sharp", "greedy", "pass@2")
        ]
        entropy = statistics.fmean(entropy_at(curve, completions) for curve in curves)
        lines.append([row.name, str(len(curves)), *values, f"{entropy:.3f}"])
    header = (
        f"after {completions:,} completions",
        "seeds",
        "sampled",
        f"at T = {SHARP:g}",
        "greedy",
        "pass@2",
        "entropy",
    )
    return table(header, lines) if lines else ""


def _transfer(transfer: Transfer, rows: Rows) -> str:
    """Section of another task or model; empty if neither of its rows has been run."""
    tables = [_ends(transfer.rows, rows, completions) for completions in (transfer.budget // 2, transfer.budget)]
    if not any(tables):
        return ""
    half, end = f"{transfer.budget // 2:,}", f"{transfer.budget:,}"
    return (
        f"## {transfer.heading}\n\n{transfer.text}, with the fields tuned on arithmetic, "
        f"{_COUNTS[len(transfer.seeds)]} seeds; accuracies after {half}\nand {end} completions. "
        + "\n\n".join([_catches_up(transfer.name, rows) + "\n" + _leads(transfer, rows), *tables])
    )


def _catches_up(task: str, rows: Rows) -> str:
    """When OPO and GSPO have the sampled accuracy that GRPO ends with."""
    other = rows.get(f"{task}, GRPO", {})
    found = []
    for name in ("OPO", "GSPO"):
        if own := rows.get(f"{task}, {name}", {}):
            shares = []
            for seed, curve in other.items():
                end = curve["points"][-1]["completions"]
                place = completions_to(smoothed(curve["points"])[-1], own[seed]["points"])
                shares.append(math.log((end if place is None else place) / end))
            mean = estimate(shares)
            low, high = (math.exp(bound) for bound in mean.interval or (math.nan, math.nan))
            found.append(f"{name} needs {math.exp(mean.mean):.2f} [{low:.2f}, {high:.2f}]")
    if not found:
        return ""
    return (
        f"To the sampled accuracy with which GRPO ends,\n{' and '.join(found)} times its completions (a run that does "
        "not get there counts as 1)."
    )


def _leads(transfer: Transfer, rows: Rows) -> str:
    """How far OPO ends above the others."""
    own, found = rows.get(f"{transfer.name}, OPO", {}), []
    for name in ("GRPO", "GSPO"):
        if own and (other := rows.get(f"{transfer.name}, {name}", {})):
            sides = [[measured_at(c[seed], transfer.budget, "sampled") for seed in own] for c in (own, other)]
            mean = paired_difference(*sides).estimate
            low, high = mean.interval or (math.nan, math.nan)
            found.append(f"{mean.mean:+.1f} [{low:+.1f}, {high:+.1f}] points from {name}'s".replace("-", "−"))
    return f"OPO's sampled accuracy there is {' and '.join(found)}." if own else ""


def phase_costs(curves: Curves) -> tuple[float, float]:
    """Seconds to generate and score a completion, and to compute one gradient of a completion, over some runs."""
    generation = sum(c["phases"]["generate"] + c["phases"]["score"] for c in curves.values())
    update = sum(c["phases"]["update"] + c["phases"]["anchor"] for c in curves.values())
    generated = sum(c["points"][-1]["completions"] for c in curves.values())
    gradients = sum(48 * c["points"][-1]["optimizer_steps"] for c in curves.values())
    return generation / generated, update / gradients


def _seconds(record: Mapping[str, Any], rows: Rows) -> str:
    if not record["times"]:
        return ""
    by_name: dict[str, list[float]] = {}
    for entry in record["times"]:
        by_name.setdefault(entry["name"], []).append(entry["seconds"])
    rates = {name: statistics.fmean(values) for name, values in by_name.items()}
    lines = []
    for name, rate in rates.items():
        label, method = ("TRL's GRPOTrainer", "GRPO") if name == "TRL" else (name, name)
        line = [label, f"{1000 * rate:.1f}"]
        for goal in GOALS:
            found = _ratio_to_grpo(method, rows, goal, rate / rates["TRL"])
            line.append("1" if name == "TRL" else _ratio_text(found))
        lines.append(line)
    goals = (f"seconds to {goal:.0%}, ratio to TRL" for goal in GOALS)
    text = (
        f"## Seconds\n\nMilliseconds of training per completion generated, all passes included, over "
        f"{TIMED_COMPLETIONS} completions, alone on a CPU\nwhere generation is cheap; three seeds. TRL's trainer runs "
        "the fields of GRPO. Seconds to a goal are these, times the\ncompletions to it.\n\n"
        + table(("method", "ms per completion", *goals), lines)
    )
    return text + "\n\n" + _cost_model(by_name, rows)


def _ratio_to_grpo(name: str, rows: Rows, goal: float, factor: float = 1.0) -> Estimate | None:
    """A row's ratio of completions to GRPO's, with its interval, times a factor."""
    if name == "GRPO":
        return Estimate(factor, (factor, factor), len(rows[name]))
    budgets = {row.name: row.budget for row in FIGURE}
    found = ratio(rows[name], rows["GRPO"], goal, budget=budgets[name], other_budget=budgets["GRPO"])
    if found is None:
        return None
    low, high = found.interval or (math.nan, math.nan)
    return Estimate(factor * found.mean, (factor * low, factor * high), found.n)


def _cost_model(times: Mapping[str, Sequence[float]], rows: Rows) -> str:
    """When it pays: with a share of generation in the seconds of a one-pass run."""
    goal = GOALS[-1]
    found = _ratio_to_grpo("OPO", rows, goal)
    if found is None:
        return ""
    generate, update = phase_costs(rows["GRPO"])
    _, opo_update = phase_costs(rows["OPO"])
    share = generate / (generate + update * _gradients(rows["GRPO"]))
    passes = {name: _gradients(rows[name]) for name in ("GRPO", "OPO")}

    def predicted(share: float) -> float:
        """Seconds of OPO to the goal over GRPO's, if generation is this share of GRPO's seconds."""
        per_gradient = (1 - share) / passes["GRPO"]
        return found.mean * (share + passes["OPO"] * per_gradient * opo_update / update)

    measured = found.mean * statistics.fmean(times["OPO"]) / statistics.fmean(times["GRPO"])
    lines = [[f"{s:.0%}", f"{predicted(s):.2f}"] for s in (0.2, 0.4, 0.6, 0.8, 0.9, 0.95)]
    equal = next((s for s in np.linspace(0, 1, 1001) if predicted(float(s)) <= 1), math.nan)
    return (
        f"To {goal:.0%}, OPO needs {found.mean:.2f} times the completions of GRPO, and computes "
        f"{passes['OPO']:.1f} gradients per completion\nwhere GRPO computes {passes['GRPO']:.1f}. So the seconds to "
        "the goal, as a ratio to GRPO's, follow from the share of generation\n(and scoring) in GRPO's seconds; they "
        f"are equal at {equal:.0%}:\n\n" + table(("share of generation", "seconds, ratio to GRPO"), lines) + "\n\n"
        f"Measured here, at a share of {share:.0%}: {measured:.2f}; the model says {predicted(share):.2f}."
    )


def _gradients(curves: Curves) -> float:
    """Gradients computed per completion generated."""
    last = [curve["points"][-1] for curve in curves.values()]
    return sum(48 * point["optimizer_steps"] for point in last) / sum(point["completions"] for point in last)


def _draw(rows: Rows, path: Path) -> None:
    colors = {contender.name: contender.color for contender in CONTENDERS}
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
    for panel, name in zip(panels, ("sampled", "sharp", "greedy"), strict=True):
        for row in FIGURE:
            curves = rows.get(row.name, {})
            if not curves:
                continue
            grid = np.linspace(0, row.budget, 60)
            values = np.array([[measured_at(curve, x, name) for x in grid] for curve in curves.values()])
            bands = [estimate(list(column)) for column in values.T]
            low, high = zip(*[band.interval or (band.mean, band.mean) for band in bands], strict=True)
            panel.plot(grid, [band.mean for band in bands], color=colors[row.name], label=row.name)
            panel.fill_between(grid, low, high, color=colors[row.name], alpha=0.2, linewidth=0)
        panel.set_title(f"accuracy, {_MEASURED[name]}")
        panel.set_xlabel("completions generated")
        panel.grid(alpha=0.3)
    for goal in GOALS:
        panels[0].axhline(100 * goal, color="black", linewidth=0.8, linestyle=":")
    panels[0].set_ylabel("%")
    panels[-1].legend(loc="lower right")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
