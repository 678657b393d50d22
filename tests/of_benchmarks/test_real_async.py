"""Stale completions on the pretrained model: what a run is asked for, and what the page leaves out."""

from dataclasses import asdict

import pytest

from benchmarks import real_async
from benchmarks.objectives import published
from benchmarks.real_async import LAGS, METHODS, SEEDS, STEPS, Run
from opo_trl import methods
from opo_trl.launch.recipe import parse


@pytest.fixture(autouse=True)
def registered():
    kept = [*methods.METHODS]
    methods.register(real_async.GRPO)
    yield
    methods.METHODS[:] = kept


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("method", METHODS)
def test_command_line_asks_for_what_the_plan_says(method, lag, tmp_path):
    script, args, _, _ = parse(Run(method, lag, 7).command_line(tmp_path))
    assert (args.in_process_staleness, args.max_steps, args.seed) == (lag, STEPS, 7)
    assert (args.learning_rate, args.completions_per_step, args.mu) == (1e-5, 48, 0.3)
    assert script.levels == script.report_levels == ["addition"]
    objective = methods.by_trainer()[script.trainer].trainer_class.objective_class
    assert objective is (None if method == "OPO" else published.GRPO)


def test_page_has_complete_ages():
    measured = {"over_run": 0.5, "curve": [0.1, 0.4, 0.6], "sampled": 0.6, "greedy": 0.7, "ess": 0.4, "seconds": 60}
    runs = [Run(method, lag, seed) for method in METHODS for lag in LAGS for seed in SEEDS]
    found = {run: {**asdict(run), **measured} for run in runs}
    del found[Run("OPO", 16, SEEDS[0])]
    rows = [line.split(" | ")[:2] for line in real_async.page(found).splitlines() if line.startswith("| ")][2:]
    assert rows == [["| 0", name] for name in METHODS] + [["| 4", name] for name in METHODS] + [
        ["| 16", [*METHODS][1]]
    ]
