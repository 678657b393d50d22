"""A rollout without a learning signal changes nothing, for any number of processes."""

import json

import pytest
import torch
from helpers import RecordingOPO, Script, make_trainer, snapshot, trained
from invariance.launch import launch, logs

from faults.nothing_to_learn import ROLLOUTS, run


@pytest.mark.parametrize(("config", "processes"), [(None, 1), ("multi_gpu", 4)])
def test_rollout_without_a_signal_changes_nothing(tiny_model, tmp_path, config, processes):
    status = launch(run, tiny_model, str(tmp_path), processes, config=config, processes=processes, folder=tmp_path)
    assert status == [0] * processes, logs(tmp_path)
    nothing = {"processes": processes, "moved": False, "logged": [[0.0, 0.0, 0]]}
    for rank in range(processes):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == dict.fromkeys(ROLLOUTS, nothing)


class Watching(RecordingOPO):
    """An override that only looks."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("trainer_class", [RecordingOPO, Watching])
def test_a_run_without_a_signal_is_resumed_between_passes(tiny_model, tmp_path, trainer_class):
    steps = {"num_iterations": 4, "steps_per_generation": 4, "optim": "adamw_torch", "learning_rate": 1e-3}
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    script = Script(rewards=[1.0] * 8, max_length=12)
    options = {"trainer_class": trainer_class, "script": script, **steps, **saved}
    trainer = trained(tiny_model, tmp_path, **options)
    rest = make_trainer(tiny_model, tmp_path, **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for each in (trainer, rest):
        now = snapshot(each.model)
        assert all(torch.equal(now[name], each.initial[name]) for name in now)
