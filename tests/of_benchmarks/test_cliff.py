"""The cliff and the stale completions of a pretrained model: which runs there are, and the rules."""

import math

import numpy as np
import pytest

from benchmarks.losses import bounds, cliff, stale_pretrained
from benchmarks.losses.bounds import Run
from benchmarks.staged import Stages, extended


def test_a_form_forgives_the_rate_if_it_surely_loses_less_than_the_margin():
    noise = np.random.default_rng(0).normal(0, 1, (8, 3))
    assert cliff.forgives(noise + np.array([50, 52, 45]))
    assert not cliff.forgives(noise + np.array([50, 52, 42.5]))  # 9.5 points, but not beyond chance
    assert not cliff.forgives(noise + np.array([50, 40, 20]))
    assert cliff.forgives(noise + np.array([30, 40, 60]))


def accuracy_of(run: Run) -> float:
    """Best at a rate of 1e-5 and, of plain GRPO, a clip range of 1.6; each doubling from there costs a point."""
    distance = abs(math.log2(run.learning_rate / 1e-5))
    if run.arm == "GRPO":
        distance += abs(math.log2(run.own / 1.6))
    return 0.5 - distance / 100


def finish(next_runs, found) -> int:
    """Make runs until none is missing; returns their number."""
    number = 0
    while missing := next_runs(found):
        found |= {run: {"sampled": accuracy_of(run), "greedy": accuracy_of(run)} for run in missing}
        number += len(missing)
    return number


def test_every_form_reports_at_multiples_of_the_rate_of_its_trials():
    found = {}
    for form in ("OPO", *bounds.LATER):
        finish(lambda found, form=form: bounds.explored(form, "addition", found)[0], found)
        runs = cliff.reports(form, "addition", found)
        assert {run.learning_rate for run in runs} == {1e-5, 2e-5, 4e-5}
        assert len(set(runs)) == 24
        assert not {run.seed for run in runs} & {run.seed for run in found if run.tuning}
        finish(lambda found, runs=runs: [run for run in runs if run not in found], found)
        reached = cliff.accuracies(form, "addition", found)
        np.testing.assert_allclose(reached, np.tile([50, 49, 48], (8, 1)))
        assert cliff.verdict(form, found) is None  # as long as the other task is missing


def test_rates_of_forms_that_were_recorded_are_those_of_the_record():
    recorded = bounds.read(Run, bounds.RECORD)
    rates = {"(1, 2, 0, 1)": 2e-5, "TOPR": 4e-5, "truncated REINFORCE": 5e-6, "OPO": 2e-5}
    for form, rate in rates.items():
        assert cliff.reports(form, "largest", recorded)[0].learning_rate == rate


@pytest.mark.parametrize("times", [1, 3])
def test_region_grows_until_no_edge_is_chosen(times):
    def run(setting, seed, tuning):
        return Run("GRPO", "largest", *setting, seed, tuning)

    settings = [(rate, clip) for rate in (5e-6, 1e-5, 2e-5) for clip in (0.2, 0.4)]
    region = Stages(run, settings, (1, 2), (), few=2)
    found = {}
    finish(lambda found: extended(region, found, times).next_runs(found), found)
    grown = extended(region, found, times)
    clips = {clip for _, clip in grown.settings}
    assert clips == ({0.2, 0.4, 0.8} if times == 1 else {0.2, 0.4, 0.8, 1.6, 3.2})
    assert {rate for rate, _ in grown.settings} == {5e-6, 1e-5, 2e-5}
    assert grown.chosen(found) == (1e-5, max(clips) if times == 1 else 1.6)


def stale_results(**points) -> dict[Run, dict]:
    """A finished comparison in which the arms of `points` are so far from the others."""
    found = {}
    random = np.random.default_rng(0)
    while True:
        missing = [run for task in stale_pretrained.TASKS for run in missing_of(task, found)]
        if not missing:
            return found
        for run in missing:
            gain = points.get(run.arm.replace(" ", "_"), 0) / 100
            noise = random.normal(0, 0.005)
            found[run] = {"sampled": accuracy_of(run) + gain + noise, "greedy": accuracy_of(run) - gain + noise}


def missing_of(task, found):
    trials = [stale_pretrained.trials(arm, task, found).next_runs(found) for arm in stale_pretrained.ARMS]
    if any(trials):
        return [run for runs in trials for run in runs]
    arms = stale_pretrained.reporting(task, found)
    runs = [run for arm in arms for run in stale_pretrained.reports(arm, task, found)]
    return [run for run in runs if run not in found]


def test_a_form_is_recommended_if_it_is_ahead_of_what_users_would_pick():
    tokens, completions = stale_pretrained.TRUNCATED
    found = stale_results(**{completions.replace(" ", "_"): 1, "truncated_REINFORCE": 2.5})
    for task in stale_pretrained.TASKS:
        assert stale_pretrained.reporting(task, found) == ["GRPO", completions, *stale_pretrained.CANDIDATES]
        assert not stale_pretrained.reports(tokens, task, found)
    assert stale_pretrained.recommended(found) == "truncated REINFORCE"
    assert "**truncated REINFORCE** is recommended" in stale_pretrained.page(found)
    behind_greedy = stale_results(truncated_REINFORCE=5)
    assert stale_pretrained.recommended(behind_greedy) == ""
    level = stale_results()
    assert stale_pretrained.recommended(level) == ""
    assert "**No form is recommended.**" in stale_pretrained.page(level)
