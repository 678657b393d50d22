"""Targets of a group: from its rewards, without completions that have no score, one for each conversation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import advantages, drive_and_target
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from opo_trl.asynchronous.targets import MEANS, group_targets, with_targets
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import OPO


GRPO = SimpleNamespace(reward_weights=None, scale_rewards="group", multi_objective_aggregation="sum_then_normalize")


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(mu=0.3),
        ObjectiveConfig(mu=0.3, alpha=0.0, escort_temperature=0.5, drive_scaling="group", positivity="clip"),
        ObjectiveConfig(mu=2.0, positivity="project"),
    ],
)
@pytest.mark.parametrize("rewards", [[1.0, 0.0, None, 0.5, 1.0, 0.0], [1.0] * 6, [None] * 5 + [1.0]])
def test_targets_are_those_of_opo_on_the_advantages_of_grpo(objective, rewards):
    """Which TRL's asynchronous trainer divides by another standard deviation."""
    valid = [reward is not None for reward in rewards]
    A = advantages([[reward] for reward in rewards], GRPO, len(rewards))
    args = SimpleNamespace(**{**vars(objective), "mu": objective.mu})
    expected = drive_and_target(args, A, valid, [0.0] * 6, objective.escort_temperature, 6)
    given = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    targets, means = group_targets(given, OPO(objective))
    metrics = dict(zip(MEANS, means, strict=True))
    assert targets.target.tolist() == pytest.approx(expected.target, abs=1e-12)
    assert targets.omega.tolist() == pytest.approx(expected.omega, abs=1e-12)
    weights = [w for w, kept in zip(expected.omega, valid, strict=True) if kept]
    assert metrics["escort/ess"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights))


def test_reward_that_is_not_finite_has_no_target():
    rewards = torch.tensor([1.0, 0.0, math.inf, math.nan], dtype=torch.float64)
    target = group_targets(rewards, OPO(ObjectiveConfig(mu=0.3)))[0].target
    assert target[2:].tolist() == [0.0, 0.0]
    assert target[0] > 0 > target[1]


def samples(rewards: list[float], lengths: list[int]) -> list[RolloutSample]:
    return [
        RolloutSample([], [], np.ones(n), np.ones(n, int), np.zeros(n), 0.0, 3, 0, {"reward": reward})
        for reward, n in zip(rewards, lengths, strict=True)
    ]


def test_rows_of_a_conversation_share_its_target():
    forked = samples([1.0, 1.0, 0.0], [3, 5, 4])
    kept = with_targets(forked, [0, 0, 2], OPO(ObjectiveConfig(mu=0.3)))
    whole = with_targets(samples([1.0, 0.0], [8, 4]), [0, 1], OPO(ObjectiveConfig(mu=0.3)))
    assert [s.advantage for s in kept] == [whole[0].advantage, whole[0].advantage, whole[1].advantage]
    assert [s.metrics["opo"][0] for s in kept] == [3, 3, 3]


def test_completions_without_a_score_are_left_out():
    """TRL's advantage of 0 would be a target: that the policy stays as likely to write them."""
    made = samples([1.0, math.nan, 0.0], [2, 2, 2])
    kept = with_targets(made, [0, 1, 2], OPO(ObjectiveConfig(mu=0.3)))
    assert [id(s) for s in kept] == [id(made[0]), id(made[2])]
    made[2].completion_mask[:] = 0  # nor is there anything to train
    assert [id(s) for s in with_targets(made, [0, 1, 2], OPO(ObjectiveConfig(mu=0.3)))] == [id(made[0])]
    assert with_targets(samples([math.nan, math.nan], [2, 2]), [0, 1], OPO(ObjectiveConfig(mu=0.3))) == []
