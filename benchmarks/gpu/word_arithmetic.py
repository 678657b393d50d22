"""
GRPO, GSPO, DAPO and OPO on word problems in several steps, from one base model of 57 million parameters.

    python -m benchmarks.gpu.word_arithmetic --output runs/gpu/word_arithmetic              on a GPU
    python -m benchmarks.gpu.word_arithmetic --output runs/gpu/tiny --tiny                  also on a CPU, a minute

Trains the base model for `--base_seconds`, measures it, trains each method of `recipes/` from it with each seed, and
measures the result. `results.json` in the output folder is updated after each part. The program can be stopped at any
time; called again with the same folder, it resumes. Unknown options go to every run as fields of the recipes:
`--learning_rate 1e-5`.
"""

import argparse
import functools
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
from opo_trl.checks.files import append_lines, read_json, read_lines
from opo_trl.report.run_folder import LOG, SUMMARY

from ..record import Limit, measure_missing, peak_memory, reset_peak_memory
from . import base
from .words import SPLIT_SIZES, make_problems


RECIPES = Path(__file__).resolve().parent / "recipes"
METHODS = ("dapo", "grpo", "gspo", "opo")  # the slowest first, for the time limit
FIRST_SEED = 42


@dataclass(frozen=True)
class Size:
    """
    Sizes of a benchmark.

    Args:
        shape: of the base model.
        base_seconds: duration of its training.
        rows: problems per step of the base model's training.
        problems: test problems per level.
        batch: completions per batch when measuring an accuracy.
        max_new_tokens: longest completion when measuring; a worked solution of Level 6 has at most 85 tokens.
        seeds: runs of each method.
        fields: overrides of the recipes.
    """

    shape: dict[str, int]
    base_seconds: float
    rows: int
    problems: int
    batch: int
    max_new_tokens: int
    seeds: int
    fields: dict[str, Any] = field(default_factory=dict)


GPU = Size(
    shape=base.SHAPE,
    base_seconds=300,
    rows=256,
    problems=SPLIT_SIZES["test"],
    batch=1500,
    max_new_tokens=112,
    seeds=2,
)
TINY = Size(
    shape=base.TINY_SHAPE,
    base_seconds=5,
    rows=16,
    problems=4,
    batch=24,
    max_new_tokens=16,
    seeds=1,
    fields={
        **({} if base.DEVICE == "cuda" else {"use_cpu": True, "bf16": False}),
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
    """Write the data; train and measure the base model."""
    write_data(output / "data")
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
            One of `METHODS`, and the run's seed.
        output (`Path`):
            Folder of the benchmark.
        size ([`Size`]):
            Size of the run.
        fields (`Sequence[str]`):
            Command line of additional fields.

    Returns:
        `dict[str, Any]`: Date, command, the fraction of right completions by optimizer step, once per rollout,
        completions generated, seconds, peak of GPU memory, and accuracies.

    Raises:
        `SystemExit`: a signal has ended the run.
        `RuntimeError`: the run has failed, or cannot be started.
    """
    folder = output / f"{method}-{seed}"
    overrides = {
        "config": os.path.relpath(RECIPES / f"{method}.yaml"),
        "model_name_or_path": output / "base",
        "dataset_name": output / "data",
        "output_dir": folder,
        "seed": seed,
        "overwrite": True,
        **size.fields,
    }
    argv = [*(str(item) for name, value in overrides.items() for item in (f"--{name}", value)), *fields]
    reset_peak_memory()
    started = time.perf_counter()
    status = opo_trl.train.main(argv)
    if status > 128:  # a signal, which is meant for all runs
        raise SystemExit(status)
    if status:
        raise RuntimeError(f"{folder} ended with exit status {status}")
    seconds, peak = time.perf_counter() - started, peak_memory()
    log = [line for line in read_lines(folder / LOG) if "reward" in line]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m opo_trl.train", *argv]),
        "reward": [[line["step"], line["rewards/word_reward/mean"]] for line in log],
        "completions_generated": log[-1]["completions/generated"],
        "seconds": round(seconds, 1),
        "train_seconds": read_json(folder / SUMMARY)["train_seconds"],
        "peak_memory": peak,
        "accuracy": measure(folder, size),
    }


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write or resume")
    parser.add_argument("--base_seconds", type=float, help="seconds to train the base model (300)")
    parser.add_argument("--seeds", type=int, help="runs of each method (2)")
    parser.add_argument("--limit_seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, also on a CPU")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments, fields = parse(argv)
    limit = Limit(arguments.limit_seconds)
    size, output = TINY if arguments.tiny else GPU, arguments.output
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit("No GPU. `--tiny` tries the same code on a CPU.")
    seconds = arguments.base_seconds or size.base_seconds
    measure_cases = functools.partial(
        measure_missing,
        output / "results.json",
        {"tiny": arguments.tiny, "base_seconds": seconds, "fields": fields},
        limit=limit,
        first=1.1 * seconds,  # of the base model, with its measurement
    )
    results = measure_cases({"base": functools.partial(run_base, output, size, seconds=seconds)})
    if "base" in results["cases"]:
        runs = [(method, FIRST_SEED + i) for i in range(arguments.seeds or size.seeds) for method in METHODS]
        results = measure_cases(
            {
                f"{method}, seed {seed}": functools.partial(run_method, method, seed, output, size, fields)
                for method, seed in runs
            }
        )
        print(json.dumps(summary(results["cases"]), indent=1))
    return int(bool(results["failed"]))


def summary(cases: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Sampled accuracy by level: of the base model, and of each run."""
    return {
        name: {level: round(by["sampled"]["accuracy"], 3) for level, by in case["accuracy"].items()}
        for name, case in cases.items()
        if "accuracy" in case  # else out of memory
    }


if __name__ == "__main__":
    raise SystemExit(main())
