"""
GRPO, GSPO, DAPO and OPO on word problems in several steps, from one base model of 57 million parameters.

    python -m benchmarks.gpu.word_arithmetic --output runs/gpu/word_arithmetic              on a GPU
    python -m benchmarks.gpu.word_arithmetic --output runs/gpu/tiny --tiny                  on a CPU, in a minute

Trains the base model for `--base_seconds`, measures it, trains each method of `recipes/` from it with each seed, and
measures what came out. `results.json` in the output folder is written anew after each part. Called again with the same
folder, the program goes on with what is missing, so that it can be stopped at any time. What it does not know itself
goes to every run as a field of the recipes: `--learning_rate 1e-5`.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import opo_trl.train
from opo_trl.report.run_folder import LOG, SUMMARY, append_lines, read_json, read_lines, write_json

from ..record import Limit, begin, peak_memory, reset_peak_memory
from . import base
from .words import SPLIT_SIZES, make_problems


RECIPES = Path(__file__).resolve().parent / "recipes"
METHODS = ("dapo", "grpo", "gspo", "opo")  # the one that takes longest first: then no other outlasts its estimate
FIRST_SEED = 42


@dataclass(frozen=True)
class Size:
    """
    How large everything is.

    Args:
        shape: of the base model.
        base_seconds: how long it is trained.
        rows: problems per step of the base model's training.
        problems: test problems per level.
        batch: completions generated at a time for an accuracy.
        max_new_tokens: longest completion there; a worked solution of Level 6 has at most 85 tokens.
        fields: of the recipes, in place of what they say.
    """

    shape: dict[str, int]
    base_seconds: float
    rows: int
    problems: int
    batch: int
    max_new_tokens: int
    fields: dict[str, Any] = field(default_factory=dict)


GPU = Size(
    shape=base.SHAPE,
    base_seconds=300,
    rows=256,
    problems=SPLIT_SIZES["test"],
    batch=1500,
    max_new_tokens=112,
)
TINY = Size(
    shape=base.TINY_SHAPE,
    base_seconds=5,
    rows=16,
    problems=4,
    batch=24,
    max_new_tokens=16,
    fields={
        "use_cpu": True,
        "bf16": False,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_steps": 4,
    },
)


def write_data(folder: Path):
    """Write both splits as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        file = folder / f"{split}.jsonl"
        file.unlink(missing_ok=True)
        append_lines(file, make_problems(split))


def run_base(output: Path, size: Size, *, seconds: float) -> dict[str, Any]:
    """Train and measure the base model."""
    reset_peak_memory()
    trained = base.make_base(output / "base", seconds=seconds, rows=size.rows, shape=size.shape, seed=FIRST_SEED)
    return {**trained, "peak_memory": peak_memory(), "accuracy": measure(output / "base", size)}


def measure(folder: Path, size: Size) -> dict[str, Any]:
    return base.measure(folder, problems=size.problems, batch=size.batch, max_new_tokens=size.max_new_tokens)


def run_method(method: str, seed: int, output: Path, size: Size, fields: Sequence[str]) -> dict[str, Any]:
    """
    Train one method from the base model, and measure it.

    Args:
        method (`str`), seed (`int`):
            One of `METHODS`, and the seed of the run.
        output (`Path`):
            Folder of the benchmark.
        size ([`Size`]):
            How large the run is.
        fields (`Sequence[str]`):
            Command line of further fields.

    Returns:
        `dict[str, Any]`: Method, seed, date, the command that repeats it, the share of right completions by optimizer
        step, once per rollout, completions generated, seconds, peak of GPU memory, and accuracies.
    """
    folder = output / f"{method}-{seed}"
    told = {
        "config": os.path.relpath(RECIPES / f"{method}.yaml"),
        "model_name_or_path": output / "base",
        "dataset_name": output / "data",
        "output_dir": folder,
        "seed": seed,
        "overwrite": True,
        **size.fields,
    }
    argv = [*(str(item) for name, value in told.items() for item in (f"--{name}", value)), *fields]
    reset_peak_memory()
    started = time.perf_counter()
    if status := opo_trl.train.main(argv):
        raise SystemExit(status)
    seconds, peak = time.perf_counter() - started, peak_memory()
    # The trainer's parts refer to each other, and its weights would count as the next run's.
    gc.collect()
    torch.cuda.empty_cache()
    log = [line for line in read_lines(folder / LOG) if "reward" in line]
    return {
        "method": method,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m opo_trl.train", *argv]),
        "reward": [[line["step"], line["rewards/word_reward/mean"]] for line in log],
        "completions_generated": log[-1]["completions/generated"],
        "seconds": round(seconds, 1),
        "train_seconds": read_json(folder / SUMMARY)["train_seconds"],
        "peak_memory": peak,
        "accuracy": measure(folder, size),
    }


def missing_runs(results: dict[str, Any], seeds: int) -> list[tuple[str, int]]:
    """Method and seed of the runs that are not in the results, a seed's four runs in a row."""
    done = {(run["method"], run["seed"]) for run in results["runs"]}
    wanted = [(method, FIRST_SEED + i) for i in range(seeds) for method in METHODS]
    return [run for run in wanted if run not in done]


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to, or to go on in")
    parser.add_argument("--base_seconds", type=float, help="how long to train the base model (300)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each method")
    parser.add_argument("--limit_seconds", type=float, default=float("inf"), help="start nothing that would end later")
    parser.add_argument("--tiny", action="store_true", help="everything as small as it gets, on a CPU")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments, fields = parse(argv)
    limit = Limit(arguments.limit_seconds)
    size, output = TINY if arguments.tiny else GPU, arguments.output
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit("No GPU. `--tiny` tries the same code on a CPU.")
    seconds = arguments.base_seconds or size.base_seconds
    file = output / "results.json"
    results = {"runs": [], **begin(file, {"tiny": arguments.tiny, "base_seconds": seconds, "fields": fields})}
    if "base" not in results:
        if limit.is_too_near(1.1 * seconds):  # it is measured, too
            return 0
        write_data(output / "data")
        results["base"] = run_base(output, size, seconds=seconds)
        write_json(file, results)
    for method, seed in missing_runs(results, arguments.seeds):
        if limit.is_too_near(max((run["seconds"] for run in results["runs"]), default=seconds)):
            break
        results["runs"].append(run_method(method, seed, output, size, fields))
        write_json(file, results)
    print(json.dumps(summary(results), indent=1))
    return 0


def summary(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Sampled accuracy by level: of the base model, and of each run."""
    measured = {"base": results["base"], **{f"{run['method']}, seed {run['seed']}": run for run in results["runs"]}}
    return {
        name: {level: round(by["sampled"]["accuracy"], 3) for level, by in result["accuracy"].items()}
        for name, result in measured.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
