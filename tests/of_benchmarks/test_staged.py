"""Runs of a comparison: what happens to a run that fails, which runs there are, and which comparisons remain."""

import json
import math
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest

from benchmarks import staged
from benchmarks.losses import bounds, offline, real_model
from benchmarks.losses.objectives import design
from benchmarks.losses.objectives.__main__ import RECORD
from benchmarks.losses.objectives.training import Run
from benchmarks.staged import holm, read, run_missing
from opo_trl.command.recipe import parse


def killed_or_failed(run: int) -> dict:
    if run % 2 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if run == 3:
        raise ValueError("no 3")
    return {"run": run}


def test_a_killed_or_failed_run_ends_no_other(tmp_path, capfd, monkeypatch):
    forked = multiprocessing.get_context("fork")  # with all imports, for which new processes would take long
    monkeypatch.setattr(forked, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(staged, "multiprocessing", SimpleNamespace(get_context=lambda method: forked))
    file = tmp_path / "runs.jsonl"

    def next_runs():
        return [] if file.read_text() else [1, 2, 3, 4, 5]

    assert run_missing([next_runs], killed_or_failed, file, jobs=2) == 1
    finished = map(json.loads, file.read_text().splitlines())
    assert sorted(row["run"] for row in finished) == [1, 5]
    assert "3 failed" in capfd.readouterr().err


def test_recorded_runs_are_those_that_the_plans_ask_for():
    recorded = read(Run, RECORD)
    for cell in design.cells():
        if cell[0] != design.WIDER:  # which is not finished
            assert not design.stages(*cell, recorded).next_runs(recorded)
    recorded = read(offline.Run, offline.RECORD)
    for task in ("arithmetic", "spell_backward"):
        for name in offline.OBJECTIVES:
            assert not offline.stages(task, name).next_runs(recorded)
    # With rates at the edge of their region, which is then extended; seventeen cells are finished.
    finished_cells = bounds.cells()[:17]
    for cell in finished_cells:
        assert not bounds.next_runs(*cell)


@pytest.mark.parametrize("tuning", [True, False])
@pytest.mark.parametrize("task", real_model.TASKS)
@pytest.mark.parametrize("method", real_model.METHODS)
def test_command_line_asks_for_what_the_plan_says(method, task, tuning, tmp_path):
    run = real_model.Run(method, task, 2e-5, 3, tuning)
    script, args, _, _ = parse(run.command_line(tmp_path))
    assert script.levels == script.report_levels == [task]
    assert script.dataset_test_split == ("validation" if tuning else "test")
    assert args.learning_rate == 2e-5
    assert args.seed == 3
    assert args.generation_batch_size == real_model.COMPLETIONS
    assert args.max_completions == (384 if tuning else 768)
    passes_and_staleness = (2, 0) if method == "GRPO" else (4, 8)
    assert (args.num_iterations, args.max_staleness) == passes_and_staleness


def test_holm_goes_on_until_the_first_that_does_not_remain():
    assert holm({"a": 0.01, "b": 0.02, "c": 0.04, "d": 0.2}) == {"a"}
    assert holm({"a": 0.01, "b": 0.016, "c": 0.04, "d": 0.2}) == {"a", "b"}
    assert holm({"a": 0.01}, comparisons=6) == set()
    assert holm({"same": math.nan, "a": 0.001}) == {"a"}
