"""
The `opo-trl` command.

    opo-trl train recipes/R.yaml [--accelerate_config X] [--field value] [--num_processes 4 …] [--plan]
    opo-trl report RUN_FOLDER … [--output REPORT.html]
    opo-trl diagnose RUN [--output REPORT.html]
    opo-trl recipes [RECIPE] [--output FOLDER]
    opo-trl pivots LOGS --model MODEL --output FOLDER
    opo-trl selftest

`opo_trl.checks.text` explains the exit status; of `diagnose`, 1 says that something is wrong with the run, of
`selftest` with the installed releases.
`--debug` also shows the traceback of an error.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..checks.text import report_error
from . import pivots


SHIPPED = Path(__file__).parents[1] / "recipes"  # the recipes of the package

_FIRST_RUN = """\
a first run, minutes on a CPU:
  opo-trl recipes arithmetic/opo.yaml
  opo-trl train recipes/arithmetic/opo.yaml
your own problems with answers:
  opo-trl recipes own_data.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point of `opo-trl`; returns the exit status: 2 for an error that the message explains, else what the command
    returns, 0 if all is well.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["train"]:
            from .launching import launch  # it needs more modules than the other commands

            return launch(argv[1:])
        return _run(argv)
    except (ValueError, ImportError, OSError) as error:  # an error of the file system names the file
        return report_error(f"opo-trl {argv[0]}", error, debug="--debug" in argv)


def _run(argv: list[str]) -> int:
    """Run a command other than `train`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="opo-trl",
        description="Orthogonalized Policy Optimization on TRL.",
        epilog=_FIRST_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("train", help="train from a recipe, through accelerate")  # which has its own parser
    diagnose = commands.add_parser("diagnose", help="judge the log of any GRPO run, of TRL's trainer too")
    diagnose.add_argument(
        "run", type=Path, help="TRL's folder or trainer_state.json, or an export: .jsonl, .json, .csv"
    )
    diagnose.add_argument("--output", type=Path, help="also write this .html file")
    report = commands.add_parser("report", help="print the report of a run, or compare several finished ones")
    report.add_argument("folder", nargs="+", type=Path, help="folders of runs; of several, prints a table")
    report.add_argument("--output", type=Path, help="also write this .html file; of several runs, this .md file")
    recipes = commands.add_parser("recipes", help="list the package's recipes, or copy one to change it")
    recipes.add_argument("recipe", nargs="?", help="recipe to copy, or a folder of them, such as `agent`, with a game")
    recipes.add_argument("--output", type=Path, default=Path("recipes"), help="folder to copy to (default: recipes)")
    pivots_parser = commands.add_parser("pivots", help="make states to train in of the logs of an agent")
    pivots.add_options(pivots_parser)
    commands.add_parser("selftest", help="check in minutes that the installed releases train what they are told")
    for command in (report, diagnose, recipes, pivots_parser):
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")

    arguments = parser.parse_args(argv)
    # Each command imports what it needs: TRL takes seconds.
    if arguments.command == "report":
        from ..report.run_report import report as write_report

        write_report(arguments.folder, arguments.output)
    elif arguments.command == "diagnose":
        from ..report.logs import diagnose as judge

        return judge(arguments.run, arguments.output)
    elif arguments.command == "recipes":
        lines = copy_out(arguments.recipe, arguments.output) if arguments.recipe else _recipes_with_first_lines()
        print(*lines, sep="\n")
    elif arguments.command == "pivots":
        pivots.run(arguments)
    elif arguments.command == "selftest":
        from .. import selftest

        return selftest.run()
    else:
        parser.print_help()
    return 0


def _recipes_with_first_lines() -> Sequence[str]:
    """A line for each recipe of the package: its name, and the first line of its file, which says what it does."""
    first_lines = {}
    for path in sorted(SHIPPED.rglob("*.yaml")):
        if path.parent.name != "accelerate":  # its configurations are no recipes
            first_line, *_ = path.read_text(encoding="utf-8").split("\n", 1)
            first_lines[str(path.relative_to(SHIPPED))] = first_line.removeprefix("# ")
    width = max(map(len, first_lines))
    return [f"{name:<{width}}  {line}" for name, line in first_lines.items()]


def copy_out(name: str, output: Path) -> Sequence[Path]:
    """
    Copy a recipe of the package, or the files of a folder of recipes, and the configurations of accelerate that they
    name, to a folder; returns the files written. A `ValueError` if there is no such recipe, or a file there differs.
    """
    name = name.removeprefix("recipes/")
    source = SHIPPED / name
    files = sorted(file for file in source.glob("*.*") if file.is_file()) if source.is_dir() else [source]
    if not (name and files and all(map(Path.is_file, files))):
        raise ValueError(f"recipe={name!r} is not one of the package's. `opo-trl recipes` lists them.")
    parts: dict[str, None] = {}  # paths of the files to copy, in order, without duplicates
    for file in files:
        parts[str(file.relative_to(SHIPPED))] = None
        text = file.read_text(encoding="utf-8")
        parts.update(dict.fromkeys(re.findall(r"^accelerate_config: .*?(accelerate/\S+)", text, re.MULTILINE)))
    written = []
    for part in parts:
        target = output / part
        if target.is_file() and target.read_bytes() != (SHIPPED / part).read_bytes():
            raise ValueError(f"{str(target)!r} exists and differs from the package's. Move it, or set `--output`.")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SHIPPED / part, target)
        written.append(target)
    return written


if __name__ == "__main__":
    sys.exit(main())
