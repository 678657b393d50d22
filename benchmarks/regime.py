"""
The regime map: what every method reaches, over optimizer steps per rollout and learning rate, and OPO over its fields.

    python -m benchmarks.regime run --jobs 2        # all that is missing, into runs/regime; about 2.5 hours on 2 cores
    python -m benchmarks.regime collect             # runs/regime → benchmarks/results/regime.jsonl.gz
    python -m benchmarks.regime report              # results/regime.jsonl.gz → results/regime.md and regime_*.png

Every run has the same budget: 64 optimizer steps of 48 completions (8 prompts × 6) of the arithmetic task's Level 3,
from the embedded base model. Only how often a rollout is reused differs: with k optimizer steps per rollout, each
rollout is 48·k completions. DAPO generates more, as its sampling is dynamic; the report says how many. The outcome is
the sampled accuracy on 250 test problems after training, two completions each, which has the same meaning for every k.
"""

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm


HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
RUNS = Path("runs/regime")

METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"trainer": "grpo", "loss_type": "grpo", "epsilon": 0.2},
    "GSPO": {
        "trainer": "grpo",
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "DAPO": {
        "trainer": "grpo",
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "max_sampling_rounds": 4,
    },
    # Sum, log form, alpha = 0.4, and `PAPERS_MU`. Rows without a gradient are computed, for their entropy.
    "OPO": {"trainer": "opo", "skip_inert_rows": False},
    "OPO mean": {  # the paper's experiments, as the Qwen3 recipes have them
        "trainer": "opo",
        "skip_inert_rows": False,
        "log_ratio_reduction": "mean",
        "log_ratio_clamp": 5.0,
        "escort_temperature": 0.5,
        "adaptive_temperature": True,
    },
}
PAPERS_MU = 1.0
STEPS_PER_ROLLOUT = (1, 2, 4, 8, 16)
LEARNING_RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
SEEDS = (1, 2, 3)
# On seeds that no choice was made on, at the rate that is the best for all: what heavy reuse of a rollout comes to.
CONFIRMATION_SEEDS = tuple(range(11, 19))
CONFIRMED = (
    ("GRPO", ""),
    ("GRPO", "GRPO, epsilon = 0.4"),
    ("GSPO", ""),
    ("DAPO", ""),
    ("OPO", "mu = 0.3"),
    ("OPO", "mean, mu = 5"),
)
CONFIRMED_STEPS = (8, 16)

