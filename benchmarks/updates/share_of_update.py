"""
What an update is a share of: generation, scoring and update in a step of TRL's GRPOTrainer and of OPOTrainer.

    python -m benchmarks.models.smollm2 --output runs/smollm2
    python -m benchmarks.updates.share_of_update                  # → share_of_update.{json,md}; one core, half an hour
    python -m benchmarks.updates.share_of_update --write          # the page, from share_of_update.json

Each trainer trains the same model on the same prompts, with one optimizer step per rollout and the same rates, in
turns, three times; the first rollout is not counted. Processor seconds of this process: *generation* is TRL's
`_generate`; *scoring* the rest of `_generate_and_score_completions` (rewards, advantages, log-probabilities under the
behaviour policy); *update* the rest of a step. Policies differ after their first update, and so do the completions
that they write: compare the seconds of generation with this in mind.
"""

import argparse
import contextlib
import functools
import io
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.files import write_json
from opo_trl.data import arithmetic, few_shot

from ..pages import table
from ..record import origin


RECORD = Path(__file__).resolve().with_name("share_of_update.json")
SMOLLM2 = Path("runs/smollm2")
REPEATS, SEED = 3, 4242
PHASES = ("generation", "scoring", "update")
TRAINERS: dict[str, tuple[type[GRPOTrainer], Callable[..., Any]]] = {
    "TRL's GRPOTrainer": (GRPOTrainer, GRPOConfig),
    "`objective: grpo`": (OPOTrainer, functools.partial(OPOConfig, objective="grpo")),
    "OPO": (OPOTrainer, OPOConfig),
}


@dataclass(frozen=True)
class Case:
    """A model and its task."""

    model: Callable[[], Path]
    problems: Callable[[], list[dict[str, Any]]]
    reward: Callable[..., list[float]]
    fields: dict[str, Any]
    rollouts: int  # the first is not counted


_EMBEDDED = Case(
    arithmetic.base_model_path,
    lambda: list(arithmetic.make_problems("train", ["Level 3"])),
    arithmetic.arithmetic_reward,
    {"per_device_train_batch_size": 96, "max_completion_length": 40, "learning_rate": 1e-4},
    rollouts=9,
)
_PRETRAINED = Case(
    lambda: SMOLLM2,
    lambda: list(few_shot.make_problems("train", ["addition"])),
    few_shot.first_line_reward,
    {"per_device_train_batch_size": 48, "max_completion_length": 6, "learning_rate": 1e-5},
    rollouts=3,
)
CASES = {"embedded model, `Level 3`": _EMBEDDED, "SmolLM2-135M, `addition`": _PRETRAINED}


class Clock:
    """Processor seconds by phase of a trainer's steps, from the second rollout on."""

    def __init__(self, trainer: GRPOTrainer):
        self.seconds = dict.fromkeys(("generation", "rollout", "step"), 0.0)
        self._rollouts = 0
        trainer._generate = self._timed("generation", trainer._generate)
        trainer._generate_and_score_completions = self._timed("rollout", trainer._generate_and_score_completions)
        trainer.add_callback(StepTimes(self))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            output = function(*args, **kwargs)
            self.add(name, time.process_time() - began)
            return output

        return timed

    def add(self, name: str, seconds: float) -> None:
        if self._rollouts > 0:
            self.seconds[name] += seconds
        if name == "step":
            self._rollouts += 1

    def by_phase(self) -> dict[str, float]:
        """Seconds per step, by phase."""
        steps = self._rollouts - 1
        generation, rollout, step = (self.seconds[name] / steps for name in ("generation", "rollout", "step"))
        return {"generation": generation, "scoring": rollout - generation, "update": step - rollout}


class StepTimes(TrainerCallback):
    """Tells a clock the seconds of each optimizer step, its rollout included."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.process_time()
        self.clock.add("step", now - self._began)
        self._began = now


def measure(case: Case, name: str) -> dict[str, float]:
    """Seconds per step of a trainer, by phase."""
    trainer_class, config_class = TRAINERS[name]
    prompts = [{"prompt": problem["problem"], "solution": problem["solution"]} for problem in case.problems()]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = config_class(
            output_dir=folder,
            num_generations=6,
            max_steps=case.rollouts,
            lr_scheduler_type="constant",
            beta=0.0,
            seed=SEED,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            **case.fields,
        )
        trainer = trainer_class(
            model=str(case.model()), reward_funcs=case.reward, args=args, train_dataset=Dataset.from_list(prompts)
        )
        clock = Clock(trainer)
        trainer.train()
    return clock.by_phase()


def run() -> dict[str, Any]:
    """Every trainer of every case, in turns."""
    torch.set_num_threads(1)
    cases: dict[str, dict[str, list[dict[str, float]]]] = {}
    for title, case in CASES.items():
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in TRAINERS}
        for _ in range(REPEATS):
            for name in TRAINERS:
                seconds[name].append(measure(case, name))
                print(title, name, seconds[name][-1], flush=True)
        cases[title] = seconds
    steps = {title: case.rollouts - 1 for title, case in CASES.items()}
    return {**origin(), "steps": steps, "cases": cases}


def page(record: dict[str, Any]) -> str:
    """The page of a record."""
    rows = []
    for title, by_trainer in record["cases"].items():
        reference = [sum(phases.values()) for phases in by_trainer["TRL's GRPOTrainer"]]
        for name, repeats in by_trainer.items():
            means = [median(phases[phase] for phases in repeats) for phase in PHASES]
            shares = [f"{mean:.2f} ({mean / sum(means):.0%})" for mean in means]
            ratios = [sum(phases.values()) / of_trl for phases, of_trl in zip(repeats, reference, strict=True)]
            ratio = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            rows.append([title, name, *shares, "1" if name == "TRL's GRPOTrainer" else ratio])
    steps = " and ".join(str(number) for number in record["steps"].values())
    made = f"`python {record['command']}`, {record['date']}, {record['device']}, commit {record['git_commit']}"
    return "\n".join(
        [
            "# What an update is a share of",
            "",
            "Processor seconds per step on one core, with the share of the step in brackets, and the time of whole",
            "steps relative to TRL's GRPOTrainer: medians of three runs, the ratio with its range.",
            f"{steps} steps each, one per rollout, of completions from the model's own policy; float32.",
            "[How](share_of_update.py).",
            "",
            table(["model and task", "trainer", *PHASES, "step"], rows),
            "",
            f"Made by {made}. {record.get('remark', '')}".strip(),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, unless only the page is to be written."""
    parser = argparse.ArgumentParser(description="Generation, scoring and update as shares of a step.")
    parser.add_argument("--write", action="store_true", help="write the page from the record, without measuring")
    if not parser.parse_args(argv).write:
        write_json(RECORD, run())
    RECORD.with_suffix(".md").write_text(page(json.loads(RECORD.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
