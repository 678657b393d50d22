"""`OPOScriptArguments`: recipe fields that belong to neither the trainer's configuration nor the model's."""

from dataclasses import dataclass
from typing import Annotated, Literal

import yaml
from trl import ScriptArguments

from ..data import INSTRUCTION, gym
from ..evaluate import Decoding
from ..fields import COUNT, COUNT_OR_ZERO, PART, POSITIVE, SHARE, check_fields, setting


_Style = Literal["chat", "plain", "dataset"]


@dataclass
class OPOScriptArguments(ScriptArguments):
    """
    Arguments of the training script, in addition to those of [`OPOConfig`] and [`~trl.ModelConfig`].

    Those of TRL's script for GRPO, but for `datasets`, are among them, so that its recipes also train here.
    """

    trainer: str = setting("opo", "`opo`, the only one.")
    reward_funcs: list[str] | None = setting(
        None,
        "Reward functions, by name ([`~launch.rewards`]) or dotted import path. The first says what is correct. By "
        "default `gym_reward` for reasoning-gym, none with a reward model or environment, else `accuracy_reward`.",
    )
    reward_model_name_or_path: str | None = setting(
        None, "Reward model to add to the reward functions, as the last one; its weight is the first, as in TRL."
    )
    overlong_cache: Annotated[int | None, COUNT] = setting(
        None, "Tokens before `max_completion_length` over which `soft_overlong_punishment` falls from 0 to -1."
    )
    tools: list[str] | None = setting(
        None, "Functions that the model can call, by dotted import path, each with a docstring and type hints."
    )
    environment_factory: str | None = setting(
        None, "Dotted import path of what makes environments, whose public methods the model can call."
    )
    reward_workers: Annotated[int, COUNT_OR_ZERO] = setting(
        4, "Processes per node that run `accuracy_reward` or `gym_reward`; 0: in the training processes."
    )
    reward_timeout: Annotated[float, POSITIVE] = setting(
        30.0, "Seconds a worker has to score one completion. After that the completion is unscored, not wrong."
    )
    reward_memory: Annotated[int, COUNT] = setting(
        2048, "Memory a worker can allocate to score one completion, in MiB, at least 512."
    )
    test_fraction: Annotated[float | None, PART] = setting(
        None, "Share of problems to hold out, in place of `dataset_test_split`; a fifth of a single file."
    )
    columns: dict | str | None = setting(
        None, "Our column → the dataset's, such as `{problem: question, solution: answer}`; most are recognized."
    )
    dataset_settings: dict | str | None = setting(
        None, "Settings of a task of reasoning-gym, such as `{size: 5000, min_numbers: 3}`."
    )
    levels: list[str] | None = setting(
        None, "Levels of the training problems; by default all. Those of reasoning-gym's curricula begin at 0."
    )
    fraction: Annotated[float, SHARE] = setting(1.0, "Fraction of these problems to train on, in (0, 1].")
    subset_seed: Annotated[int, COUNT_OR_ZERO] = setting(
        42, "Seed that selects the problems to train on, and those for validation and report."
    )
    prompt_style: _Style | None = setting(
        None, "`chat` (with `instruction`), `plain` (the problem alone) or `dataset` (its own column `prompt`)."
    )
    instruction: str | None = setting(
        None, "What follows the problem in a chat prompt; by default, in which form the reward reads answers."
    )
    max_prompt_length: Annotated[int | None, COUNT] = setting(
        None, "Maximum tokens of a prompt, without descriptions of tools; longer ones are dropped and counted."
    )
    validation_levels: list[str] | None = setting(
        None, "Levels of the test problems to solve every `validation_steps`, and for `eval_strategy`."
    )
    validation_size: Annotated[int, COUNT] = setting(100, "Number of these problems.")
    validation_steps: Annotated[int | None, COUNT] = setting(
        None, "Optimizer steps between validations; by default there is none."
    )
    validation_decoding: Decoding = setting("sampled", "Decoding of the validation.")
    report_levels: list[str] | None = setting(
        None, "Levels to report accuracy on before and after; `[all]` together, `[]` none; default: trained ones."
    )
    report_size: Annotated[int, COUNT] = setting(500, "Number of test problems per reported level.")
    report_samples: Annotated[int, COUNT] = setting(1, "Completions to sample per reported problem.")
    overwrite: bool = setting(
        False, "Whether to move an earlier run in `output_dir` aside, to a folder with the ending `-2`, `-3` …"
    )
    accelerate_config: str | None = setting(
        None, "Accelerate configuration to launch with: a file, from here or the recipe, or a name of TRL's."
    )

    def __post_init__(self):
        check_fields(self)
        if self.dataset_streaming:  # of TRL's scripts
            raise ValueError("dataset_streaming=True has no effect: datasets are loaded completely. Remove it.")
        for name in ("columns", "dataset_settings"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, yaml.safe_load(value))
        drawn = str(self.dataset_name).startswith(gym.PREFIX)
        if self.reward_funcs is None:
            default = "gym_reward" if drawn else "accuracy_reward"
            self.reward_funcs = [] if self.reward_model_name_or_path or self.environment_factory else [default]
        if self.instruction is None:
            in_tags = drawn and "accuracy_reward" not in self.reward_funcs  # which reads boxes
            self.instruction = gym.INSTRUCTION if in_tags else INSTRUCTION
