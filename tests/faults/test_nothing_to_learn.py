"""A rollout without a learning signal changes nothing, for any number of processes."""

import json

import pytest
from invariance.launch import launch, logs

from faults.nothing_to_learn import ROLLOUTS, run


@pytest.mark.parametrize(("config", "processes"), [(None, 1), ("multi_gpu", 4)])
def test_rollout_without_a_signal_changes_nothing(tiny_model, tmp_path, config, processes):
    status = launch(run, tiny_model, str(tmp_path), processes, config=config, processes=processes, folder=tmp_path)
    assert status == [0] * processes, logs(tmp_path)
    nothing = {"processes": processes, "moved": False, "logged": [[0.0, 0.0, 0]]}
    for rank in range(processes):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == dict.fromkeys(ROLLOUTS, nothing)
