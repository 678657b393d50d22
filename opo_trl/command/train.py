"""
Train a model with OPO or another method, from a recipe.

    accelerate launch [--config_file recipes/accelerate/X.yaml] -m opo_trl.command.train recipes/R.yaml [--alpha 0.3]

A recipe is a flat YAML file with fields of [`OPOScriptArguments`], [`OPOConfig`] and [`~trl.ModelConfig`]; fields on
the command line override it. The files of a run are listed in `opo_trl.report.run_files`.
"""

import dataclasses
import gc
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


# First, because it checks versions: another release may lack names that are imported below.
from .. import compatibility  # isort: skip  # noqa: F401

from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..checks import files
from ..checks.secrets import mask, mask_words
from ..checks.text import report_error
from ..checks.weights import check_weights
from ..config import OPOConfig
from ..data import gym
from ..data.arithmetic import EMBEDDED_MODELS
from ..data.problems import EMBEDDED
from ..fields import require
from ..models.adapter import tokenizer_source
from ..patching import temporarily
from ..report import run_files as run_folder
from ..report.run_report import accuracies, accuracy_lines, write_report
from ..resume.checkpoint import check_resumable
from ..reuse import recorded
from ..reuse.reading import RECORDED
from ..rewards.errors import RewardError
from ..trainer import OPOTrainer
from . import run_folder as output_dir
from .arguments import OPOScriptArguments
from .callbacks import LogFile, NewRate, ProgressBar, ReportBefore, Validation, measure
from .datasets import Data, load_data
from .named_rewards import check_columns, load_rewards, load_tools
from .packages import check_packages
from .recipe import parse
from .signals import StopOnSignal, StoppedBySignal, ignored
from .weightless import WeightlessTrainer, config_elsewhere, lacks_weights


@dataclass
class Run:
    """A run that is ready to start, of which no file has been written."""

    trainer: OPOTrainer
    script: OPOScriptArguments
    data: Data
    checkpoint: str | None  # folder to resume from
    recipe: dict[str, Any]  # the recipe with the command line merged in, as the run's folder stores it
    settings: dict[str, Any]  # every setting, without secrets


def prepare(argv: Sequence[str], *, processes_elsewhere: int | None = None) -> Run:
    """
    Do everything that comes before the first step: read the recipe, check it, load rewards, data and model, and make
    the trainer with its callbacks.

    Args:
        argv (`Sequence[str]`):
            The words of the command line.
        processes_elsewhere (`int`, *optional*):
            Number of processes of a run on another machine, of which only the plan is wanted: neither its weights nor
            its packages need be here.

    Raises:
        `ValueError`, `ImportError`, `OSError`: the run is impossible as requested; no file has been touched.
    """
    is_elsewhere = processes_elsewhere is not None
    config_class = OPOConfig if processes_elsewhere is None else config_elsewhere(processes_elsewhere)
    script, args, model_config, recipe = parse(argv, config_class)
    if not is_elsewhere:
        check_packages(args, model_config)
    settings = {**args.to_dict(), **dataclasses.asdict(script), **dataclasses.asdict(model_config)}
    # Without secrets and as JSON, which is how a run's folder holds them, so that both can be compared.
    settings = json.loads(json.dumps(mask(settings), default=str))
    require(model_config.model_name_or_path is not None, "model_name_or_path", None, "a model")
    has_data = bool(script.dataset_name or args.rollouts)
    require(has_data, "dataset_name", None, "a dataset, or `rollouts` to recorded completions")
    checkpoint = output_dir.find_checkpoint(args, settings, overwrite=script.overwrite)

    tools = load_tools(script)
    reward_funcs = load_rewards(script, args)
    path = _model_path(model_config)
    args.model_init_kwargs = _loading_options(args, model_config)
    data = _load_data(script, args, path)
    # Recorded rewards are taken as they are: then no function is called.
    has_recorded_rewards = RECORDED in data.training.column_names and recorded.has_rewards(data.training)
    if not has_recorded_rewards:
        check_columns(reward_funcs, data.training, environments="environment_factory" in tools)

    quantization = get_quantization_config(model_config)
    is_weightless = is_elsewhere or ("--plan" in argv and lacks_weights(path) and quantization is None)
    trainer_class = WeightlessTrainer if is_weightless else OPOTrainer
    trainer = trainer_class(
        model=path,
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=data.training,
        eval_dataset=data.evaluation,
        callbacks=[LogFile(Path(args.output_dir))],
        quantization_config=quantization,
        peft_config=get_peft_config(model_config),
        **tools,
    )
    _replace_callbacks(trainer, script, data)
    if checkpoint is not None:
        trainer.add_callback(NewRate(trainer))
        check_resumable(trainer, checkpoint)
    trainer.plan += f"\n  {'data':<10} {data.plan}"
    return Run(trainer, script, data, checkpoint, recipe, settings)


def _model_path(model_config: ModelConfig) -> str:
    """Folder of the recipe's model, or its name on the Hub. A `ValueError` if it is a folder that does not exist."""
    name = str(model_config.model_name_or_path)
    path = EMBEDDED_MODELS.get(name, name)
    exists = not path.startswith((".", "/", "~")) or Path(path).is_dir()  # no name on the Hub begins like that
    require(exists, "model_name_or_path", path, "a folder that exists, or a model on the Hub")
    return path


