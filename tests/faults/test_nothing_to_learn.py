"""A rollout without a learning signal changes nothing, for any number of processes."""

import json
from pathlib import Path

import pytest
import torch
from helpers import RecordingOPO, Script, logged, make_trainer, snapshot, trained
from invariance.launch import launch, logs


ROLLOUTS = {
    "all are unscored": {"script": Script([None] * 8)},
    "all are truncated": {"script": Script(truncated=range(16)), "mask_truncated_completions": True},
    "all rewards are equal": {"script": Script([1.0] * 8)},
    "all are empty": {"script": Script([0.0] * 8, min_length=1, max_length=1)},
    # In a second pass, micro-batches have other shapes, so the log-ratio is rounding, of which AdamW would make steps.
    "all rewards are equal, twice": {"script": Script([1.0] * 8), "num_iterations": 2, "max_steps": 4},
    "in bfloat16": {
        "script": Script([1.0] * 8),
        "num_iterations": 2,
        "max_staleness": 1,
        "max_steps": 6,
        "model_init_kwargs": {"dtype": "bfloat16"},
    },
}


def run(model: str, folder: str, processes: int) -> None:
    """Train on each kind of rollout; each process writes its outcomes."""
    rank, outcomes = 0, {}
    for name, options in ROLLOUTS.items():
        trainer = trained(
            model,
            Path(folder) / name,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4 // processes,
            steps_per_generation=8 // processes,
            optim="adamw_torch",
            **{"max_steps": 2, **options},
        )
        rank = trainer.accelerator.process_index
        outcomes[name] = outcome(trainer)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(outcomes))


def outcome(trainer: RecordingOPO) -> dict:
    """What the optimizer steps changed, and which values they logged."""
    model = snapshot(trainer.accelerator.unwrap_model(trainer.model))
    names = ("loss", "grad_norm", "opo/skipped_steps")
    return {
        "processes": trainer.accelerator.num_processes,
        "moved": not all(torch.equal(tensor, trainer.initial[name]) for name, tensor in model.items()),
        "logged": sorted({tuple(entry[name] for name in names) for entry in logged(trainer)}),
    }


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