# OPO's fields one by one, at a learning rate that is too large for most: what makes it bearable, and what not?
LARGE_RATE = 2e-4
_STIFFNESS: dict[str, dict[str, Any]] = {
    "mu = 1": {},
    **{f"mu = {mu:g}": {"mu": mu} for mu in (0.1, 0.3, 3.0)},
    **{f"chi2_radius = {radius:g}": {"chi2_radius": radius} for radius in (0.03, 0.3, 3.0)},
    **{f"mean, mu = {mu:g}": {"log_ratio_reduction": "mean", "mu": mu} for mu in (1.0, 5.0, 18.0)},
    # Momentum carries the pull back to one anchor on to the next rollout, which has another.
    "no momentum": {"adam_beta1": 0.0},
    "no momentum, mean": {"adam_beta1": 0.0, "log_ratio_reduction": "mean"},
}
# At the rate that is the best for GRPO and for mu = 1: do these choices cost anything, or bring something?
BEST_RATE = 1e-4
_RADII: dict[str, dict[str, Any]] = {
    **{f"mu = {mu:g}": {"mu": mu} for mu in (0.1, 0.3)},
    **{f"chi2_radius = {radius:g}": {"chi2_radius": radius} for radius in (1.0, 3.0, 10.0)},
    # A smaller drive has a nearer target: only at the same radius does alpha change the direction alone.
    **{f"alpha = {alpha:g}, chi2_radius = 3": {"alpha": alpha, "chi2_radius": 3.0} for alpha in (0.0, 0.8)},
    "drive group, chi2_radius = 3": {"drive_scaling": "group", "chi2_radius": 3.0},
    "mean, mu = 5": {"log_ratio_reduction": "mean", "mu": 5.0},
}
# Does the best radius depend on the length of completions? They have 9, 18, 30 and 45 tokens on these levels.
_LENGTHS: dict[str, dict[str, Any]] = {
    f"{level}, chi2_radius = {radius:g}": {
        "levels": level,
        "report_levels": level,
        "max_completion_length": 60,
        "chi2_radius": radius,
    }
    for level in ("Level 2", "Level 3", "Level 4", "Level 5")
    for radius in (0.3, 3.0, 30.0)
}
# GRPO's clip range, where reuse is heavy: what is tuned for one method is tuned for the other. 100 is no clipping.
_CLIPPING = {f"GRPO, epsilon = {epsilon:g}": {"epsilon": epsilon} for epsilon in (0.05, 0.1, 0.4, 0.8, 100.0)}
# Optimizer steps per rollout and learning rate → OPO's fields, and GRPO's.
VARIANTS: dict[tuple[int, float], dict[str, dict[str, Any]]] = {
    (2, BEST_RATE): _RADII,
    (8, BEST_RATE): _RADII | _LENGTHS | _CLIPPING,
    (16, BEST_RATE): _RADII | _CLIPPING,
    (2, LARGE_RATE): _STIFFNESS,
    (8, LARGE_RATE): {
        **_STIFFNESS,
        **{f"alpha = {alpha:g}": {"alpha": alpha} for alpha in (0.0, 0.2, 0.6, 0.8, 0.95)},
        "anchor length_normalized": {"anchor_correction": "length_normalized"},
        "anchor sequence": {"anchor_correction": "sequence"},
        "drive group": {"drive_scaling": "group"},
        "drive batch": {"drive_scaling": "batch"},
        "exact": {"ratio_form": "exact"},
        "positivity stiffen, mu = 0.3": {"positivity": "stiffen", "mu": 0.3},
        "positivity project, mu = 0.3": {"positivity": "project", "mu": 0.3},
        "dynamic sampling": {"max_sampling_rounds": 4},
    },
}

COMMON: dict[str, Any] = {
    "model_name_or_path": "arithmetic",
    "dtype": "float32",
    "dataset_name": "arithmetic",
    "levels": "Level 3",
    "prompt_style": "plain",
    "reward_funcs": "arithmetic_reward",
    "beta": 0.0,
    "num_generations": 6,
    "max_completion_length": 32,
    "per_device_train_batch_size": 48,
    "gradient_accumulation_steps": 1,
    "max_steps": 64,
    "lr_scheduler_type": "constant",
    # A gradient's size is not comparable between losses, and AdamW does not depend on it; clipping its norm would.
    "max_grad_norm": 0.0,
    "report_levels": "Level 3",
    "report_size": 250,
    "report_samples": 2,
    "per_device_eval_batch_size": 1000,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def runs() -> Iterator[dict[str, Any]]:
    """All runs: OPO's fields, the confirmation, then a whole map for each seed before the next."""
    for seed in SEEDS:
        for (k, rate), variants in VARIANTS.items():
            fields = {"steps_per_rollout": k, "learning_rate": rate, "seed": seed}
            for variant in variants:
                yield {"method": "GRPO" if variant in _CLIPPING else "OPO", "variant": variant, **fields}
    for seed, k, (method, variant) in itertools.product(CONFIRMATION_SEEDS, CONFIRMED_STEPS, CONFIRMED):
        fields = {"steps_per_rollout": k, "learning_rate": BEST_RATE, "seed": seed}
        yield {"method": method, "variant": variant, **fields}
    for seed in SEEDS:
        for k, rate, method in itertools.product(STEPS_PER_ROLLOUT, LEARNING_RATES, METHODS):
            yield {"method": method, "variant": "", "steps_per_rollout": k, "learning_rate": rate, "seed": seed}


def folder(run: dict[str, Any]) -> Path:
    """Where a run's folder is."""
    name = f"{run['method']} {run['variant']} k{run['steps_per_rollout']} lr{run['learning_rate']:g} seed{run['seed']}"
    return RUNS / name.replace(" ", "_").replace("=", "").replace(",", "")


def command_line(run: dict[str, Any]) -> list[str]:
    """Its command line for `opo_trl.train`."""
    variant = VARIANTS[run["steps_per_rollout"], run["learning_rate"]][run["variant"]] if run["variant"] else {}
    fields = {
        **COMMON,
        **METHODS[run["method"]],
        **variant,
        "steps_per_generation": run["steps_per_rollout"],
        "learning_rate": run["learning_rate"],
        "seed": run["seed"],
        "output_dir": folder(run),
    }
    if fields["trainer"] == "opo" and "chi2_radius" not in fields:
        fields.setdefault("mu", PAPERS_MU)
    return list(itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in fields.items()))


