"""A gradient that is not finite: the step is skipped, and too many in a row end the run."""

import math

import pytest
import torch
from helpers import RecordingOPO, Script, logged, make_trainer, snapshot, trained
from safetensors.torch import load_file

from opo_trl.resume import checkpoint


def poison(*rollouts: int):
    """Set a target of these rollouts to NaN."""

    def inject(rollout: dict, trainer):
        for name in ("opo_target", "advantages"):
            if name in rollout and int(rollout["rollout"][0]) in rollouts:
                rollout[name][2] = torch.nan

    return inject


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_step_is_skipped_and_the_next_is_taken(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, inject=poison(1), max_steps=4, optim="adamw_torch")
    before = [step.policy for step in trainer.steps]
    assert not same(before[0], before[1])
    assert same(before[2], before[1])  # not even AdamW's momentum moved it
    assert not same(before[2], before[3])
    assert all(tensor.isfinite().all() for tensor in snapshot(trainer.model).values())
    entries = logged(trainer)
    assert [entry["opo/skipped_steps"] for entry in entries] == [0, 1, 1, 1]
    assert [math.isfinite(entry["grad_norm"]) for entry in entries] == [True, False, True, True]


def test_too_many_in_a_row_end_the_run_with_a_checkpoint_to_resume(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, inject=poison(1, 3, 4), max_steps=8, max_skipped_steps=2)
    with pytest.raises(RuntimeError, match=r"max_skipped_steps=2 is reached.*The last complete .*checkpoint-5"):
        trainer.train()
    folder = tmp_path / "checkpoint-5"
    assert checkpoint.fault(folder) is None
    assert same(load_file(folder / "model.safetensors"), load_file_like(trainer.steps[3].policy, folder))
    again = make_trainer(tiny_model, tmp_path, max_steps=7, max_skipped_steps=2)
    again.train(resume_from_checkpoint="last")
    assert [entry["opo/skipped_steps"] for entry in logged(again)] == [0, 1, 1, 2, 3, 3, 3]
    again = make_trainer(tiny_model, tmp_path, inject=poison(0), max_steps=7, max_skipped_steps=2)
    again.train(resume_from_checkpoint=str(folder))  # one more, not the last one allowed
    assert [entry["opo/skipped_steps"] for entry in logged(again)][-2:] == [4, 4]


def load_file_like(state: dict, folder) -> dict:
    """A model's state by the names in its file, which holds tied weights once."""
    return {name: state[name] for name in load_file(folder / "model.safetensors")}


class NotANumberOnce(RecordingOPO):
    """Its model returns only NaN in the second optimizer step."""

    def _token_logps(self, *inputs, **options):
        logps, entropies, aux_loss = super()._token_logps(*inputs, **options)
        factor = torch.nan if self.state.global_step == 1 else 1.0
        return logps * factor, entropies * factor, aux_loss


def test_log_probabilities_of_nan_do_not_reach_the_policy(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, trainer_class=NotANumberOnce, max_steps=3)
    assert [entry["opo/skipped_steps"] for entry in logged(trainer)] == [0, 1, 1]
    assert all(tensor.isfinite().all() for tensor in snapshot(trainer.model).values())


def test_infinite_reward_counts_as_unscored(tiny_model, tmp_path, caplog):
    infinite, none = ([1.0, value, 0.0, 0.5, 1.0, 0.3, 0.2, 0.0] for value in (math.inf, None))
    runs = {
        name: trained(tiny_model, tmp_path / name, script=Script(rewards), max_steps=2)
        for name, rewards in (("infinite", infinite), ("none", none))
    }
    assert same(snapshot(runs["infinite"].model), snapshot(runs["none"].model))
    assert "Infinite rewards count as unscored" in caplog.text
    assert logged(runs["infinite"])[0]["opo/skipped_steps"] == 0
