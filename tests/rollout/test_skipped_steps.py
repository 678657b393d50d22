"""A gradient that is not finite: the step is skipped, its samples are kept, and too many in a row end the run."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import RecordingOPO, Script, logged, make_trainer, snapshot, trained
from safetensors.torch import load_file

from opo_trl.rollout import checkpoint
from opo_trl.rollout.skipped_steps import SkippedSteps


def poison(*rollouts: int):
    """Set a target of these rollouts to NaN."""

    def inject(rollout: dict, trainer):
        for name in ("opo_target", "advantages"):
            if name in rollout and int(rollout["rollout"][0]) in rollouts:
                rollout[name][2] = torch.nan

    return inject


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_part_counts_keeps_samples_and_resumes(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path / "new"), max_skipped_steps=2)
    model = torch.nn.Linear(1, 1)
    part = SkippedSteps(args, Accelerator(cpu=True))
    norms = [0.5, math.nan, 0.25, math.inf, math.nan]
    found = [part.check(model, norm, step=step, micro_batches=[step]) for step, norm in enumerate(norms, 1)]
    assert [norm if math.isfinite(norm) else None for norm in found] == [0.5, None, 0.25, None, None]
    assert torch.load(tmp_path / "new" / "skipped_step_0.pt") == {"step": 5, "micro_batches": [5]}
    again = SkippedSteps(args, Accelerator(cpu=True))
    again.load_state_dict(part.state_dict())
    trainer = SimpleNamespace(lr_scheduler=None, control=SimpleNamespace())
    with pytest.raises(RuntimeError, match="max_skipped_steps=2"), again.end_of_step(trainer):
        pass
    assert vars(trainer.control) == {"should_log": True, "should_save": True}
    again.check(model, 0.5, step=6, micro_batches=[])
    assert again.state_dict() == {"total": 3, "in_a_row": 0, "moved_at": 6}
    with again.end_of_step(trainer):
        pass


def test_samples_replace_a_link_and_may_be_lost_on_a_full_disk(tmp_path, caplog, monkeypatch):
    def check(step: int) -> None:
        norm = part.check(torch.nn.Linear(1, 1), math.nan, step=step, micro_batches=[step])
        assert math.isnan(norm)

    def full(*_):
        raise RuntimeError("unexpected pos 64 vs 0")  # what torch says of a full disk

    part = SkippedSteps(SimpleNamespace(output_dir=str(tmp_path), max_skipped_steps=9), Accelerator(cpu=True))
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "skipped_step_0.pt").symlink_to("mine.txt")
    check(1)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    monkeypatch.setattr(torch, "save", full)
    check(2)
    assert "Its samples could not be kept: unexpected pos" in caplog.text
    assert torch.load(tmp_path / "skipped_step_0.pt")["step"] == 1


@pytest.mark.parametrize("trainer_class", [RecordingOPO])
def test_step_is_skipped_and_the_next_is_taken(tiny_model, tmp_path, trainer_class):
    trainer = trained(
        tiny_model, tmp_path, trainer_class=trainer_class, inject=poison(1), max_steps=4, optim="adamw_torch"
    )
    before = [step.policy for step in trainer.steps]
    assert not same(before[0], before[1])
    assert same(before[2], before[1])  # not even AdamW's momentum moved it
    assert not same(before[2], before[3])
    assert all(tensor.isfinite().all() for tensor in snapshot(trainer.model).values())
    entries = logged(trainer)
    assert [entry["opo/skipped_steps"] for entry in entries] == [0, 1, 1, 1]
    assert [math.isfinite(entry["grad_norm"]) for entry in entries] == [True, False, True, True]


class Scaled(RecordingOPO):
    """With float16's gradient scaler, which skips a step by itself and reports it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accelerator.native_amp, self.accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=4.0)


@pytest.mark.parametrize("options", [{}, {"trainer_class": Scaled, "fp16": True}], ids=["float32", "float16"])
def test_learning_rate_follows_its_schedule_over_a_skipped_step(tiny_model, tmp_path, options):
    schedule = {"lr_scheduler_type": "linear", "learning_rate": 0.004, "max_steps": 4, "num_iterations": 2}
    trainer = trained(tiny_model, tmp_path, inject=poison(0), **schedule, **options)
    entries = logged(trainer)
    assert [entry["opo/skipped_steps"] for entry in entries] == [1, 2, 2, 2]
    assert [entry["learning_rate"] for entry in entries] == pytest.approx([0.004, 0.003, 0.002, 0.001])
    assert set(trainer.lr_scheduler.get_last_lr()) == {0}
    if options:
        assert trainer.accelerator.scaler.get_scale() == 1.0  # halved by both skipped steps
        assert not trainer.accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("trainer_class", [RecordingOPO])
