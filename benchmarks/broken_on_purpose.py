"""
Runs that are broken on purpose, next to a healthy one: what the log shows of each.

    python -m benchmarks.broken_on_purpose run      # into runs/broken_on_purpose; minutes on one core
    python -m benchmarks.broken_on_purpose collect  # … → benchmarks/results/broken_on_purpose.json.gz
    python -m benchmarks.broken_on_purpose report   # … → the figure and the table of docs/diagnostics.md

Every run takes 64 optimizer steps with 48 completions each, on the embedded task: OPO with summed log-ratios.
"""

import argparse
import gzip
import json
import re
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from opo_trl.metrics.watches import Watches

from .pages import fill, table
from .regime_design import COMMON


ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/broken_on_purpose")
RESULT = ROOT / "benchmarks" / "results" / "broken_on_purpose.json.gz"
FIGURE = ROOT / "docs" / "figures" / "broken_on_purpose.png"
PAGE = ROOT / "docs" / "diagnostics.md"

_SHARED: dict[str, Any] = {
    **{name: value for name, value in COMMON.items() if not name.startswith("report_") or name == "report_to"},
    "trainer": "opo",
    "ratio_form": "log",
    "skip_inert_rows": False,  # entropy is then logged in every step
    "steps_per_generation": 8,
    "learning_rate": 1e-4,
    "seed": 1,
}
# What is wrong with each run, as fields.
CASES: dict[str, dict[str, Any]] = {
    "healthy": {},
    "collapsing": {  # a reward that one completion maximizes for every problem
        "learning_rate": 5e-4,
        "steps_per_generation": 1,
        "reward_funcs": ["benchmarks.broken_on_purpose.ones", "arithmetic_reward"],
        "reward_weights": [1.0, 0.0],
    },
    "rate too high": {"learning_rate": 2e-3, "steps_per_generation": 1},
    "adrift": {"learning_rate": 4e-4, "mu": 0.003, "steps_per_generation": 16},
    "too stiff": {"learning_rate": 4e-4, "mu": 10.0, "steps_per_generation": 16},
    "without signal": {"max_completion_length": 4},
}
KEPT = (
    "reward",
    "rewards/arithmetic_reward/mean",
    "entropy",
    "grad_norm",
    "completions/clipped_ratio",
    "opo/off_policy_steps",
    "opo/chi2",
    "opo/conservation_residual",
    "opo/log_ratio/absmax",
    "opo/frac_clamped",
    "opo/frac_zero_drive",
    "opo/escort/ess",
)

Steps = list[dict[str, float]]


