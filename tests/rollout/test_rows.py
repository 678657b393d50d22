"""Which optimizer step a completion serves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opo_trl.rollout.rows import micro_batches, optimizer_step_of_rows, rows_of_steps, take_rows


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


def rows(first: int, n: int) -> dict:
    ids = torch.arange(first, first + n)
    return {
        "completion_ids": ids[:, None].repeat(1, 3),
        "row": ids,
        "names": [f"row {i}" for i in ids],
        "total": torch.tensor(7),
    }


def cut(n_rows: int, process: int, processes: int, steps_per_generation: int, accumulation: int) -> list[dict]:
    n_local = n_rows // processes
    steps = rows_of_steps(
        rows(process * n_local, n_local),
        steps_per_generation=steps_per_generation,
        gradient_accumulation_steps=accumulation,
        seed=3,
        index=5,
        passed=0,
        process=process,
        processes=processes,
    )
    return [batch for step in steps for batch in micro_batches(step, steps_per_generation // len(steps))]


def members_of_steps(n_rows: int, processes: int, steps_per_generation: int, accumulation: int) -> list[set]:
    """Samples of each run of `accumulation` micro-batches, over all processes."""
    steps = [set() for _ in range(steps_per_generation // accumulation)]
    for process in range(processes):
        for i, batch in enumerate(cut(n_rows, process, processes, steps_per_generation, accumulation)):
            steps[i // accumulation] |= set(batch["row"].tolist())
    return steps


@pytest.mark.parametrize(
    ("processes", "steps_per_generation", "accumulation"),
    [(1, 24, 8), (1, 12, 4), (2, 12, 4), (2, 3, 1), (4, 6, 2), (8, 3, 1)],
)
def test_a_step_has_the_same_samples_however_it_is_cut(processes, steps_per_generation, accumulation):
    steps = members_of_steps(24, processes, steps_per_generation, accumulation)
    assert steps == members_of_steps(24, 1, 3, 1)
    assert [len(step) for step in steps] == [8, 8, 8]


@pytest.mark.parametrize(("steps_per_generation", "accumulation"), [(2, 4), (4, 4), (6, 4), (3, 2)])
def test_steps_of_more_or_less_than_one_rollout(steps_per_generation, accumulation):
    batches = cut(24, 0, 1, steps_per_generation, accumulation)
    assert len(batches) == steps_per_generation
    assert sorted(torch.cat([batch["row"] for batch in batches]).tolist()) == list(range(24))


def test_all_entries_of_a_sample_stay_together():
    for batch in cut(24, 1, 2, 6, 2):
        assert batch["completion_ids"][:, 0].tolist() == batch["row"].tolist()
        assert batch["names"] == [f"row {i}" for i in batch["row"]]
        assert batch["total"] == 7


def test_images_stay_with_their_sample():
    images = [1, 0, 2, 1]
    batch = rows(0, 4) | {
        "num_images": images,
        "image_grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 1], [1, 3, 1]]),
        "pixel_values": torch.cat([torch.full((n, 2), row) for row, n in [(0, 2), (2, 4), (2, 1), (3, 3)]]).float(),
    }
    steps = rows_of_steps(
        batch, steps_per_generation=2, gradient_accumulation_steps=1, seed=0, index=0, passed=0, process=0, processes=1
    )
    for micro_batch in [*steps, *micro_batches(batch, 2), take_rows(batch, np.array([3, 0]))]:
        grid, start = micro_batch["image_grid_thw"].prod(1).tolist(), 0
        assert micro_batch["num_images"] == [images[i] for i in micro_batch["row"]]
        owners = [i for i in micro_batch["row"].tolist() for _ in range(images[i])]
        for owner, size in zip(owners, grid, strict=True):
            assert (micro_batch["pixel_values"][start : start + size] == owner).all()
            start += size
