"""Counts of completions that rewards fail to score."""

from accelerate import Accelerator

from opo_trl.generation.failures import RewardFailures
from opo_trl.rewards.errors import CountingReward


def test_each_entry_of_the_log_counts_the_failures_since_the_one_before():
    failures = RewardFailures()
    reward = CountingReward()
    taken = []
    for timeouts, errors in ((1, 0), (0, 2), (0, 0)):
        reward.timeouts, reward.errors = timeouts, errors
        failures.add([reward], n_completions=8, accelerator=Accelerator(cpu=True))
        taken.append(failures.take())
    assert taken == [
        {"reward/timeouts": 1, "reward/errors": 0},
        {"reward/timeouts": 0, "reward/errors": 2},
        {"reward/timeouts": 0, "reward/errors": 0},
    ]


def test_rounds_of_one_entry_are_added_up():
    failures = RewardFailures()
    reward = CountingReward()
    reward.errors = 3
    for _ in range(2):
        failures.add([reward, lambda completions: [0.0]], n_completions=8, accelerator=Accelerator(cpu=True))
    assert failures.take() == {"reward/timeouts": 0, "reward/errors": 6}
