"""
Trials, then reports: the same stages for every method of a comparison.

All settings are tried with the first tuning seed, the best few with the other tuning seeds, and the best of those
reports, with seeds that no choice was based on. Each finished run is a line of a file that is committed, so that the
same command goes on anywhere.
"""

import json
import math
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool
from tqdm import tqdm


Results = Mapping[Any, Mapping[str, Any]]  # run → what it measured


@dataclass(frozen=True)
class Stages:
    """
    The runs of a method.

    Args:
        run (`Callable[[setting, seed, tuning], Run]`): makes a run, a dataclass; `tuning` if a choice depends on it.
        settings (`Sequence`): that are tried.
        tuning_seeds, seeds (`Sequence[int]`): of trials and of reports; none of a method that is only tuned.
        few (`int`): settings that are tried with all tuning seeds.
        measure (`str`): result of a run by which settings are chosen, the higher the better.
    """

    run: Callable[[Any, int, bool], Hashable]
    settings: Sequence[Any]
    tuning_seeds: Sequence[int]
    seeds: Sequence[int]
    few: int = 3
    measure: str = "sampled"

    def scores(self, setting: Any, found: Results) -> list[float]:
        """What the trials of a setting measured, if all are finished."""
        return [found[self.run(setting, seed, True)][self.measure] for seed in self.tuning_seeds]

    def best_few(self, found: Results) -> list[Any]:
        """The best settings on the first tuning seed."""

        def first(setting: Any) -> float:
            return found[self.run(setting, self.tuning_seeds[0], True)][self.measure]

        return sorted(self.settings, key=first, reverse=True)[: self.few]

    def chosen(self, found: Results) -> Any:
        """The best of the few, on all tuning seeds."""
        return max(self.best_few(found), key=lambda setting: fmean(self.scores(setting, found)))

    def next_runs(self, found: Results) -> list[Any]:
        """The missing runs that can be made now, of one stage; none when all are finished."""
        for stage in (self._first_trials, self._further_trials, self._reporting):
            if missing := [run for run in stage(found) if run not in found]:
                return missing
        return []

    def _first_trials(self, _: Results) -> list[Any]:
        """All settings with the first tuning seed."""
        return [self.run(setting, self.tuning_seeds[0], True) for setting in self.settings]

    def _further_trials(self, found: Results) -> list[Any]:
        """The best few of them with the other tuning seeds."""
        pairs = product(self.best_few(found), self.tuning_seeds[1:])
        return [self.run(setting, seed, True) for setting, seed in pairs]

    def _reporting(self, found: Results) -> list[Any]:
        """The chosen setting with the seeds that report."""
        chosen = self.chosen(found)
        return [self.run(chosen, seed, False) for seed in self.seeds]

    def reports(self, found: Results) -> list[Mapping[str, Any]]:
        """What the runs of the chosen setting measured, in the order of the seeds, if all are finished."""
        return [found[self.run(self.chosen(found), seed, False)] for seed in self.seeds]


def extended(trials: Stages, found: Results, times: int) -> Stages:
    """
    Trials whose settings are pairs of numbers, in a region that grows where its edge is chosen: by the number twice as
    large or half as large, with all others of its pair, at most so many times.
    """
    for _ in range(times):
        if trials.next_runs(found):
            break
        chosen = trials.chosen(found)
        columns = zip(*trials.settings, strict=True)
        wider = [_around(number, sorted(set(column))) for number, column in zip(chosen, columns, strict=True)]
        trials = replace(trials, settings=list(product(*wider)))
    return trials


def _around(chosen: float, numbers: list[float]) -> list[float]:
    """The numbers, and one beyond the edge if that is chosen."""
    lowest, highest = numbers[0], numbers[-1]
    if lowest == highest:
        return numbers
    below = [lowest / 2] if chosen == lowest else []
    above = [highest * 2] if chosen == highest else []
    return [*below, *numbers, *above]


def read(kind: Any, *files: Path) -> dict[Any, dict[str, Any]]:
    """The finished runs of some files, as `kind`, the dataclass of a run."""
    lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return {kind(**{name: line[name] for name in kind.__dataclass_fields__}): line for line in lines}


def run_missing(
    methods: Iterable[Callable[[], list[Any]]], make: Callable[[Any], dict[str, Any]], file: Path, jobs: int
) -> int:
    """
    Make the missing runs of each method, stage by stage, in new processes; each is written when it ends.

    Args:
        methods (`Iterable[Callable]`): of each method, what gives its next runs.
        make (`Callable[[Run], dict]`): makes a run; returns its line of the file.
        file (`Path`): of finished runs.
        jobs (`int`): runs at a time.

    Returns:
        `int`: the exit status, 1 if a run failed. Then its method's later stages are left out, and the others go on.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    context, failed = multiprocessing.get_context("forkserver"), False
    context.set_forkserver_preload(["opo_trl.command.train", *_imported()])  # importing them takes long
    workers = ProcessPool(jobs, max_tasks=1, context=context)
    with workers, file.open("a") as lines, tqdm(desc="runs") as bar:
        for next_runs in methods:
            complete = True
            while complete and (missing := next_runs()):
                runs = {workers.schedule(_made, (make, run)): run for run in missing}
                for finished in as_completed(runs):
                    line, error = _outcome(finished, runs[finished])
                    if error:
                        print(error, file=sys.stderr)
                        complete, failed = False, True
                    else:
                        lines.write(json.dumps(line) + "\n")
                        lines.flush()
                        bar.update()
    return int(failed)


def _imported() -> list[str]:
    """The modules of benchmarks that are imported, without the one that `python -m` has started."""
    return [name for name in sys.modules if name.startswith(f"{__package__}.")]


def _made(make: Callable[[Any], dict[str, Any]], run: Any) -> tuple[dict[str, Any], str]:
    """A run's line of the file; or an empty one, and what was wrong."""
    try:
        return make(run), ""
    except Exception:
        return {}, f"{run} failed:\n{traceback.format_exc()}"


def _outcome(finished: ProcessFuture, run: Any) -> tuple[dict[str, Any], str]:
    try:
        return finished.result()
    except (ProcessExpired, BrokenProcessPool) as error:
        return {}, f"{run} failed: {error}"


def holm(p: Mapping[Any, float], comparisons: int | None = None) -> set[Any]:
    """The comparisons that remain at 5 % after Holm's correction for all `comparisons`, by default those given."""
    remaining: set[Any] = set()
    p = {name: 1.0 if math.isnan(value) else value for name, value in p.items()}  # NaN where nothing differs
    for rank, name in enumerate(sorted(p, key=p.__getitem__)):
        if p[name] > 0.05 / ((comparisons or len(p)) - rank):
            break
        remaining.add(name)
    return remaining