def is_done(run: dict[str, Any]) -> bool:
    """Whether a run's folder holds a finished run."""
    summary = folder(run) / "summary.json"
    return summary.exists() and "after" in json.loads(summary.read_text())


def train(run: dict[str, Any]) -> tuple[str, int]:
    """Run one, in a process of its own; its output goes beside its folder."""
    from opo_trl.train import main

    place = folder(run)
    place.parent.mkdir(parents=True, exist_ok=True)
    log = place.with_name(place.name + ".txt").open("w")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    return place.name, main([*command_line(run), "--overwrite", "true"])


def run_missing(jobs: int) -> int:
    """Run what is not finished; the number of runs that failed."""
    missing = [run for run in runs() if not is_done(run)]
    # Importing takes longer than some of the runs: the server does it once for all.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opo_trl.train"])
    failed = []
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for name, status in tqdm(pool.imap_unordered(train, missing), total=len(missing), desc="runs"):
            failed += [name] if status else []
    for name in failed:
        print(f"failed: {RUNS / name}.txt", file=sys.stderr)
    return len(failed)


def collect() -> None:
    """Keep of each run what the report reads, and its curves; every one has to be finished."""
    missing = [run for run in runs() if not is_done(run)]
    if missing:
        raise SystemExit(f"{len(missing)} runs are not finished. `python -m benchmarks.regime run` goes on with them.")
    lines = []
    for run in runs():
        log = [json.loads(line) for line in (folder(run) / "log.jsonl").read_text().splitlines()]
        steps = [entry for entry in log if "grad_norm" in entry]
        summary = json.loads((folder(run) / "summary.json").read_text())
        before, after = (next(iter(summary[time].values())) for time in ("before", "after"))  # of the only level
        lines.append(
            {
                **run,
                "accuracy": after["sampled"]["accuracy"],
                "greedy": after["greedy"]["accuracy"],
                "before": before["sampled"]["accuracy"],
                "seconds": summary["train_seconds"],
                "completions": max(entry.get("completions/generated", 0) for entry in steps),
                "reward": [
                    round(entry["rewards/arithmetic_reward/mean"], 4)
                    for entry in steps
                    if "rewards/arithmetic_reward/mean" in entry
                ],
                **{name: [float(f"{entry[name]:.4g}") for entry in steps] for name in ("grad_norm", "entropy")},
            }
        )
    RESULTS.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (RESULTS / "regime.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(lines)} runs")


def read() -> list[dict[str, Any]]:
    """The collected runs."""
    return [json.loads(line) for line in gzip.decompress((RESULTS / "regime.jsonl.gz").read_bytes()).splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "collect", "report"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return int(run_missing(arguments.jobs) > 0)
    if arguments.command == "collect":
        collect()
    else:
        from .regime_report import write_report

        write_report(read(), RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
