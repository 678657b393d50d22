"""
Train a model with OPO or another method, from a recipe.

    accelerate launch [--config_file recipes/accelerate/X.yaml] -m opo_trl.train recipes/R.yaml [--alpha 0.3]

A recipe is a flat YAML file with fields of [`OPOScriptArguments`], of [`OPOConfig`] (with `trainer: async_opo`, of
[`AsyncOPOConfig`]) and of [`~trl.ModelConfig`]; fields on the command line override it. The files of a run are listed
in `opo_trl.report.run_folder`.
"""

import dataclasses
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from . import methods
from .arguments import OPOScriptArguments, check_together
from .checks import files
from .checks.errors import report_error
from .checks.ranges import reject
from .checks.secrets import mask, mask_words
from .checks.silent import check_generation_config
from .checks.weights import check_weights
from .config import OPOConfig
from .data.models import EMBEDDED_MODELS
from .data.rollouts import RECORDED
from .launch import foreign, output_dir, preflight
from .launch.callbacks import LogFile, ProgressBar, ReportBefore, Validation, measure, table
from .launch.data import Data, load_data, source_of
from .launch.recipe import arguments, read
from .launch.resume import check_same_run, continues, forget_if_changed, known_accuracies
from .launch.rewards import load_rewards
from .launch.signals import StopOnSignal, StoppedBySignal
from .launch.tools import Tools, check_conversations, load_tools
from .report import run_folder
from .report.run_report import write_or_say_why
from .rewards.errors import RewardError, told
from .rollout import recorded
from .rollout.checkpoint import resolve as find_checkpoint
from .rollout.position import check_resumable
from .rollout.prompts import check_enough_prompts
from .trainer import OPOTrainer


@dataclass
class Run:
    """A run that is ready to start. Its folder stays locked within `lock`."""

    trainer: OPOTrainer
    script: OPOScriptArguments
    data: Data
    checkpoint: str | None
    lock: AbstractContextManager[Any]


def prepare(argv: Sequence[str]) -> Run:
    """
    Do everything that comes before the first step; claim the run's folder last.

    Raises:
        `ValueError`, `ImportError`: the run is impossible as requested; no file has been touched.
    """
    given = read(argv)
    recipe = given.as_stored  # before a library changes a mapping
    script, args, model_config = arguments(given)
    check_together(script, args, model_config, recipe)
    if not isinstance(args, OPOConfig):  # asynchronous training
        args.check_requirements(script, model_config)
    settings = mask({**args.to_dict(), **dataclasses.asdict(script), **dataclasses.asdict(model_config)})
    settings = json.loads(json.dumps(settings, default=str))  # as the run's folder holds them
    checkpoint, resume = _find_checkpoint(script, args, settings, model_path(model_config))

    tools = load_tools(script)
    reward_funcs = load_rewards(script, args)
    config, tokenizer = _check_models(args, model_config)
    source = source_of(script, args)
    with _blamed_on(source):
        with args.main_process_first(desc="loading the dataset"):
            data = load_data(script, args, tokenizer, **tools.for_template)
        preflight.check_template_options(args, tokenizer)
        check_conversations(tools, data.training)
        if not (RECORDED in data.training.column_names and recorded.has_rewards(data.training)):
            preflight.check_columns(reward_funcs, data.training, of_trainer=tools.for_rewards)
        preflight.check_length(data.training["prompt"], tokenizer, config, args, **tools.for_template)
    if isinstance(args, OPOConfig):  # asynchronous training repeats its prompts, and has a server of another kind
        check_enough_prompts(len(data.training), args, data.plan)

    folder, options = Path(args.output_dir), args.model_init_kwargs
    with_options = f" with model_init_kwargs={options!r}" if options else ""
    with _blamed_on(_named(model_config) + with_options):
        trainer = make_trainer(script, args, model_config, data, reward_funcs, tools)
        if checkpoint is not None and isinstance(trainer, OPOTrainer):
            with _blamed_on(f"resume_from_checkpoint={checkpoint!r}"):
                check_resumable(trainer, checkpoint)
    trainer.plan += f"\n  {'data':<10} {data.plan}"
    lock: AbstractContextManager[Any] = nullcontext()
    if args.process_index == 0 and not given.plan:
        lock = output_dir.claim(folder, resume=resume, overwrite=script.overwrite)
        if checkpoint is None:
            forget_if_changed(folder, settings)
        settings |= {"prompt_style_used": data.prompt_style}  # a recipe may leave it open
        output_dir.write_description(folder, recipe=recipe, settings=settings, seed=args.seed)
    return Run(trainer, script, data, checkpoint, lock)


