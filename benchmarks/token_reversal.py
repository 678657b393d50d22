r"""
Token reversal with a terminal reward: OPO next to published figures of GRPO and TPO.

    python -m benchmarks.token_reversal run --lengths 7 8 9 10 --seeds 20 --device cuda    # the published setting
    python -m benchmarks.token_reversal run          # a smaller task, on one core
    python -m benchmarks.token_reversal trials --seeds 2 --episodes 100    # fields compared, on seeds of their own
    python -m benchmarks.token_reversal report       # results/token_reversal.json → token_reversal.md and .png

A cell is a method with its fields on prompts of one length, all seeds side by side; it is saved when it is finished,
and the same command, or one with more seeds, trains what is missing.

The task is the prompt-matched one of Table 3 of "Target Policy Optimization" (Kaddour, arXiv 2604.06159): a prompt of
H random bits, to be completed by the same bits in reverse; reward 1 if all H are right, otherwise 0. Each of 2,000
episodes samples 8 completions at temperature 1 for each of 100 new prompts and takes 4 optimizer steps on all of them.
The error is the share of wrong completions among the 800 of the last episode: nothing is decoded greedily.

What the paper leaves open is as in its public code (`JeanKaddour/tpo`): causal pre-norm transformer of 2 layers, width
64, 2 heads (the paper says 4), feed-forward width 256, GELU by tanh, learned positions; Flax's initialization; Optax's
`muon` at learning rate 1e-3, constant, without weight decay or gradient clipping. It gives every parameter of two axes
to Muon, also the biases of queries, keys and values (heads × width), and the others to Adam with Nesterov momentum,
also attention's kernels, which have three axes in Flax. The standard deviation of a group's rewards divides by 8, not
7; the ratio is that of a whole completion. GRPO clips it at 1 ± 0.2 and adds 0.04 × a KL penalty to the policy that
sampled. Four optimizer steps of TPO and of GRPO on one rollout agree with that code's, with Optax 0.2.8, to the
rounding of float32, but for the biases of keys: these have no effect, and Muon scales their gradient up, which is
nothing but rounding. Random numbers differ, so that seeds cannot be compared one by one.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from opo_trl.checks.files import write_json
from opo_trl.methods import METHODS
from opo_trl.report.figures import STYLE, write

from .intervals import estimate
from .pages import table
from .record import origin
from .token_reversal_training import Training


Cell = dict[str, Any]
RESULTS = Path(__file__).resolve().parent / "results"
RECORD = RESULTS / "token_reversal.json"
POINT = 20  # episodes of a point of the curves
PUBLISHED_EPISODES, FEW_EPISODES = 2_000, 150
# Error, %, in Table 3 of the paper; no more than 5 % of PPO's completions were right at H = 10.
PUBLISHED = {
    "GRPO": {7: 14.5, 8: 27.6, 9: 30.0, 10: 50.4},
    "TPO": {7: 6.9, 8: 8.6, 9: 6.1, 10: 7.4},
    "PPO": {7: 12.0, 8: 26.3, 9: 90.6},
}
# The first ones are published for GRPO and TPO, and OPOConfig's defaults for OPO.
TRIALS: dict[str, list[dict[str, Any]]] = {
    "GRPO": [{"epsilon": 0.2, "beta": beta, "epochs": 4} for beta in (0.04, 0.01, 0.16)],
    "TPO": [{"eta": eta, "epochs": 4} for eta in (1.0, 0.5, 2.0)],
    "OPO": [
        {"alpha": 0.4, "mu": 0.3, "epochs": 4},
        {"alpha": 0.0, "mu": 1.0, "epochs": 4},
        {"alpha": 0.4, "chi2_radius": 1.0, "epochs": 4},
    ],
}
FIELDS = {"GRPO": TRIALS["GRPO"][0], "TPO": TRIALS["TPO"][0], "OPO": TRIALS["OPO"][0]}
TRIAL_SEEDS = 1000  # and following: used for nothing but the choice of fields


def cells_of(chosen: argparse.Namespace) -> Iterator[Cell]:
    """The cells of a command."""
    first = TRIAL_SEEDS if chosen.command == "trials" else 0
    for length, method in itertools.product(chosen.lengths, chosen.methods):
        for fields in TRIALS[method] if chosen.command == "trials" else [FIELDS[method]]:
            yield {
                "method": method,
                "fields": fields,
                "length": length,
                "episodes": chosen.episodes or (PUBLISHED_EPISODES if length >= 7 else FEW_EPISODES),
                "seeds": list(range(first, first + chosen.seeds)),
            }


def train(cell: Cell, device: str) -> dict[str, Any]:
    """Train a cell; the error of each seed, in the last episode and as a curve, and seconds per episode."""
    training = Training(cell["method"], cell["fields"], cell["length"], cell["seeds"], device)
    began, errors = time.perf_counter(), []
    for episode in range(1, cell["episodes"] + 1):
        errors.append(training.episode())
        if episode % 100 == 0:
            recent = ", ".join(f"{error:.1%}" for error in torch.stack(errors[-POINT:]).mean(0).tolist())
            seconds = (time.perf_counter() - began) / episode
            print(f"{cell['method']}, H = {cell['length']}, {episode}: {recent}, {seconds:.2f} s", flush=True)
    history = torch.stack(errors, 1).double().cpu()  # [seeds, episodes]
    points = history[:, : history.shape[1] // POINT * POINT].unflatten(1, (-1, POINT)).mean(2)
    return {
        "final": [round(error, 5) for error in history[:, -1].tolist()],
        "curve": [[round(error, 4) for error in curve] for curve in points.tolist()],
        "seconds_per_episode": round((time.perf_counter() - began) / cell["episodes"], 3),
    }


def same_task(run: Cell, other: Cell) -> bool:
    """Whether two cells differ at most in their seeds."""
    return all(run[name] == other[name] for name in ("method", "fields", "length", "episodes"))


def run_missing(cells: Sequence[Cell], device: str) -> None:
    """Train the cells that the record lacks, or their missing seeds, one by one; each is saved when it is finished."""
    runs = json.loads(RECORD.read_text()) if RECORD.exists() else []
    for cell in cells:
        done = {seed for run in runs if same_task(run, cell) for seed in run["seeds"]}
        if seeds := [seed for seed in cell["seeds"] if seed not in done]:
            runs.append({**cell, "seeds": seeds, **train({**cell, "seeds": seeds}, device), **origin()})
            write_json(RECORD, runs)


# The page


def percent(errors: Sequence[float]) -> str:
    """Mean error in percent, its 95 % interval and the number of seeds."""
    found = estimate([100 * error for error in errors])
    low, high = found.interval or (None, None)
    interval = "" if low is None else f" [{max(low, 0):.1f}, {min(high, 100):.1f}]"
    return f"{found.mean:.1f}{interval} ({found.n})"


def over_episodes(run: Cell) -> list[float]:
    """Mean error of each seed over the episodes, as far as they fill points of the curve."""
    return [statistics.fmean(curve) for curve in run["curve"]]


def report(runs: Sequence[Cell]) -> str:
    """The page."""
    trials = merged([run for run in runs if run["seeds"][0] >= TRIAL_SEEDS])
    others = chosen_runs(runs)
    lengths = sorted(PUBLISHED["TPO"])
    rows = []
    for method in ("GRPO", "TPO", "PPO", "OPO"):
        if method in PUBLISHED:
            published = (PUBLISHED[method].get(length) for length in lengths)
            rows.append([f"{method}, the paper's", *("> 95" if x is None else f"{x:.1f}" for x in published)])
        if method in FIELDS:
            found = (others.get((length, PUBLISHED_EPISODES, method)) for length in lengths)
            rows.append([f"{method}, ours", *("–" if run is None else percent(run["final"]) for run in found)])
    ours = [
        [method, str(length), f"{episodes:,}", percent(run["final"]), percent(over_episodes(run))]
        for (length, episodes, method), run in sorted(others.items())
    ]
    tried = []
    for run in trials:
        errors = [100 * error for error in over_episodes(run)]
        each = ", ".join(f"{error:.1f}" for error in errors)
        row = (run["method"], described(run["fields"]), str(run["length"]), str(run["episodes"]))
        tried.append([*row, f"{statistics.fmean(errors):.1f} ({each})"])
    speeds = "; ".join(
        f"{run['method']}, H = {run['length']}, {len(run['seeds'])} on {run['device']}, "
        f"{run['seconds_per_episode']:.2f} s"
        for run in with_fields(runs)
    )
    dates = sorted(run["date"][:10] for run in runs)
    versions = {f"torch {run['versions']['torch']}" for run in runs}
    return (
        "# Token reversal with a terminal reward\n\n"
        "`python -m benchmarks.token_reversal report` makes this page from `token_reversal.json`; the script's\n"
        "docstring says what is measured and where the settings come from. Errors are exact-match errors in percent:\n"
        "mean over seeds [95 % interval] (number of seeds).\n\n"
        "## The published setting\n\n"
        "Error of the last of 2,000 episodes. The paper's rows are quoted from arXiv 2604.06159, Table 3\n"
        "(prompt-matched, 20 seeds), which gives no intervals. Seeds differ by much: in the per-seed results of the\n"
        "paper's repository, H = 10, they range from 0 to 77 for TPO and from 0 to 100 for GRPO, with standard\n"
        "errors of 4.0 and 9.9. A row with few seeds reproduces nothing.\n\n"
        f"{table(('method', *(f'H = {length}' for length in lengths)), rows)}\n\n"
        f"Fields: {'; '.join(f'{method} {described(fields)}' for method, fields in FIELDS.items())}.\n\n"
        "## Over the episodes\n\n"
        "The mean over episodes says how fast a method learns. It is taken over whole stretches of 20: of 150\n"
        "episodes, over the first 140. Prompts of 5 bits and 150 episodes are not the published setting, all else\n"
        "is.\n\n"
        f"{table(('method', 'H', 'episodes', 'error, last episode', 'error, mean over episodes'), ours)}\n\n"
        "![Error over episodes](token_reversal.png)\n\n"
        "## The choice of fields\n\n"
        f"Three trials per method, on seeds from {TRIAL_SEEDS} on, which nothing else uses. Mean error over\n"
        "the episodes: mean over the seeds, and each. GRPO and TPO keep their published fields in the tables above,\n"
        "so that they can be checked; OPO has its best.\n\n"
        f"{table(('method', 'fields', 'H', 'episodes', 'error, mean over episodes'), tried)}\n\n"
        f"Time per episode, seeds side by side: {speeds}.\n\n"
        f"Measured {dates[0]} to {dates[-1]} with {', '.join(sorted(versions))}.\n"
    )


def merged(runs: Sequence[Cell]) -> list[Cell]:
    """Runs of the same task as one, with all their seeds."""
    found: list[Cell] = []
    for run in runs:
        if same := next((other for other in found if same_task(run, other)), None):
            same.update({name: same[name] + run[name] for name in ("seeds", "final", "curve")})
        else:
            found.append(dict(run))
    return found


def chosen_runs(runs: Sequence[Cell]) -> dict[tuple[int, int, str], Cell]:
    """By length, episodes and method: the runs with the method's fields that are no trials."""
    return {(run["length"], run["episodes"], run["method"]): run for run in merged(with_fields(runs))}


