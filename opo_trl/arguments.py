"""`OPOScriptArguments`: recipe fields that belong to neither the trainer's configuration nor the model's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from huggingface_hub import constants, get_token
from trl import ModelConfig, ScriptArguments
from trl.scripts.utils import DatasetConfig

from . import methods
from .checks.ranges import require
from .checks.strict_yaml import read_mappings
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
    RUN,
    Range,
    deciding,
    given,
    integer,
    setting,
)
from .rewards import LEAST_MEMORY


_Style = Literal["chat", "plain", "dataset"]
_WORKERS = integer(0, text="an integer, 0 or more")
_MEMORY = integer(LEAST_MEMORY, 2**30, text=f"a whole number of MiB, {LEAST_MEMORY} or more")
_CACHE = integer(1, text="a positive number up to `max_completion_length`")
_EVERY = integer(1, text="a positive integer, or leave it out")
_SIZE = Range(0, ends="()", text="a number of rows, or a fraction of them below 1")
_SHARE = Range(0, 1, ends="()", text="a share of the rows, such as 0.2")
_FRACTION = Range(0, 1, ends="(]", text="a number in (0, 1]. Use 1.0 for all rows")

# Fields of TRL's script that do nothing here, and why.
NOT_STREAMED = dict.fromkeys(("dataset_streaming", "streaming"), "datasets are loaded completely") | {
    "ignore_bias_buffers": "DDP handles boolean buffers by itself"
}


@dataclass
class OPOScriptArguments(ScriptArguments):
    """
    Arguments of the training script, in addition to those of [`OPOConfig`] and [`~trl.ModelConfig`].

    Those of TRL's script for GRPO are among them, so that its recipes and command lines also train here.

    Args:
        trainer (`str`, *optional*, defaults to `"opo"`):
            `"opo"`: [`OPOTrainer`]; `"grpo"`: [`OPOTrainer`] with TRL's losses, for GRPO, GSPO, DAPO and others;
            `"async_opo"`: [`AsyncOPOTrainer`].
        reward_funcs (`list[str]`, *optional*):
            Reward functions: `accuracy_reward`, `format_reward`, `arithmetic_reward`, `gym_reward`, TRL's
            `reasoning_accuracy_reward`, `think_format_reward` and `soft_overlong_punishment`, or dotted import paths.
            The first one defines what counts as correct in every accuracy. By default `gym_reward` for the tasks of
            reasoning-gym, none with a reward model, and `accuracy_reward` for all else. `[]` if the environment alone
            gives the reward.
        tools (`list[str]`, *optional*):
            Dotted import paths of functions that the model can call, each with a docstring and type hints.
        environment_factory (`str`, *optional*):
            Dotted import path of a class, or of a function that makes its objects: an environment, whose public
            methods the model can call. Its `reset` begins each conversation; its `get_reward`, if it has one, is a
            reward after those of `reward_funcs`.
        reward_workers (`int`, *optional*, defaults to `4`):
            Worker processes per node that run `accuracy_reward` or `gym_reward`, divided among the node's training
            processes, at least one each; 0 scores in the training processes, where all other rewards run.
        reward_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds a worker has to score one completion. After that the completion is unscored, not wrong.
        reward_memory (`int`, *optional*, defaults to `2048`):
            Memory a worker can allocate to score one completion, in MiB, at least 512; see [`IsolatedReward`].
        overlong_cache (`int`, *optional*):
            Tokens before `max_completion_length` over which `soft_overlong_punishment` falls from 0 to -1. TRL's
            name for this reward, `get_soft_overlong_punishment`, has TRL's fixed limits of 1,280 and 256 tokens.
        reward_model_name_or_path (`str`, *optional*):
            Reward model to add to the reward functions.
        datasets (`list[dict]`, *optional*), test_split_size (`float`, *optional*):
            Datasets to mix, in place of `dataset_name`, as in TRL's [`~trl.DatasetMixtureConfig`]; and the size of the
            test split to hold out of them, drawn with `subset_seed`.
        test_fraction (`float`, *optional*):
            Share of the training split's problems to hold out, drawn with `subset_seed`, in place of
            `dataset_test_split`; a problem with duplicates is held out with all of them. By default a fifth of a
            dataset that is one file, if anything is measured on held-out problems.
        columns (`dict[str, str]`, *optional*):
            Maps our column names to the dataset's, such as `{problem: question, solution: answer}`; those of most
            public datasets are recognized ([`load_problems`]). With `prompt_style: dataset`: new name → old name.
        dataset_settings (`dict[str, Any]`, *optional*):
            Settings of a task of reasoning-gym (`dataset_name: reasoning_gym/countdown`), such as
            `{size: 5000, min_numbers: 3}`; see [`gym.make_problems`].
        levels (`list[str]`, *optional*), fraction (`float`, *optional*, defaults to `1.0`):
            Levels of the training problems, `None` for all (those of reasoning-gym's curricula begin at 0), and the
            fraction of these problems to train on, in `(0, 1]`.
        subset_seed (`int`, *optional*, defaults to `42`):
            Seed that selects this subset and the problems for validation and report.
        prompt_style (`str`, *optional*):
            `"chat"`: a user message with the problem and `instruction`; `"plain"`: the problem alone; `"dataset"`: the
            dataset's own `prompt` column, unchanged. By default `"dataset"` if there is such a column and `columns`
            names no problem, and `"chat"` otherwise.
        instruction (`str`, *optional*):
            Instruction that follows the problem in a chat prompt. By default it asks for the answer in the form that
            `accuracy_reward` reads, or `gym_reward` for the tasks of reasoning-gym.
        max_prompt_length (`int`, *optional*):
            Maximum length of a prompt in tokens; longer prompts are dropped and counted.
        validation_levels (`list[str]`, *optional*), validation_size (`int`, *optional*, defaults to `100`):
            Levels and number of test problems to solve every `validation_steps`. With TRL's `eval_strategy`, all
            problems of these levels are the evaluation dataset.
        validation_steps (`int`, *optional*), validation_decoding (`str`, *optional*, defaults to `"sampled"`):
            Optimizer steps between validations, `None` for none, and their decoding, `"greedy"` or `"sampled"`.
        report_levels (`list[str]`, *optional*), report_size (`int`, *optional*, defaults to `500`):
            Levels on which accuracy is reported before and after training, greedy and sampled, and the number of test
            problems per level. `[all]` reports on all problems together, with levels or without; `[]` on nothing. By
            default those of training (`levels`), or all problems, if there are answers.
        report_samples (`int`, *optional*, defaults to `1`):
            Completions to sample per reported problem; with 2 or more, pass@k is reported as well.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to move an earlier run in `output_dir` aside, to a folder with the ending `-2`, `-3`, …
        accelerate_config (`str`, *optional*):
            Accelerate configuration that `opo-trl train` launches with: a file, relative to the current folder or to
            the recipe's, or the name of one of TRL's (`single_gpu`, `multi_gpu`, `zero2`, …).
    """

    trainer: Annotated[str, OBJECTIVE] = setting(methods.DEFAULT, f"Method: {', '.join(methods.by_trainer())}.")
    reward_funcs: Annotated[list[str] | None, REWARDS] = setting(None, "Reward functions, by name or dotted path.")
    tools: Annotated[list[str] | None, DATA] = setting(None, "Functions that the model can call, by dotted path.")
    environment_factory: Annotated[str | None, DATA] = setting(None, "Class of environments, by dotted path.")
    reward_model_name_or_path: Annotated[str | None, REWARDS] = setting(None, "Reward model, after the functions.")
    reward_workers: Annotated[int, RUN, _WORKERS] = setting(4, "Workers of accuracy_reward and gym_reward, or 0.")
    reward_timeout: Annotated[float, RUN, POSITIVE] = setting(30.0, "Seconds a worker has to score one completion.")
    reward_memory: Annotated[int, RUN, _MEMORY] = setting(2048, "Memory that a worker can allocate, in MiB.")
    overlong_cache: Annotated[int | None, REWARDS, _CACHE] = setting(None, "Tokens of soft_overlong_punishment.")
    columns: Annotated[dict | str | None, DATA] = setting(None, "Columns to use as problem, solution, level, type.")
    dataset_settings: Annotated[dict | str | None, DATA] = setting(None, "Settings of a task of reasoning-gym.")
    datasets: Annotated[list[dict], DATA] = setting(list, "Datasets to mix, as in TRL, in place of dataset_name.")
    streaming: Annotated[bool, RUN] = setting(False, "Without effect: datasets are loaded completely.")
    test_split_size: Annotated[float | None, DATA, _SIZE] = setting(None, "Size of the test split of `datasets`.")
    test_fraction: Annotated[float | None, DATA, _SHARE] = setting(None, "Share of the training split to hold out.")
    levels: Annotated[list[str] | None, DATA] = setting(None, "Levels of the training problems.")
    fraction: Annotated[float, DATA, _FRACTION] = setting(1.0, "Fraction of the training problems, in (0, 1].")
    subset_seed: Annotated[int, DATA, COUNT_OR_ZERO] = setting(42, "Seed that selects problems.")
    prompt_style: Annotated[_Style | None, DATA] = setting(None, "How a problem becomes a prompt.")
    instruction: Annotated[str | None, DATA] = setting(None, "Instruction that follows the problem in a chat prompt.")
    max_prompt_length: Annotated[int | None, DATA, COUNT] = setting(None, "Maximum length of a prompt in tokens.")
    validation_levels: Annotated[list[str] | None, RUN] = setting(None, "Levels of the validation problems.")
    validation_size: Annotated[int, RUN, COUNT] = setting(100, "Number of validation problems.")
    validation_steps: Annotated[int | None, RUN, _EVERY] = setting(None, "Optimizer steps between validations.")
    validation_decoding: Annotated[Decoding, RUN] = setting("sampled", "Decoding of the validation.")
    report_levels: Annotated[list[str] | None, RUN] = setting(None, "Levels reported before and after.")
    report_size: Annotated[int, RUN, COUNT] = setting(500, "Problems per reported level.")
    report_samples: Annotated[int, RUN, COUNT] = setting(1, "Completions sampled per reported problem.")
    overwrite: Annotated[bool, RUN] = setting(False, "Whether to move an earlier run in output_dir aside.")
    accelerate_config: Annotated[str | None, RUN] = setting(None, "Accelerate configuration to launch with.")

    def __post_init__(self):
        for name in ("columns", "dataset_settings"):
            setattr(self, name, read_mappings(name, getattr(self, name)))
        drawing = self.dataset_settings
        require(isinstance(drawing, dict | None), "dataset_settings", drawing, "a mapping, such as `{size: 1000}`")
        drawn = str(self.dataset_name).startswith(gym.PREFIX)
        if self.reward_funcs is None:
            default = "gym_reward" if drawn else "accuracy_reward"
            self.reward_funcs = [] if self.reward_model_name_or_path else [default]
        if self.instruction is None:
            in_tags = drawn and "accuracy_reward" not in self.reward_funcs  # which reads boxes
            self.instruction = gym.INSTRUCTION if in_tags else INSTRUCTION
        pairs: Any = self.columns.items() if isinstance(self.columns, dict) else [(self.columns, None)]
        plain = self.columns is None or all(isinstance(name, str) for pair in pairs for name in pair)
        require(plain, "columns", self.columns, "a mapping of names: `columns: {problem: question}`")


def check_together(
    script: OPOScriptArguments, args: OPOConfig, model_config: ModelConfig, recipe: Mapping[str, Any]
) -> None:
    """Check that the fields of a recipe fit together, and that each of them has an effect."""
    rollouts = getattr(args, "rollouts", None)  # asynchronous training has none
    for name in ("tools", "environment_factory") if rollouts is not None else ():
        if value := getattr(script, name):
            both = f"{name}={value!r} cannot be combined with rollouts={rollouts!r}"
            raise ValueError(f"{both}: completions are recorded. Remove one of them.")
    _check_data(script, None if rollouts is None else args)
    if script.environment_factory is not None and "reward_funcs" not in recipe:
        said = f"environment_factory={script.environment_factory!r} needs `reward_funcs` to be set, of which the first"
        fix = "Set `reward_funcs: []` if the environment alone gives the reward"
        raise ValueError(f"{said} defines what counts as correct. {fix}.")
    for name in ("load_best_model_at_end", "metric_for_best_model") if args.eval_strategy == "no" else ():
        if value := getattr(args, name):
            raise ValueError(f"{name}={value!r} needs an evaluation. Remove `{name}`, or set `eval_strategy`.")
    if args.save_strategy == "best" and args.eval_strategy == "no":
        fix = "Set `eval_strategy`, or `save_strategy` to steps, epoch or no"
        raise ValueError(f"save_strategy='best' needs an evaluation. {fix}.")
    for name, value in given(model_config).items() if not model_config.use_peft else ():
        # A recipe that sets `use_peft: false` turns adapters off on purpose.
        if (name.startswith("lora_") or name in ("use_dora", "use_rslora")) and "use_peft" not in recipe:
            raise ValueError(f"{name}={value!r} has no effect without adapters. Set `use_peft` to true, or remove it.")
    if not model_config.model_name_or_path:
        raise ValueError("model_name_or_path is not set. Set it to a model's Hub id or folder.")
    if args.sync_ref_model and model_config.use_peft:
        why = "the reference is the base model below the adapters, which does not move"
        raise ValueError(f"sync_ref_model=True cannot be combined with use_peft=True: {why}. Remove one of them.")
    for name in ("load_in_4bit", "load_in_8bit"):
        if args.use_vllm and getattr(model_config, name):
            why = "vLLM rejects the packed weights that TRL sends (huggingface/trl#4973)"
            raise ValueError(f"{name}=True cannot be combined with use_vllm=True: {why}. Remove one of them.")
    if args.push_to_hub and (constants.HF_HUB_OFFLINE or not (args.hub_token or get_token())):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "there is no token"
        fix = "Log in with `hf auth login`, set the variable HF_TOKEN, or remove `push_to_hub`"
        raise ValueError(f"push_to_hub=True is impossible: {why}. {fix}.")


def _check_data(script: OPOScriptArguments, of_rollouts: OPOConfig | None) -> None:
    if of_rollouts is not None and not script.dataset_name and not script.datasets:
        measured = {"validation_steps": script.validation_steps, "report_levels": script.report_levels}
        measured["eval_strategy"] = None if of_rollouts.eval_strategy == "no" else of_rollouts.eval_strategy
        for name, value in measured.items():
            if value:
                said = f"{name}={value!r} needs held-out problems, and rollouts={of_rollouts.rollouts!r} has none"
                raise ValueError(f"{said}. Set `dataset_name` to problems to measure on, or remove `{name}`.")
        of_datasets = {*deciding(OPOScriptArguments, DATA)} - {"tools", "environment_factory", "max_prompt_length"}
        for name, value in given(script).items():
            if name in of_datasets and value not in (INSTRUCTION, gym.INSTRUCTION):
                why = f"the prompts are those of rollouts={of_rollouts.rollouts!r}"
                raise ValueError(f"{name}={value!r} has no effect without `dataset_name`: {why}. Remove `{name}`.")
    elif not script.dataset_name and not script.datasets:
        raise ValueError("dataset_name is not set. Set it to a dataset's Hub id, file or folder, or to 'arithmetic'.")
    if script.dataset_name and script.datasets:
        both = f"dataset_name={script.dataset_name!r} and datasets={script.datasets!r}"
        raise ValueError(f"{both} are both set. Remove one of them.")
    known = DatasetConfig.__dataclass_fields__
    for part in script.datasets if isinstance(script.datasets, list) else [script.datasets]:
        path = part.get("path") if isinstance(part, dict) and part is not script.datasets else None
        fits = isinstance(path, str) and path != "" and part.keys() <= known.keys()
        require(fits, "datasets", part, f"a list of mappings with `path` and, as needed, others of {', '.join(known)}")
    of_mixtures = {"test_split_size": None, "streaming": False}
    of_others = {"dataset_config": None, "dataset_settings": None, "test_fraction": None}
    where = "with `datasets`" if script.datasets else "without `datasets`"
    for name, default in (of_others if script.datasets else of_mixtures).items():
        if (value := getattr(script, name)) != default:
            raise ValueError(f"{name}={value!r} has no effect {where}. Remove `{name}`.")
    if script.test_fraction is not None and script.dataset_test_split != "test":
        unread = f"dataset_test_split={script.dataset_test_split!r} has no effect"
        why = f"test_fraction={script.test_fraction!r}, which holds out a part of the training split"
        raise ValueError(f"{unread} with {why}. Remove one of them.")
    size = script.test_split_size
    whole = size is None or size < 1 or float(size).is_integer()
    require(whole, "test_split_size", size, "a number of rows, or to a fraction below 1")
    for name in NOT_STREAMED:
        if getattr(script, name):
            raise ValueError(f"{name}=True has no effect here: {NOT_STREAMED[name]}. Remove `{name}`.")
