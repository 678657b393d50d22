"""Which optimizer step a completion serves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opo_trl.updates.steps import optimizer_step_of_rows


@given(
    n_steps=st.integers(1, 6),
    blocks=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    rollout=st.integers(0, 1000),
)
def test_every_block_of_completions_goes_to_different_steps(n_steps, blocks, seed, rollout):
    steps = optimizer_step_of_rows(blocks * n_steps, n_steps, seed=seed, rollout=rollout)
    for block in np.split(steps, blocks):
        assert sorted(block) == list(range(n_steps))
    again = optimizer_step_of_rows(blocks * n_steps, n_steps, seed=seed, rollout=rollout)
    assert np.array_equal(again, steps)


def test_seed_and_rollout_choose_the_steps():
    changes = ({}, {"seed": 1}, {"rollout": 1}, {"rollout": 2}, {"passed": 1}, {"passed": 2})
    draws = set()
    for change in changes:
        steps = optimizer_step_of_rows(48, 4, **{"seed": 0, "rollout": 0, **change})
        draws.add(tuple(steps))
    assert len(draws) == len(changes)


def test_every_completion_is_equally_likely_in_every_step():
    counts = np.zeros((8, 4))
    for rollout in range(4000):
        steps = optimizer_step_of_rows(8, 4, seed=1, rollout=rollout)
        counts[np.arange(8), steps] += 1
    # 1000 ± 27 each; 4.5 standard deviations on either side
    assert np.abs(counts - 1000).max() < 125