def _find_checkpoint(
    script: OPOScriptArguments, args: OPOConfig, settings: Mapping[str, Any], model: str
) -> tuple[str | None, bool]:
    """The checkpoint to resume from, if any, and whether the run in the folder continues."""
    folder, asked = Path(args.output_dir), args.resume_from_checkpoint
    with _blamed_on(f"output_dir={args.output_dir!r} with resume_from_checkpoint={asked!r}"):
        checkpoint = find_checkpoint(asked, args.output_dir)
        resume = continues(folder, asked, checkpoint)
        output_dir.check(folder, resume=resume, overwrite=script.overwrite)
        if checkpoint is not None:
            check_same_run(checkpoint, settings)
    return checkpoint, resume


def _check_models(args: OPOConfig, model_config: ModelConfig) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Configuration and tokenizer of the model, whose weights the trainer checks; checks those of `rollouts_model`."""
    path = model_path(model_config)
    source: Any = {"revision": model_config.model_revision, "trust_remote_code": args.trust_remote_code}
    with _blamed_on(_named(model_config)):
        config = AutoConfig.from_pretrained(path, **source)
        with suppress(OSError):  # not every model has that file
            generation = GenerationConfig.from_pretrained(path, revision=model_config.model_revision).to_dict()
            check_generation_config(getattr(args, "generation_kwargs", None) or {}, generation)
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
    if author := getattr(args, "rollouts_model", None):
        args.rollouts_model = author = EMBEDDED_MODELS.get(author, author)
        with _blamed_on(f"rollouts_model={author!r}"):
            check_weights("rollouts_model", author, source | _init_options(args, model_config))
    return config, tokenizer


def model_path(model_config: ModelConfig) -> str:
    """Hub id or folder of the model; for an embedded one, its folder in the installed package."""
    name = str(model_config.model_name_or_path)
    return EMBEDDED_MODELS.get(name, name)


def make_trainer(
    script: OPOScriptArguments,
    args: OPOConfig,
    model_config: ModelConfig,
    data: Data,
    reward_funcs: list,
    tools: Tools | None = None,
) -> OPOTrainer:
    """Build the trainer of a run, with its log file, progress bar and validation."""
    folder = Path(args.output_dir)
    args.model_init_kwargs = _init_options(args, model_config)
    trainer = methods.by_trainer()[script.trainer].trainer_class(
        model=model_path(model_config),
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=data.training,
        eval_dataset=data.evaluation,
        callbacks=[LogFile(folder)],
        quantization_config=get_quantization_config(model_config),
        peft_config=get_peft_config(model_config),
        **({} if tools is None else tools.for_trainer),
    )
    if data.validation is not None:
        steps, decoding = script.validation_steps, script.validation_decoding
        trainer.add_callback(Validation(trainer, data.validation, steps=steps, decoding=decoding, folder=folder))
    for default in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(default)
    if not args.disable_tqdm:
        trainer.add_callback(ProgressBar())
    return trainer


def _init_options(args: OPOConfig, model_config: ModelConfig) -> dict[str, Any]:
    """The options of `from_pretrained` with which the policy is loaded."""
    options: Any = args.model_init_kwargs or {}
    if "torch_dtype" in options:
        reject("model_init_kwargs", options, "torch_dtype", "is overridden by `dtype`", "Set `dtype` instead")
    return {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype,
        "use_safetensors": True,  # pickled weights could run code
        **options,
    }


def _named(model_config: ModelConfig) -> str:
    return f"model_name_or_path={model_config.model_name_or_path!r}"


def _blamed_on(what: str) -> AbstractContextManager[None]:
    return foreign.library(f"{what} cannot be used", own=(ValueError, ImportError, RewardError))


def run(ready: Run) -> dict[str, Any]:
    """Train, and measure accuracies before and after; returns what `summary.json` holds."""
    trainer, script, data, checkpoint = ready.trainer, ready.script, ready.data, ready.checkpoint
    folder = Path(trainer.args.output_dir)
    is_main = trainer.accelerator.is_main_process
    summary = known_accuracies(folder, checkpoint)
    before = ReportBefore(trainer, data.report, script.report_samples, summary)
    trainer.callback_handler.callbacks.insert(0, before)  # prints above the progress bar
    if is_main:
        files.write(folder / run_folder.PLAN, trainer.plan + "\n")
    started = time.perf_counter()
    with StopOnSignal(trainer):
        trainer.train(resume_from_checkpoint=checkpoint)
        seconds = round(time.perf_counter() - started - before.seconds, 1)
        trainer.save_model(trainer.args.output_dir)
    summary |= {"optimizer_steps": trainer.state.global_step, "train_seconds": seconds}
    summary["after"] = measure(trainer, data.report, script.report_samples)
    if is_main:
        files.write_json(folder / run_folder.SUMMARY, summary)
    if summary["after"]:
        trainer.accelerator.print(table(summary.get("before", {}), summary["after"]))
    if trainer.args.push_to_hub:
        name = script.dataset_name or ""  # the model card links to it
        on_hub = name.count("/") == 1 and not name.startswith((".", "~", "/")) and not Path(name).exists()
        trainer.push_to_hub(dataset_name=name if on_hub else None)
    trainer.end()
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point; returns the exit status: 2 for a recipe or command line that cannot be run, 1 for a reward function
    that fails in training, 128 plus its number for a signal that ended training after a save.
    """
    # TRL still calls renamed fields of Transformers by their old names; users cannot fix that.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    if argv is None:
        argv, sys.argv[1:] = sys.argv[1:], mask_words(sys.argv[1:])  # trackers record `sys.argv`
    debug = "--debug" in argv
    try:
        ready = prepare(argv)
    except (ValueError, ImportError, OSError, RewardError) as error:
        return report_error("opo-trl train", error, debug=debug)
    status = 0
    if "--plan" in argv:
        ready.trainer.accelerator.print(ready.trainer.plan)
        ready.trainer.end()
        for made in (folder := Path(ready.trainer.args.output_dir)) / "completions", folder:
            with suppress(OSError):  # only if empty
                made.rmdir()
        return 0
    with ready.lock:
        try:
            run(ready)
        except StoppedBySignal as stopped:
            status = stopped.code
        except (RewardError, OSError) as error:
            # An error of the disk while the log or the results are written says all; any other one has a traceback.
            if isinstance(error, OSError) and not _is_within(error.filename, ready.trainer.args.output_dir):
                raise
            return report_error("opo-trl train", error, debug=debug, status=1)
        except SystemExit as error:  # of a library, or of a user's code: with status 0, the run would look finished
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{where.name} ({where.filename}, line {where.lineno}) has ended training with {told(error)}."
            return report_error("opo-trl train", RuntimeError(said), debug=debug, status=1)
        finally:  # the report matters most when a run ends with an error
            if ready.trainer.args.process_index == 0:
                write_or_say_why(Path(ready.trainer.args.output_dir))
    # `Trainer.end` has shut the process group down, but its threads and connections live as long as the wrapped model
    # refers to it. Left to the exit of the interpreter, gloo's destructor sometimes hangs. All processes have agreed
    # to end, so nothing is pending. After an error, other processes may still wait, so this is skipped.
    del ready
    gc.collect()
    return status


def _is_within(path: Any, folder: str) -> bool:
    return isinstance(path, str) and Path(path).absolute().is_relative_to(Path(folder).absolute())


if __name__ == "__main__":
    sys.exit(main())