def with_fields(runs: Sequence[Cell]) -> list[Cell]:
    """The runs with their method's fields that are no trials."""
    return [run for run in runs if run["seeds"][0] < TRIAL_SEEDS and run["fields"] == FIELDS[run["method"]]]


def described(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in fields.items())


def draw(runs: Sequence[Cell], path: Path) -> None:
    """Error over episodes: a panel per task, each seed thin, the mean thick."""
    others = chosen_runs(runs)
    tasks = sorted({(length, episodes) for length, episodes, _ in others})
    colors = {method.label: method.color for method in METHODS} | {"TPO": "#009e73"}
    plt.switch_backend("Agg")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.2), layout="constrained", squeeze=False)
        for axis, task in zip(axes[0], tasks, strict=True):
            for method in FIELDS:
                if run := others.get((*task, method)):
                    episodes = [POINT * (i + 0.5) for i in range(len(run["curve"][0]))]
                    for curve in run["curve"]:
                        axis.plot(episodes, curve, color=colors[method], linewidth=0.6, alpha=0.5)
                    mean = [statistics.fmean(point) for point in zip(*run["curve"], strict=True)]
                    label = f"{method} ({len(run['seeds'])})"
                    axis.plot(episodes, mean, color=colors[method], linewidth=2, label=label)
            axis.set(title=f"H = {task[0]}", xlabel="episode", ylabel="exact-match error", ylim=(0, 1))
            axis.legend(title="method (seeds)", frameon=False)
        write(figure, path)
        plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "trials", "report"])
    parser.add_argument("--methods", nargs="+", default=list(FIELDS), choices=list(FIELDS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[5], metavar="H", help="bits of a prompt")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, trained side by side")
    parser.add_argument("--episodes", type=int, help="2,000 from H = 7 on, otherwise 150")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    if chosen.command == "report":
        runs = json.loads(RECORD.read_text())
        RECORD.with_suffix(".md").write_text(report(runs))
        draw(runs, RECORD.with_suffix(".png"))
    else:
        run_missing(list(cells_of(chosen)), chosen.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
