"""
The `opo-trl` command.

    opo-trl train --config recipes/R.yaml [--accelerate_config X] [--field value] [--num_processes 4 …]
    opo-trl report RUN_FOLDER … [--output REPORT.html]
    opo-trl diagnose RUN [--output REPORT.html]
    opo-trl recipes [RECIPE] [--output FOLDER]

`opo_trl.checks.errors` explains the exit status; of `diagnose`, 1 says that something is wrong with the run.
`--debug` also shows the traceback of an error.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..checks.errors import report_error
from .words import check_at_once, find_accelerate_config, split


_FIRST_RUN = """\
a first run, minutes on a CPU:
  opo-trl recipes arithmetic/opo.yaml
  opo-trl train --config recipes/arithmetic/opo.yaml
your own problems with answers:
  opo-trl recipes own_data.yaml
"""
# Commands of earlier releases, and what is done instead.
_GONE = {
    "env": "use `trl env`, and `opo-trl --version`.",
    "figures": "trackers draw curves (`report_to: trackio`), and the page of `opo-trl report` small ones.",
    "compare": "train a run per recipe and seed with `opo-trl train`, then `opo-trl report RUN RUN …`.",
    "evaluate": "use lm-eval's own on the folder of the run, such as `lm_eval --model hf --model_args "
    "pretrained=runs/x,dtype=float32 --tasks gsm8k --apply_chat_template`.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `opo-trl`; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] and (said := _GONE.get(argv[0])):
        return report_error(f"opo-trl {argv[0]}", ValueError(f"this command is gone: {said}"), debug=False)
    parser = _make_parser()
    arguments = parser.parse_args(argv[:1] if argv[:1] == ["train"] else argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return _run(arguments, argv[1:])
    except (ValueError, ImportError, OSError) as error:  # an error of the file system names the file
        return report_error(f"opo-trl {arguments.command}", error, debug="--debug" in argv)


def _make_parser() -> argparse.ArgumentParser:
    form: Any = {"epilog": _FIRST_RUN, "formatter_class": argparse.RawDescriptionHelpFormatter}
    text = "Orthogonalized Policy Optimization on TRL."
    parser = argparse.ArgumentParser(prog="opo-trl", description=text, **form)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("train", help="train from a recipe, through accelerate", add_help=False)
    report = commands.add_parser("report", help="print the report of a run, or compare several finished ones")
    recipes = commands.add_parser("recipes", help="list the package's recipes, or copy one to change it")
    diagnose = commands.add_parser("diagnose", help="judge the log of any GRPO run, of TRL's trainer too")
    diagnose.add_argument(
        "run", type=Path, help="TRL's folder or trainer_state.json, or an export: .jsonl, .json, .csv"
    )
    diagnose.add_argument("--output", type=Path, help="also write this .html file")
    report.add_argument("folder", nargs="+", type=Path, help="folders of runs; of several, prints a table")
    report.add_argument("--output", type=Path, help="also write this .html file; of several runs, this .md file")
    recipes.add_argument("recipe", nargs="?", help="recipe, or folder of recipes, to copy")
    text = "folder to copy to (default: recipes)"
    recipes.add_argument("--output", type=Path, default=Path("recipes"), help=text)
    for command in (report, diagnose, recipes):
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _run(arguments: argparse.Namespace, words: list[str]) -> int:
    # Each command imports what it needs: TRL takes seconds.
    if arguments.command == "train":
        return _train(words)
    if arguments.command == "report":
        from ..report.run_report import report

        report(arguments.folder, arguments.output)
    elif arguments.command == "diagnose":
        from ..report.diagnosis import diagnose

        return diagnose(arguments.run, arguments.output)
    elif arguments.command == "recipes":
        from .shipped import copy_out
        from .shipped import describe as list_recipes

        print(*(copy_out(arguments.recipe, arguments.output) if arguments.recipe else [list_recipes()]), sep="\n")
    return 0


def _train(argv: list[str]) -> int:
    """Launch `opo_trl.train` through accelerate, which also gets every option that is not a field of a recipe."""
    if not {"-h", "--help", "--help_all"} & {*argv}:
        check_at_once(argv)
    import torch
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..config import check_deepspeed
    from ..report.run_folder import is_run
    from ..report.run_report import write_or_say_why
    from .foreign import library
    from .recipe import describe_unknown, launch_words, read, set_variables
    from .signals import passed_on

    fields = read(argv)
    set_variables(fields.env)  # before the launch: OMP_NUM_THREADS and others are read when a process starts
    config_file = find_accelerate_config(fields.values["accelerate_config"], split(argv)[0])
    if config_file:
        fix = "Fix that file, or make one with `accelerate config`."
        with library(f"accelerate_config={config_file!r} cannot be used", fix):
            config = load_config_from_file(config_file)
            int(getattr(config, "num_processes", None) or 1)
        if config.distributed_type == "DEEPSPEED":
            check_deepspeed(f"accelerate_config={config_file!r}")
    launch = [*(["--config_file", config_file] if config_file else []), *launch_words(fields.launch), *fields.unknown]
    known, place = list(argv), 0
    for word in fields.unknown:  # argparse returns them in their order
        place = known.index(word, place)
        del known[place]
    script = ["-m", "opo_trl.train", *known]
    launcher = launch_command_parser()
    launcher.error = _reject_option  # type: ignore[method-assign]  # its own shows all options
    launch_arguments, unknown = launcher.parse_known_args([*launch, *script])
    if launch_arguments.config_file and not Path(launch_arguments.config_file).is_file():
        raise ValueError(f"config_file={launch_arguments.config_file!r} does not exist. Use `accelerate_config`.")
    if unknown or launch_arguments.training_script != "opo_trl.train":
        names = [word for word in unknown if word.startswith("--")] or [launch_arguments.training_script]
        raise ValueError(describe_unknown(fields.unknown, names, fields.trainer, further=vars(launch_arguments)))
    if launch_arguments.config_file is None and not Path(default_config_file).is_file():
        # Without a configuration, accelerate would name each default that it takes. Precision is the recipe's field.
        defaults = {"num_processes": torch.accelerator.device_count(), "num_machines": 1}
        for name, value in {**defaults, "mixed_precision": "no", "dynamo_backend": "no"}.items():
            if getattr(launch_arguments, name) is None:
                setattr(launch_arguments, name, value)
    try:
        with passed_on():
            launch_command(launch_arguments)
    except subprocess.CalledProcessError as error:
        return _status("the training process", error.returncode)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        folder = Path(os.path.expanduser(fields.values["output_dir"] or ""))
        if failure.exitcode != 2 and launch_arguments.machine_rank in (None, 0) and is_run(folder):
            write_or_say_why(folder)  # the first process may have been ended before it could
        return _status(f"training process {rank}", failure.exitcode)
    return 0


def _reject_option(message: str) -> NoReturn:
    message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
    raise ValueError(f"{message}. It is an option of accelerate: `accelerate launch --help` lists its values.")


def _status(process: str, code: int) -> int:
    """Exit status of a process that failed. It has reported why, unless a signal ended it."""
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = ", probably because memory ran out" if name == "SIGKILL" else ""
    advice = "Continue with `--resume_from_checkpoint auto`."
    print(f"opo-trl train: error: {process} was ended by {name}{hint}. {advice}", file=sys.stderr)
    return 128 - code  # as in a shell


if __name__ == "__main__":
    sys.exit(main())
