"""The ablation: every cell has the force of its formula, and trains."""

import itertools
import math

import pytest
import torch
from test_published_objectives import force

from benchmarks.objectives import design, report, training
from benchmarks.objectives.__main__ import RECORD, read
from benchmarks.objectives.grid import CELLS, PULL_BACKS, PUSHES, WEIGHTS
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import OPO, Groups


MU = 0.3


@pytest.mark.parametrize(("weight", "pull_back"), [*itertools.product(WEIGHTS, PULL_BACKS)])
@pytest.mark.parametrize("moved", [-1.0, 0.0, 0.3, 1.5])
@pytest.mark.parametrize("target", [-2.0, 1.5])
def test_force_is_weight_times_push_less_pull_back(weight, pull_back, moved, target):
    ratio = math.exp(moved)
    weights = {"one": 1.0, "bounded": min(ratio, 2), "tapered": 1.0 if target >= 0 else min(ratio, 1)}
    pull_backs = {"none": 0.0, "log": MU * moved, "chi2": MU * (min(ratio, 2) - 1)}
    found = force(CELLS[f"escort-{weight}-{pull_back}"], moved=moved, target=target, mu=MU)
    assert found == pytest.approx(weights[weight] * (MU * target - pull_backs[pull_back]), abs=1e-12)


@pytest.mark.parametrize("push", PUSHES)
def test_push_is_centred_over_the_group(push):
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    rows = rewards.view(2, 4)
    advantages = ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).flatten()
    groups = Groups(advantages=advantages, rewards=rewards, valid=torch.ones(8).bool(), num_generations=4)
    args = ObjectiveConfig(mu=MU)
    escort = OPO(args).targets(groups).target
    expected = {"reward": (rows - rows.mean(1, keepdim=True)).flatten() / MU, "advantage": advantages / MU}
    found = CELLS[f"{push}-bounded-log"](args).targets(groups).target
    assert torch.allclose(found, expected.get(push, escort))


def test_run_measures_a_trained_objective(monkeypatch, tmp_path):
    monkeypatch.setitem(training.REGIMES, "short", training.Regime(2, lag=1, passes=2))
    threads = torch.get_num_threads()
    found = []
    for rate in (1e-12, 1e-3):
        run = training.Run("reward-bounded-chi2", "short", rate, 0.1, 1, tuning=True)
        found.append(training._train(run, CELLS[run.objective], "mu", {}, None, str(tmp_path)))
    torch.set_num_threads(threads)
    assert 0.3 < found[0]["sampled"] < 0.7  # of the base model
    assert found[0]["sampled"] != found[1]["sampled"]


def test_default_of_the_configuration_is_what_the_second_rule_chooses():
    found = read(RECORD)
    assert report.is_admissible(design.PAPER, found)
    simpler = design.FORMS[: design.FORMS.index(design.PAPER)]
    assert all(report.beats_today(name, found) <= report.beats_today(design.PAPER, found) for name in simpler)
    assert force(OPO, moved=1.5, target=2.0) == pytest.approx(force(CELLS[design.PAPER], moved=1.5, target=2.0))
