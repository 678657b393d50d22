"""
How the states of a checkpoint's processes are divided among others, and a run that goes on in other micro-batches.
Runs that go on with other processes are in `faults/test_elastic.py`.
"""

import doctest

import pytest
import torch
from datasets import Dataset
from named_tensors import distance, snapshot
from recording_trainers import make_trainer, trained
from scripted_rollouts import PROMPTS, Script

from opo_trl.resume import other_processes
from opo_trl.resume.other_processes import CUT, divide, fitting


def test_the_example_of_the_module_is_right():
    failed, attempted = doctest.testmod(other_processes)
    assert attempted > 0
    assert failed == 0


def cut(*values: int) -> dict[str, int]:
    return dict(zip(CUT, values, strict=True))


def micro_batch(*samples: int, width: int, skipped: tuple[bool, ...]) -> dict:
    """Samples that are told apart by their tokens, and whether others count that were left out."""
    ids = torch.tensor(samples)[:, None].repeat(1, width)
    return {
        "completion_ids": ids,
        "opo_valid": torch.ones(len(ids), dtype=torch.bool),
        "importance_sampling_ratio": torch.zeros(len(ids), 1),
        "opo_shape": (1, 2, 3),
        "opo_skipped": torch.tensor(skipped, dtype=torch.bool),
    }


def state(loss: float, calls: list) -> dict:
    """Of a process, after three of six calls, with the micro-batches of the others."""
    micro_batches = [None, None, None, *calls]
    settings = cut(2, 1, 3, 6)
    pending_loss = torch.tensor(loss)
    return {
        "settings": settings,
        "position": 3,
        "replay": {},
        "micro_batches": micro_batches,
        "pending_loss": pending_loss,
    }


def test_every_process_gets_as_many_samples_of_a_step():
    """Of six, which two processes were to compute in three calls; three were left out, of which one does not count."""
    calls = (
        [[], [micro_batch(1, 2, width=3, skipped=(True,))], []],
        [[], [], [micro_batch(3, width=5, skipped=(False, True))]],
    )
    states = [state(1.0, calls[0]), state(3.0, calls[1])]
    parts = [divide(states, cut(3, 2, 1, 2), process) for process in range(3)]
    for part in parts:
        assert part["pending_loss"] == 2
        assert part["position"] == 1
    steps = [part["micro_batches"][0] for part in parts]
    filler = [1, 1, 1, 0, 0]
    ids = [[[1, 1, 1, 0, 0], filler], [[2, 2, 2, 0, 0], filler], [[3, 3, 3, 3, 3], filler]]
    assert [step["completion_ids"].tolist() for step in steps] == ids
    assert [step["opo_filler"].tolist() for step in steps] == [[False, True]] * 3
    # A filler is not trained, and counts in the log as the sample that it replaces.
    assert [step["opo_valid"].tolist() for step in steps] == [[True, False]] * 3
    assert [step["opo_counts"].tolist() for step in steps] == [[True, True], [True, False], [True, True]]
    assert all("opo_shape" not in step for step in steps)


def test_samples_count_in_the_log_also_if_a_run_is_divided_twice():
    """A filler is not valid, but counts as the sample that it replaces."""
    calls = [[], [micro_batch(1, width=2, skipped=(True, False))], []]
    once = divide([state(1.0, calls), state(1.0, calls)], cut(1, 6, 1, 2), 0)
    (step,) = once["micro_batches"]
    settled = {**once, "settings": cut(1, 6, 1, 2), "micro_batches": [None, [step]]}
    parts = [divide([settled], cut(3, 2, 1, 2), process)["micro_batches"][0] for process in range(3)]
    assert [part["opo_filler"].tolist() for part in parts] == [[False, True], [False, True], [True, True]]
    assert [part["opo_counts"].tolist() for part in parts] == [[True, False], [True, True], [True, False]]


def test_other_processes_keep_the_completions_of_a_step_and_of_a_rollout():
    assert fitting(cut(4, 2, 3, 6), cut(1, 3, 1, 1)) == {"gradient_accumulation_steps": 8, "steps_per_generation": 16}
    with pytest.raises(
        ValueError, match=r"=5 on 2 processes does not divide the .* 24 .* step and 48 .* divides 24\."
    ):
        fitting(cut(4, 2, 3, 6), cut(2, 5, 1, 1))


def test_a_step_across_two_rollouts_goes_on_in_other_micro_batches(tiny_model, tmp_path):
    """A rollout has five calls, and a step three: the second step ends after the first call of the second rollout."""
    prompts = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS * 2})}  # three rollouts
    options = {"trainer_arguments": prompts, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    steps = {"gradient_accumulation_steps": 3, "steps_per_generation": 5}
    whole = trained(tiny_model, tmp_path, **steps, **options)
    smaller = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6, "steps_per_generation": 10}
    script = Script(calls=[None] * 2)
    rest = make_trainer(tiny_model, tmp_path / "rest", script=script, **smaller, **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    end = snapshot(whole.model)
    assert distance(snapshot(rest.model), end) < 1e-4 * distance(end, whole.initial)
