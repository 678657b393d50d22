"""
The datasets of a run.

A recipe can name any dataset: its columns are recognized, `columns` maps others, and a column `prompt` is taken as it
is, as in TRL. To add one that needs code, as the embedded task does, see `opo_trl.data.problems.EMBEDDED`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..arguments import OPOScriptArguments
from ..config import OPOConfig
from ..data import INSTRUCTION, drop_long_prompts, gym, to_prompts, without_overlap
from ..data.files import is_single_file
from ..data.problems import Sources, draw_or_load, has_prompts, select, take
from ..data.prompts import Style
from ..data.rollouts import load_rollouts
from .preflight import check_template


logger = logging.getLogger(__name__)

ALL = "all"  # as a level: every problem
TEST_FRACTION = 0.2  # of a dataset that is one file


@dataclass
class Data:
    """Datasets for training, validation, report and TRL's evaluation. Each has `prompt` and what the rewards read."""

    training: Dataset
    validation: Dataset | None
    report: dict[str, Dataset]  # by level
    evaluation: Dataset | None
    plan: str  # which column was used as which field, as a line of the run's plan


def load_data(
    script: OPOScriptArguments, args: OPOConfig, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Callable] = ()
) -> Data:
    """
    Load the problems of a run: `levels` of the training split, or recorded `rollouts`, and held-out ones of the test
    split. The chat template describes the `tools`.
    """

    def fitting(prompts: Dataset) -> Dataset:
        check_template(prompts, tokenizer, tools)
        options = {**cast(dict, args.chat_template_kwargs or {}), "tools": tools or None}
        limit = script.max_prompt_length
        return prompts if limit is None else drop_long_prompts(prompts, tokenizer, limit, options)

    rollouts = getattr(args, "rollouts", None)  # asynchronous training has none
    if rollouts is None:
        return _load_problems(script, args, fitting)
    groups = fitting(load_rollouts(rollouts, args.num_generations))
    prompts, plan = groups.select_columns("prompt"), f"{len(groups):,} groups of {rollouts}"
    if not script.dataset_name:
        return Data(groups, None, {}, None, plan)
    data = _load_problems(script, args, fitting)
    report = {level: without_overlap(problems, prompts) for level, problems in data.report.items()}
    validation, evaluation = (d and without_overlap(d, prompts) for d in (data.validation, data.evaluation))
    return Data(groups, validation, report, evaluation, plan)


def _load_problems(script: OPOScriptArguments, args: OPOConfig, fitting: Callable[[Dataset], Dataset]) -> Data:
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    source = _Source(script, measured=bool(script.validation_steps or evaluates))
    training = source.read(script.dataset_train_split, script.levels, script.fraction)
    if source.style == "dataset" and script.instruction not in (INSTRUCTION, gym.INSTRUCTION, ""):
        fix = "Remove `instruction`, or set `columns: {problem: prompt}` to add it to them"
        raise ValueError(f"instruction={script.instruction!r} has no effect: the dataset brings its prompts. {fix}.")
    reads_boxes = "accuracy_reward" in (script.reward_funcs or ())
    if source.style == "dataset" and reads_boxes and not any("boxed" in str(p) for p in training["prompt"][:100]):
        fix = "`columns: {problem: prompt}` adds `instruction` to each"
        logger.warning(f"No prompt asks for an answer in \\boxed{{}}, which `accuracy_reward` reads: {fix}.")
    plan = source.describe()
    prompts = fitting(source.prompts(training))

    def held_out(levels: list[str] | None, size: int | None) -> Dataset:
        problems = source.read(script.dataset_test_split, None if levels == [ALL] else levels)
        problems = without_overlap(problems, training)
        if size is not None:
            problems = problems.shuffle(seed=script.subset_seed).select(range(min(size, len(problems))))
        return source.prompts(problems)

    of = script.validation_levels
    validation = held_out(of, script.validation_size) if script.validation_steps else None
    evaluation = held_out(of, None) if evaluates else None
    report = {}
    try:
        for level in source.report_levels(training):
            report[level] = held_out([level], script.report_size)
    except (OSError, ValueError) as error:
        if script.report_levels is not None:
            raise
        logger.warning("No accuracy is measured before and after training: %s", error)
    answers = "" if "solution" in prompts.column_names else "; no column has answers"
    return Data(prompts, validation, report, evaluation, f"{len(prompts):,} prompts of {plan}{answers}")


@dataclass
class _Source:
    """The dataset of a recipe; its first split decides on the `style` of all."""

    script: OPOScriptArguments
    measured: bool  # whether held-out problems are needed besides those of the report
    style: str = ""
    sources: Sources = field(default_factory=dict)  # of the last split
    held_out: str = ""  # for the plan: which part of the training split serves as test split

    def read(self, split: str, levels: Sequence[str] | None, fraction: float = 1.0) -> Dataset:
        """Rows of a split, problems or with their own prompts."""
        script, name = self.script, str(self.script.dataset_name)
        splits = script.test_fraction is not None or is_single_file(name)
        stored, drawn = script.dataset_train_split if splits else split, cast(dict | None, script.dataset_settings)
        rows = draw_or_load(name, script.dataset_config, stored, levels, drawn)
        columns = cast(dict, script.columns or {})
        self.style = self.style or script.prompt_style or ("dataset" if has_prompts(rows, columns) else "chat")
        problems, self.sources = take(rows, columns, "prompt" if self.style == "dataset" else "problem")
        if splits:
            problems = self._split(problems, split == script.dataset_train_split)
        return select(problems, levels, fraction, script.subset_seed)

    def _split(self, problems: Dataset, is_training: bool) -> Dataset:
        """The part of all problems that is for training, or the other one."""
        size = self.script.test_fraction
        if size is None and not (self.measured or self.report_levels(problems)):
            return problems
        parts = problems.train_test_split(size or TEST_FRACTION, seed=self.script.subset_seed)
        said = f"{len(parts['test']):,} of its {len(problems):,} rows are held out"
        self.held_out = f"; {said} (test_fraction: {size or TEST_FRACTION:g})"
        return parts["train" if is_training else "test"]

    def report_levels(self, problems: Dataset) -> list[str]:
        """The levels to report on; by default those of the training problems, if there are answers to score."""
        script = self.script
        if script.report_levels is not None:
            return script.report_levels
        has_answers = "solution" in problems.column_names and bool(script.reward_funcs)
        return (script.levels or [ALL]) if has_answers else []

    def prompts(self, problems: Dataset) -> Dataset:
        """The rows with their prompts."""
        if self.style == "dataset":
            return problems
        return to_prompts(problems, style=cast(Style, self.style), instruction=str(self.script.instruction))

    def describe(self) -> str:
        """For a line of the plan: where the prompts are from, and which column was used as which field."""
        script = self.script
        levels = f", levels {', '.join(script.levels)}" if script.levels else ""
        taken = [f"{ours} is its column {theirs!r}" for ours, theirs in self.sources.items()]
        taken.append(f"prompt_style: {self.style}")
        return f"{script.dataset_name} ({script.dataset_train_split}{levels}): {'; '.join(taken)}{self.held_out}"
