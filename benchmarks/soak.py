"""
Whether a long run stays stable: memory, handles, processes and speed of `opo-trl train`, measured from outside.

    python -m benchmarks.soak            → benchmarks/results/soak.{jsonl,md,png}; 2,000 steps on one core
    python -m benchmarks.soak --write    the page and the figure from soak.jsonl
    python -m benchmarks.soak --quick    60 steps; writes nothing

The run is the arithmetic recipe with small rollouts, validation, checkpoints (two are kept), and rewards in worker
processes that die now and then (`soak_reward.py`). All its processes are sampled every few seconds.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from opo_trl.checks.files import append_lines, read_lines
from opo_trl.report.run_folder import LOG

from .record import origin


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "soak.jsonl"
STEPS, SAMPLES = 2000, 400
OVERRIDES = {
    "reward_funcs": "benchmarks.soak_reward.isolated_reward",
    "per_device_train_batch_size": 24,
    "validation_steps": 50,
    "validation_size": 50,
    "report_size": 50,
    "per_device_eval_batch_size": 50,
    "save_steps": 50,
    "save_total_limit": 2,
    "disable_tqdm": "true",
}

Sample = dict[str, float]


# The run


def soak(steps: int, seconds: float) -> list[dict[str, Any]]:
    """Train, sampling every few seconds; returns a header with origin and outcome, then the samples."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        overrides = OVERRIDES | {"output_dir": folder, "max_steps": steps}
        options = [part for name, value in overrides.items() for part in (f"--{name}", str(value))]
        command = [
            sys.executable,
            "-m",
            "opo_trl.launch.cli",
            "train",
            "--config",
            "recipes/arithmetic/opo.yaml",
            *options,
        ]
        samples = []
        with psutil.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}) as training:
            while training.poll() is None:
                samples.append({"step": step_of(folder / LOG), **sample(training)})
                time.sleep(seconds)
        if training.returncode:
            raise RuntimeError(f"The run ended with status {training.returncode}, see its output above.")
        log = read_lines(folder / LOG)
        outcome = {
            "steps": steps,
            "checkpoints": len([*folder.glob("checkpoint-*")]),
            "failed_scores": sum(row.get("reward/errors", 0) + row.get("reward/timeouts", 0) for row in log),
        }
    while_training = [one for one in samples if 0 < one["step"] < steps]  # without start and report
    return [{"origin": origin(), **outcome}, *while_training[:: len(while_training) // SAMPLES + 1]]


def step_of(log: Path) -> int:
    """Completed optimizer steps, from the end of the log."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 20_000, 0))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else 0


def sample(training: psutil.Process) -> Sample:
    """What a process and its descendants hold now, in MiB and counts, and the trainer's processor time in seconds."""
    held: list[Sample] = []
    for process in [training, *training.children(recursive=True)]:
        try:
            memory, times = process.memory_full_info(), process.cpu_times()
            held.append(
                {
                    "uss": memory.uss / 2**20,
                    "rss": memory.rss / 2**20,
                    "handles": process.num_fds(),
                    "threads": process.num_threads(),
                    "processes": 1,
                    "seconds": times.user + times.system,
                }
            )
        except psutil.Error:  # it has just exited
            continue
    total = {name: sum(one[name] for one in held) for name in ("uss", "rss", "handles", "threads", "processes")}
    return total | {"seconds": max(one["seconds"] for one in held)}


# The page


class Verdict(NamedTuple):
    """
    A quantity at the end, compared with its value after warm-up.

    Args:
        early (`float`), late (`float`): Medians over the second and the last tenth of the steps.
        slope (`float`): Least-squares change per 1,000 steps, without the first tenth.
        holds (`bool`): Whether `late` is within its bound.
    """

    early: float
    late: float
    slope: float
    holds: bool


# Quantity → label, largest and smallest ratio of late to early.
BOUNDS = {
    "uss": ("memory, unshared (MiB)", 1.05, 0.0),
    "rss": ("memory, resident (MiB)", 1.05, 0.0),
    "handles": ("open file descriptors", 1.0, 0.0),
    "threads": ("threads", 1.0, 0.0),
    "processes": ("processes", 1.0, 0.0),
    "speed": ("steps per second of the trainer's processor time", math.inf, 0.95),
}


def judge(samples: Sequence[Sample]) -> dict[str, Verdict]:
    """The verdict on each quantity of [`BOUNDS`]."""
    samples = with_speed(samples)
    last = samples[-1]["step"]
    verdicts = {}
    for name, (_, most, least) in BOUNDS.items():
        early = statistics.median(one[name] for one in samples if 0.1 * last <= one["step"] < 0.2 * last)
        late = statistics.median(one[name] for one in samples if one["step"] >= 0.9 * last)
        steps, values = np.array([(one["step"], one[name]) for one in samples if one["step"] >= 0.1 * last]).T
        slope = 1000 * float(np.polyfit(steps, values, 1)[0])
        verdicts[name] = Verdict(early, late, slope, least * early <= late <= most * early)
    return verdicts


def with_speed(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with `speed`, over the twentieth of the run around each, including validations."""
    reach = max(len(samples) // 40, 1)
    rows = []
    for i, one in enumerate(samples):
        first, last = samples[max(i - reach, 0)], samples[min(i + reach, len(samples) - 1)]
        rows.append(one | {"speed": (last["step"] - first["step"]) / (last["seconds"] - first["seconds"])})
    return rows


def page(header: dict[str, Any], samples: Sequence[Sample]) -> str:
    """`soak.md`."""
    made, verdicts = header["origin"], judge(samples)
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    lines = [
        f"# {header['steps']:,} optimizer steps",
        "",
        f"By `{made['command']}` ({made['cpu_cores']} cores of a {made['device']}, {made['date']}, commit"
        f" {made['git_commit']}; Python {made['python']}, {versions}).",
        f"{len(samples)} samples of all processes of `opo-trl train` on the arithmetic recipe, with rewards in",
        f"workers. {header['failed_scores']:.0f} of them died and were replaced; at the end there were"
        f" {header['checkpoints']} checkpoints.",
        "",
        "Early and late are the medians over the second and the last tenth of the steps; the first tenth is warm-up.",
        "The slope is that of a line fitted to all but the first tenth.",
        "",
        "| | early | late | late ÷ early | bound | slope per 1,000 steps | holds |",
        "| --- | ---: | ---: | ---: | :---: | ---: | :---: |",
    ]
    for name, (label, most, least) in BOUNDS.items():
        early, late, slope, holds = verdicts[name]
        bound = f"≥ {least:g}" if least else f"≤ {most:g}"
        ratio = f"{late / early:.3f} | {bound} | {slope:+.3g} | {'yes' if holds else '**no**'}"
        lines.append(f"| {label} | {early:.5g} | {late:.5g} | {ratio} |")
    return "\n".join([*lines, "", "![Memory, handles and speed over optimizer steps](soak.png)"]) + "\n"


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Memory, numbers of things held, and speed over optimizer steps."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    samples = with_speed(samples)
    steps = [one["step"] for one in samples]
    with plt.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure, axes = plt.subplots(1, 3, figsize=(11, 3), layout="constrained", sharex=True)
        panels = (
            ("memory (MiB)", {"uss": "unshared", "rss": "resident"}),
            ("held", {"handles": "file descriptors", "threads": "threads", "processes": "processes"}),
            ("steps per second of processor time", {"speed": None}),
        )
        for axis, (title, names) in zip(axes, panels, strict=True):
            for name, label in names.items():
                axis.plot(steps, [one[name] for one in samples], linewidth=1, label=label)
            axis.set_title(title)
            axis.set_xlabel("optimizer step")
            axis.set_ylim(0, 1.4 * axis.dataLim.y1)  # with room for the legend above the curves
            if len(names) > 1:
                axis.legend(frameon=False)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 1 where a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="from the samples, without training")
    parser.add_argument("--quick", action="store_true", help="60 steps; write nothing")
    args = parser.parse_args(argv)
    if args.quick:
        header, *samples = soak(60, seconds=0.1)
        print(page(header, samples))
        return 0
    if not args.write:
        rows = soak(STEPS, seconds=1)
        RESULTS.unlink(missing_ok=True)
        append_lines(RESULTS, rows)
    header, *samples = read_lines(RESULTS, form={})
    RESULTS.with_suffix(".md").write_text(page(header, samples))
    draw(samples, RESULTS.with_suffix(".png"))
    return 0 if all(verdict.holds for verdict in judge(samples).values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
