"""
Train a model with OPO, or with a baseline, as a recipe says.

    accelerate launch [--config_file recipes/accelerate/X.yaml] -m opo_trl.train --config recipes/R.yaml [--alpha 0.3]

A recipe is a flat YAML file of the fields of [`OPOScriptArguments`], of [`OPOConfig`] (or with `trainer: grpo` of
[`RolloutConfig`]) and of [`~trl.ModelConfig`]; a field on the command line overrides the recipe's. The run's folder
(`output_dir`) is described in `opo_trl.run_folder`.
"""

import dataclasses
import difflib
import importlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import trl
import yaml
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config, rewards
from trl.rewards import get_soft_overlong_punishment

from . import run_folder
from .arithmetic import arithmetic_reward, base_model_path
from .callbacks import LogFile, ProgressBar, Validation
from .checkpoint import resolve as find_checkpoint
from .config import RolloutConfig
from .data import INSTRUCTION, drop_long_prompts, load_problems, to_prompts, without_overlap
from .evaluate import Decoding, evaluate
from .plan import training_plan
from .report import write_report
from .rewards import accuracy_reward, format_reward
from .rollout_trainer import RolloutTrainer
from .scoring import IsolatedReward
from .trainer import OPOTrainer


TRAINERS: dict[str, type[RolloutTrainer]] = {"opo": OPOTrainer, "grpo": RolloutTrainer}


REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "format_reward": format_reward,
    "arithmetic_reward": arithmetic_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
}

# The embedded base model goes by this name in a recipe, wherever the package is installed.
EMBEDDED_MODEL = "arithmetic"


