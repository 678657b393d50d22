"""
What makes OPO work: pushes, weights and pull-backs, and published objectives, tuned alike (plan.md).

    python -m benchmarks.losses.objectives run --jobs 2                 # what is missing of the two records
    python -m benchmarks.losses.objectives report                       # → objectives.md and .png
    python -m benchmarks.losses.objectives add my_module.MyObjective    # tunes and runs a further one: its row
    python -m benchmarks.losses.objectives check [replay]               # makes a row of the README's table again

Every finished run is a line of `objectives.jsonl` or `fresh_seeds.jsonl`, which are committed: `run` goes on
from there, on any machine. `add` takes an objective with the loss of tokens or completions, and keeps its runs beside
the table's, in `runs/objectives.jsonl`.
"""

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from pathlib import Path

from ... import staged
from ...pages import table
from . import design
from .design import ENTRIES, Entry, Results
from .report import AGES, METHODS, cells, reported, row_of, write_report
from .training import Run


HERE = Path(__file__).resolve().parent
RECORD, FRESH, ADDED = HERE / "objectives.jsonl", HERE / "fresh_seeds.jsonl", Path("runs/objectives.jsonl")


read = partial(staged.read, Run)  # the finished runs of some files


def run_missing(cells: Iterable[tuple[str, str]], file: Path, jobs: int) -> int:
    """Make the missing runs of some objectives and regimes; returns the exit status."""

    def next_jobs(name: str, regime: str) -> list[tuple[Run, design.Entry]]:
        found = read(RECORD, file)
        return [(run, ENTRIES[name]) for run in design.stages(name, regime, found).next_runs(found)]

    return staged.run_missing([partial(next_jobs, *cell) for cell in cells], design.make, file, jobs)


def missing_of_fresh_seeds() -> list[tuple[Run, design.Entry]]:
    """The missing runs with fresh seeds."""
    done = read(FRESH)
    return [(run, ENTRIES[run.objective]) for run in design.of_fresh_seeds(read(RECORD)) if run not in done]


def add(path: str, jobs: int, field: str, values: tuple[float, ...]) -> int:
    """Tune and run an objective that is not in the table, and print its rows beside the table's; the exit status."""
    module, _, name = path.rpartition(".")
    sys.path.insert(0, "")
    ENTRIES[name] = Entry(getattr(import_module(module), name), field, values if field else (0.0,))
    design.REPORTED = (*design.REPORTED, name)
    status = run_missing([(name, regime) for regime in design.TABLE], ADDED, jobs)
    found: Results = read(RECORD, ADDED)
    for regime in design.TABLE:
        print(f"\n{regime}")
        for each in design.REPORTED:
            print("  " + row_of(each, regime, found))
    return status


def check(regime: str, jobs: int) -> int:
    """Make the runs of one row of the README's table again, and print it below the recorded row; the exit status."""
    recorded, file = read(RECORD), Path("runs/check.jsonl")
    wanted = [run for name in METHODS.values() for run in reported(name, regime, recorded).values()]

    def missing() -> list[tuple[Run, design.Entry]]:
        done = read(file)
        return [(run, ENTRIES[run.objective]) for run in wanted if run not in done]

    status = staged.run_missing([missing], design.make, file, jobs)
    rows = [["record", *cells(regime, recorded)], ["here", *cells(regime, read(file))]]
    print(table((AGES[regime], *METHODS), rows))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("run", "add", "check"):
        commands.add_parser(command).add_argument("--jobs", type=int, default=1, help="runs at a time")
    commands.choices["add"].add_argument("path", help="dotted path of a subclass of `opo_trl.objective.Objective`")
    commands.choices["add"].add_argument("--field", default="", help="its own field, of the configuration or its own")
    commands.choices["add"].add_argument("--values", type=float, nargs=2, help="two values of the field to try")
    commands.choices["check"].add_argument("regime", nargs="?", default="lag64", choices=AGES, help="the row")
    commands.add_parser("report")
    arguments = parser.parse_args()
    if arguments.command == "run":
        status = run_missing(design.cells(), RECORD, arguments.jobs)
        return status or staged.run_missing([missing_of_fresh_seeds], design.make, FRESH, arguments.jobs)
    if arguments.command == "check":
        return check(arguments.regime, arguments.jobs)
    if arguments.command == "add":
        if bool(arguments.field) != bool(arguments.values):
            parser.error("--field and --values go together.")
        return add(arguments.path, arguments.jobs, arguments.field, tuple(arguments.values or ()))
    write_report(read(RECORD), read(FRESH), HERE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
