"""
Runs whose accuracy is measured along the way, over completions generated and seconds.

Each run ends once it has generated a budget of completions. Accuracies are measured at ends of rollouts, so that every
completion counted has been trained on, and their time is not counted.
"""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from tqdm import tqdm
from transformers import TrainerCallback

from opo_trl.evaluate import evaluate
from opo_trl.methods import Method, register
from opo_trl.metrics.log import PHASES
from opo_trl.trl import temporarily

from .many_runs import options


SHARP = 0.6  # the second temperature of sampling


@dataclass(frozen=True)
class CurveRun:
    """
    A run.

    Args:
        folder (`Path`): its folder, in which `curve.json` is written last.
        fields (`Mapping[str, Any]`): fields of its recipe.
        budget (`int`): completions to generate.
        points (`int`, *optional*, defaults to `12`): of the curve, at most.
        brief (`bool`, *optional*, defaults to `False`): whether to measure the sampled accuracy only.
        methods (`tuple[Method, ...]`, *optional*): methods that its recipe may name beside the package's.
    """

    folder: Path
    fields: Mapping[str, Any]
    budget: int
    points: int = 12
    brief: bool = False
    methods: tuple[Method, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the run has been finished."""
        return (self.folder / "curve.json").exists()


class Curve(TrainerCallback):
    """Measures the policy at the ends of rollouts."""

    def __init__(self, trainer: Any, problems: Any, run: CurveRun, samples: int):
        self.trainer, self.problems, self.run, self.samples = trainer, problems, run, samples
        self.points: list[dict[str, Any]] = []
        self.began = time.perf_counter()
        self.measuring = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._measure(0)
        self.began, self.measuring = time.perf_counter(), 0.0

    def on_step_end(self, args, state, control, **kwargs):
        done, budget = self.trainer.completions_generated, self.run.budget
        due = done - self.points[-1]["completions"] >= budget / self.run.points
        if self.trainer.rollout_is_used_up and (due or done >= budget):
            self._measure(done)

    def _measure(self, completions: int) -> None:
        began = time.perf_counter()
        point: dict[str, Any] = {
            "completions": completions,
            "optimizer_steps": self.trainer.state.global_step,
            "seconds": round(began - self.began - self.measuring, 2),
        }
        seed = self.trainer.state.global_step
        sampled = evaluate(self.trainer, self.problems, samples=self.samples, seed=seed).summary()
        point |= {"sampled": sampled["accuracy"], "pass_at": sampled["pass_at"]}
        if not self.run.brief:
            point["greedy"] = evaluate(self.trainer, self.problems, decoding="greedy").accuracy
            with temporarily(self.trainer.generation_config, temperature=SHARP):
                point["sharp"] = evaluate(self.trainer, self.problems, seed=seed).accuracy
        self.points.append(point)
        self.measuring += time.perf_counter() - began


def smoothed(points: Sequence[Mapping[str, Any]]) -> list[float]:
    """
    Sampled accuracy at the points of a curve, by isotonic regression: the nearest curve that never falls. Crossings of
    the raw curve would come too early, the more so the more points it has.
    """
    return isotonic_regression([point["sampled"] for point in points]).x.tolist()


def completions_to(goal: float, points: Sequence[Mapping[str, Any]]) -> float | None:
    """Completions after which the smoothed curve, linear between its points, reaches an accuracy; `None` if never."""
    heights = smoothed(points)
    for i, (before, after) in enumerate(itertools.pairwise(heights)):
        if after >= goal:
            share = max(0.0, (goal - before) / (after - before)) if after > before else 0.0
            first, last = (point["completions"] for point in points[i : i + 2])
            return first + share * (last - first)
    return None


def at(completions: float, points: Sequence[Mapping[str, Any]], name: str) -> float:
    """A measurement after some completions, between the points of a curve by linear interpolation."""
    return float(np.interp(completions, [p["completions"] for p in points], [p[name] for p in points]))


def train(run: CurveRun) -> CurveRun:
    """Train in this process, which must be a new one; its output goes to a file next to the run's folder."""
    from opo_trl.train import prepare

    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = run.folder.with_name(run.folder.name + ".txt").open("w")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    for method in run.methods:
        register(method)
    fields = {**run.fields, "output_dir": run.folder, "max_completions": run.budget, "overwrite": True}
    ready = prepare(options(fields))
    (problems,) = ready.data.report.values()  # of the only level
    curve = Curve(ready.trainer, problems, run, ready.script.report_samples)
    ready.trainer.add_callback(curve)
    with ready.lock:
        ready.trainer.train()
    log = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in log if "grad_norm" in entry]
    found = {"points": curve.points, "phases": _seconds(steps), "steps": _metrics(steps)}
    (run.folder / "curve.json").write_text(json.dumps(found))
    return run


_KEPT = ("entropy", "opo/pass", "opo/target_fit", "opo/ratio/ess", "completions/generated")


def _seconds(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all optimizer steps, by phase."""
    return {phase: round(sum(entry[f"opo/time/{phase}"] for entry in steps), 3) for phase in PHASES}


def _metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Metrics of each optimizer step, to four digits."""
    found = {name: [entry.get(name) for entry in steps] for name in _KEPT}
    return {
        name: [None if value is None else float(f"{value:.4g}") for value in values]
        for name, values in found.items()
        if any(value is not None for value in values)
    }


def run_missing(runs: Sequence[CurveRun], jobs: int) -> int:
    """Train what is not finished. Returns the exit status."""
    missing = [run for run in runs if not run.is_done]
    # Importing takes longer than some of the runs: the server does it once for all.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opo_trl.train"])
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for _ in tqdm(pool.imap_unordered(train, missing), total=len(missing), desc="runs"):
            pass
    return int(not all(run.is_done for run in runs))
