"""
A run on two processes, on one of which every completion fails to be scored; each writes down how it ends.

    torchrun --nproc-per-node 2 tests/scripts/failing_rewards.py MODEL FOLDER
"""

import os
import sys
from pathlib import Path

import scorers
import torch
from datasets import Dataset
from helpers import PROMPTS, RecordingOPO, make_trainer

from opo_trl.scoring import IsolatedReward


if __name__ == "__main__":
    rank = os.environ["RANK"]
    trainer = make_trainer(
        sys.argv[1],
        Path(sys.argv[2]) / "run",
        trainer_class=RecordingOPO,
        trainer_arguments={
            "reward_funcs": IsolatedReward(scorers.by_fate, workers=1),
            "train_dataset": Dataset.from_dict({"prompt": PROMPTS, "fate": ["raise", "1"] * 4}),
        },
        gradient_accumulation_steps=1,
        shuffle_dataset=False,
        max_steps=20,
    )
    try:
        trainer.train()
    except RuntimeError as error:
        (Path(sys.argv[2]) / f"{rank}.txt").write_text(str(error))
    torch.distributed.destroy_process_group()
