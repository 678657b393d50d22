"""
Train a model with OPO, or with a baseline, as a recipe says.

    accelerate launch [--config_file recipes/accelerate/X.yaml] -m opo_trl.train --config recipes/R.yaml [--alpha 0.3]

A recipe is a flat YAML file of the fields of [`OPOScriptArguments`], of [`OPOConfig`] (or with `trainer: grpo` of
[`RolloutConfig`]) and of [`~trl.ModelConfig`]; a field on the command line overrides the recipe's. The run's folder
(`output_dir`) is described in `opo_trl.report.run_folder`.
"""

import dataclasses
import gc
import importlib
import inspect
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset
from huggingface_hub import constants, get_token
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config, rewards
from trl.rewards import get_soft_overlong_punishment

from .checks import paths, ranges
from .checks.errors import refuse
from .checks.rehearsal import REFUSALS, check_tokens, given, rehearse_model
from .config import RolloutConfig
from .data.arithmetic import arithmetic_reward, base_model_path
from .data.problems import drop_long_prompts, load_from_hub, load_problems, rename_columns, to_prompts, without_overlap
from .evaluate import evaluate
from .launch import preflight
from .launch.callbacks import LogFile, ProgressBar, ReportBefore, Validation
from .launch.recipe import OPOScriptArguments, parse, split
from .launch.resume import check_same_run
from .launch.signals import StopOnSignal
from .report import run_folder
from .report.run_report import write_report
from .report.settings import DATA, MODEL, SAMPLING
from .report.settings import REWARDS as REWARD_FIELDS
from .rewards.accuracy import accuracy_reward, format_reward
from .rewards.scoring import IsolatedReward, RewardError
from .rollout.checkpoint import resolve as find_checkpoint
from .rollout.prompts import check_enough_prompts
from .rollout.trainer import RolloutTrainer
from .trainer import OPOTrainer


TRAINERS: dict[str, type[RolloutTrainer]] = {"opo": OPOTrainer, "grpo": RolloutTrainer}


REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "format_reward": format_reward,
    "arithmetic_reward": arithmetic_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
}

Lock = AbstractContextManager[Any]

# The embedded base model goes by this name in a recipe, wherever the package is installed.
EMBEDDED_MODEL = "arithmetic"


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
        reward = getattr(importlib.import_module(module), attribute)
        if not callable(reward) or inspect.isclass(reward):
            raise TypeError(f"{reward!r} is {'a class, ' if callable(reward) else ''}not a function")
    except Exception as error:  # the module's own code may raise anything
        raise ValueError(
            f"reward_funcs={name!r} cannot be imported ({type(error).__name__}: {error}). Use one of "
            f"{', '.join(REWARDS)}, or the dotted path of a function, such as my_rewards.length_reward."
        ) from error
    finally:
        sys.path.pop(0)
    return reward