def ones(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward unrelated to the answer: the fraction of ones."""
    return [completion.count("1") / max(len(completion), 1) for completion in completions]


def command_line(name: str) -> list[str]:
    """The command line of a case, for `opo_trl.train`."""
    fields = {**_SHARED, **CASES[name], "output_dir": RUNS / name.replace(" ", "_"), "overwrite": True}
    words = {field: value if isinstance(value, list) else [value] for field, value in fields.items()}
    return [word for field, value in words.items() for word in (f"--{field}", *map(str, value))]


def run() -> None:
    """Run the cases that have not run yet."""
    from opo_trl.train import main as train

    for name in CASES:
        if not (RUNS / name.replace(" ", "_") / "model.safetensors").exists() and train(command_line(name)):
            raise SystemExit(1)


def collect() -> None:
    """Keep the metrics that the report reads."""
    kept = {}
    for name in CASES:
        lines = (RUNS / name.replace(" ", "_") / "log.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if "grad_norm" in row]
        kept[name] = [{key: float(f"{row[key]:.4g}") for key in KEPT if key in row} for row in steps]
    RESULT.write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


def read() -> dict[str, Steps]:
    """The collected runs."""
    return json.loads(gzip.decompress(RESULT.read_bytes()))


def values(steps: Steps, key: str) -> list[float]:
    """Values of a metric; off-policy steps only, if it is 0 on-policy by construction."""
    only_off_policy = key in ("opo/chi2", "opo/conservation_residual", "opo/log_ratio/absmax", "opo/frac_clamped")
    return [row[key] for row in steps if key in row and (not only_off_policy or row["opo/off_policy_steps"] > 0)]


def first_watch(steps: Steps) -> str:
    """The first of the page's watches to fire, and its step."""
    block = re.search(r"```yaml\n(watches:.*?)```", PAGE.read_text(), flags=re.DOTALL)
    watches = Watches(yaml.safe_load(block[1])["watches"])
    for step, row in enumerate(steps, 1):
        for watch in watches.watches:
            if watches._fires(watch, row):
                return f"`{watch.metric}`, {step}"
    return "none"


def runs_table(runs: dict[str, Steps]) -> str:
    """Markdown table: first and last rollouts, and extremes."""

    def span(steps: Steps, key: str, n: int) -> str:
        series = values(steps, key)
        return f"{fmean(series[:n]):.2g} → {fmean(series[-n:]):.2g}"

    def extreme(steps: Steps, key: str, which: Any) -> str:
        series = values(steps, key)
        return f"{which(series):.3g}".replace("-", "−") if series else "–"

    def median_and_largest(steps: Steps, key: str) -> str:
        series = values(steps, key)
        return f"{median(series):.3g}, {max(series):.3g}" if series else "–"

    rows = {
        "`reward`, first and last": lambda steps: span(steps, "reward", 2),
        "problems solved, first and last": lambda steps: span(steps, "rewards/arithmetic_reward/mean", 2),
        "`entropy`, first and last 8 steps": lambda steps: span(steps, "entropy", 8),
        "`grad_norm`, median and largest": lambda steps: median_and_largest(steps, "grad_norm"),
        "`opo/chi2`, median and largest": lambda steps: median_and_largest(steps, "opo/chi2"),
        "`opo/conservation_residual`, lowest": lambda steps: extreme(steps, "opo/conservation_residual", min),
        "`opo/log_ratio/absmax`, largest": lambda steps: extreme(steps, "opo/log_ratio/absmax", max),
        "`opo/frac_clamped`, largest": lambda steps: extreme(steps, "opo/frac_clamped", max),
        "`opo/frac_zero_drive`, last 8 steps": lambda steps: f"{fmean(values(steps, 'opo/frac_zero_drive')[-8:]):.2g}",
        "`completions/clipped_ratio`, largest": lambda steps: extreme(steps, "completions/clipped_ratio", max),
        "first watch to fire, at step": first_watch,
    }
    return table(["", *runs], ([name, *map(cell, runs.values())] for name, cell in rows.items()))


PANELS = (
    ("problems solved", "rewards/arithmetic_reward/mean", "linear"),
    ("entropy per token (nats)", "entropy", "log"),
    ("gradient norm", "grad_norm", "symlog"),
    ("χ², off-policy steps", "opo/chi2", "log"),
    ("conservation residual, off-policy", "opo/conservation_residual", "linear"),
    ("in zero-variance groups", "opo/frac_zero_drive", "linear"),
)
COLORS = ("#000000", "#d55e00", "#e69f00", "#0072b2", "#cc79a7", "#009e73")


def draw(runs: dict[str, Steps], path: Path = FIGURE) -> None:
    """The figure."""
    import matplotlib.pyplot as plt

    from opo_trl.report.figures import STYLE

    plt.switch_backend("Agg")
    with plt.rc_context({**STYLE, "figure.dpi": 110, "font.size": 12}):  # legible on a phone
        figure, axes = plt.subplots(3, 2, figsize=(7.5, 10), layout="constrained", sharex=True)
        for axis, (title, key, scale) in zip(axes.flat, PANELS, strict=True):
            axis.set(title=title, yscale=scale)
            for color, (name, steps) in zip(COLORS, runs.items(), strict=True):
                shown = [(i, row[key]) for i, row in enumerate(steps, 1) if key in row]
                if key in ("opo/chi2", "opo/conservation_residual"):
                    shown = [(i, value) for i, value in shown if steps[i - 1]["opo/off_policy_steps"] > 0]
                axis.plot(*zip(*shown, strict=True), color=color, label=name, linewidth=1.5) if shown else None
        axes[2, 0].set_ylim(-1.05, 1.05)
        for axis in axes[-1]:
            axis.set_xlabel("optimizer step")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(path)


def write_table(runs: dict[str, Steps]) -> None:
    """Write the table into the page."""
    PAGE.write_text(fill(PAGE.read_text(), {"runs": runs_table(runs)}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "collect", "report"])
    command = parser.parse_args().command
    if command == "run":
        run()
    elif command == "collect":
        collect()
    else:
        draw(read())
        write_table(read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
