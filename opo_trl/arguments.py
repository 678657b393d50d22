"""`OPOScriptArguments`: recipe fields that belong to neither the trainer's configuration nor the model's."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from trl import ModelConfig, ScriptArguments

from .checks.ranges import require
from .config import OPOConfig
from .data import INSTRUCTION, gym
from .evaluate import Decoding
from .fields import (
    COUNT,
    COUNT_OR_ZERO,
    DATA,
    OBJECTIVE,
    POSITIVE,
    REWARDS,
    Range,
    deciding,
    given,
    setting,
)


_Style = Literal["chat", "plain", "dataset"]
_NOT_ALL = Range(0, 1, ends="()", text="a share of the rows, such as 0.2")
_SHARE = Range(0, 1, ends="(]", text="a number in (0, 1]. Use 1.0 for all rows")

# Fields of TRL's script that do nothing here, and why.
NOT_STREAMED = {
    "dataset_streaming": "datasets are loaded completely",
    "ignore_bias_buffers": "DDP handles boolean buffers by itself",
}


@dataclass
class OPOScriptArguments(ScriptArguments):
    """
    Arguments of the training script, in addition to those of [`OPOConfig`] and [`~trl.ModelConfig`].

    Those of TRL's script for GRPO are among them, so that its recipes and command lines also train here.
    """

    trainer: Annotated[str, OBJECTIVE] = setting("opo", "`opo`, or `async_opo` for asynchronous training.")
    reward_funcs: Annotated[list[str] | None, REWARDS] = setting(
        None,
        "Reward functions: `accuracy_reward`, `arithmetic_reward`, `gym_reward`, TRL's "
        "`reasoning_accuracy_reward`, `think_format_reward` and `soft_overlong_punishment`, or dotted import paths. "
        "The first one defines what counts as correct in every accuracy. By default `gym_reward` for the tasks of "
        "reasoning-gym, none with a reward model, and `accuracy_reward` for all else. `[]` if the environment alone "
        "gives the reward.",
    )
    reward_model_name_or_path: Annotated[str | None, REWARDS] = setting(
        None, "Reward model to add to the reward functions, as the last one."
    )
    overlong_cache: Annotated[int | None, REWARDS, COUNT] = setting(
        None,
        "Tokens before `max_completion_length` over which `soft_overlong_punishment` falls from 0 to -1. TRL's name "
        "for this reward, `get_soft_overlong_punishment`, has TRL's fixed limits of 1,280 and 256 tokens.",
    )
    tools: Annotated[list[str] | None, DATA] = setting(
        None, "Functions that the model can call, by dotted import path, each with a docstring and type hints."
    )
    environment_factory: Annotated[str | None, DATA] = setting(
        None,
        "Dotted import path of a class, or of a function that makes its objects: an environment, whose public methods "
        "the model can call. Its `reset` begins each conversation; its `get_reward`, if it has one, is a reward after "
        "those of `reward_funcs`.",
    )
    reward_workers: Annotated[int, COUNT_OR_ZERO] = setting(
        4,
        "Worker processes per node that run `accuracy_reward` or `gym_reward`, divided among the node's training "
        "processes, at least one each; 0 scores in the training processes, where all other rewards run.",
    )
    reward_timeout: Annotated[float, POSITIVE] = setting(
        30.0, "Seconds a worker has to score one completion. After that the completion is unscored, not wrong."
    )
    reward_memory: Annotated[int, COUNT] = setting(
        2048, "Memory a worker can allocate to score one completion, in MiB, at least 512."
    )
    datasets: Annotated[list[dict], DATA] = setting(
        list, "Datasets to mix, in place of `dataset_name`, as in TRL's `DatasetMixtureConfig`."
    )
    test_split_size: Annotated[float | None, DATA, POSITIVE] = setting(
        None, "Of `datasets`: size of the test split to hold out of them, drawn with `subset_seed`."
    )
    test_fraction: Annotated[float | None, DATA, _NOT_ALL] = setting(
        None,
        "Share of the training split's problems to hold out, drawn with `subset_seed`, in place of "
        "`dataset_test_split`; a problem with duplicates is held out with all of them. By default a fifth of a "
        "dataset that is one file, if anything is measured on held-out problems.",
    )
    columns: Annotated[dict | str | None, DATA] = setting(
        None,
        "Maps our column names to the dataset's, such as `{problem: question, solution: answer}`; those of most "
        "public datasets are recognized. With `prompt_style: dataset`: new name → old name.",
    )
    dataset_settings: Annotated[dict | str | None, DATA] = setting(
        None,
        "Settings of a task of reasoning-gym (`dataset_name: reasoning_gym/countdown`), such as "
        "`{size: 5000, min_numbers: 3}`.",
    )
    levels: Annotated[list[str] | None, DATA] = setting(
        None, "Levels of the training problems; by default all. Those of reasoning-gym's curricula begin at 0."
    )
    fraction: Annotated[float, DATA, _SHARE] = setting(
        1.0, "Fraction of these problems to train on, in (0, 1], drawn with `subset_seed`."
    )
    subset_seed: Annotated[int, DATA, COUNT_OR_ZERO] = setting(
        42, "Seed that selects the problems to train on, and those for validation and report."
    )
    prompt_style: Annotated[_Style | None, DATA] = setting(
        None,
        "`chat`: a user message with the problem and `instruction`; `plain`: the problem alone; `dataset`: the "
        "dataset's own `prompt` column, unchanged. By default `dataset` if there is such a column and `columns` names "
        "no problem, and `chat` otherwise.",
    )
    instruction: Annotated[str | None, DATA] = setting(
        None,
        "Instruction that follows the problem in a chat prompt. By default it asks for the answer in the form that "
        "`accuracy_reward` reads, or `gym_reward` for the tasks of reasoning-gym.",
    )
    max_prompt_length: Annotated[int | None, DATA, COUNT] = setting(
        None, "Maximum length of a prompt in tokens; longer prompts are dropped and counted."
    )
    validation_levels: list[str] | None = setting(
        None,
        "Levels of the test problems to solve every `validation_steps`. With TRL's `eval_strategy`, all problems of "
        "these levels are the evaluation dataset.",
    )
    validation_size: Annotated[int, COUNT] = setting(100, "Number of these problems.")
    validation_steps: Annotated[int | None, COUNT] = setting(
        None, "Optimizer steps between validations; by default there is none."
    )
    validation_decoding: Decoding = setting("sampled", "Decoding of the validation.")
    report_levels: list[str] | None = setting(
        None,
        "Levels on which accuracy is reported before and after training, greedy and sampled. `[all]` reports on all "
        "problems together, with levels or without; `[]` on nothing. By default the levels of training, or all "
        "problems, if there are answers.",
    )
    report_size: Annotated[int, COUNT] = setting(500, "Number of test problems per reported level.")
    report_samples: Annotated[int, COUNT] = setting(
        1, "Completions to sample per reported problem; with 2 or more, pass@k is reported as well."
    )
    overwrite: bool = setting(
        False, "Whether to move an earlier run in `output_dir` aside, to a folder with the ending `-2`, `-3` …"
    )
    accelerate_config: str | None = setting(
        None,
        "Accelerate configuration that `opo-trl train` launches with: a file, relative to the current folder or to "
        "the recipe's, or the name of one of TRL's (`single_gpu`, `multi_gpu`, `zero2`, …).",
    )

    def __post_init__(self):
        for name in ("columns", "dataset_settings"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, json.loads(value))
            require(isinstance(getattr(self, name), dict | None), name, value, "a mapping: `{name: value}`")
        drawn = str(self.dataset_name).startswith(gym.PREFIX)
        if self.reward_funcs is None:
            default = "gym_reward" if drawn else "accuracy_reward"
            self.reward_funcs = [] if self.reward_model_name_or_path else [default]
        if self.instruction is None:
            in_tags = drawn and "accuracy_reward" not in self.reward_funcs  # which reads boxes
            self.instruction = gym.INSTRUCTION if in_tags else INSTRUCTION


def check_together(
    script: OPOScriptArguments, args: OPOConfig, model_config: ModelConfig, recipe: Mapping[str, Any]
) -> None:
    """
    Check that the fields of a recipe have an effect together.

    Raises:
        `ValueError`: names the first field that has none, with its value and what to do.
    """
    rollouts, mixed = getattr(args, "rollouts", None), bool(script.datasets)  # asynchronous training has no rollouts
    if not (script.dataset_name or mixed or rollouts is not None):
        raise ValueError("dataset_name is not set. Set it to a dataset's Hub id, file or folder, or to 'arithmetic'.")
    if not model_config.model_name_or_path:
        raise ValueError("model_name_or_path is not set. Set it to a model's Hub id or folder.")
    if script.environment_factory is not None and "reward_funcs" not in recipe:
        said = f"environment_factory={script.environment_factory!r} needs `reward_funcs` to be set, of which the first"
        fix = "Set `reward_funcs: []` if the environment alone gives the reward"
        raise ValueError(f"{said} defines what counts as correct. {fix}.")
    called, recorded = ("tools", "environment_factory"), rollouts is not None
    of_problems = {*deciding(OPOScriptArguments, DATA), "validation_steps", "report_levels", "eval_strategy"}
    of_problems -= {*called, "max_prompt_length", *({"instruction"} - recipe.keys())}  # which has a default
    adapters = [name for name in vars(model_config) if name.startswith("lora_")] + ["use_dora", "use_rslora"]
    # Whether it is so, why fields then have no effect, and which.
    cases: list[tuple[bool, str, Iterable[str]]] = [
        *((True, f"here: {why}", [name]) for name, why in NOT_STREAMED.items()),
        (recorded, f"on the recorded rollouts={rollouts!r}", called),
        (recorded and not (mixed or script.dataset_name), "without `dataset_name`", of_problems),
        (mixed, "with `datasets`", ("dataset_name", "dataset_config", "dataset_settings", "test_fraction")),
        (not mixed, "without `datasets`", ["test_split_size"]),
        (script.test_fraction is not None, f"with test_fraction={script.test_fraction!r}", ["dataset_test_split"]),
        (args.eval_strategy == "no", "without `eval_strategy`", ["load_best_model_at_end"]),
        # A recipe that sets `use_peft: false` turns adapters off on purpose.
        (not model_config.use_peft and "use_peft" not in recipe, "without `use_peft: true`", adapters),
    ]
    found = given(args) | given(model_config) | given(script)
    for holds, why, names in cases:
        for name in names if holds else ():
            if name in found:
                raise ValueError(f"{name}={found[name]!r} has no effect {why}. Remove `{name}`, or change that.")
