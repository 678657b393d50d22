"""The ablation: every cell has the force of its formula, and trains."""

import itertools
import math

import pytest
import torch
from test_published_objectives import force

from benchmarks.losses.objectives import design, report, training
from benchmarks.losses.objectives.__main__ import RECORD, read
from benchmarks.losses.objectives.grid import CELLS, PULL_BACKS, PUSHES, WEIGHTS
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import OPO, Groups


MU = 0.3


@pytest.mark.parametrize(("weight", "pull_back"), [*itertools.product(WEIGHTS, PULL_BACKS)])
@pytest.mark.parametrize("moved", [-1.0, 0.0, 0.3, 1.5])
@pytest.mark.parametrize("target", [-2.0, 1.5])
def test_force_is_weight_times_push_less_pull_back(weight, pull_back, moved, target):
    ratio = math.exp(moved)
    bounded = min(ratio, 2)
    tapered = 1.0 if target >= 0 else min(ratio, 1)
    weights = {"one": 1.0, "bounded": bounded, "tapered": tapered}
    pull_backs = {"none": 0.0, "log": MU * moved, "chi2": MU * (bounded - 1)}
    expected = weights[weight] * (MU * target - pull_backs[pull_back])
    computed = force(CELLS[f"escort-{weight}-{pull_back}"], log_ratio=moved, target=target, mu=MU)
    assert computed == pytest.approx(expected, abs=1e-12)


def pushes(push, groups):
    objective = CELLS[f"{push}-bounded-log"](ObjectiveConfig(mu=MU))
    return objective.targets(groups).target


def pushes_of_opo(groups):
    objective = OPO(ObjectiveConfig(mu=MU))
    return objective.targets(groups).target


@pytest.mark.parametrize("push", PUSHES)
def test_push_is_centred_over_the_group(push):
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    by_group = rewards.view(2, 4)
    centred = by_group - by_group.mean(1, keepdim=True)
    standardized = centred / by_group.std(1, keepdim=True)
    advantages = standardized.flatten()
    valid = torch.ones(8, dtype=torch.bool)
    groups = Groups(advantages=advantages, rewards=rewards, valid=valid, num_generations=4)
    if push == "reward":
        expected = centred.flatten() / MU
    elif push == "advantage":
        expected = advantages / MU
    else:
        expected = pushes_of_opo(groups)
    assert torch.allclose(pushes(push, groups), expected)


def test_run_measures_a_trained_objective(monkeypatch, tmp_path):
    monkeypatch.setitem(training.REGIMES, "short", training.Regime(2, lag=1, passes=2))
    threads = torch.get_num_threads()
    accuracies = []
    for rate in (1e-12, 1e-3):
        run = training.Run("reward-bounded-chi2", "short", rate, 0.1, 1, tuning=True)
        results = training._train(run, CELLS[run.objective], "mu", {}, None, str(tmp_path))
        accuracies.append(results["sampled"])
    torch.set_num_threads(threads)
    of_base_model, of_trained_model = accuracies
    assert 0.3 < of_base_model < 0.7
    assert of_base_model != of_trained_model


def test_default_of_the_configuration_is_what_the_second_rule_chooses():
    recorded = read(RECORD)
    assert report.is_admissible(design.PAPER, recorded)
    wins = report.beats_today(design.PAPER, recorded)
    place = design.FORMS.index(design.PAPER)
    for simpler in design.FORMS[:place]:
        assert report.beats_today(simpler, recorded) <= wins
    force_of_paper = force(CELLS[design.PAPER], log_ratio=1.5, target=2.0)
    assert force(OPO, log_ratio=1.5, target=2.0) == pytest.approx(force_of_paper)
