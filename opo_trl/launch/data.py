"""
The datasets of a run.

A recipe can name any dataset: `columns` maps its columns, and with `prompt_style: dataset` it brings its own prompts.
To add one that needs code, as the embedded task does, see `opo_trl.data.problems.EMBEDDED`.
"""

from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..arguments import OPOScriptArguments
from ..config import RolloutConfig
from ..data import drop_long_prompts, load_from_hub, load_problems, rename_columns, to_prompts, without_overlap
from .preflight import check_template


@dataclass
class Data:
    """Datasets for training, validation and report. Each has `prompt` and the columns that the rewards read."""

    training: Dataset
    validation: Dataset | None
    report: dict[str, Dataset]


def load_data(
    script: OPOScriptArguments, args: RolloutConfig, tokenizer: PreTrainedTokenizerBase, **in_template: Any
) -> Data:
    """
    Load the problems of a run: `levels` of the training split, and held-out ones of the test split.

    `in_template` are further arguments of the chat template that lengthen a prompt, such as `tools`.

    Raises:
        `ValueError`: the dataset cannot be read, a selection leaves no row, or a chat prompt has no template.
    """
    training = _problems(script, script.dataset_train_split, script.levels, script.fraction)
    prompts = _prompts(script, training)
    check_template(prompts, tokenizer)
    if script.max_prompt_length is not None:
        template_kwargs: Any = args.chat_template_kwargs or {}  # a dict, once parsed
        prompts = drop_long_prompts(prompts, tokenizer, script.max_prompt_length, template_kwargs | in_template)

    def held_out(field: str, levels: list[str] | None, size: int) -> Dataset:
        try:
            problems = _problems(script, script.dataset_test_split, levels)
            if script.prompt_style != "dataset":
                problems = without_overlap(problems, training)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
        problems = problems.shuffle(seed=script.subset_seed)
        return _prompts(script, problems.select(range(min(size, len(problems)))))

    validation = None
    if script.validation_steps:
        validation = held_out("validation_levels", script.validation_levels, script.validation_size)
    report = {level: held_out("report_levels", [level], script.report_size) for level in script.report_levels or []}
    return Data(prompts, validation, report)


def _problems(script: OPOScriptArguments, split: str, levels: list[str] | None, fraction: float = 1.0) -> Dataset:
    name, config = script.dataset_name, script.dataset_config
    columns: Any = script.columns or {}  # a dict, once parsed
    if script.prompt_style == "dataset":
        return rename_columns(load_from_hub(name, config, split), columns)
    selection: Any = {"levels": levels, "fraction": fraction, "seed": script.subset_seed}
    return load_problems(name, dataset_config=config, split=split, columns=columns, **selection)


def _prompts(script: OPOScriptArguments, problems: Dataset) -> Dataset:
    if script.prompt_style == "dataset":
        return problems
    return to_prompts(problems, style=script.prompt_style, instruction=script.instruction)