def load_rewards(script: OPOScriptArguments, args: RolloutConfig) -> list:
    """
    The reward functions of a run, a reward model last.

    Raises:
        `ValueError`: there is no such function, one of `soft_overlong_punishment` and `overlong_cache` is alone, or
            there are more or fewer weights than rewards.
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
    n_rewards = len(script.reward_funcs) + bool(script.reward_model_name_or_path)
    if args.reward_weights is not None and len(args.reward_weights) != n_rewards:
        raise ValueError(
            f"reward_weights={args.reward_weights} does not fit {n_rewards} rewards. Set `reward_weights` to one "
            "number for each of `reward_funcs`, and one for `reward_model_name_or_path`, or leave it out."
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


def load_data(script: OPOScriptArguments, args: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    """
    Load the problems of a run: `levels` of the training split, and held-out ones of the test split.

    Raises:
        `ValueError`: the data set cannot be read, a selection leaves no row, or a chat prompt has no template.
    """
    training = _problems(script, script.dataset_train_split, script.levels, script.fraction)
    prompts = _prompts(script, training)
    preflight.check_template(prompts, tokenizer)
    if script.max_prompt_length is not None:
        template_kwargs: Any = args.chat_template_kwargs  # a dict, once parsed
        prompts = drop_long_prompts(prompts, tokenizer, script.max_prompt_length, template_kwargs)

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


def make_trainer(
    script: OPOScriptArguments, args: RolloutConfig, model_config: ModelConfig, data: Data, reward_funcs: list
) -> RolloutTrainer:
    """Build the trainer of a run, with its log file, progress bar and validation."""
    folder = Path(args.output_dir)
    options: Any = args.model_init_kwargs or {}  # a dict, once parsed
    args.model_init_kwargs = {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype,
        "use_safetensors": True,  # never pickled weights, whoever made them
        **options,
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
    """A table of accuracies with their intervals, one line per level and decoding; blank where one is not known."""
    after = after or {}
    rows = dict.fromkeys((level, way) for results in (before, after) for level in results for way in results[level])

    def cell(results: Mapping[str, Any], level: str, decoding: str) -> str:
        result = results.get(level, {}).get(decoding)
        return f"{result['accuracy']:6.1%} [{result['low']:.1%}, {result['high']:.1%}]" if result else ""

    lines = [f"{'accuracy (95 % interval)':<26}{'before':<26}{'after' if after else ''}"]
    for row in rows:
        lines.append(f"{', '.join(row):<26}{cell(before, *row):<26}{cell(after, *row)}")
    return "\n".join(line.rstrip() for line in lines)


def _summary_so_far(folder: Path, checkpoint: str | None) -> dict[str, Any]:
    """What `summary.json` holds of a run that goes on, the same on every process, each of which might see another."""
    summary = run_folder.read_json(folder / run_folder.SUMMARY)
    if checkpoint is None:  # it starts over
        summary = {name: summary[name] for name in summary if name == "before"}
    elif "before" not in summary:  # the checkpoint may lie in the folder of another run
        there = run_folder.read_json(Path(checkpoint).resolve().parent / run_folder.SUMMARY)
        summary |= {name: there[name] for name in there if name == "before"}
    return broadcast_object_list([summary])[0]


def run(trainer: RolloutTrainer, script: OPOScriptArguments, data: Data, checkpoint: str | None) -> dict[str, Any]:
    """Train, with accuracies before and after; returns what `summary.json` holds."""
    args = trainer.args
    folder = Path(args.output_dir)
    is_main = trainer.accelerator.is_main_process
    summary = _summary_so_far(folder, checkpoint)
    before = ReportBefore(
        summary,
        measure=lambda: report(trainer, data.report, script.report_samples),
        folder=folder,
        show=lambda accuracies: trainer.accelerator.print(format_report(accuracies), flush=True),
    )
    trainer.callback_handler.callbacks.insert(0, before)  # what it prints stands above the progress bar
    if is_main:
        (folder / run_folder.PLAN).write_text(trainer.plan + "\n")
    started = time.perf_counter()
    with StopOnSignal(trainer):
        trainer.train(resume_from_checkpoint=checkpoint)
    summary |= {
        "optimizer_steps": trainer.state.global_step,
        "train_seconds": round(time.perf_counter() - started - before.seconds, 1),
        "after": report(trainer, data.report, script.report_samples),
    }
    trainer.save_model(args.output_dir)
    if is_main:
        run_folder.write_json(folder / run_folder.SUMMARY, summary)
    trainer.accelerator.print(format_report(summary.get("before", {}), summary["after"]))
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.end()
    return summary


# What the accuracy before training depends on.
_REPORTED = (*DATA, *MODEL, *SAMPLING, *REWARD_FIELDS, "report_levels", "report_size", "report_samples")

# What selects problems; a data set that comes with its own prompts is taken as it is.
_SELECTIONS = ("levels", "fraction", "validation_levels", "report_levels")


def check_arguments(arguments: OPOScriptArguments | ModelConfig) -> None:
    """
    Check the numbers, words and paths of the script's or the model's arguments.

    Raises:
        `ValueError`: names the field, its value and what to set it to.
    """
    ranges.check(arguments)
    for name in ("dataset_name", "model_name_or_path", "reward_model_name_or_path", "accelerate_config"):
        paths.check_name(name, getattr(arguments, name, None))


def _check_script(
    script: OPOScriptArguments, args: RolloutConfig, model_config: ModelConfig, recipe: Mapping[str, Any]
):
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
    if args.eval_strategy != "no" or args.eval_on_start:
        field = "eval_on_start" if args.eval_strategy == "no" else "eval_strategy"
        raise ValueError(
            f"{field}={getattr(args, field)!s} needs a data set of its own, which this command has not. Set "
            f"`validation_steps` in its place, and remove `{field}`."
        )
    for name in ("load_best_model_at_end", "metric_for_best_model"):
        if getattr(args, name):
            raise ValueError(
                f"{name}={getattr(args, name)!r} needs an evaluation, which this command has not. Remove `{name}`."
            )
    if args.save_strategy == "best":
        raise ValueError("save_strategy='best' needs an evaluation. Set `save_strategy` to steps, epoch or no.")
    for name, value in given(model_config).items() if not model_config.use_peft else ():
        # Where `use_peft` is written out, it has been switched off on purpose.
        if (name.startswith("lora_") or name in ("use_dora", "use_rslora")) and "use_peft" not in recipe:
            raise ValueError(f"{name}={value!r} has no effect without adapters. Set `use_peft` to true, or remove it.")
    if args.sync_ref_model and model_config.use_peft:
        raise ValueError(
            "sync_ref_model=True does not go with use_peft=True: the reference is the base model below the adapters, "
            "which does not move. Remove one of them."
        )
    if args.push_to_hub and (constants.HF_HUB_OFFLINE or not (args.hub_token or get_token())):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "there is no token"
        raise ValueError(
            f"push_to_hub=True cannot be done: {why}. Set `hub_token`, or log in with `hf auth login`, or remove "
            "`push_to_hub`."
        )
    for name in ("load_in_4bit", "load_in_8bit"):
        if args.use_vllm and getattr(model_config, name):
            raise ValueError(
                f"{name}=True does not go with use_vllm=True: TRL hands vLLM the packed weights, which it refuses "
                "(huggingface/trl#4973). Remove one of them."
            )


@contextmanager
def _said_of(what: str) -> Iterator[None]:
    """Say of what was asked for whatever a library raises in this context; `--debug` shows where."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except REFUSALS as error:
        said = str(error).strip().rstrip(".") or "no more is said"
        raise ValueError(f"{what} cannot be used: {type(error).__name__}: {said}. `--debug` shows where.") from error


