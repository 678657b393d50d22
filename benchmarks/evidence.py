"""
The paper's two experiments at small scale, from learning rates to claims.

    python -m benchmarks.evidence sweep --jobs 2     # learning rates, on a separate seed; 25 minutes on 2 cores
    python -m benchmarks.evidence run --jobs 2       # the experiments, 5 seeds × 4 methods; 75 minutes on 2 cores
    python -m benchmarks.evidence collect            # runs/evidence → benchmarks/evidence/, without the models
    python -m benchmarks.evidence report             # benchmarks/evidence/ → benchmarks/results/experiment*, claims.md

`run` and `report` call `benchmarks.compare` on the recipes of recipes/arithmetic/experiment*, and on the collected
runs. Finished runs are not repeated.
"""

import gzip
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from .compare.measures import final, reward
from .compare.runs import find_runs, read_run
from .many_runs import read_command_line
from .record import origin


ROOT = Path(__file__).resolve().parents[1]
RECIPES = Path("recipes/arithmetic")
RUNS = Path("runs/evidence")
KEPT = Path("benchmarks/evidence")
RESULTS = Path("benchmarks/results")

EXPERIMENTS = ("experiment1", "experiment2")
# Experiment 2 with DAPO's dynamic sampling for every method: only the objectives differ.
EQUAL_SAMPLING = "experiment2_equal_sampling"
# Experiment 2 with other forms of OPO: escort weights scaled per group like GRPO's advantages, and a χ² term strong
# enough to act.
FORMS = "experiment2_forms"
FIELDS_OF_FORMS = {
    "opo_group": ["--drive_scaling", "group"],
    "opo_mu5": ["--mu", "5"],
    "opo_group_mu5": ["--drive_scaling", "group", "--mu", "5"],
}
COLLECTED = (*EXPERIMENTS, EQUAL_SAMPLING, FORMS)
# Report → the collected runs it compares.
REPORTS = {
    **{name: [KEPT / name] for name in (*EXPERIMENTS, EQUAL_SAMPLING)},
    FORMS: [KEPT / "experiment2" / "grpo", KEPT / "experiment2" / "opo", KEPT / FORMS],
}
METHODS = ("grpo", "gspo", "dapo", "opo")
SEEDS = (1, 2, 3, 4, 5)
SWEEP_SEED = 0
LEARNING_RATES = ("5e-5", "1e-4", "2e-4", "4e-4")
# To choose a learning rate: half of Experiment 1, without validation.
SWEEP = {
    "experiment1": ["--num_train_epochs", "2"],
    "experiment2": [],
}
NO_VALIDATION = ["--validation_steps", "1000", "--report_size", "8"]


def recipes(experiment: str) -> list[str]:
    """The recipes of an experiment."""
    return [str(RECIPES / experiment / f"{method}.yaml") for method in METHODS]


def compare(*arguments: str) -> None:
    """`python -m benchmarks.compare`."""
    subprocess.run([sys.executable, "-m", "benchmarks.compare", *arguments], check=True, cwd=ROOT)


def sweep(jobs: int) -> None:
    """Every method at every learning rate; `sweep.json` has the final rewards, and the recipes the best rates."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for experiment in EXPERIMENTS:
        table[experiment] = {method: {} for method in METHODS}
        for rate in LEARNING_RATES:
            place = RUNS / "sweep" / experiment / rate
            fields = ["--learning_rate", rate, *SWEEP[experiment], *NO_VALIDATION]
            seed = ["--seeds", str(SWEEP_SEED), "--jobs", str(jobs), "--output", str(place)]
            compare(*recipes(experiment), *seed, *fields)
            for method in METHODS:
                run = read_run(ROOT / place / "runs" / method / f"seed-{SWEEP_SEED}")
                table[experiment][method][rate] = round(final(reward(run), run) or 0.0, 4)
    (ROOT / RESULTS / "sweep.json").write_text(json.dumps({"origin": origin(), **table}, indent=2) + "\n")


def run(jobs: int) -> None:
    """Both experiments, and the second with equal sampling and with other forms of OPO, unless finished."""
    seeds = ["--seeds", *map(str, SEEDS), "--jobs", str(jobs)]
    for experiment in EXPERIMENTS:
        compare(*recipes(experiment), *seeds, "--output", str(RUNS / experiment))
    dapo = ROOT / RUNS / EQUAL_SAMPLING / "runs" / "dapo"
    if not dapo.exists():  # its sampling is dynamic anyway
        shutil.copytree(ROOT / RUNS / "experiment2" / "runs" / "dapo", dapo)
    rounds = ["--max_sampling_rounds", "4"]
    compare(*recipes("experiment2"), *seeds, "--output", str(RUNS / EQUAL_SAMPLING), *rounds)
    for name, fields in FIELDS_OF_FORMS.items():
        form = ROOT / RUNS / FORMS / "runs" / name
        if not form.exists():
            compare(str(RECIPES / "experiment2" / "opo.yaml"), *seeds, "--output", str(RUNS / FORMS), *fields)
            form.with_name("opo").rename(form)


def collect() -> None:
    """Keep the files that a comparison reads, with paths relative to the repository and only the platform's name."""
    for experiment in COLLECTED:
        shutil.rmtree(ROOT / KEPT / experiment, ignore_errors=True)
        for source in find_runs(ROOT / RUNS / experiment / "runs"):
            target = ROOT / KEPT / experiment / source.relative_to(ROOT / RUNS / experiment / "runs")
            target.mkdir(parents=True)
            for name in ("recipe.yaml", "settings.json", "environment.json", "summary.json"):
                text = (source / name).read_text().replace(f"{ROOT}/", "")
                (target / name).write_text(text.replace(platform.platform(), platform.system()))
            (target / "log.jsonl.gz").write_bytes(gzip.compress((source / "log.jsonl").read_bytes(), mtime=0))


def report() -> None:
    """Compare the collected runs, and check the paper's claims on them."""
    from .claims import write_claims

    for name, folders in REPORTS.items():
        compare(*map(str, folders), "--output", str(RESULTS / name))
    write_claims(ROOT / KEPT, sweep_table(), ROOT / RESULTS / "claims.md")


def sweep_table() -> dict[str, dict[str, dict[str, float]]]:
    """Experiment → method → learning rate → final reward."""
    sweep = json.loads((ROOT / RESULTS / "sweep.json").read_text())
    return {experiment: sweep[experiment] for experiment in EXPERIMENTS}


def best_rates() -> dict[str, dict[str, float]]:
    """The learning rate with the highest final reward in the sweep, by experiment and method."""
    table = sweep_table()
    return {e: {m: float(max(rates, key=rates.get)) for m, rates in rows.items()} for e, rows in table.items()}


def recipe_rates() -> dict[str, dict[str, float]]:
    """The learning rates in the recipes."""

    def rate(recipe: str) -> float:
        return float(yaml.safe_load((ROOT / recipe).read_text())["learning_rate"])

    return {e: dict(zip(METHODS, map(rate, recipes(e)), strict=True)) for e in EXPERIMENTS}


def main() -> int:
    arguments = read_command_line(__doc__, "sweep", "run", "collect", "report")
    if arguments.command in ("sweep", "run"):
        {"sweep": sweep, "run": run}[arguments.command](arguments.jobs)
    else:
        {"collect": collect, "report": report}[arguments.command]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
