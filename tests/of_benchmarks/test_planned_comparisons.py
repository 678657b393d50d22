"""
Comparisons that are planned before they run: which runs there are, what happens to one that fails, and the rules that
decide.
"""

import json
import math
import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np
import pytest
from pebble import ProcessFuture

from benchmarks import staged
from benchmarks.agents import agent_logs
from benchmarks.losses import bounds, offline, real_model, stale_pretrained
from benchmarks.losses.bounds import REFERENCES, REGIMES
from benchmarks.losses.objectives import design, training
from benchmarks.losses.objectives.__main__ import RECORD
from benchmarks.staged import Stages, extended, holm, read, run_missing
from opo_trl.command.recipe import parse


def killed_or_failed(run: int) -> dict:
    if run % 2 == 0:
        time.sleep(0.5)  # until the pool knows which worker has the run
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


def test_a_run_that_breaks_the_pool_has_failed():
    finished = ProcessFuture()
    finished.set_exception(BrokenProcessPool("All workers expired"))
    assert staged._outcome(finished, 3) == ({}, "3 failed: All workers expired")


def test_recorded_runs_are_those_that_the_plans_ask_for():
    recorded = read(training.Run, RECORD)
    for cell in design.cells():
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


# Bounds on the importance weight


def accuracies_of_arms(**behind: float) -> dict:
    """Accuracies of a form at 80 everywhere, and of references so many points behind in one regime each."""
    random = np.random.default_rng(1)
    accuracies = {}
    for arm in ("form", *REFERENCES):
        for regime in REGIMES:
            accuracies[arm, regime] = 80 + random.normal(0, 1, 24)
    regimes = dict(zip(REFERENCES, ("few", "lag", "many"), strict=True))
    for arm, points in behind.items():
        name = arm.replace("_", " ")
        accuracies[name, regimes[name]] -= points
    return accuracies


def test_a_form_passes_that_is_nowhere_behind_and_somewhere_ahead_of_each():
    ahead = {"TOPR": 4.0, "truncated_REINFORCE": 4.0, "OPO": 4.0}
    accuracies = accuracies_of_arms(**ahead)
    assert bounds.passes(accuracies, "form") == (True, True)
    accuracies["form", "fresh"] -= 6
    assert bounds.passes(accuracies, "form") == (False, True)
    level_with_opo = accuracies_of_arms(**ahead | {"OPO": 0.0})
    assert bounds.passes(level_with_opo, "form") == (True, False)


def test_rates_of_reports_that_were_recorded_are_chosen_again():
    recorded = bounds.read(bounds.Run, bounds.RECORD)
    rates = {"(1, 2, 0, 1)": 2e-5, "TOPR": 4e-5, "truncated REINFORCE": 5e-6, "OPO": 2e-5}
    for form, rate in rates.items():
        assert bounds.reports(form, "largest", recorded)[0].learning_rate == rate


# Stale completions of a pretrained model


def accuracy_of(run: bounds.Run) -> float:
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


@pytest.mark.parametrize("times", [1, 3])
def test_region_grows_until_no_edge_is_chosen(times):
    def run(setting, seed, tuning):
        return bounds.Run("GRPO", "largest", *setting, seed, tuning)

    settings = [(rate, clip) for rate in (5e-6, 1e-5, 2e-5) for clip in (0.2, 0.4)]
    region = Stages(run, settings, (1, 2), (), few=2)
    found = {}
    finish(lambda found: extended(region, found, times).next_runs(found), found)
    grown = extended(region, found, times)
    clips = {clip for _, clip in grown.settings}
    assert clips == ({0.2, 0.4, 0.8} if times == 1 else {0.2, 0.4, 0.8, 1.6, 3.2})
    assert {rate for rate, _ in grown.settings} == {5e-6, 1e-5, 2e-5}
    assert grown.chosen(found) == (1e-5, max(clips) if times == 1 else 1.6)


def test_a_setting_tried_with_both_seeds_can_be_chosen_when_the_region_has_grown():
    found = {}
    while missing := stale_pretrained.trials("GRPO", "addition", found).next_runs(found):
        for run in missing:
            first = 0.5 + 0.02 * math.log2(run.own) - 0.005 * abs(math.log2(run.learning_rate / 1e-5))
            found[run] = {"sampled": 0.1 if run.seed == 702 and run.own > 0.8 else first}
    own = stale_pretrained.trials("GRPO", "addition", found)
    assert {clip for _, clip in own.best_few(found)} == {1.6}
    assert own.chosen(found) == (1e-5, 0.8)
    assert not stale_pretrained.is_at_edge(own, found)


def test_the_second_task_waits_for_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(stale_pretrained, "RECORD", tmp_path / "none.jsonl")
    first, second = stale_pretrained.TASKS
    assert len(stale_pretrained.next_trials(first)) == 5 * (3 + 2 + 2)
    assert stale_pretrained.next_trials(second) == []


def stale_results(**points) -> dict[bounds.Run, dict]:
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


def test_a_comparison_ends_where_neither_form_passes_on_the_first_task():
    for ahead, is_decided in ((0, True), (2.5, False)):
        found = stale_results(truncated_REINFORCE=ahead)
        first = {run: line for run, line in found.items() if run.regime == "addition"}
        assert stale_pretrained.is_decided(first) == is_decided
        page = stale_pretrained.page(first)
        assert ("**No form is recommended.**" in page) == is_decided
        assert ("so nothing is decided: `largest`" in page) != is_decided
        assert ("`largest` was not run" in page) == is_decided
    level = stale_pretrained.page(stale_results())
    assert "**No form is recommended.**" in level
    assert "was not run, as planned" not in level


# Logs of an agent


@pytest.mark.parametrize(("mean", "words"), [(5.0, "win more games"), (-5.0, "win fewer games"), (0.1, "undecided")])
def test_verdict_is_that_of_the_interval(mean, words):
    spread = np.linspace(-3, 3, len(agent_logs.SEEDS))
    assert words in agent_logs.verdict(mean + spread)


def test_rule_finds_large_gains_and_seldom_what_is_not_there():
    assert agent_logs.simulate(gain=8, spread=5) > 0.95
    assert agent_logs.simulate(gain=0, spread=5) == pytest.approx(0.025, abs=0.01)


def runs_with_gains(gain: dict[str, float]) -> dict:
    """All trials and reports, where an arm gains so much over the start, most of it at the third rate."""
    found = {run: games_won(run, 0.2) for run in agent_logs.STARTS}
    for arm in agent_logs.ARMS:
        while runs := agent_logs.stages(arm).next_runs(found):
            for run in runs:
                share = 1.0 if run.learning_rate == agent_logs.RATES[2] else 0.5
                found[run] = games_won(run, 0.2 + share * gain[arm] + run.seed / 1e5)
    return found


def games_won(run: agent_logs.Run, won: float) -> dict:
    return {**dict.fromkeys((*agent_logs.KINDS, agent_logs.HELD_OUT, "trained"), won), "seconds": 60.0, "steps": 1}


def test_page_has_the_chosen_rates_and_the_decision():
    found = runs_with_gains({"SFT": 0.2, "rollouts": 0.3, "pivots": 0.5, "online": 0.6})
    page = agent_logs.page(found)
    assert "| pivots less SFT | +30.0 ± 0.0 | +30.0 ± 0.0 |" in page
    assert "| pivots | 0.0005 | 70.7" in page
    assert "**By the rule:** pivots win more games" in page
    assert "Not finished" not in page
    finished = {run: line for run, line in found.items() if run.arm != "online"}
    assert "Not finished: online." in agent_logs.page(finished)
