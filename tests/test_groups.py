"""Columns over the completions of all processes."""

from types import SimpleNamespace

import torch

from opo_trl.groups import own_samples


def test_each_process_gets_its_part_of_columns_over_all():
    rollout = {"advantages": torch.zeros(3)}
    columns = {"target": torch.arange(6.0), "valid": torch.tensor([True, False, True, False, True, False])}
    parts = [own_samples(rollout, columns, SimpleNamespace(process_index=index)) for index in range(2)]
    for name, column in columns.items():
        assert torch.cat([part[name] for part in parts]).equal(column.float())