@dataclass
class OPOScriptArguments(ScriptArguments):
    """
    Arguments of the training script, beside those of [`OPOConfig`] and [`~trl.ModelConfig`].

    Args:
        trainer (`str`, *optional*, defaults to `"opo"`):
            `"opo"`: [`OPOTrainer`]; `"grpo"`: [`RolloutTrainer`] with TRL's losses, for GRPO, GSPO, DAPO and the like.
        reward_funcs (`list[str]`, *optional*, defaults to `["accuracy_reward"]`):
            Reward functions: `accuracy_reward`, `format_reward`, `arithmetic_reward`, TRL's
            `reasoning_accuracy_reward`, `think_format_reward` and `soft_overlong_punishment`, or dotted import paths.
            The first one decides what counts as solved in every accuracy.
        reward_workers (`int`, *optional*, defaults to `4`):
            Worker processes of a node that score completions by `accuracy_reward`, shared by its training processes,
            at least one each; 0 scores in the training processes. The other rewards always do, but for functions that
            are an [`IsolatedReward`] of their own.
        reward_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds that a worker has for one completion, which is else unscorable, not wrong.
        reward_memory (`int`, *optional*, defaults to `2048`):
            Memory that a worker may allocate for it in MiB; see [`IsolatedReward`].
        overlong_cache (`int`, *optional*):
            Tokens before `max_completion_length` over which `soft_overlong_punishment` falls from 0 to -1.
        reward_model_name_or_path (`str`, *optional*):
            Reward model to add to the reward functions.
        levels (`list[str]`, *optional*):
            Levels of the training problems; `None` takes all.
        fraction (`float`, *optional*, defaults to `1.0`):
            Share of these problems to train on, in `(0, 1]`.
        subset_seed (`int`, *optional*, defaults to `42`):
            Seed that chooses the share, and the problems of validation and report.
        prompt_style (`str`, *optional*, defaults to `"chat"`):
            `"chat"`: a user message of the problem and `instruction`; `"plain"`: the problem as it is; `"dataset"`:
            the data set has a `prompt` column of its own and is taken as it is.
        instruction (`str`, *optional*):
            What the chat prompt asks for.
        max_prompt_length (`int`, *optional*):
            Longest prompt in tokens; longer ones are left out and counted.
        validation_levels (`list[str]`, *optional*), validation_size (`int`, *optional*, defaults to `100`):
            Levels and number of the test split's problems that are solved every `validation_steps`.
        validation_steps (`int`, *optional*):
            Optimizer steps between two validations; `None` validates not at all.
        validation_decoding (`str`, *optional*, defaults to `"sampled"`):
            `"greedy"` or `"sampled"`.
        report_levels (`list[str]`, *optional*), report_size (`int`, *optional*, defaults to `500`):
            Levels, and number of the test split's problems of each, whose accuracies before and after training are
            reported, greedy and sampled. `None` reports none.
        report_samples (`int`, *optional*, defaults to `1`):
            Completions sampled for each of these problems; from 2 on, pass@k is reported as well.
        overwrite (`bool`, *optional*, defaults to `False`):
            Delete an earlier run in `output_dir`.
        accelerate_config (`str`, *optional*):
            Accelerate configuration that `opo-trl train` launches with: a file, as seen from the current folder or
            from the recipe's, or a name of TRL's (`single_gpu`, `multi_gpu`, `zero2`, …).
    """

    trainer: Literal["opo", "grpo"] = field(default="opo", metadata={"help": "OPO, or TRL's losses."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy_reward"], metadata={"help": "Reward functions, by name or dotted path."}
    )
    reward_model_name_or_path: str | None = field(default=None, metadata={"help": "Reward model to add."})
    reward_workers: int = field(default=4, metadata={"help": "Worker processes for accuracy_reward; 0 for none."})
    reward_timeout: float = field(default=30.0, metadata={"help": "Seconds that a worker has for one completion."})
    reward_memory: int = field(default=2048, metadata={"help": "Memory of a worker in MiB."})
    overlong_cache: int | None = field(
        default=None, metadata={"help": "Tokens over which soft_overlong_punishment falls to -1."}
    )
    levels: list[str] | None = field(default=None, metadata={"help": "Levels of the training problems."})
    fraction: float = field(default=1.0, metadata={"help": "Share of the training problems, in (0, 1]."})
    subset_seed: int = field(default=42, metadata={"help": "Seed that chooses problems."})
    prompt_style: Literal["chat", "plain", "dataset"] = field(
        default="chat", metadata={"help": "How a problem becomes a prompt."}
    )
    instruction: str = field(default=INSTRUCTION, metadata={"help": "What the chat prompt asks for."})
    max_prompt_length: int | None = field(default=None, metadata={"help": "Longest prompt in tokens."})
    validation_levels: list[str] | None = field(default=None, metadata={"help": "Levels of the validation problems."})
    validation_size: int = field(default=100, metadata={"help": "Number of validation problems."})
    validation_steps: int | None = field(default=None, metadata={"help": "Optimizer steps between validations."})
    validation_decoding: Decoding = field(default="sampled", metadata={"help": "Decoding of validation."})
    report_levels: list[str] | None = field(default=None, metadata={"help": "Levels reported before and after."})
    report_size: int = field(default=500, metadata={"help": "Problems per reported level."})
    report_samples: int = field(default=1, metadata={"help": "Completions sampled per reported problem."})
    overwrite: bool = field(default=False, metadata={"help": "Delete an earlier run in output_dir."})
    accelerate_config: str | None = field(default=None, metadata={"help": "Accelerate configuration to launch with."})


def make_parser(trainer: str, prog: str | None = None) -> TrlParser:
    """Parser of recipes and command lines, into script, trainer and model arguments."""
    dataclass_types: Any = _argument_classes(trainer)
    return TrlParser(dataclass_types, prog=prog)


def _argument_classes(trainer: str) -> tuple[type, type, type]:
    return OPOScriptArguments, TRAINERS[trainer].config_class, ModelConfig


def _fields(trainer: str) -> set[str]:
    return {f.name for arguments in _argument_classes(trainer) for f in dataclasses.fields(arguments)}


def read_recipe(path: str | Path | None, argv: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """
    Read a recipe, and find out which trainer it is for.

    Args:
        path (`str` or `Path`, *optional*):
            YAML file.
        argv (`Sequence[str]`, *optional*):
            Command line, whose `--trainer` overrides the recipe's.

    Returns:
        `tuple[dict[str, Any], str]`: field → value, as written; and a key of [`TRAINERS`].

    Raises:
        `ValueError`: the file does not exist or is no mapping, there is no such trainer, or a key is no field; the
        message names the key and the nearest field.
    """
    recipe = {} if path is None else _read_yaml(path)
    trainer = recipe.get("trainer", "opo")
    if "--trainer" in argv[:-1]:
        trainer = argv[list(argv).index("--trainer") + 1]
    if trainer not in TRAINERS:
        raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to one of {', '.join(TRAINERS)}.")
    known = _fields(trainer)
    for key in recipe.keys() - known - {"env"}:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else "Remove it."
        other = next((name for name in TRAINERS if key in _fields(name)), None)
        if other:
            hint = f"It belongs to `trainer: {other}`, and this is for `trainer: {trainer}`."
        raise ValueError(f"{str(path)!r} sets {key}={recipe[key]!r}, but there is no such field. {hint}")
    return recipe, trainer


def _read_yaml(path: str | Path) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ValueError(f"config={str(path)!r} does not exist. Pass the path of a recipe.")
    try:
        recipe = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"config={str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"config={str(path)!r} holds no `field: value` lines. Write one field per line.")
    return recipe


def parse(argv: Sequence[str]) -> tuple[OPOScriptArguments, RolloutConfig, ModelConfig, dict[str, Any]]:
    """Parse a command line; the last item of the result is the recipe with the command line's fields merged in."""
    argv = list(argv)
    named = {a[2:].split("=")[0].replace("-", "_") for a in argv if a.startswith("--")} - {"config"}
    recipe_path = argv[argv.index("--config") + 1] if "--config" in argv[:-1] else None
    written, trainer = read_recipe(recipe_path, argv)
    environment = {"env": written.pop("env")} if "env" in written else {}
    named |= written.keys()
    parsed: Any = make_parser(trainer).parse_args_and_config(argv)
    parsed[0].accelerate_config = find_accelerate_config(parsed[0].accelerate_config, recipe_path)
    values = {f.name: getattr(part, f.name) for part in reversed(parsed) for f in dataclasses.fields(part)}
    recipe = {name: _plain(value) for name, value in values.items() if name in named}
    return *parsed, environment | recipe


def find_accelerate_config(name: str | None, recipe_path: str | None) -> str | None:
    """
    Find an accelerate configuration: a file, as seen from here or from the recipe's folder, or a name of TRL's.

    Raises:
        `ValueError`: there is no such file or name.
    """
    if name is None:
        return None
    places = [Path(name), Path(trl.__file__).parent / "accelerate_configs" / f"{name}.yaml"]
    if recipe_path is not None:
        places.insert(1, Path(recipe_path).parent / name)
    for place in places:
        if place.is_file():
            return str(place.resolve())
    raise ValueError(
        f"accelerate_config={name!r} is neither a file nor one of TRL's configurations. Looked for "
        f"{', '.join(map(str, places))}."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return dict(value) if isinstance(value, Mapping) else value


def load_reward(name: str) -> Callable:
    """
    Find a reward function by its name in [`REWARDS`] or its dotted import path.

    Raises:
        `ValueError`: there is no such function; the message lists the names.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, attribute = name.rpartition(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward_funcs={name!r} cannot be imported ({error}). Use one of {', '.join(REWARDS)}, or the dotted path "
            "of a function, such as my_rewards.length_reward."
        ) from error
    finally:
        sys.path.pop(0)


def load_rewards(script: OPOScriptArguments, args: RolloutConfig) -> list:
    """
    The reward functions of a run, a reward model last.

    Raises:
        `ValueError`: there is no such function, or one of `soft_overlong_punishment` and `overlong_cache` is alone.
    """
    overlong = "soft_overlong_punishment" in script.reward_funcs
    length, cache = args.max_completion_length, script.overlong_cache
    if overlong != (cache is not None):
        raise ValueError(
            f"reward_funcs={script.reward_funcs} and overlong_cache={cache}: `soft_overlong_punishment` and "
            "`overlong_cache` need each other. Set both, or neither."
        )
    if cache is not None and not (length and 0 < cache <= length):
        raise ValueError(
            f"overlong_cache={cache} is not allowed. Set `overlong_cache` to a positive number up to "
            f"max_completion_length={length}."
        )
    found: list = [
        get_soft_overlong_punishment(length, cache) if name == "soft_overlong_punishment" else load_reward(name)
        for name in script.reward_funcs
    ]
    if script.reward_workers:
        workers = max(script.reward_workers // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
        limits: Any = {"timeout": script.reward_timeout, "memory": script.reward_memory}
        found = [IsolatedReward(f, workers=workers, **limits) if f is accuracy_reward else f for f in found]
    return [*found, script.reward_model_name_or_path] if script.reward_model_name_or_path else found


def model_path(model_config: ModelConfig) -> str:
    """Where the model is: its Hub id or folder, the embedded one's wherever the package is installed."""
    name = str(model_config.model_name_or_path)
    return base_model_path() if name == EMBEDDED_MODEL else name


@dataclass
class Data:
    """What a run trains on, validates with and reports on; every set has `prompt` and what the rewards read."""

    training: Dataset
    validation: Dataset | None
    report: dict[str, Dataset]


def load_data(script: OPOScriptArguments, args: RolloutConfig, model_name: str) -> Data:
    """
    Load the problems of a run: `levels` of the training split, and held-out ones of the test split.

    Raises:
        `ValueError`: the data set cannot be read, or a selection leaves no row.
    """
    training = _problems(script, script.dataset_train_split, script.levels, script.fraction)

    def held_out(levels: list[str] | None, size: int) -> Dataset:
        problems = _problems(script, script.dataset_test_split, levels)
        if script.prompt_style != "dataset":
            problems = without_overlap(problems, training)
        problems = problems.shuffle(seed=script.subset_seed)
        return _prompts(script, problems.select(range(min(size, len(problems)))))

    prompts = _prompts(script, training)
    if script.max_prompt_length is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=args.trust_remote_code)
        template_kwargs: Any = args.chat_template_kwargs  # a dict, once parsed
        prompts = drop_long_prompts(prompts, tokenizer, script.max_prompt_length, template_kwargs)
    return Data(
        training=prompts,
        validation=held_out(script.validation_levels, script.validation_size) if script.validation_steps else None,
        report={level: held_out([level], script.report_size) for level in script.report_levels or []},
    )


def _problems(script: OPOScriptArguments, split: str, levels: list[str] | None, fraction: float = 1.0) -> Dataset:
    name, config = script.dataset_name, script.dataset_config
    if script.prompt_style == "dataset":
        return load_dataset(name, config, split=split)
    return load_problems(name, config=config, split=split, levels=levels, fraction=fraction, seed=script.subset_seed)


def _prompts(script: OPOScriptArguments, problems: Dataset) -> Dataset:
    if script.prompt_style == "dataset":
        return problems
    return to_prompts(problems, style=script.prompt_style, instruction=script.instruction)


def make_trainer(
    script: OPOScriptArguments, args: RolloutConfig, model_config: ModelConfig, data: Data, reward_funcs: list
) -> RolloutTrainer:
    """Build the trainer of a run, with its log file, progress bar and validation."""
    folder = Path(args.output_dir)
    given: Any = args.model_init_kwargs or {}  # a dict, once parsed
    args.model_init_kwargs = {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype,
        "use_safetensors": True,  # never pickled weights, whoever made them
        **given,
    }
    trainer = TRAINERS[script.trainer](
        model=model_path(model_config),
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=data.training,
        callbacks=[LogFile(folder)],
        quantization_config=get_quantization_config(model_config),
        peft_config=get_peft_config(model_config),
    )
    if data.validation is not None:
        steps, decoding = script.validation_steps, script.validation_decoding
        trainer.add_callback(Validation(trainer, data.validation, steps=steps, decoding=decoding, folder=folder))
    for default in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(default)
    if not args.disable_tqdm:
        trainer.add_callback(ProgressBar())
    return trainer


def report(trainer: RolloutTrainer, data: Mapping[str, Dataset], samples: int) -> dict[str, dict[str, dict]]:
    """Accuracy on each level's problems, greedy and sampled: level → decoding → [`Evaluation.summary`]."""
    return {
        level: {
            "greedy": evaluate(trainer, problems, decoding="greedy").summary(),
            "sampled": evaluate(trainer, problems, decoding="sampled", samples=samples).summary(),
        }
        for level, problems in data.items()
    }


def format_report(before: Mapping[str, Any], after: Mapping[str, Any] | None = None) -> str:
    """A table of accuracies with their intervals, one line per level and decoding."""

    def cell(result: Mapping[str, float]) -> str:
        return f"{result['accuracy']:6.1%} [{result['low']:.1%}, {result['high']:.1%}]"

    lines = [f"{'accuracy (95 % interval)':<26}{'before':<26}{'after' if after else ''}"]
    for level, by_decoding in before.items():
        for decoding, result in by_decoding.items():
            then = cell(after[level][decoding]) if after else ""
            lines.append(f"{level + ', ' + decoding:<26}{cell(result):<26}{then}")
    return "\n".join(line.rstrip() for line in lines)


def run(trainer: RolloutTrainer, script: OPOScriptArguments, data: Data, checkpoint: str | None) -> dict[str, Any]:
    """Train, with accuracies before and after; returns what `summary.json` holds."""
    args = trainer.args
    folder = Path(args.output_dir)
    summary = run_folder.read_json(folder / run_folder.SUMMARY) if checkpoint else {}
    is_main = trainer.accelerator.is_main_process
    if "before" not in summary:
        summary["before"] = report(trainer, data.report, script.report_samples)
        if is_main:
            run_folder.write_json(folder / run_folder.SUMMARY, summary)
    trainer.accelerator.print(format_report(summary["before"]))
    if is_main:
        (folder / run_folder.PLAN).write_text(training_plan(trainer) + "\n")
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    summary |= {
        "optimizer_steps": trainer.state.global_step,
        "train_seconds": round(time.perf_counter() - started, 1),
        "after": report(trainer, data.report, script.report_samples),
    }
    trainer.save_model(args.output_dir)
    if is_main:
        run_folder.write_json(folder / run_folder.SUMMARY, summary)
    trainer.accelerator.print(format_report(summary["before"], summary["after"]))
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.end()
    return summary


# What selects problems; a data set that comes with its own prompts is taken as it is.
_SELECTIONS = ("levels", "fraction", "validation_levels", "report_levels")


_POSITIVE = (
    "validation_steps",
    "validation_size",
    "report_size",
    "report_samples",
    "max_prompt_length",
    "reward_timeout",
    "reward_memory",
)


def _check_script(script: OPOScriptArguments, args: RolloutConfig, model_config: ModelConfig):
    if not model_config.model_name_or_path:
        raise ValueError("model_name_or_path is not set. Set it to a model's Hub id or folder.")
    if not script.dataset_name:
        raise ValueError("dataset_name is not set. Set it to a data set's Hub id, file or folder, or to 'arithmetic'.")
    for name in _SELECTIONS if script.prompt_style == "dataset" else ():
        value = getattr(script, name)
        if value != OPOScriptArguments.__dataclass_fields__[name].default:
            raise ValueError(f"{name}={value!r} has no effect with prompt_style='dataset'. Remove `{name}`.")
    for name in ("dataset_streaming", "ignore_bias_buffers"):
        if getattr(script, name):
            raise ValueError(f"{name}=True has no effect here: problems are loaded whole. Remove `{name}`.")
    for name in ("load_in_4bit", "load_in_8bit"):
        if args.use_vllm and getattr(model_config, name):
            raise ValueError(
                f"{name}=True does not go with use_vllm=True: TRL hands vLLM the packed weights, which it refuses "
                "(huggingface/trl#4973). Remove one of them."
            )
    for name in _POSITIVE:
        value = getattr(script, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} is not allowed. Set `{name}` to a positive number, or leave it out.")
    if script.reward_workers < 0:
        raise ValueError(f"reward_workers={script.reward_workers} is not allowed. Set `reward_workers` to 0 or more.")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for a recipe or command line that cannot be run."""
    # Renamed fields of Transformers that TRL still calls by their old names: nothing that a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    try:
        script, args, model_config, recipe = parse(sys.argv[1:] if argv is None else argv)
        _check_script(script, args, model_config)
        checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
        # All that a recipe can have wrong comes before the folder, where it might cost an earlier run.
        reward_funcs = load_rewards(script, args)
        with args.main_process_first(desc="loading the data set"):
            data = load_data(script, args, model_path(model_config))
        if args.process_index == 0:
            folder = Path(args.output_dir)
            resume = checkpoint is not None or (args.resume_from_checkpoint == "auto" and run_folder.is_run(folder))
            run_folder.claim(folder, resume=resume, overwrite=script.overwrite)
            settings = {**args.to_dict(), **dataclasses.asdict(script), **dataclasses.asdict(model_config)}
            run_folder.write_description(folder, recipe=recipe, settings=settings, seed=args.seed)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":  # each process of a launch comes here
            print(f"opo-trl train: error: {error}", file=sys.stderr)
        return 2
    trainer = make_trainer(script, args, model_config, data, reward_funcs)
    try:
        run(trainer, script, data, checkpoint)
    finally:  # a run that ends with an error is the one to read about
        if args.process_index == 0:
            print(f"Report: {write_report(Path(args.output_dir))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
