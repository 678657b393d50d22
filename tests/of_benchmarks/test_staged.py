"""Runs of a comparison: what happens to a run that fails, what is resumed, and which comparisons remain."""

import json
import math
import os
import signal

from benchmarks.staged import holm, run_missing


def test_a_failed_run_ends_neither_the_others_nor_the_command(tmp_path, capfd):
    """`dict` makes a run of pairs, and fails for a number."""
    file = tmp_path / "runs.jsonl"
    methods = ([[("run", 1)], 7], [[("run", 2)]])

    def missing(runs: list) -> list:
        done = [json.loads(line) for line in file.read_text().splitlines()]
        return [run for run in runs if isinstance(run, int) or dict(run) not in done]

    for expected in (1, 2), (1, 2):  # the second call makes nothing twice
        assert run_missing([lambda runs=runs: missing(runs) for runs in methods], dict, file, jobs=1) == 1
        assert [json.loads(line)["run"] for line in file.read_text().splitlines()] == [*expected]
    assert "7 failed" in capfd.readouterr().err


def killed_if_even(run: int) -> dict:
    if run % 2 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"run": run}


def test_a_killed_run_ends_no_other(tmp_path, capfd):
    file = tmp_path / "runs.jsonl"
    assert run_missing([lambda: [] if file.read_text() else [1, 2, 3, 4, 5]], killed_if_even, file, jobs=2) == 1
    assert sorted(json.loads(line)["run"] for line in file.read_text().splitlines()) == [1, 3, 5]
    assert "2 failed" in capfd.readouterr().err


def test_holm_goes_on_until_the_first_that_does_not_remain():
    assert holm({"a": 0.01, "b": 0.02, "c": 0.04, "d": 0.2}) == {"a"}
    assert holm({"a": 0.01, "b": 0.016, "c": 0.04, "d": 0.2}) == {"a", "b"}
    assert holm({"a": 0.01}, comparisons=6) == set()
    assert holm({"same": math.nan, "a": 0.001}) == {"a"}
