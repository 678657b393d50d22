"""
The `opo-trl` command.

    opo-trl train --config recipes/R.yaml [--accelerate_config X] [--field value] [--num_processes 4 …]
    opo-trl compare RECIPE_OR_RUN … [--seeds 1 2 3] --output FOLDER
    opo-trl report RUN_FOLDER
    opo-trl figures RUN_FOLDER
    opo-trl figures saturation [--output FILE]
    opo-trl env
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `opo-trl`; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="opo-trl", description="Orthogonalized Policy Optimization on TRL.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train as a recipe says, through accelerate", add_help=False)
    commands.add_parser("compare", help="compare methods over seeds, or finished runs", add_help=False)
    figures = commands.add_parser("figures", help="draw the figures of a run again, or the toy of gradient saturation")
    figures.add_argument("subject", help="folder of a run, or `saturation`")
    figures.add_argument("--output", type=Path, default=Path("saturation.png"), help="file of the saturation figure")
    report = commands.add_parser("report", help="write the report of a run again, finished or not")
    report.add_argument("folder", type=Path, help="folder of a run")
    commands.add_parser("env", help="print what a bug report needs")
    arguments, _ = parser.parse_known_args(argv[:1] if argv[:1] in (["train"], ["compare"]) else argv)
    try:
        if arguments.command == "train":
            return _train(argv[1:])
        if arguments.command == "compare":
            from .compare import main as compare

            return compare(argv[1:])
        if arguments.command == "report":
            from .report import write_report

            print(write_report(arguments.folder))
            return 0
        if arguments.command == "env":
            from .environment import describe

            print(describe())
            return 0
        return _figures(arguments.subject, arguments.output)
    except ValueError as error:
        print(f"opo-trl {arguments.command}: error: {error}", file=sys.stderr)
        return 2


def _figures(subject: str, output: Path) -> int:
    from .figures import draw_run, draw_saturation

    drawn = [draw_saturation(output)] if subject == "saturation" else draw_run(Path(subject))
    print(*drawn, sep="\n")
    return 0


def _train(argv: list[str]) -> int:
    """Launch `opo_trl.train` through accelerate; what no field of a recipe is named like goes to accelerate."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from .train import find_accelerate_config, make_parser, read_recipe

    fields = list(argv)
    recipe_path = None
    if "--config" in argv[:-1]:
        position = fields.index("--config")
        _, recipe_path = fields[position : position + 2]
        del fields[position : position + 2]
    recipe, trainer = read_recipe(recipe_path, fields)
    # Before the launch: OMP_NUM_THREADS and the like are read when a process starts.
    os.environ.update({name: str(value) for name, value in recipe.pop("env", {}).items()})
    parser = make_parser(trainer, prog="opo-trl train")
    parser.set_defaults_with_config(**recipe)
    arguments, for_accelerate = parser.parse_known_args(fields)
    config_file = find_accelerate_config(arguments.accelerate_config, recipe_path)
    launch = [*(["--config_file", config_file] if config_file else []), *for_accelerate]
    script = ["-m", "opo_trl.train", *_without(argv, for_accelerate)]
    try:
        launch_command(launch_command_parser().parse_args([*launch, *script]))
    except subprocess.CalledProcessError as error:  # the process has said why
        return error.returncode
    except ChildFailedError as error:  # and so have several
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status  # a signal, as shells count it
    return 0


def _without(items: list[str], removed: list[str]) -> list[str]:
    """`items` less `removed`, which stand among them in the same order."""
    rest = iter(removed)
    following = next(rest, None)
    kept = []
    for item in items:
        if item == following:
            following = next(rest, None)
        else:
            kept.append(item)
    return kept


if __name__ == "__main__":
    sys.exit(main())
