"""
The datasets of a run.

A recipe can name any dataset: its columns are recognized, `columns` maps others, and a column `prompt` is taken as it
is, as in TRL. To add one that needs code, as the embedded task does, see `opo_trl.data.problems.EMBEDDED`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..config import OPOConfig
from ..data import INSTRUCTION, drop_long_prompts, gym, to_prompts, without_overlap
from ..data.files import is_single_file
from ..data.problems import draw_or_load, has_prompts, select, take
from ..data.prompts import Style
from ..fields import require
from ..reuse.reading import load_rollouts
from .arguments import OPOScriptArguments


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


def load_data(script: OPOScriptArguments, args: OPOConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    """
    Load what a run trains on, recorded `rollouts` or else prompts of the training split, and the held-out problems of
    its validation, report and evaluation; none of these is trained on.
    """

    def fitting(prompts: Dataset) -> Dataset:
        """The prompts that are not longer than `max_prompt_length`; an error if the tokenizer cannot render them."""
        _check_template(script, prompts, tokenizer)
        options, limit = cast(dict, args.chat_template_kwargs), script.max_prompt_length
        return prompts if limit is None else drop_long_prompts(prompts, tokenizer, limit, options)

    for name in args.chat_template_kwargs or ():
        if name not in str(tokenizer.chat_template):
            logger.warning(f"{name!r} of `chat_template_kwargs` has no effect: this model's chat template ignores it.")
    if args.rollouts is None:
        return _load_problems(script, args, fitting)
    groups = fitting(load_rollouts(args.rollouts, args.num_generations, args.seed))
    prompts, plan = groups.select_columns("prompt"), f"{len(groups):,} groups of {args.rollouts}"
    if not script.dataset_name:  # no problems to validate or report on
        return Data(groups, None, {}, None, plan)
    data = _load_problems(script, args, fitting)
    report = {level: without_overlap(problems, prompts) for level, problems in data.report.items()}
    # Each is `None` if it was not asked for.
    validation, evaluation = (d and without_overlap(d, prompts) for d in (data.validation, data.evaluation))
    return Data(groups, validation, report, evaluation, plan)


def _check_template(script: OPOScriptArguments, data: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Check, by the first prompt, that the tokenizer can render the prompts of a dataset, with the tools that the model
    can call: conversations need a chat template, and tools need conversations.
    """
    is_text = isinstance(data[0]["prompt"], str)
    if is_text and (script.tools or script.environment_factory):  # TRL describes none in a prompt of text
        fix = "Set `prompt_style` to 'chat', or write each prompt as messages"
        raise ValueError(f"`tools` and `environment_factory` need conversations, but the prompts are text. {fix}.")
    if not is_text and tokenizer.chat_template is None:
        raise ValueError(
            f"prompt_style='chat', but the tokenizer of {tokenizer.name_or_path!r} has no chat template. "
            "Set `prompt_style` to 'plain', or add a chat_template.jinja there."
        )


def _load_problems(script: OPOScriptArguments, args: OPOConfig, fitting: Callable[[Dataset], Dataset]) -> Data:
    """
    The datasets of a run from the problems of `dataset_name`, as prompts. `fitting` checks those for training, and
    drops the ones that are too long.
    """
    name = str(script.dataset_name)
    problems = _Problems(script)
    has_answers = "solution" in problems.rows.column_names
    levels = script.report_levels  # on which the accuracy is reported; without answers and rewards, on none
    if levels is None:
        levels = (script.levels or [ALL]) if has_answers and script.reward_funcs else []
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    validates = bool(script.validation_steps)
    share = script.test_fraction
    # A single file has no test split: a part is held out, if anything is measured on it.
    if share is None and is_single_file(name) and (levels or evaluates or validates):
        share = TEST_FRACTION
    if share is not None:
        split = script.dataset_test_split
        allowed = "'test', its default: `test_fraction` holds out a part of the training split, also of a single file"
        require(split == "test", "dataset_test_split", split, allowed)
        problems.hold_out(share)
    training = select(problems.rows, script.levels, script.fraction, script.subset_seed)
    prompts = fitting(problems.prompts_of(training))
    held_out = partial(problems.held_out, training)
    validation = held_out(script.validation_levels, script.validation_size) if validates else None
    evaluation = held_out(script.validation_levels, None) if evaluates else None
    report = {}
    try:
        for level in levels:
            report[level] = held_out([level], script.report_size)
    except (OSError, ValueError) as error:  # such as a dataset without a test split
        if script.report_levels is not None:  # asked for, not a default
            raise
        logger.warning("No accuracy is measured before and after training: %s", error)
    notes = problems.notes if has_answers else [*problems.notes, "no column has answers"]
    of_levels = f", levels {', '.join(script.levels)}" if script.levels else ""
    plan = f"{len(prompts):,} prompts of {name} ({script.dataset_train_split}{of_levels}): {'; '.join(notes)}"
    return Data(prompts, validation, report, evaluation, plan)


