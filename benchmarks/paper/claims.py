"""
The paper's claims, checked on the runs in `benchmarks/paper/`.

    python -m benchmarks.paper.claims     # → claims.md

Commit b7fa095 has the code that made the runs, `benchmarks.evidence`.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..compare.measures import LAST_STEPS, accuracies, efficiency, final, mean, reward, series
from ..compare.runs import Run, find_runs, read_run
from ..intervals import Difference, Estimate, estimate, paired_difference
from .recorded_runs import unpack


HERE = Path(__file__).resolve().parent
METHODS = ("grpo", "gspo", "dapo", "opo")
Runs = dict[str, list[Run]]
Measure = Callable[[Run], float]

# Tables 1 and 2 of the paper (Qwen3-1.7B on MATH), as printed there.
PAPER = {
    "experiment1": {
        "mean reward": {"grpo": "0.686", "gspo": "0.713", "dapo": "0.67", "opo": "0.756"},
        "gradient norm": {"grpo": "0.61", "gspo": "0.50", "dapo": "0.22", "opo": "0.90"},
    },
    "experiment2": {
        "mean reward": {"grpo": "0.544", "gspo": "0.553", "dapo": "0.548", "opo": "0.558"},
        "harder level, %": {"grpo": "44", "gspo": "48", "dapo": "44", "opo": "48"},
        "gradient norm": {"grpo": "0.674", "gspo": "0.623", "dapo": "0.213", "opo": "1.279"},
        "entropy": {"grpo": "0.115", "gspo": "0.128", "dapo": "0.126", "opo": "0.126"},
    },
}


def harder_level(run: Run) -> float:
    """Sampled accuracy after training, in %, on the level that was not trained on."""
    sampled = [value for name, value in accuracies(run).items() if name.endswith("sampled")]
    return 100 * sampled[0]


MEASURES: dict[str, Measure] = {
    "mean reward": lambda run: mean(reward(run)) or 0.0,
    "final reward": lambda run: final(reward(run), run) or 0.0,
    "harder level, %": harder_level,
    "gradient norm": lambda run: mean(series(run, "grad_norm")) or 0.0,
    "entropy": lambda run: mean(series(run, "entropy")) or 0.0,
}


def over_steps(points: list[tuple[float, float]], first: float, last: float) -> float:
    """Mean of the values between two optimizer steps, inclusive."""
    return float(np.mean([value for step, value in points if first <= step <= last]))


def early_reward(run: Run) -> float:
    """Mean reward of the first 50 optimizer steps."""
    return over_steps(reward(run), 1, 50)


def norm_kept(run: Run) -> float:
    """Gradient norm of the last 20 optimizer steps relative to that of the first 20."""
    norms = series(run, "grad_norm")
    return (final(norms, run) or 0.0) / over_steps(norms, 1, LAST_STEPS)


def efficiency_ratio(run: Run, other: Run) -> float:
    """Mean gradient response efficiency of a run relative to that of another."""
    return (mean(efficiency(run)) or 0.0) / (mean(efficiency(other)) or 1.0)


def page() -> str:
    """The page, from the collected runs and the learning-rate sweep."""
    sweep = json.loads((HERE / "sweep.json").read_text())
    experiments = recorded_experiments()
    lines = [
        "# The paper's claims, at small scale",
        "",
        "`python -m benchmarks.paper.claims` makes this page from the runs in `benchmarks/paper/`. The paper",
        "trains Qwen3-1.7B on MATH; here a model of 0.6 million parameters learns chained arithmetic. So compare",
        "the methods with each other, not the figures with the paper's. Mean over 5 seeds ± half-width of the 95 %",
        "t interval.",
        "",
        "A claim is *held* if the 95 % t interval of the difference, paired by seed, lies on the claimed side of 0,",
        "*not held* if it lies on the other side, and *undecided* if it contains 0.",
    ]
    for (name, runs), title in zip(experiments.items(), ("Experiment 1", "Experiment 2"), strict=True):
        lines += ["", f"## {title}", "", *figures(name, runs), "", "| claim | against | here | |", "|---|---|---|---|"]
        for claim in CLAIMS[name]:
            lines += claim(runs)
    lines += ["", "## Learning rates", "", *_sweep_lines({name: sweep[name] for name in PAPER})]
    return "\n".join(lines) + "\n"


def recorded_experiments() -> dict[str, Runs]:
    """The runs of the paper's two experiments."""
    with TemporaryDirectory() as folder:
        return {name: load(unpack(name, Path(folder))) for name in PAPER}


def load(folder: Path) -> Runs:
    """Runs by method, sorted by seed."""
    found = [read_run(path) for path in find_runs(folder)]
    by_method = {method: [run for run in found if run.label == method] for method in METHODS}
    return {method: sorted(runs, key=lambda run: run.seed) for method, runs in by_method.items()}


def _text(value: Estimate, digits: int = 3) -> str:
    return f"{value.mean:.{digits}f}{_half_width(value, digits)}"


