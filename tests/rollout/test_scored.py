"""Completions that isolated rewards fail to score."""

import pytest
from accelerate import Accelerator

from opo_trl.rewards.errors import CountingReward, RewardError
from opo_trl.rollout.scored import count_failures


class Failing(CountingReward):
    def __init__(self, timeouts: int, errors: int):
        self.timeouts, self.errors = timeouts, errors


def test_failures_are_counted_and_half_end_the_run():
    accelerator = Accelerator(cpu=True)
    assert count_failures([len], 8, accelerator) == {}  # a run without isolated rewards logs nothing
    assert count_failures([len, Failing(1, 2)], 8, accelerator) == {"reward/timeouts": 1, "reward/errors": 2}
    with pytest.raises(RewardError, match="5 of 8 completions could not be scored: 2 by running out of time, 3 by"):
        count_failures([Failing(2, 3)], 8, accelerator)
