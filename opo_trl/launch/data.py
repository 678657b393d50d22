"""
The datasets of a run.

A recipe can name any dataset: its columns are recognized, `columns` maps others, and a column `prompt` is taken as it
is, as in TRL. To add one that needs code, as the embedded task does, see `opo_trl.data.problems.EMBEDDED`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import DatasetMixtureConfig, get_dataset

from ..arguments import OPOScriptArguments
from ..checks.blame import LIBRARY_ERRORS
from ..config import RolloutConfig
from ..data import INSTRUCTION, drop_long_prompts, gym, to_prompts, without_overlap
from ..data.problems import Sources, as_problems, as_prompts, draw_or_load, has_prompts, select
from .preflight import check_template


ALL = "all"  # as a level: every problem


@dataclass
class Data:
    """
    Datasets for training, validation, report and TRL's evaluation. Each has `prompt` and what the rewards read.

    Args:
        plan (`str`): what was taken for what, as a line of the run's plan.
        prompt_style (`str`): the style of the prompts, also where the recipe leaves it open.
        asked (`dict[str, str]`): how to ask another problem in the same way: style, instruction and system prompt.
    """

    training: Dataset
    validation: Dataset | None
    report: dict[str, Dataset]
    evaluation: Dataset | None
    plan: str
    prompt_style: str
    asked: dict[str, str]


def load_data(
    script: OPOScriptArguments, args: RolloutConfig, tokenizer: PreTrainedTokenizerBase, **in_template: Any
) -> Data:
    """
    Load the problems of a run: `levels` of the training split, and held-out ones of the test split.

    `in_template` are further arguments of the chat template that lengthen a prompt, such as `tools`.

    Raises:
        `ValueError`: the dataset cannot be read, a selection leaves no row, or a chat prompt has no template.
    """
    source = _Source(script)
    training = source.read(script.dataset_train_split, script.levels, script.fraction)
    if source.style == "dataset" and script.instruction not in (INSTRUCTION, gym.INSTRUCTION, ""):
        raise ValueError(
            f"instruction={script.instruction!r} has no effect: the dataset brings its prompts. Remove `instruction`, "
            "or set `columns: {problem: prompt}` to add it to them."
        )
    prompts = source.prompts(training)
    taken = source.describe()
    check_template(prompts, tokenizer)
    if script.max_prompt_length is not None:
        template_kwargs: Any = args.chat_template_kwargs or {}  # a dict, once parsed
        prompts = drop_long_prompts(prompts, tokenizer, script.max_prompt_length, template_kwargs | in_template)

    def held_out(name: str, levels: list[str] | None, size: int | None) -> Dataset:
        try:
            levels = None if levels == [ALL] else levels
            problems = without_overlap(source.read(script.dataset_test_split, levels), training)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if size is not None:
            problems = problems.shuffle(seed=script.subset_seed).select(range(min(size, len(problems))))
        return source.prompts(problems)

    validation = evaluation = None
    if script.validation_steps:
        validation = held_out("validation_levels", script.validation_levels, script.validation_size)
    if args.eval_strategy != "no" or args.eval_on_start:
        evaluation = held_out("eval_strategy", script.validation_levels, None)
    report = {level: held_out("report_levels", [level], script.report_size) for level in script.report_levels or []}
    plan = f"{len(prompts):,} prompts of {taken}"
    return Data(prompts, validation, report, evaluation, plan, source.style, source.asked(prompts))


@dataclass
class _Source:
    """The dataset of a recipe; its first split decides on the `style` of all. `sources` are those of the last one."""

    script: OPOScriptArguments
    style: str = ""
    sources: Sources = field(default_factory=dict)

    def read(self, split: str, levels: Sequence[str] | None, fraction: float = 1.0) -> Dataset:
        """Rows of a split, with [`data.COLUMNS`] or with their own prompts."""
        script, rows = self.script, self._rows(split, levels)
        columns: Any = script.columns or {}  # a dict, once parsed
        if not self.style:
            self.style = script.prompt_style or ("dataset" if has_prompts(rows, columns) else "chat")
        if self.style == "dataset":
            problems, self.sources = as_prompts(rows, columns)
        else:
            problems, self.sources = as_problems(str(script.dataset_name), rows, columns)
        return select(problems, levels, fraction, script.subset_seed)

    def _rows(self, split: str, levels: Sequence[str] | None) -> Dataset:
        script = self.script
        if not script.datasets:
            settings: Any = script.dataset_settings  # a dict, once parsed
            return draw_or_load(str(script.dataset_name), script.dataset_config, split, levels, settings)
        parts: Any = [*script.datasets]  # TRL makes objects of them
        try:
            mixture: Any = get_dataset(DatasetMixtureConfig(parts))["train"]
        except LIBRARY_ERRORS as error:
            raise ValueError(f"datasets={parts!r} cannot be loaded: {error}. Change it.") from error
        size, is_training = script.test_split_size, split == script.dataset_train_split
        if size is None and not is_training:
            raise ValueError("test_split_size=None leaves `datasets` without a test split. Set `test_split_size`.")
        if size is None:
            return mixture
        n_held_out = int(size) if size >= 1 else math.ceil(size * len(mixture))
        if n_held_out >= len(mixture):
            raise ValueError(f"test_split_size={size!r} leaves none of the {len(mixture)} rows to train on. Lower it.")
        # TRL draws this split without a seed, so that each process would hold out other rows.
        return mixture.train_test_split(n_held_out, seed=script.subset_seed)["train" if is_training else "test"]

    def prompts(self, problems: Dataset) -> Dataset:
        """The rows with their prompts."""
        if self.style == "dataset":
            return problems
        style: Any = self.style
        return to_prompts(problems, style=style, instruction=str(self.script.instruction))

    def asked(self, prompts: Dataset) -> dict[str, str]:
        """See [`Data`]. What else the data's own prompts ask is not known, only a system prompt that all have."""
        if self.style != "dataset":
            return {"style": self.style, "instruction": str(self.script.instruction), "system": ""}
        if isinstance(prompts[0]["prompt"], str):
            return {"style": "plain", "instruction": "", "system": ""}
        first = [prompt[0] for prompt in prompts["prompt"]]
        system = {str(turn["content"]) if turn["role"] == "system" else "" for turn in first}
        shared = system.pop() if len(system) == 1 else ""
        return {"style": "chat", "instruction": "" if shared else INSTRUCTION, "system": shared}

    def describe(self) -> str:
        """For a line of the plan: where the prompts are from, and what was taken for what."""
        script = self.script
        name = script.dataset_name or " + ".join(str(part["path"]) for part in script.datasets)
        taken = [f"{ours} is its column {theirs!r}" for ours, theirs in self.sources.items() if ours != theirs]
        prompts = {
            "dataset": "its column 'prompt', unchanged",
            "chat": "a user message of the problem and the instruction",
            "plain": "the problem as text",
        }
        levels = f", levels {', '.join(script.levels)}" if script.levels else ""
        taken.append(f"a prompt is {prompts[self.style]}")
        return f"{name} ({script.dataset_train_split}{levels}): {'; '.join(taken)}"