def _half_width(value: Estimate, digits: int) -> str:
    """Such as ` ± 0.012`, which follows a mean; nothing for a single value."""
    if value.interval is None:
        return ""
    low, high = value.interval
    return f" ± {(high - low) / 2:.{digits}f}"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def figures(experiment: str, runs: Runs) -> list[str]:
    """The paper's table, next to ours."""
    paper = PAPER[experiment]
    methods = " | ".join(METHODS).upper()
    lines = [f"| | {methods} |", "|---|" + "---:|" * len(METHODS)]
    for name, measure in MEASURES.items():
        if name in paper:
            printed = [paper[name][method] for method in METHODS]
            lines.append(_row(f"{name}, paper", printed))
        elif name not in ("final reward", "harder level, %"):
            continue
        digits = 1 if name.endswith("%") else 3
        own = []
        for method in METHODS:
            values = [measure(run) for run in runs[method]]
            own.append(_text(estimate(values), digits))
        lines.append(_row(f"{name}, here", own))
    return lines


def _difference(runs: Runs, measure: Measure, other: str, sign: int = 1) -> Difference:
    pairs = [[sign * measure(run) for run in runs[method]] for method in ("opo", other)]
    return paired_difference(*pairs)


def _verdict(difference: Difference) -> str:
    return {"higher": "held", "lower": "**not held**", "undecided": "undecided"}[difference.verdict]


def higher(text: str, measure: Measure, *, digits: int = 3, others: tuple[str, ...] = METHODS[:3], sign: int = 1):
    """The claim that a measure is higher for OPO than for others (lower with `sign=-1`)."""

    def lines(runs: Runs) -> list[str]:
        rows = []
        for other in others:
            difference = _difference(runs, measure, other, sign)
            shown = _signed(Estimate(sign * difference.estimate.mean, difference.estimate.interval, 0), digits)
            rows.append(f"| {text} | {other.upper()} | {shown} | {_verdict(difference)} |")
        return rows

    return lines


def _signed(value: Estimate, digits: int) -> str:
    return f"{value.mean:+.{digits}f}{_half_width(value, digits)}"


def not_decaying(runs: Runs) -> list[str]:
    """The claim that OPO's gradient norm does not decay as reward rises, while the others' do."""
    rows = []
    for method in METHODS:
        kept = [norm_kept(run) for run in runs[method]]
        sign = 1 if method == "opo" else -1
        unchanged = [1.0 * sign] * len(kept)
        verdict = _verdict(paired_difference([sign * value for value in kept], unchanged))
        claim = "OPO's gradient norm does not decay" if method == "opo" else "the others' gradient norm decays"
        what = f"last {LAST_STEPS} steps: {_text(estimate(kept), 2)} of the first {LAST_STEPS}"
        rows.append(f"| {claim} | itself ({method.upper()}) | {what} | {verdict} |")
    return rows


def five_times(runs: Runs) -> list[str]:
    """The claim that OPO's gradient response efficiency is about five times that of GRPO and DAPO."""
    rows = []
    for other in ("grpo", "dapo"):
        pairs = zip(runs["opo"], runs[other], strict=True)
        ratio = estimate([efficiency_ratio(*pair) for pair in pairs])
        low, high = ratio.interval or (ratio.mean, ratio.mean)
        verdict = "held" if low > 3 else "**not held**" if high < 3 else "undecided"
        claim = "about five times the gradient response efficiency (three would do)"
        rows.append(f"| {claim} | {other.upper()} | {_text(ratio, 2)} times | {verdict} |")
    return rows


Claim = Callable[[Runs], list[str]]  # its rows of the table

CLAIMS_1: list[Claim] = [
    higher("higher final reward", MEASURES["final reward"]),
    higher("higher mean reward", MEASURES["mean reward"]),
    higher("behind GRPO in the first 50 steps", early_reward, others=("grpo",), sign=-1),
    higher("ahead after step 100", lambda run: over_steps(reward(run), 101, 1e9)),
    not_decaying,
    five_times,
    higher("higher entropy", MEASURES["entropy"], digits=4),
]
CLAIMS_2: list[Claim] = [
    higher("higher mean reward", MEASURES["mean reward"]),
    higher("higher final reward", MEASURES["final reward"]),
    higher("better on the harder level, percentage points", harder_level, digits=1),
    higher("larger gradient norm", MEASURES["gradient norm"]),
    higher("higher entropy", MEASURES["entropy"], digits=4),
]
CLAIMS = {"experiment1": CLAIMS_1, "experiment2": CLAIMS_2}


def _sweep_lines(sweep: dict) -> list[str]:
    lines = [
        "Final reward on seed 0, which is not among those above; the recipes use each method's best rate (**bold**).",
        "For Experiment 1 these runs are half as long.",
    ]
    for experiment, rows in sweep.items():
        rates, *_ = map(list, rows.values())
        lines += ["", _row(experiment, rates), "|---|" + "---:|" * len(rates)]
        for method, values in rows.items():
            cells = {rate: f"{values[rate]:.3f}" for rate in rates}
            best = max(values, key=lambda rate: values[rate])
            cells[best] = f"**{cells[best]}**"
            lines.append(_row(method.upper(), cells.values()))
    return lines


if __name__ == "__main__":
    (HERE / "claims.md").write_text(page())
