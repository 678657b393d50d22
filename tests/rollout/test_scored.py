"""Rewards as a trainer records them, and completions that isolated ones fail to score."""

from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from opo_trl.rewards.errors import CountingReward, RewardError
from opo_trl.rollout.scored import RewardFailures


class Failing(CountingReward):
    def __init__(self, timeouts: int, errors: int):
        self.timeouts, self.errors = timeouts, errors


def failures(limit: float) -> RewardFailures:
    return RewardFailures(SimpleNamespace(max_reward_failure_rate=limit), Accelerator(cpu=True))


def test_failures_are_counted_for_each_log_entry():
    part = failures(1.0)
    part.count([len], 8)
    assert part.take() == {}  # a run without isolated rewards logs nothing
    for timeouts, errors in ((1, 2), (0, 3)):
        part.count([len, Failing(timeouts, errors)], 8)
    assert part.take() == {"reward/timeouts": 1, "reward/errors": 5}
    assert part.take() == {"reward/timeouts": 0, "reward/errors": 0}


def test_resumed_part_ends_the_run_in_the_same_round():
    part = failures(0.4)
    for _ in range(4):  # 1 - 0.9⁴ < 0.4 < 1 - 0.9⁵
        part.count([Failing(8, 0)], 8)
        resumed = failures(0.4)
        resumed.load_state_dict(part.state_dict())
        part = resumed
    with pytest.raises(RewardError, match=r"max_reward_failure_rate=0\.4"):
        part.count([Failing(8, 0)], 8)
