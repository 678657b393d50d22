"""Runs of a comparison: what happens to a run that fails, which runs there are, and which comparisons remain."""

import json
import math
import multiprocessing
import os
import signal
from types import SimpleNamespace

from benchmarks import bounds, offline, staged
from benchmarks.objectives import design
from benchmarks.objectives.__main__ import RECORD
from benchmarks.objectives.training import Run
from benchmarks.staged import holm, read, run_missing


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
    assert run_missing([lambda: [] if file.read_text() else [1, 2, 3, 4, 5]], killed_or_failed, file, jobs=2) == 1
    assert sorted(json.loads(line)["run"] for line in file.read_text().splitlines()) == [1, 5]
    assert "3 failed" in capfd.readouterr().err


def test_recorded_runs_are_those_that_the_plans_ask_for():
    found = read(Run, RECORD)
    assert not [cell for cell in design.cells() if design.stages(*cell).next_runs(found)]
    found = read(offline.Run, offline.RECORD)
    cells = [(task, name) for task in ("arithmetic", "spell_backward") for name in offline.OBJECTIVES]
    assert not [cell for cell in cells if offline.stages(*cell).next_runs(found)]
    # With rates at the edge of their region, which is then extended; seventeen cells are finished.
    assert not [cell for cell in bounds.cells()[:17] if bounds.next_runs(*cell)]


def test_holm_goes_on_until_the_first_that_does_not_remain():
    assert holm({"a": 0.01, "b": 0.02, "c": 0.04, "d": 0.2}) == {"a"}
    assert holm({"a": 0.01, "b": 0.016, "c": 0.04, "d": 0.2}) == {"a", "b"}
    assert holm({"a": 0.01}, comparisons=6) == set()
    assert holm({"same": math.nan, "a": 0.001}) == {"a"}