class _Problems:
    """The rows of the training split of a run's dataset, with the package's columns, and rows that are held out."""

    def __init__(self, script: OPOScriptArguments):
        self.script = script
        self.columns = cast(dict, script.columns or {})
        has_split = script.dataset_train_split == "train" or not is_single_file(str(script.dataset_name))
        require(has_split, "dataset_train_split", script.dataset_train_split, "'train': a file has no other")
        rows = self._stored(script.dataset_train_split, script.levels)
        self.style = script.prompt_style or ("dataset" if has_prompts(rows, self.columns) else "chat")
        self.asked = "prompt" if self.style == "dataset" else "problem"  # the column that the dataset needs
        self.rows, sources = take(rows, self.columns, self.asked)
        self.rows_held_out: Dataset | None = None  # of the training split
        if self.style != "chat":
            _check_prompts(script, self.rows[self.asked][:], self.style)
        # What the plan says of the columns and rows
        self.notes = [f"{ours} is its column {theirs!r}" for ours, theirs in sources.items()]
        self.notes.append(f"prompt_style: {self.style}")

    def _stored(self, split: str, levels: Sequence[str] | None) -> Dataset:
        """A split of the dataset with all of its columns; only drawn problems are of these levels already."""
        script = self.script
        settings = cast(dict | None, script.dataset_settings)
        return draw_or_load(str(script.dataset_name), script.dataset_config, split, levels, settings)

    def hold_out(self, share: float) -> None:
        """Hold out a share of the training split, in place of a test split."""
        parts = self.rows.train_test_split(share, seed=self.script.subset_seed)
        n_rows = len(self.rows)
        self.rows, self.rows_held_out = parts["train"], parts["test"]
        self.notes.append(
            f"{len(self.rows_held_out):,} of its {n_rows:,} rows are held out (test_fraction: {share:g})"
        )

    def prompts_of(self, problems: Dataset) -> Dataset:
        """The prompts made from problems, or those that the dataset brings as they are."""
        if self.style == "dataset":
            return problems
        return to_prompts(problems, style=cast(Style, self.style), instruction=str(self.script.instruction))

    def held_out(self, training: Dataset, levels: list[str] | None, size: int | None) -> Dataset:
        """
        Prompts of the test split, or of the part that was held out, with these levels (all if `None`), at most `size`,
        none of them in `training`.
        """
        seed = self.script.subset_seed
        levels = None if levels == [ALL] else levels
        test = self.rows_held_out
        if test is None:
            test, _ = take(self._stored(self.script.dataset_test_split, levels), self.columns, self.asked)
        problems = without_overlap(select(test, levels, 1.0, seed), training)
        if size is not None:
            size = min(size, len(problems))
            problems = problems.shuffle(seed=seed).select(range(size))
        return self.prompts_of(problems)


def _check_prompts(script: OPOScriptArguments, prompts: Sequence[object], style: str) -> None:
    """
    Check prompts to which nothing is added, as their style is `"dataset"` or `"plain"`: an `instruction` in the recipe
    is an error, and there is a warning if the reward reads boxes, but none of the first 100 prompts asks for one.
    """
    if style == "dataset":
        cause, setting = "the dataset brings its prompts", "`columns: {problem: prompt}`"
    else:
        cause, setting = f"with prompt_style={style!r}, a prompt is the problem alone", "`prompt_style: chat`"
    if script.instruction not in (INSTRUCTION, gym.INSTRUCTION, ""):
        raise ValueError(
            f"instruction={script.instruction!r} has no effect: {cause}. "
            f"Remove `instruction`, or set {setting} to add it to them."
        )
    reads_boxes = "accuracy_reward" in (script.reward_funcs or ())
    asks_for_box = any("boxed" in str(prompt) for prompt in prompts[:100])
    if reads_boxes and not asks_for_box:
        logger.warning(
            "No prompt asks for an answer in \\boxed{}, which `accuracy_reward` reads: "
            f"{setting} adds `instruction` to each."
        )
