"""Which optimizer step a completion serves."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opo_trl.rollout.rows import (
    concatenate,
    exchange_rows,
    micro_batches,
    optimizer_step_of_rows,
    resize,
    rows_of_steps,
    take_rows,
)


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


def steps_of(rollout: dict, steps_per_generation: int, accumulation: int, process=0, processes=1) -> list[dict]:
    args = SimpleNamespace(steps_per_generation=steps_per_generation, gradient_accumulation_steps=accumulation, seed=3)
    accelerator = SimpleNamespace(process_index=process, num_processes=processes)
    return rows_of_steps(rollout, args, accelerator, index=5, passed=0)


def cut(n_rows: int, process: int, processes: int, steps_per_generation: int, accumulation: int) -> list[dict]:
    n_local = n_rows // processes
    steps = steps_of(rows(process * n_local, n_local), steps_per_generation, accumulation, process, processes)
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


def test_images_stay_with_their_sample():
    images = [1, 0, 2, 1]
    batch = rows(0, 4) | {
        "num_images": images,
        "image_grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 1], [1, 3, 1]]),
        "pixel_values": torch.cat([torch.full((n, 2), row) for row, n in [(0, 2), (2, 4), (2, 1), (3, 3)]]).float(),
    }
    for micro_batch in [*steps_of(batch, 2, 1), *micro_batches(batch, 2), take_rows(batch, np.array([3, 0]))]:
        grid, start = micro_batch["image_grid_thw"].prod(1).tolist(), 0
        assert micro_batch["num_images"] == [images[i] for i in micro_batch["row"]]
        owners = [i for i in micro_batch["row"].tolist() for _ in range(images[i])]
        for owner, size in zip(owners, grid, strict=True):
            assert (micro_batch["pixel_values"][start : start + size] == owner).all()
            start += size


def tables(first: int, n: int, *, prompt: int = 3, completion: int = 4) -> dict:
    """Entries of all types and shapes, bit patterns of NaN among them."""
    numbers = torch.arange(first, first + n)
    per_token = numbers[:, None] * 10 + torch.arange(completion)
    return {
        "prompt_ids": numbers[:, None].repeat(1, prompt),
        "prompt_mask": torch.ones(n, prompt, dtype=torch.long),
        "completion_ids": per_token,
        "completion_mask": per_token % 3,
        "old_per_token_logps": (-per_token).to(torch.bfloat16),
        "opo_steering": per_token % 2 == 0,
        "per_layer": per_token[:, :, None].repeat(1, 1, 5).double(),
        "rewards_per_func": torch.where(numbers[:, None] % 2 == 0, torch.nan, numbers[:, None].float()),
        "opo_valid": numbers % 2 == 0,
        "num_items_in_batch": torch.tensor(7),
    }


class Processes:
    """Accelerators whose `gather` returns what all of them have passed it before."""

    def __init__(self):
        self.seen = []

    def gather(self, table):
        self.seen.append(table)
        return torch.cat(self.seen)


@pytest.mark.parametrize("samples", [[3], [5, 0, 3, 1], []])
def test_exchanged_samples_are_bitwise_those_of_the_other_processes(samples):
    accelerator = Processes()
    own = [resize(tables(0, 2, completion=4), prompt=3, completion=6), tables(2, 4, completion=6)]
    exchange_rows(own[0], np.array([], dtype=int), accelerator)
    found = exchange_rows(own[1], np.array(samples, dtype=int), accelerator)
    assert found.keys() == own[1].keys()
    for name, value in take_rows(concatenate(own), np.array(samples, dtype=int)).items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].nan_to_num(-1), value.nan_to_num(-1)), name
