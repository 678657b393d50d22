"""
Run methods over seeds, and write a report that compares them.

    python -m benchmarks.compare recipes/arithmetic/*.yaml --seeds 1 2 3 --output runs/comparison [--jobs 2]
    python -m benchmarks.compare runs/a runs/b --output runs/comparison

A recipe `R.yaml` runs in `OUTPUT/runs/R/seed-N`, unless that holds a finished run; any other `--field value` is
passed to every `opo-trl train`. A folder is a finished run, or contains some.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.methods import BASELINE
from opo_trl.checks.secrets import mask_words
from opo_trl.checks.text import one_line, report_error

from .jobs import OWN_FIELDS, Job, check, failure, run_missing
from .measures import Comparison
from .report import check_output, write_report
from .runs import Run, by_label, check_comparable, check_same_method, find_runs, read_run


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a run failed, 2 if the input is wrong, 130 if it was interrupted."""
    parser = _make_parser()
    arguments, fields = parser.parse_known_args(argv)
    try:
        return _compare(arguments, fields)
    except (ValueError, ImportError, OSError) as error:
        return report_error(parser.prog, error, debug=arguments.debug)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted. To resume, repeat the command.", file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    text = "Run what is missing, then report on all runs. Any other --field value is passed to every run."
    # Without abbreviations: a prefix of an option may be a field of a run.
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=text, allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", type=Path, help="recipes (*.yaml), and folders of finished runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="seeds to run each recipe with")
    text = "folder for the report, and for the recipes' runs"
    parser.add_argument("--output", type=Path, required=True, help=text)
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at once (default: 1)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--baseline", help=f"method to compare with (default: {BASELINE}, or the first one)")
    return parser


def _compare(arguments: argparse.Namespace, fields: list[str]) -> int:
    jobs = plan(arguments, fields)
    own = [read_run(folder) for path in arguments.inputs if path.is_dir() for folder in find_runs(path)]
    _check(own)
    labels = {run.label for run in own} | {one_line(job.recipe.stem) for job in jobs}
    if arguments.baseline not in (None, *labels):
        known = ", ".join(sorted(labels))
        raise ValueError(f"--baseline {arguments.baseline} is none of the methods. Use one of {known}.")
    check_output(arguments.output)
    failed = run_missing(jobs, arguments.jobs, {run.name: run.settings for run in own})
    if failed:
        print(*map(failure, failed), sep="\n\n", file=sys.stderr)
        print(f"\n{len(failed)} of {len(jobs)} runs failed. To resume them, repeat the command.", file=sys.stderr)
        return 1
    runs = [*own, *(read_run(job.folder) for job in jobs)]
    _check(runs)
    methods = order(runs, arguments.baseline)
    print(write_report(Comparison(methods), arguments.output, command(arguments, fields)))
    return 0


def _check(runs: Sequence[Run]) -> None:
    check_same_method(runs)
    check_comparable({run.name: run.settings for run in runs})


def order(runs: Sequence[Run], baseline: str | None) -> dict[str, list[Run]]:
    """The runs of each method: the baseline first, the others sorted by name."""
    methods = by_label(runs)
    if baseline is None:
        baseline = BASELINE if BASELINE in methods else runs[0].label
    return {label: methods[label] for label in sorted(methods, key=lambda label: (label != baseline, label))}


def command(arguments: argparse.Namespace, fields: Sequence[str]) -> str:
    """The command that reproduces the report, without paths of this machine."""
    parts = ["python", "-m", "benchmarks.compare", *map(str, arguments.inputs)]
    parts += ["--seeds", *map(str, arguments.seeds)] if arguments.seeds else []
    parts += ["--baseline", arguments.baseline] if arguments.baseline else []
    parts += mask_words(fields)
    named = [Path(part).name if Path(part).is_absolute() else part for part in parts]
    return shlex.join([*named, "--output", "OUTPUT"])


def plan(arguments: argparse.Namespace, fields: list[str]) -> list[Job]:
    """The runs of the recipes, seed by seed, so that every method has results early."""
    recipes = [path for path in arguments.inputs if not path.is_dir()]
    if missing := [str(path) for path in recipes if not path.is_file()]:
        raise ValueError(f"inputs={missing} do not exist. Pass recipes or folders of runs; fields come last.")
    if recipes and not arguments.seeds:
        raise ValueError(f"{str(recipes[0])!r} is a recipe, and --seeds is not set. Add the seeds: `--seeds 1 2 3`.")
    if not recipes and (arguments.seeds or fields):
        given = f"--seeds {' '.join(map(str, arguments.seeds))}" if arguments.seeds else " ".join(fields)
        raise ValueError(f"{given} has no effect: there is no recipe to run. Remove it, or add a recipe.")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs} is not allowed. Set it to a positive number.")
    stems = [path.stem for path in recipes]
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise ValueError(f"Several recipes are named {twice[0]!r}, which is the method's name. Rename one of them.")
    options = [word[2:].partition("=")[0] for word in fields if word.startswith("--")]
    names = [option.replace("-", "_") for option in options]
    if own := [name for name in names if name in OWN_FIELDS]:
        raise ValueError(f"--{own[0]} is set by this command for each run. Remove it.")
    jobs = []
    for seed in dict.fromkeys(arguments.seeds):
        for recipe in recipes:
            folder = arguments.output / "runs" / recipe.stem / f"seed-{seed}"
            jobs.append(Job(recipe, seed, folder, tuple(fields)))
    for job in jobs:
        check(job)
    return jobs


if __name__ == "__main__":
    sys.exit(main())
