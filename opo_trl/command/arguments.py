"""`OPOScriptArguments`: recipe fields that belong to neither the trainer's configuration nor the model's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trl import ScriptArguments

from ..data import INSTRUCTION, gym
from ..evaluate import Decoding
from ..fields import COUNT, COUNT_OR_ZERO, PART, POSITIVE, SHARE, WORKER_MEMORY, check_fields, documented, mapping_of


_Style = Literal["chat", "plain", "dataset"]


@documented
@dataclass
class OPOScriptArguments(ScriptArguments):
    r"""
    Arguments of the training script, in addition to those of [`OPOConfig`] and [`~trl.ModelConfig`].

    Those of TRL's script for GRPO, but for `datasets`, are among them, so that its recipes also train here.

    Parameters:
        > Parameters that control rewards, tools and environments

        reward_funcs (`list[str]`, *optional*):
            Reward functions, by name (`accuracy_reward`, `gym_reward`, …) or dotted import path. The first says what
            is correct. By default `gym_reward` for reasoning-gym, none with a reward model or an environment, and else
            `accuracy_reward`. See docs/rewards.md.
        reward_model_name_or_path (`str`, *optional*):
            Reward model to add to the reward functions, as the last one; its weight is the first of `reward_weights`,
            as in TRL. See docs/rewards.md.
        overlong_cache (`int`, *optional*):
            Number of tokens before `max_completion_length` over which `soft_overlong_punishment` falls from 0 to -1.
            Needed with that reward, and only with it. See docs/methods/baselines.md.
        tools (`list[str]`, *optional*):
            Functions that the model can call, by dotted import path, each with a docstring and type hints. See
            docs/environments.md.
        environment_factory (`str`, *optional*):
            Dotted import path of a class, or function, that makes environments, whose public methods the model can
            call. See docs/environments.md.
        reward_workers (`int`, *optional*, defaults to `4`):
            Processes per node that run `accuracy_reward` or `gym_reward`, so that what a model writes cannot take the
            run down; 0 runs them in the training processes. Four by default, as parsing may take seconds. See
            docs/rewards.md.
        reward_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds that a worker has to score one completion, positive. After that the completion is unscored, not
            wrong. The default is above the 5 seconds of processor time that a comparison may take. See
            docs/rewards.md.
        reward_memory (`int`, *optional*, defaults to `2048`):
            Memory that a worker can allocate to score one completion, in MiB, at least 512. The default leaves room
            for the libraries that compare formulas. See docs/rewards.md.

        > Parameters that control data and prompts

        columns (`dict` or `str`, *optional*):
            Our column → the dataset's, such as `{problem: question, solution: answer}`. Usual names are recognized by
            default. See docs/tasks.md.
        dataset_settings (`dict` or `str`, *optional*):
            Settings of a task of reasoning-gym, such as `{size: 5000, min_numbers: 3}`. By default those of the task.
            See docs/tasks.md.
        levels (`list[str]`, *optional*):
            Levels of the training problems; by default all. Those of reasoning-gym's curricula begin at 0. See
            docs/tasks.md.
        fraction (`float`, *optional*, defaults to `1.0`):
            Share of these problems to train on, in `(0, 1]`. By default all. See docs/tasks.md.
        subset_seed (`int`, *optional*, defaults to `42`):
            Seed, 0 or more, that selects the problems to train on, to hold out, to validate on and to report. Not
            `seed`, so that runs with several seeds have the same problems. See docs/tasks.md.
        test_fraction (`float`, *optional*):
            Share of the problems to hold out, in `(0, 1)`, in place of `dataset_test_split`. By default a fifth of a
            single file, which has no other split. See docs/tasks.md.
        prompt_style (`str`, *optional*):
            What the model is asked: `chat`, a message of problem and `instruction`; `plain`, the problem alone; or
            `dataset`, the column `prompt` as it is, which is the default where that exists. See docs/tasks.md.
        instruction (`str`, *optional*):
            What follows the problem in a chat prompt. By default it says in which form the reward reads answers. See
            docs/tasks.md.
        max_prompt_length (`int`, *optional*):
            Most tokens of a prompt, without descriptions of tools; prompts with more are dropped and counted. By
            default all are trained on. See docs/tasks.md.

        > Parameters that control evaluation and the report

        validation_levels (`list[str]`, *optional*):
            Levels of the held-out problems to solve every `validation_steps`, and for `eval_strategy`. By default all.
            See docs/report.md.
        validation_size (`int`, *optional*, defaults to `100`):
            Number of these problems. With 100, a 95 % interval is at most ± 10 points. See docs/report.md.
        validation_steps (`int`, *optional*):
            Optimizer steps between validations. By default there is none, as each one generates. See docs/report.md.
        validation_decoding (`str`, *optional*, defaults to `"sampled"`):
            How the validation decodes: `sampled`, as in training, or `greedy`. See docs/report.md.
        report_levels (`list[str]`, *optional*):
            Levels to report the accuracy on, before and after training: `[all]` together, `[]` none. By default those
            that are trained on. See docs/tasks.md.
        report_size (`int`, *optional*, defaults to `500`):
            Most held-out problems per reported level. With 500, a 95 % interval is at most ± 5 points. See
            docs/tasks.md.
        report_samples (`int`, *optional*, defaults to `1`):
            Completions to sample for each reported problem; more narrow the interval of the sampled accuracy. See
            docs/report.md.

        > Parameters that control the run

        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to move an earlier run in `output_dir` aside, to a folder with the ending `-2`, `-3` … By default
            such a run is an error, so that none is lost. See docs/quickstart.md.
        accelerate_config (`str`, *optional*):
            Configuration of accelerate to launch with: a file, relative to here or to the recipe, or the name of one
            of TRL's. By default accelerate's own. See docs/execution.md.
        trainer (`str`, *optional*, defaults to `"opo"`):
            Always `opo`; `objective` names the loss. See docs/objectives.md.

    Raises:
        `ValueError`: a value is out of its range or of another type.
    """

    trainer: str = "opo"
    reward_funcs: list[str] | None = None
    reward_model_name_or_path: str | None = None
    overlong_cache: Annotated[int | None, COUNT] = None
    tools: list[str] | None = None
    environment_factory: str | None = None
    reward_workers: Annotated[int, COUNT_OR_ZERO] = 4
    reward_timeout: Annotated[float, POSITIVE] = 30.0
    reward_memory: Annotated[int, WORKER_MEMORY] = 2048
    test_fraction: Annotated[float | None, PART] = None
    columns: dict | str | None = None
    dataset_settings: dict | str | None = None
    levels: list[str] | None = None
    fraction: Annotated[float, SHARE] = 1.0
    subset_seed: Annotated[int, COUNT_OR_ZERO] = 42
    prompt_style: _Style | None = None
    instruction: str | None = None
    max_prompt_length: Annotated[int | None, COUNT] = None
    validation_levels: list[str] | None = None
    validation_size: Annotated[int, COUNT] = 100
    validation_steps: Annotated[int | None, COUNT] = None
    validation_decoding: Decoding = "sampled"
    report_levels: list[str] | None = None
    report_size: Annotated[int, COUNT] = 500
    report_samples: Annotated[int, COUNT] = 1
    overwrite: bool = False
    accelerate_config: str | None = None

    def __post_init__(self):
        """Check the fields, and fill in the defaults that depend on the dataset."""
        check_fields(self)
        if self.dataset_streaming:  # of TRL's scripts
            raise ValueError("dataset_streaming=True has no effect: datasets are loaded completely. Remove it.")
        self.columns = mapping_of("columns", self.columns)
        self.dataset_settings = mapping_of("dataset_settings", self.dataset_settings)
        is_gym = str(self.dataset_name).startswith(gym.PREFIX)
        if self.reward_funcs is None:
            # A reward model scores, and an environment may (`get_reward`): beside them, no function is the default.
            has_others = bool(self.reward_model_name_or_path or self.environment_factory)
            default = "gym_reward" if is_gym else "accuracy_reward"
            self.reward_funcs = [] if has_others else [default]
        if self.instruction is None:
            # The instruction asks for the form in which the reward reads answers: a box, or reasoning-gym's tags.
            reads_boxes = "accuracy_reward" in self.reward_funcs
            self.instruction = gym.INSTRUCTION if is_gym and not reads_boxes else INSTRUCTION
