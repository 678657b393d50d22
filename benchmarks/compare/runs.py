"""Finished runs: reading their folders, and checking that they are comparable."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opo_trl.checks.files import read_json
from opo_trl.checks.text import one_line
from opo_trl.report.run_files import (
    ENVIRONMENT,
    LOG,
    RECIPE,
    SETTINGS,
    is_finished,
    is_run,
    read_log,
    read_settings,
    read_summary,
)
from opo_trl.report.run_report import INCIDENTAL


Settings = Mapping[str, Any]

_DEFINING_PREFIXES = ("lora_", "validation_", "report_")
_DEFINING = """
    dataset_name dataset_config dataset_train_split dataset_test_split chat_template_kwargs tools environment_factory
    datasets test_split_size test_fraction columns dataset_settings levels fraction subset_seed prompt_style
    instruction max_prompt_length rollouts rollouts_model
    model_name_or_path model_revision dtype load_in_8bit load_in_4bit use_peft use_dora use_rslora
    num_generations max_completion_length max_tool_calling_iterations temperature top_p top_k min_p
    repetition_penalty generation_kwargs vllm_structured_outputs_regex max_completions
"""

# Settings that make optimizer steps of a rollout.
ROLLOUT = ("generation_batch_size", "steps_per_generation", "num_iterations", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Run:
    """A finished run, with the content of its files."""

    label: str  # `LABEL` in a folder `LABEL/seed-N`, otherwise the folder's name
    seed: int
    settings: Settings
    environment: Settings = field(repr=False)
    summary: Settings = field(repr=False)
    log: list[dict[str, Any]] = field(repr=False)

    @property
    def name(self) -> str:
        """Label and seed, as in messages and tables."""
        return f"{self.label}, seed {self.seed}"


def find_runs(folder: Path) -> list[Path]:
    """Folders of the runs in a folder: itself, or those below it at any depth. A `ValueError` if there are none."""
    folders = [folder] if is_run(folder) else sorted(path.parent for path in folder.rglob(RECIPE))
    if not folders:
        raise ValueError(f"{str(folder)!r} contains no run: no {RECIPE} in it or below. Pass the folder of a run.")
    return folders


def read_run(folder: Path) -> Run:
    """Read a finished run. A `ValueError` if it is not finished, or its settings or log are missing."""
    if not is_finished(folder):
        raise ValueError(f"The run {str(folder)!r} is not finished. Let it finish (`--resume_from_checkpoint auto`).")
    settings, log = read_settings(folder), read_log(folder)
    if not settings or not log:
        missing = LOG if settings else SETTINGS
        raise ValueError(f"The run {str(folder)!r} lacks {missing}, or it is empty. Restore it, or repeat the run.")
    place = folder.resolve()
    if re.fullmatch(r"seed-\d+", place.name):
        place = place.parent  # the folder of a method
    return Run(
        label=one_line(place.name),
        seed=settings["seed"],
        settings=settings,
        environment=read_json(folder / ENVIRONMENT),
        summary=read_summary(folder),
        log=log,
    )


def defining_settings(settings: Settings) -> dict[str, Any]:
    """Data, budget, base model and reward: runs that differ here answer different questions."""
    prefixed = [key for key in settings if key.startswith(_DEFINING_PREFIXES) and key != "report_to"]
    defining = (*_DEFINING.split(), *sorted(prefixed))
    values = {key: settings.get(key) for key in defining}
    if settings.get("max_completions") is None:  # otherwise the number of steps and passes is the method's own
        values["max_steps"] = steps = settings.get("max_steps")
        if steps is None or steps <= 0:  # otherwise epochs have no effect
            values["num_train_epochs"] = settings.get("num_train_epochs")
        values["optimizer steps per rollout"] = optimizer_steps_per_rollout(settings)
    values["completions per optimizer step"] = completions_per_optimizer_step(settings)
    # The others shape the reward: part of the method. Without any, the environment gives it.
    values["reward_funcs[0]"] = next(iter(settings["reward_funcs"]), None)
    return values


def completions_per_optimizer_step(settings: Settings) -> float:
    return settings["generation_batch_size"] / optimizer_steps_per_rollout({**settings, "num_iterations": 1})


def optimizer_steps_per_rollout(settings: Settings) -> float:
    return settings["steps_per_generation"] * settings["num_iterations"] / settings["gradient_accumulation_steps"]


def check_comparable(settings: Mapping[str, Settings]) -> None:
    """Reject runs that differ in a defining setting, given their resolved settings by name, with a `ValueError`."""
    if lines := _differing({name: defining_settings(own) for name, own in settings.items()}):
        raise ValueError(
            "These runs are not comparable: they differ in data, budget, base model, reward or validation:\n"
            f"{lines}\nLeave out runs until the rest agree, or train with the same values."
        )


def check_same_method(runs: Sequence[Run]) -> None:
    """Reject runs of one label that differ in more than the seed, or share it, with a `ValueError`."""
    for label, members in by_label(runs).items():
        if lines := _differing({run.name: method_settings(run.settings) for run in members}):
            raise ValueError(f"Runs of {label!r} differ in more than the seed:\n{lines}\nGive them different names.")
        seeds = [run.seed for run in members]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"{label!r} has several runs of one seed: {seeds}. Give one of them another name.")


def _differing(values: Mapping[str, Settings]) -> str:
    """A line for each field that differs: every value, with the names that have it."""
    lines = []
    for key in sorted({key for own in values.values() for key in own}):
        names: dict[str, list[str]] = {}
        for name, own in values.items():
            names.setdefault(repr(own.get(key)), []).append(name)
        if len(names) > 1:
            shown = {value: who if len(who) < 3 else [who[0], f"{len(who) - 1} more"] for value, who in names.items()}
            lines.append(f"  {key}: " + "; ".join(f"{value} in {' and '.join(who)}" for value, who in shown.items()))
    return "\n".join(lines)


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each method, sorted by seed."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault(run.label, []).append(run)
    return groups


def method_settings(settings: Settings) -> dict[str, Any]:
    """The settings without those that are incidental to a run."""
    return {key: value for key, value in settings.items() if key not in INCIDENTAL}


def what_differs(methods: Mapping[str, list[Run]]) -> list[list[str]]:
    """Settings in which methods differ: name and values; `–` if a method has no such field, or does not use it."""
    settings = [{"trainer": "opo", **method_settings(runs[0].settings)} for runs in methods.values()]
    keys = sorted({key for own in settings for key in own})
    rows = [[key, *(_shown(own.get(key)) for own in settings)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
