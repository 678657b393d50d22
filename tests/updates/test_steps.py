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
def test_every_block_of_samples_goes_to_different_steps(n_steps, blocks, seed, rollout):
    steps = optimizer_step_of_rows(blocks * n_steps, n_steps, seed=seed, rollout=rollout)
    assert (np.sort(steps.reshape(blocks, n_steps), axis=1) == np.arange(n_steps)).all()
    assert (steps == optimizer_step_of_rows(blocks * n_steps, n_steps, seed=seed, rollout=rollout)).all()


def test_seed_and_rollout_choose_the_steps():
    def steps(**named):
        return optimizer_step_of_rows(48, 4, **{"seed": 0, "rollout": 0, **named}).tolist()

    drawn = (steps(), steps(seed=1), steps(rollout=1), steps(rollout=2), steps(passed=1), steps(passed=2))
    assert len({tuple(s) for s in drawn}) == 6


def test_every_sample_is_equally_likely_in_every_step():
    counts = np.zeros((8, 4))
    for rollout in range(4000):
        counts[np.arange(8), optimizer_step_of_rows(8, 4, seed=1, rollout=rollout)] += 1
    # 1000 ± 27 each; 4.5 standard deviations on either side
    assert np.abs(counts - 1000).max() < 125
