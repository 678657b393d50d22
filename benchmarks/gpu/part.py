"""
One part of the comparison: a trainer, from the base model to its accuracy at the end, in this process.

Each measurement is a line of `NAME.jsonl` when it is made, so that a part that is killed leaves what it has: the
`settings` and where they came from, an `accuracy`, the seconds of a `step`, and why the part came to its `end`.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.files import append_lines
from opo_trl.data import drop_long_prompts, load_problems, to_prompts
from opo_trl.data.arithmetic import arithmetic_reward
from opo_trl.evaluate import evaluate
from opo_trl.forecast.plan import memory_plan
from opo_trl.metrics.step_clock import StepClock
from opo_trl.rewards import accuracy_reward

from ..record import origin, peak_memory, reset_peak_memory
from .settings import DATA, MAX_PROMPT_LENGTH, PARTS, PHASES, TEMPLATE, TINY_DATA, Settings


EVALUATIONS = 2  # after the first one: half way, and at the end
ADAPTER = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
OF_ALL = {
    "temperature": 1.0,
    "beta": 0.0,
    "lr_scheduler_type": "constant",
    "shuffle_dataset": False,  # The prompts are shuffled already, so that all trainers take the same in each rollout.
    "gradient_checkpointing": True,
    "chat_template_kwargs": TEMPLATE,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Clock(StepClock):
    """The benchmark's own, beside the one of OPOTrainer."""


class Timed:
    """Of a trainer: seconds by phase, completions and tokens, the same way for TRL's and for ours."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.clock = Clock(self.accelerator.device)
        self.add_callback(self.clock)
        self.completions = 0  # generated in training
        self.tokens = 0  # in them
        self.mean_reward: float | None = None  # of the rollout that the current step has generated

    def _generate(self, prompts: list) -> Any:
        with self.clock.phase("generate"):
            generated = super()._generate(prompts)
        completion_ids = generated[1]
        self.completions += len(completion_ids)
        self.tokens += sum(len(ids) for ids in completion_ids)
        return generated

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with self.clock.phase("score"):
            rewards = super()._calculate_rewards(*arguments, **named)
        self.mean_reward = rewards.nanmean().item()
        return rewards


class TimedGRPO(Timed, GRPOTrainer):
    """TRL's trainer."""


class TimedOPO(Timed, OPOTrainer):
    """Ours."""


TRAINERS = {"trl": (TimedGRPO, GRPOConfig), "opo_trl": (TimedOPO, OPOConfig)}


class Measures(TrainerCallback):
    """Measures accuracies and writes lines; ends training when there is no time for another rollout."""

    def __init__(self, trainer: Any, problems: Dataset, file: Path, *, began: float, seconds: float):
        self.trainer = trainer
        self.problems = problems
        self.file = file
        self.began = began  # when the part began
        self.limit = seconds  # for the whole part
        self.steps_per_rollout = trainer.args.max_steps // trainer.rollouts
        self.evaluated: list[int] = []  # the steps after which accuracies were measured
        self.evaluating = 0.0  # seconds of the longest of them
        self.training = 0.0  # seconds of training so far
        self.longest_rollout = 0.0  # seconds, with its updates
        self.rollout_began = began
        self.end = "all completions"
        self.parent = os.getppid()  # the command that has started this part

    def write(self, **entry: Any) -> None:
        append_lines(self.file, [entry])

    def on_train_begin(self, args, state, control, **named):
        self.measure(state.global_step)
        reset_peak_memory()
        self.rollout_began = time.perf_counter()

    def on_step_end(self, args, state, control, **named):
        if os.getppid() != self.parent:  # which was killed: the same command may be making this part again
            raise SystemExit("The command that started this part has ended.")
        trainer = self.trainer
        seconds = trainer.clock.seconds_per_step()
        self.write(
            step=state.global_step,
            completions=trainer.completions,
            tokens=trainer.tokens,
            reward=trainer.mean_reward,
            seconds={phase: seconds[phase] for phase in PHASES},
            peak_memory=peak_memory(),
        )
        trainer.mean_reward = None
        if state.global_step % self.steps_per_rollout == 0:
            self.end_of_rollout(state, control)

    def end_of_rollout(self, state: Any, control: Any) -> None:
        """Measure half way, and end training where another rollout would take too long."""
        now = time.perf_counter()
        lasted = now - self.rollout_began
        self.training += lasted
        self.longest_rollout = max(self.longest_rollout, lasted)
        elapsed = now - self.began
        print(f"{self.file.stem}: {self.trainer.completions} completions, {elapsed:.0f} s", flush=True)
        way = max(elapsed / self.limit, state.global_step / state.max_steps)
        if way >= len(self.evaluated) / EVALUATIONS and state.global_step < state.max_steps:
            self.measure(state.global_step)
        self.rollout_began = time.perf_counter()
        needed = self.longest_rollout + self.evaluating
        if self.rollout_began - self.began + needed > self.limit and state.global_step < state.max_steps:
            self.end = "time"
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **named):
        if state.global_step not in self.evaluated:
            self.measure(state.global_step)
        self.write(end=self.end)

    def measure(self, step: int) -> None:
        """Measure greedy accuracy on the problems for it."""
        began = time.perf_counter()
        evaluation = evaluate(self.trainer, self.problems, decoding="greedy")
        found = evaluation.summary()
        self.evaluating = max(self.evaluating, time.perf_counter() - began)
        self.evaluated.append(step)
        trained = {"step": step, "completions": self.trainer.completions, "training_seconds": self.training}
        rewards = [sample["reward"] for sample in evaluation.samples]
        self.write(accuracy=found, rewards=rewards, **trained)
        print(f"{self.file.stem}: accuracy {found['accuracy']:.1%} of {found['scored']}", flush=True)


