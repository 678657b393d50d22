"""What every process knows of the completions of all processes."""

from types import SimpleNamespace

import torch

from opo_trl.updates.sample_info import SampleInfo


def batch(prompt_mask: list[list[int]], completion_mask: list[list[int]]) -> dict:
    prompt_mask, completion_mask = torch.tensor(prompt_mask), torch.tensor(completion_mask)
    return {
        "prompt_ids": 7 * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_mask,
        "completion_mask": completion_mask,
    }


def test_every_process_knows_the_same_of_all_completions_in_two_steps():
    steps = [
        batch([[0, 1, 1], [1, 0, 1]], [[1, 1], [0, 1]]),
        batch([[0, 0, 1], [0, 0, 0]], [[1, 0], [0, 0]]),
    ]
    steps[1]["texts"] = ["of an override", "of an override"]
    left_out = [torch.tensor([False, True]), torch.tensor([False, False])]
    two_processes = SimpleNamespace(device=torch.device("cpu"), gather=lambda table: torch.cat([table, table]))
    info = SampleInfo.gather(steps, left_out, two_processes)
    # Up to the last token, also where tokens before it are masked.
    assert info.lengths[0].tolist() == [[[2, 2], [3, 2]], [[1, 1], [0, 0]]]
    assert info.left_out[1].tolist() == [[False, True], [False, False]]
    assert info.columns[1].tolist() == [[[3, 2]] * 2] * 2
    assert info.exchangeable[0].tolist() == [[True, True], [False, False]]
    assert info.prompt.shape == (2, 2, 2)

    of_step = info[:, 0]
    on_all = of_step.on_all_processes()
    assert on_all.lengths.tolist() == [[2, 2], [3, 2], [2, 2], [3, 2]]
    assert on_all.left_out.tolist() == [False, True, False, True]
    assert on_all[on_all.left_out].lengths.tolist() == [[3, 2], [3, 2]]
