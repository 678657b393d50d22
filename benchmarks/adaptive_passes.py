"""
Is an adaptive number of passes as good as the best fixed one? OPO with passes over the current rollout only.

    python -m benchmarks.adaptive_passes run --jobs 2   # all missing runs, into runs/adaptive
    python -m benchmarks.adaptive_passes collect        # runs/adaptive → results/adaptive_passes.json
    python -m benchmarks.adaptive_passes report         # results/adaptive_passes.json → results/adaptive_passes.md

Three rules end the passes over a rollout of 192 completions, of which one pass takes four optimizer steps:

- held-out: an eighth of its groups takes part in the first pass only; stop when the target fit on them has not risen
  for two passes;
- fit: stop when the target fit over the last pass has reached 0.5;
- distance: stop when the effective sample size of the importance ratios over the last pass is below 0.6.

Sampling is dynamic, so that prompts do not come from the data loader, which expects the same number of passes for
every rollout.
"""

import itertools
import json
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from opo_trl.config import OPOConfig
from opo_trl.methods import Method
from opo_trl.metrics.opo import target_fit
from opo_trl.objective import Samples, token_sum
from opo_trl.rollout.rows import completion_tokens, take_rows
from opo_trl.trainer import OPOTrainer

from .intervals import estimate
from .learning_curves import CurveRun, at, run_missing
from .many_runs import read_command_line
from .pages import table
from .record import origin
from .regime_design import COMMON


RESULTS = Path(__file__).resolve().parent / "results"
RUNS = Path("runs/adaptive")
SEEDS = (51, 52, 53)
RATES = (1e-4,)
FIXED = (2, 8)
RULES = ("held-out", "fit", "distance")
PLACES = (800, 2000)  # completions after which accuracies are compared: a short run and a longer one
MOST = 16  # passes
HELD_OUT, PATIENCE, FIT, ESS = 0.125, 2, 0.5, 0.6


@dataclass
class AdaptiveConfig(OPOConfig):
    """[`OPOConfig`] with a rule that ends the passes over a rollout; `num_iterations` bounds them."""

    stop_rule: Literal["held-out", "fit", "distance"] = field(
        default="fit", metadata={"help": "What ends the passes."}
    )


class _EndOfPass(TrainerCallback):
    def __init__(self, trainer: "AdaptivePasses"):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.end_pass()


class AdaptivePasses(OPOTrainer):
    """[`OPOTrainer`] whose number of passes over a rollout follows a rule. One process only."""

    config_class = AdaptiveConfig
    args: AdaptiveConfig

    def __init__(self, *inputs, **named):
        super().__init__(*inputs, **named)
        self._fits: tuple[float, ...] = ()  # on the held-out groups, after each pass
        self._latest: list[dict[str, float]] = []  # metrics of the optimizer steps of the latest pass
        self.add_callback(_EndOfPass(self))

    def _finish_rollout(self, rollout: dict[str, Any]) -> dict[str, Any]:
        rollout = super()._finish_rollout(rollout)
        n_groups = len(rollout["advantages"]) // self.num_generations
        chosen = np.random.default_rng((self.args.seed, self._step)).permutation(n_groups)
        share = HELD_OUT if self.args.stop_rule == "held-out" else 0.0
        held_out = torch.zeros(n_groups, dtype=torch.bool)
        held_out[chosen[: round(share * n_groups)]] = True
        rollout["held_out"] = held_out.repeat_interleave(self.num_generations)
        return rollout

    def _samples(self, inputs: Any, logps: Tensor) -> Samples:
        samples = super()._samples(inputs, logps)
        if self._step % self.args.micro_steps_per_rollout < self.args.steps_per_generation:  # the first pass
            return samples
        return replace(samples, weights=torch.where(inputs["held_out"], 0.0, samples.weights))

    def _log_step(self, reports):
        super()._log_step(reports)
        step = {name: self._metrics["train"][name][-1] for name in ("opo/target_fit", "opo/ratio/ess")}
        self._latest = [*self._latest, step][-self.args.steps_per_generation :]

    def end_pass(self) -> None:
        """End the passes over the rollout after the pass that has just been made, if the rule says so."""
        position = self._step % self.args.micro_steps_per_rollout
        if position and position % self.args.steps_per_generation == 0 and self._is_enough():
            self._step += self.args.micro_steps_per_rollout - position  # the next micro-step needs a new rollout
        if self.rollout_is_used_up:
            self._fits = ()

    def _is_enough(self) -> bool:
        if self.args.stop_rule == "held-out":
            self._fits = (*self._fits, self._held_out_fit())
            return len(self._fits) > PATIENCE and max(self._fits[-PATIENCE:]) <= max(self._fits[:-PATIENCE])
        name, bound, side = {"fit": ("target_fit", FIT, 1), "distance": ("ratio/ess", ESS, -1)}[self.args.stop_rule]
        return side * statistics.fmean(step[f"opo/{name}"] for step in self._latest) >= side * bound

    def _held_out_fit(self) -> float:
        rollout = self._replay.rollouts[-1]
        rows = take_rows(rollout, rollout["held_out"].nonzero().flatten().numpy())
        logps, _ = self._anchor_pass(rows, batch_size=self.args.per_device_train_batch_size)
        mask = completion_tokens(rows) & rows["opo_valid"].unsqueeze(1)
        log_ratio = token_sum(logps - rows["old_per_token_logps"], mask)
        return target_fit(log_ratio, rows["opo_target"]).item()


