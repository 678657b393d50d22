"""
A scripted run whose groups lie across processes, and what came of it.

    torchrun --nproc-per-node 2 tests/scripts/two_processes.py MODEL FOLDER

On a machine without GPUs `accelerate launch` runs one process and exits 0, so the result holds their number.
"""

import json
import os
import sys
from pathlib import Path

import torch
from helpers import Script, logged, trained, without_times


ROWS = 12  # of a rollout, over all processes
REWARDS = [0.3, 1.7, 2.2, 0.1, 1.0, None, 0.2, 0.7, 0.5, 0.9, 0.4, 1.3]


def run(model: str, folder: Path) -> dict:
    """Train three optimizer steps, two of them on one rollout; the result in the order of the rollout's rows."""
    rows = ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    trainer = trained(
        model,
        folder,
        script=Script(REWARDS, truncated=(3,)),
        mask_truncated_completions=True,
        drive_scaling="batch",
        chi2_radius=0.5,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_iterations=2,
        max_steps=3,
        learning_rate=0.002,
    )
    rollout = trainer.rollouts[0]
    columns = {"target": rollout.opo_target, "valid": rollout.opo_valid, "mu": rollout.opo_mu}
    gathered = {name: trainer.accelerator.gather(column).tolist() for name, column in columns.items()}
    tokens = torch.stack([batch["completion_mask"].sum() for batch in trainer.steps[0].batches]).sum()
    parameters = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    initial = torch.cat([trainer.initial[name].flatten() for name, _ in trainer.model.named_parameters()])
    return {
        "processes": trainer.accelerator.num_processes,
        "parameters": parameters.tolist(),
        "moved": (parameters - initial).norm().item(),
        "logged": [
            {name: value for name, value in without_times(entry).items() if name.startswith("opo/")}
            for entry in logged(trainer)
        ],
        "tokens": trainer.accelerator.gather(tokens[None]).tolist(),
        "held": trainer.accelerator.gather(rollout.completion_mask.sum()[None]).tolist(),
        **gathered,
    }


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    result = run(sys.argv[1], folder)
    if torch.distributed.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        (folder / "result.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