def _prepare(argv: Sequence[str]) -> tuple[RolloutTrainer, OPOScriptArguments, Data, str | None, Lock]:
    """
    Everything that comes before the first step, the run's folder last, which stays locked within the last result.

    Raises:
        `ValueError`, `ImportError`: it cannot be run as asked for. No file has been touched then.
    """
    with _said_of(f"The command line {' '.join(argv)!r}"):
        script, args, model_config, recipe = parse(argv)
    check_arguments(script)
    check_arguments(model_config)
    _check_script(script, args, model_config, recipe)
    preflight.check_installed(args, model_config)
    folder = Path(args.output_dir)
    settings = {**args.to_dict(), **dataclasses.asdict(script), **dataclasses.asdict(model_config)}
    with _said_of(f"output_dir={args.output_dir!r} with resume_from_checkpoint={args.resume_from_checkpoint!r}"):
        checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
        # A checkpoint that lies elsewhere goes on in a new folder.
        here = checkpoint is not None and Path(checkpoint).resolve().parent == folder.resolve()
        goes_on = checkpoint is not None or args.resume_from_checkpoint == "auto"
        resume = here or (goes_on and run_folder.is_run(folder))
        run_folder.check(folder, resume=resume, overwrite=script.overwrite)
        if checkpoint is not None:
            check_same_run(checkpoint, settings, model_path(model_config))
    reward_funcs = load_rewards(script, args)
    source: Any = {"revision": model_config.model_revision, "trust_remote_code": args.trust_remote_code}
    options: Any = args.model_init_kwargs or {}  # a dict, once parsed
    weights: Any = {"pickled": not options.get("use_safetensors", True)}
    named = f"model_name_or_path={model_config.model_name_or_path!r}"
    with _said_of(named):
        config = preflight.check_model("model_name_or_path", model_path(model_config), **source, **weights)
        check_tokens(args, getattr(config.get_text_config(), "vocab_size", None))
        rehearse_model(args, model_config, model_path(model_config))
        tokenizer = preflight.load_tokenizer(model_path(model_config), **source)
    if script.reward_model_name_or_path:
        with _said_of(f"reward_model_name_or_path={script.reward_model_name_or_path!r}"):
            preflight.check_model("reward_model_name_or_path", script.reward_model_name_or_path, **source, **weights)
    with _said_of(f"dataset_name={script.dataset_name!r}"):
        with args.main_process_first(desc="loading the data set"):
            data = load_data(script, args, tokenizer)
        preflight.check_template_options(args, tokenizer, data.training[0]["prompt"])
        preflight.check_columns(reward_funcs, data.training)
        preflight.check_context(data.training["prompt"], tokenizer, config, args, script.max_prompt_length)
    check_enough_prompts(len(data.training), args)
    if args.process_index == 0:
        preflight.check_vllm_server(args)
    if options:
        named = f"{named} with model_init_kwargs={options!r}"
    with run_folder.left_as_found(folder), _said_of(named):
        trainer = make_trainer(script, args, model_config, data, reward_funcs)
        if checkpoint is not None:
            trainer.check_resumable(checkpoint)
    lock: Lock = nullcontext()
    if args.process_index == 0:
        lock = run_folder.claim(folder, resume=resume, overwrite=script.overwrite)
        saved, asked = (
            run_folder.read_json(folder / run_folder.SETTINGS),
            json.loads(json.dumps(settings, default=str)),
        )
        if checkpoint is None and any(saved.get(name) != asked.get(name) for name in _REPORTED):
            (folder / run_folder.SUMMARY).unlink(missing_ok=True)  # of another model or other problems
        run_folder.write_description(folder, recipe=recipe, settings=settings, seed=args.seed)
    return trainer, script, data, checkpoint, lock


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point; returns the exit status: 2 for a recipe or command line that cannot be run, 1 for a reward function
    that fails in training, 128 plus its number for a signal that ended training after a save.
    """
    # Renamed fields of Transformers that TRL still calls by their old names: nothing that a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    argv = sys.argv[1:] if argv is None else argv
    _, debug, _ = split(argv)
    try:
        trainer, script, data, checkpoint, lock = _prepare(argv)
    except (ValueError, ImportError) as error:
        return refuse("opo-trl train", error, debug=debug)
    status = 0
    with lock:
        try:
            run(trainer, script, data, checkpoint)
        except SystemExit as ended:
            if not isinstance(ended.code, int):
                raise
            status = ended.code  # by a signal
        except RewardError as error:
            return refuse("opo-trl train", error, debug=debug, status=1)
        finally:  # a run that ends with an error is the one to read about
            if trainer.args.process_index == 0:
                print(f"Report: {write_report(Path(trainer.args.output_dir))}")
    # `Trainer.end` has shut the process group down, but its threads and connections live as long as the wrapped model
    # refers to it. Left to the exit of the interpreter, gloo's destructor was seen to stand still. All have agreed to
    # end, so nothing is under way that it could wait for; after an error others may wait, and this must not.
    del trainer, data
    gc.collect()
    return status


if __name__ == "__main__":
    sys.exit(main())
