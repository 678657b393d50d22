"""The benchmark of reuse: where a curve reaches a goal, its ratios, and the committed page."""

import gzip
import json
import math

import pytest

from benchmarks import adaptive_passes, reuse, reuse_report
from benchmarks.learning_curves import at, completions_to, smoothed
from benchmarks.many_runs import options
from benchmarks.reuse_design import CONTENDERS, ROWS, SEEDS, TUNING_SEEDS, first_trials, trial
from benchmarks.reuse_rewards import share_of_digits
from opo_trl.launch.recipe import parse


def points(*accuracies: float) -> list[dict]:
    return [{"completions": 100 * i, "sampled": a, "greedy": a + 0.1} for i, a in enumerate(accuracies)]


def test_a_goal_is_reached_between_two_points_of_the_smoothed_curve():
    assert completions_to(0.7, points(0.5, 0.6, 0.8)) == pytest.approx(150)
    assert completions_to(0.9, points(0.5, 0.6, 0.8)) is None
    # A lucky point is averaged with the worse ones after it: 0.9, 0.5 are 0.7, 0.7.
    assert smoothed(points(0.5, 0.9, 0.5, 0.9)) == pytest.approx([0.5, 0.7, 0.7, 0.9])
    assert completions_to(0.8, points(0.5, 0.9, 0.5, 0.9)) == pytest.approx(250)
    assert completions_to(0.4, points(0.5, 0.6)) == 0
    assert at(150, points(0.5, 0.6, 0.8), "greedy") == pytest.approx(0.8)


def test_ratio_is_paired_geometric_and_never_flatters():
    own = {str(s): {"points": points(0.5, 0.9)} for s in range(3)}
    other = {str(s): {"points": points(0.5, 0.5 + 0.2 / (s + 1), 0.9, 0.95)} for s in range(3)}
    places = [completions_to(0.9, other[str(s)]["points"]) for s in range(3)]
    found = reuse_report.ratio(own, other, 0.9, budget=100, other_budget=300)
    assert found.mean == pytest.approx(math.exp(sum(math.log(100 / place) for place in places) / 3))
    # A run of the other that does not get there counts with its budget, one's own with half as much again.
    for curves in (own, other):
        curves["2"] = {"points": points(0.5, 0.6)}
    found = reuse_report.ratio(own, other, 0.9, budget=100, other_budget=200)
    expected = [100 / places[0], 100 / places[1], 150 / 200]
    assert found.mean == pytest.approx(math.prod(expected) ** (1 / 3))
    assert reuse_report.ratio({"2": own["2"]}, other, 0.9, budget=100, other_budget=200) is None


def test_partial_rewards_count_places_from_the_right():
    completions = ["42-19=23", "42-19=13", "24", "23", "123"]
    assert share_of_digits(completions, ["42-19=23"] * 5) == [1.0, 0.5, 0.5, 1.0, pytest.approx(2 / 3)]


def test_runs_are_distinct_and_can_be_parsed():
    tuned = {c.name: {**c.fields, **c.trials[0]} for c in CONTENDERS}
    runs = [*first_trials(), *(row.run(tuned[row.method], seed) for row in ROWS for seed in row.seeds)]
    assert len({run.folder for run in runs}) == len(runs)
    assert not {*TUNING_SEEDS} & {*SEEDS}
    assert len({len(c.trials) for c in CONTENDERS}) == 1, "every method has the same number of trials"
    kinds = {json.dumps({k: v for k, v in run.fields.items() if k != "seed"}): run for run in runs}
    for run in kinds.values():
        script, args, *_ = parse(options({**run.fields, "output_dir": run.folder, "max_completions": run.budget}))
        assert script.trainer == run.fields["trainer"]
        assert args.generation_batch_size == 48
        assert args.num_iterations == run.fields["num_iterations"]


def test_tuning_takes_the_trial_of_the_lowest_mean_cost(monkeypatch):
    contender = CONTENDERS[0]
    costs = {(n, seed): 1000.0 + 200 * n for n in range(len(contender.trials)) for seed in TUNING_SEEDS}
    costs[0, TUNING_SEEDS[1]] = 2000.0  # the best of the first seed is bad on another
    by_folder = {trial(contender, n, seed).folder: value for (n, seed), value in costs.items()}
    monkeypatch.setattr(reuse, "cost", lambda run: by_folder[run.folder])
    assert reuse.finalists(contender) == [0, 1, 2, 3, 4, 5]  # at most twice the cost of the best
    assert reuse.best_trial(contender) == 1


def test_page_of_the_committed_record_is_the_committed_one(tmp_path):
    record = json.loads(gzip.decompress(reuse.RECORD.read_bytes()))
    reuse_report.write_report(record, tmp_path)
    for name in ("reuse.md", "reuse.png"):
        assert (tmp_path / name).read_bytes() == (reuse.RESULTS / name).read_bytes()


def test_page_of_adaptive_passes_is_the_committed_one():
    record = json.loads((reuse.RESULTS / "adaptive_passes.json").read_text())
    assert adaptive_passes.report(record) == (reuse.RESULTS / "adaptive_passes.md").read_text()
