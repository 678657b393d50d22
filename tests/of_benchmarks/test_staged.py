"""Runs of a comparison: what happens to a run that fails, what is resumed, and which comparisons remain."""

import json
import math
import os
import signal

from benchmarks.staged import holm, run_missing


def killed_or_failed(run: int) -> dict:
    if run % 2 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if run == 3:
        raise ValueError("no 3")
    return {"run": run}


def test_a_killed_or_failed_run_ends_no_other(tmp_path, capfd):
    file = tmp_path / "runs.jsonl"
    assert run_missing([lambda: [] if file.read_text() else [1, 2, 3, 4, 5]], killed_or_failed, file, jobs=2) == 1
    assert sorted(json.loads(line)["run"] for line in file.read_text().splitlines()) == [1, 5]
    assert "3 failed" in capfd.readouterr().err


def test_holm_goes_on_until_the_first_that_does_not_remain():
    assert holm({"a": 0.01, "b": 0.02, "c": 0.04, "d": 0.2}) == {"a"}
    assert holm({"a": 0.01, "b": 0.016, "c": 0.04, "d": 0.2}) == {"a", "b"}
    assert holm({"a": 0.01}, comparisons=6) == set()
    assert holm({"same": math.nan, "a": 0.001}) == {"a"}
