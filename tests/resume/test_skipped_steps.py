"""A gradient that is not finite: the step is skipped, and too many in a row end the run."""

import math

import numpy as np
import pytest
import torch
from named_tensors import all_finite, same_weights, snapshot
from recording_trainers import RecordingOPO, make_trainer, metric, trained
from safetensors.torch import load_file
from scripted_rollouts import Script

from opo_trl.resume import checkpoint


def poison(*rollouts: int):
    """Set a target of these rollouts to NaN."""

    def inject(rollout: dict, trainer):
        for name in ("opo_target", "advantages"):
            if name in rollout and int(rollout["rollout"][0]) in rollouts:
                rollout[name][2] = torch.nan

    return inject


def test_step_is_skipped_and_the_next_is_taken(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, inject=poison(1), max_steps=4, optim="adamw_torch")
    first, second, third, fourth = (step.policy for step in trainer.steps)
    assert not same_weights(first, second)
    assert same_weights(second, third)  # not even AdamW's momentum moved it
    assert not same_weights(third, fourth)
    assert all_finite(snapshot(trainer.model))
    assert metric(trainer, "opo/skipped_steps") == [0, 1, 1, 1]
    assert np.isfinite(metric(trainer, "grad_norm")).tolist() == [True, False, True, True]


def test_too_many_in_a_row_end_the_run_with_a_checkpoint_to_resume(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, inject=poison(1, 3, 4), max_steps=8, max_skipped_steps=2)
    with pytest.raises(RuntimeError, match=r"max_skipped_steps=2 is reached.*The last complete .*checkpoint-5"):
        trainer.train()
    folder = tmp_path / "checkpoint-5"
    assert checkpoint.fault(folder) is None
    saved = load_file(folder / "model.safetensors")
    policy = trainer.steps[3].policy
    assert same_weights(saved, {name: policy[name] for name in saved})  # the file holds tied weights once
    again = make_trainer(tiny_model, tmp_path, max_steps=7, max_skipped_steps=2)
    again.train(resume_from_checkpoint="last")
    assert metric(again, "opo/skipped_steps") == [0, 1, 1, 2, 3, 3, 3]
    again = make_trainer(tiny_model, tmp_path, inject=poison(0), max_steps=7, max_skipped_steps=2)
    again.train(resume_from_checkpoint=str(folder))  # one more, not the last one allowed
    assert metric(again, "opo/skipped_steps")[-2:] == [4, 4]


class NotANumberOnce(RecordingOPO):
    """Its model returns only NaN in the second optimizer step."""

    def _token_logps(self, *inputs, **options):
        logps, entropies, aux_loss = super()._token_logps(*inputs, **options)
        factor = torch.nan if self.state.global_step == 1 else 1.0
        return logps * factor, entropies * factor, aux_loss


def test_log_probabilities_of_nan_do_not_reach_the_policy(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, trainer_class=NotANumberOnce, max_steps=3)
    assert metric(trainer, "opo/skipped_steps") == [0, 1, 1]
    assert all_finite(snapshot(trainer.model))


def test_infinite_reward_counts_as_unscored(tiny_model, tmp_path, caplog):
    def run(name: str, second: float | None):
        script = Script([1.0, second, 0.0, 0.5, 1.0, 0.3, 0.2, 0.0])
        return trained(tiny_model, tmp_path / name, script=script, max_steps=2)

    infinite = run("infinite", math.inf)
    unscored = run("unscored", None)
    assert same_weights(snapshot(infinite.model), snapshot(unscored.model))
    assert "Infinite rewards count as unscored" in caplog.text
    assert metric(infinite, "opo/skipped_steps") == [0, 0]
