"""Targets of a group: from its rewards, without completions that have no score."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import advantages, drive_and_target
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from opo_trl.asynchronous.worker import MEANS, group_targets, with_targets
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import OPO


GRPO = SimpleNamespace(reward_weights=None, scale_rewards="group", multi_objective_aggregation="sum_then_normalize")


@pytest.mark.parametrize("rewards", [[1.0, 0.0, None, 0.5, 1.0, 0.0], [1.0] * 6, [None] * 5 + [1.0]])
def test_targets_are_those_of_opo_on_the_advantages_of_grpo(rewards):
    """Which TRL's asynchronous trainer divides by another standard deviation."""
    args = ObjectiveConfig(mu=0.3, alpha=0.0, escort_temperature=0.5, drive_scaling="group", positivity="clip")
    valid = [reward is not None for reward in rewards]
    A = advantages([[reward] for reward in rewards], GRPO, len(rewards))
    expected = drive_and_target(args, A, valid, [0.0] * 6, args.escort_temperature, 6)
    given = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    targets, means = group_targets(given, OPO(args))
    assert targets.target.tolist() == pytest.approx(expected.target, abs=1e-12)
    weights = [w for w, kept in zip(expected.omega, valid, strict=True) if kept]
    assert means[MEANS.index("escort/ess")] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights))


def test_reward_that_is_not_finite_has_no_target():
    rewards = torch.tensor([1.0, 0.0, math.inf, math.nan], dtype=torch.float64)
    target = group_targets(rewards, OPO(ObjectiveConfig(mu=0.3)))[0].target
    assert target[2:].tolist() == [0.0, 0.0]
    assert target[0] > 0 > target[1]


def samples(*rewards: float) -> list[RolloutSample]:
    one = np.ones(2, int)
    return [RolloutSample([], [], one, one.copy(), one, 0.0, 3, 0, {"reward": reward}) for reward in rewards]


def test_completions_without_a_score_are_left_out():
    """TRL's advantage of 0 would be a target: that the policy stays as likely to write them."""
    made = samples(1.0, math.nan, 0.0)
    kept = with_targets(made, [0, 1, 2], OPO(ObjectiveConfig(mu=0.3)))
    assert [id(s) for s in kept] == [id(made[0]), id(made[2])]
    made[2].completion_mask[:] = 0  # nor is there anything to train
    assert [id(s) for s in with_targets(made, [0, 1, 2], OPO(ObjectiveConfig(mu=0.3)))] == [id(made[0])]
    assert with_targets(samples(math.nan, math.nan), [0, 1], OPO(ObjectiveConfig(mu=0.3))) == []