def load_prompts(settings: Settings, split: str, count: int) -> Dataset:
    """The first prompts of a split in a random order that is always the same, without the longest."""
    embedded = settings.data == TINY_DATA
    problems = load_problems(
        settings.data,
        dataset_config="main" if settings.data == DATA else None,
        split=split,
        levels=["Level 3"] if embedded else None,
    ).shuffle(seed=settings.seed)
    few = problems.select(range(min(2 * count, len(problems))))
    prompts = to_prompts(few, style="plain" if embedded else "chat")
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    short = drop_long_prompts(prompts, tokenizer, MAX_PROMPT_LENGTH, TEMPLATE)
    return short.select(range(min(count, len(short))))


def precision() -> tuple[dict[str, Any], str]:
    """Fields of the configuration, and the type of the weights: float16 products where a GPU has no bfloat16."""
    if not torch.cuda.is_available():
        return {"use_cpu": True, "bf16": False}, "float32"
    if torch.cuda.get_device_capability() >= (8, 0):
        return {"bf16": True}, "bfloat16"
    return {"bf16": False, "fp16": True}, "float32"


def make_trainer(name: str, settings: Settings, output: Path) -> Any:
    """The trainer of a part."""
    part, size = PARTS[name], settings.size
    trainer_class, config_class = TRAINERS[part.library]
    fields, dtype = precision()
    rollouts = size.completions // size.rollout
    config = config_class(
        output_dir=str(output / "trainer"),
        max_steps=rollouts * size.steps_per_rollout * part.passes,
        num_generations=size.group,
        max_completion_length=size.max_completion_length,
        per_device_train_batch_size=size.rows,
        gradient_accumulation_steps=size.micro_batches,
        steps_per_generation=size.steps_per_rollout * size.micro_batches,
        per_device_eval_batch_size=size.rollout,
        model_init_kwargs={"dtype": dtype},
        seed=settings.seed,
        learning_rate=size.learning_rate * part.rate,
        **OF_ALL,
        **part.fields,
        **fields,
    )
    trainer = trainer_class(
        settings.model,
        arithmetic_reward if settings.data == TINY_DATA else accuracy_reward,
        config,
        load_prompts(settings, "train", size.completions // size.group),
        peft_config=LoraConfig(**ADAPTER),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.rollouts = rollouts
    return trainer


def planned_memory(trainer: Any) -> dict[str, float]:
    """Bytes that the plan computes for each moment."""
    return {moment: sum(components.values()) for moment, components in memory_plan(trainer).items()}


def run(name: str, settings: Settings, output: Path, seconds: float) -> None:
    """Train and measure a part, within a number of seconds."""
    began = time.perf_counter()
    file = output / f"{name}.jsonl"
    file.unlink(missing_ok=True)
    append_lines(file, [{"settings": settings.as_dict(), "origin": origin()}])
    trainer = make_trainer(name, settings, output)
    problems = load_prompts(settings, "test", settings.size.problems)
    measures = Measures(trainer, problems, file, began=began, seconds=seconds)
    if name == "opo":
        measures.write(planned_memory=planned_memory(trainer))
    trainer.add_callback(measures)
    trainer.train()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("output", type=Path)
    parser.add_argument("seconds", type=float)
    Settings.add_arguments(parser)
    arguments = parser.parse_args(argv)
    run(arguments.name, Settings.of(arguments), arguments.output, arguments.seconds)


if __name__ == "__main__":
    main()