def test_samples_of_a_skipped_step_are_kept_and_reproduce_its_loss(tiny_model, tmp_path, trainer_class):
    trainer = trained(tiny_model, tmp_path, trainer_class=trainer_class, inject=poison(1), max_steps=3)
    kept = torch.load(tmp_path / "skipped_step_0.pt", weights_only=True)
    assert kept["step"] == 2
    step = trainer.steps[1]
    trainer.model.load_state_dict(step.policy)
    losses = [trainer.compute_loss(trainer.model, rows).item() for rows in kept["micro_batches"]]
    assert losses == pytest.approx(step.losses, nan_ok=True)
    assert sum(map(math.isnan, losses)) == 1
    assert len(losses) == 2


def test_only_the_micro_batches_of_the_skipped_step_are_kept(tiny_model, tmp_path):
    def inject(rollout, trainer):
        rollout["opo_target"][:] = torch.where(rollout["row"] == 3, torch.nan, rollout["opo_target"])

    trainer = trained(tiny_model, tmp_path, inject=inject, max_steps=2, steps_per_generation=4)
    kept = torch.load(tmp_path / "skipped_step_0.pt", weights_only=True)
    rows = torch.cat([part["row"] for part in kept["micro_batches"]])
    assert rows.tolist() == torch.cat([batch["row"] for batch in trainer.steps[kept["step"] - 1].batches]).tolist()
    assert 3 in rows
    assert len(rows) == 8


@pytest.mark.parametrize("trainer_class", [RecordingOPO])
@pytest.mark.parametrize(
    ("options", "rollouts"),
    [
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, [0, 0, 1, 1]),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 4}, [0, 1, 2, 3]),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 3, "num_iterations": 2}, [0, 0, 0]),
    ],
    ids=str,
)
def test_micro_batches_of_all_rollouts_of_the_skipped_step_are_kept(
    tiny_model, tmp_path, trainer_class, options, rollouts
):
    """The first rollout has the sample that made it skip; a later one, or a later pass, ends the step."""
    trained(tiny_model, tmp_path, trainer_class=trainer_class, inject=poison(0), max_steps=1, **options)
    kept = torch.load(tmp_path / "skipped_step_0.pt", weights_only=True)
    assert [int(part["rollout"][0]) for part in kept["micro_batches"]] == rollouts
    name = "opo_target" if trainer_class is RecordingOPO else "advantages"
    assert any(part[name].isnan().any() for part in kept["micro_batches"])


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


def test_log_probabilities_of_nan_reach_neither_policy_nor_entropy_controller(tiny_model, tmp_path):
    controlled = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_max": 0.5, "entropy_target": 100.0}
    trainer = trained(tiny_model, tmp_path, trainer_class=NotANumberOnce, max_steps=3, **controlled)
    assert [entry["opo/skipped_steps"] for entry in logged(trainer)] == [0, 1, 1]
    assert all(tensor.isfinite().all() for tensor in snapshot(trainer.model).values())
    # The entropy is below its target, so the coefficient rises by one step in each of the other two.
    assert trainer.entropy_coef == pytest.approx(0.05 + 2 * trainer.args.entropy_coef_delta)


def test_infinite_reward_counts_as_unscored(tiny_model, tmp_path, caplog):
    infinite, none = ([1.0, value, 0.0, 0.5, 1.0, 0.3, 0.2, 0.0] for value in (math.inf, None))
    runs = {
        name: trained(tiny_model, tmp_path / name, script=Script(rewards), max_steps=2)
        for name, rewards in (("infinite", infinite), ("none", none))
    }
    assert same(snapshot(runs["infinite"].model), snapshot(runs["none"].model))
    assert "Of 8 completions, 1 have an infinite reward: they count as unscored" in caplog.text
    assert logged(runs["infinite"])[0]["opo/skipped_steps"] == 0