def _loading_options(args: OPOConfig, model_config: ModelConfig) -> dict[str, Any]:
    """Options of `from_pretrained` for the recipe's model; those of `model_init_kwargs` win."""
    return {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype,
        "use_safetensors": True,  # pickled weights could run code
        **cast(dict, args.model_init_kwargs or {}),
    }


def _load_data(script: OPOScriptArguments, args: OPOConfig, path: str) -> Data:
    """The datasets of a run, for the tokenizer of the model in `path`."""
    trusted = {"trust_remote_code": args.trust_remote_code}
    options = cast(dict, args.model_init_kwargs)
    source, revision = tokenizer_source(path, options)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, **trusted)
    if args.rollouts_model:
        args.rollouts_model = EMBEDDED_MODELS.get(args.rollouts_model, args.rollouts_model)
        check_weights("rollouts_model", args.rollouts_model, trusted | options)
    with args.main_process_first(desc="loading the dataset"):
        return load_data(script, args, tokenizer)


def _replace_callbacks(trainer: OPOTrainer, script: OPOScriptArguments, data: Data) -> None:
    """Replace Transformers' progress bar and printed log by ours, and add the validation."""
    folder = Path(trainer.args.output_dir)
    if data.validation is not None:
        steps, decoding = script.validation_steps, script.validation_decoding
        trainer.add_callback(Validation(trainer, data.validation, steps=steps, decoding=decoding, folder=folder))
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if not trainer.args.disable_tqdm:
        trainer.add_callback(ProgressBar())


def run(ready: Run) -> None:
    """
    Train, measure accuracies before and after, and write the files of the run: its description, the plan, the
    accuracies, the model and its card.
    """
    trainer, script, data, checkpoint = ready.trainer, ready.script, ready.data, ready.checkpoint
    args, folder = trainer.args, Path(trainer.args.output_dir)
    summary: dict[str, Any] = {}
    if checkpoint:
        earlier = run_folder.read_summary(Path(checkpoint).resolve().parent)
        if "before" in earlier:
            summary["before"] = earlier["before"]
    is_main = trainer.accelerator.is_main_process
    if is_main:
        output_dir.claim(args, checkpoint)
        output_dir.write_description(folder, recipe=ready.recipe, settings=ready.settings, seed=args.seed)
        files.write(folder / run_folder.PLAN, trainer.plan + "\n")
    before = ReportBefore(trainer, data.report, script.report_samples, summary)
    trainer.callback_handler.callbacks.insert(0, before)  # prints above the progress bar
    if checkpoint:
        trainer.accelerator.print(f"Resuming from {checkpoint}.", flush=True)
    started = time.perf_counter()
    with StopOnSignal(trainer):
        trainer.train(resume_from_checkpoint=checkpoint)
        # Without the time in which accuracies before training were measured.
        seconds = round(time.perf_counter() - started - before.seconds, 1)
        trainer.save_model(args.output_dir)
    summary["optimizer_steps"] = trainer.state.global_step
    if not checkpoint:  # a resumed run does not know how long the part before took
        summary["train_seconds"] = seconds
    summary["after"] = measure(trainer, data.report, script.report_samples)
    lines = accuracy_lines(accuracies(summary))
    if is_main:
        files.write_json(folder / run_folder.SUMMARY, summary)
        dataset = script.dataset_name or "."
        is_on_hub = not (Path(dataset).exists() or dataset in EMBEDDED or dataset.startswith(gym.PREFIX))
        trainer.create_model_card(folder.name, dataset if is_on_hub else None)
        with (folder / "README.md").open("a", encoding="utf-8") as card:
            card.write(
                f"\n## Data and accuracy\n\nTrained on {data.plan}. Accuracy before → after training, with its 95 % "
                "interval:\n\n"
            )
            card.writelines(f"- {line}\n" for line in lines)
    if lines:
        trainer.accelerator.print(*lines, sep="\n")
    if args.push_to_hub:
        with temporarily(trainer, create_model_card=lambda *_, **__: None):  # there is one, with accuracies
            trainer.push_to_hub()
    trainer.accelerator.end_training()


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point; returns the exit status: 2 for a recipe or command line that cannot be run, 1 for a reward function
    that fails in training, 128 plus its number for a signal that ended training after a save.
    """
    # TRL still calls renamed fields of Transformers by their old names; users cannot fix that.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    if argv is None:
        argv = sys.argv[1:]
        sys.argv[1:] = mask_words(argv)  # trackers record `sys.argv`, which is to hold no password or token
    debug = "--debug" in argv
    status = 0
    try:
        ready = prepare(argv)
    except (ValueError, ImportError, OSError, RewardError) as error:
        return report_error("opo-trl train", error, debug=debug)
    trainer = ready.trainer
    if "--plan" in argv:
        trainer.accelerator.print(trainer.plan)
        trainer.accelerator.end_training()
        return 0
    try:
        run(ready)
    except StoppedBySignal as stopped:
        status = stopped.code
    except RewardError as error:
        return report_error("opo-trl train", error, debug=debug, status=1)
    finally:  # the report matters most when a run ends with an error
        if trainer.accelerator.is_main_process:
            with ignored():  # other processes may have exited, at which their launcher ends this one
                write_report(Path(trainer.args.output_dir))
    # `run` has shut the process group down, but its threads and connections live as long as the wrapped model
    # refers to it. Left to the exit of the interpreter, gloo's destructor sometimes hangs. All processes have agreed
    # to end, so nothing is pending. After an error, other processes may still wait, so this is skipped.
    del ready, trainer
    gc.collect()
    return status


if __name__ == "__main__":
    sys.exit(main())