_HERE = "benchmarks.adaptive_passes"  # also where this file is the command
METHOD = Method("adaptive", "OPO, adaptive passes", "#d55e00", f"{_HERE}.AdaptivePasses", f"{_HERE}.AdaptiveConfig")


def cells() -> list[tuple[float, str]]:
    """Learning rate and name of each setting."""
    return [*itertools.product(RATES, [*(f"{passes} passes" for passes in FIXED), *RULES])]


def run_of(rate: float, name: str, seed: int) -> CurveRun:
    """A run of a setting."""
    fields: dict[str, Any] = {
        **COMMON,
        "steps_per_generation": 4,
        "max_steps": 100_000,
        "max_sampling_rounds": 4,
        "learning_rate": rate,
        "report_samples": 2,
        "skip_inert_rows": False,
        "ratio_form": "log",
        "seed": seed,
    }
    if name in RULES:
        fields |= {"trainer": "adaptive", "stop_rule": name, "num_iterations": MOST}
    else:
        fields |= {"trainer": "opo", "num_iterations": int(name.split()[0])}
    folder = RUNS / f"{name} {rate:g} {seed}".replace(" ", "_")
    return CurveRun(folder, fields, PLACES[-1], points=6, methods=(METHOD,))


def collect() -> dict[str, Any]:
    """Passes per rollout and accuracies of each run, with versions and date."""
    found = []
    for (rate, name), seed in itertools.product(cells(), SEEDS):
        curve = json.loads((run_of(rate, name, seed).folder / "curve.json").read_text())
        passes = curve["steps"].get("opo/pass", [1.0] * len(curve["steps"]["entropy"]))
        measured = {f"{key} {n}": at(n, curve["points"], key) for n in PLACES for key in ("sampled", "greedy")}
        per_rollout = len(passes) / passes.count(1.0)
        found.append({"rate": rate, "name": name, "seed": seed, "passes": per_rollout, **measured})
    return {**origin(), "runs": found}


def report(record: dict[str, Any]) -> str:
    """The page."""
    lines = []
    columns = [f"{key} {n}" for n in PLACES for key in ("sampled", "greedy")]
    for rate, name in cells():
        runs = [r for r in record["runs"] if (r["rate"], r["name"]) == (rate, name)]
        values = [estimate([100 * r[column] for r in runs]) for column in columns]
        shown = [f"{v.mean:.1f} ± {(v.interval[1] - v.interval[0]) / 2:.1f}" for v in values if v.interval]
        lines.append([name, f"{rate:g}", f"{statistics.fmean(r['passes'] for r in runs):.1f}", *shown])
    header = ("rule", "learning rate", "passes", *(f"{c.split()[0]} after {c.split()[1]}, %" for c in columns))
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    return (
        "# Adaptive passes\n\n`python -m benchmarks.adaptive_passes report` makes this page; the script's docstring "
        f"says what is measured. {len(SEEDS)} seeds,\ndynamic sampling, rollouts of 192 completions; ± is half of the "
        f"95 % interval.\n\n{table(header, lines)}\n\nMeasured {record['date'][:10]} with {versions}.\n"
    )


def main() -> int:
    arguments = read_command_line(__doc__, "run", "collect", "report")
    record = RESULTS / "adaptive_passes.json"
    if arguments.command == "run":
        runs = [run_of(*cell, seed) for cell, seed in itertools.product(cells(), SEEDS)]
        return run_missing(runs, arguments.jobs)
    if arguments.command == "collect":
        record.write_text(json.dumps(collect(), indent=1) + "\n")
    else:
        (RESULTS / "adaptive_passes.md").write_text(report(json.loads(record.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
