"""Rollouts without a learning signal, in one process or several."""

import json
from pathlib import Path

import torch
from helpers import RecordingOPO, Script, logged, snapshot, trained


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
