"""
Started by `test_sharded.py` in two processes with a pretend CUDA device each: trains the canonical run with replay in
float32 with scripted completions, then in bfloat16 with sampled ones, the latter twice: in one go, and resumed.

    accelerate launch --config_file recipes/accelerate/CONFIG.yaml --num_processes 2 sharded_run.py CONFIG MODEL FOLDER
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from canonical_run import Form, describe, make_trainer
from equivalent_forms import REPLAYED
from recording_trainers import without_times
from simulated_releases import untested_release
from transformers import AutoModelForCausalLM

from opo_trl import OPOTrainer
from opo_trl.models.frozen_base import local_part


CONFIG, MODEL, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
ON_DEVICES = {"use_cpu": False, "ddp_backend": None}
SCRIPTED = replace(REPLAYED, rows=4, processes=2, config=CONFIG, options={**REPLAYED.options, **ON_DEVICES})
# A rollout serves nine optimizer steps: the second checkpoint is inside a pass that replays the first rollout.
SAVING = {"bf16": True, "save_strategy": "steps", "save_steps": 7}
SAMPLED = replace(SCRIPTED, sampled=True, options={**SCRIPTED.options, **SAVING})


def train(name: str, form: Form, resume: str | None = None) -> dict:
    """Train, save the model in the folder of this name, and return the log and how the run was executed."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if form.options.get("bf16") else "no"
    with untested_release():  # whose checks change nothing
        trainer = make_trainer(form, MODEL, FOLDER / name)
        trainer.train(resume_from_checkpoint=resume)
    assert resume or trainer._first_step is None  # the resumed run makes no rollout that could be checked
    trainer.save_model(str(FOLDER / name))
    log = [without_times(entry) for entry in trainer.state.log_history]
    device, precision = str(trainer.accelerator.device), trainer.accelerator.mixed_precision
    return {"log": log, "device": device, "precision": precision, "held": held(trainer), **describe(trainer)}


def held(trainer: OPOTrainer) -> float:
    """The fraction of AdamW's first moments that this process holds."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    numbers = sum(local_part(state["exp_avg"]).numel() for state in optimizer.state.values())
    return numbers / sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainer.model.parameters())


def kl_to_what_is_given() -> float:
    """In the first step, where the weights of a loaded model are not those of its files."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    _kept = make_trainer(SCRIPTED, MODEL, FOLDER / "kept")  # under ZeRO-3, what is loaded from now on is sharded
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert any(hasattr(weight, "ds_tensor") for weight in model.parameters()) == (CONFIG == "zero3")
    with torch.no_grad():
        for weight in model.parameters():
            local_part(weight).mul_(1.5)
    trainer = make_trainer(replace(SCRIPTED, options={**SCRIPTED.options, "max_steps": 1}), model, FOLDER / "given")
    trainer.train()
    return next(entry["kl"] for entry in trainer.state.log_history if "kl" in entry)


found = {
    "scripted": train("scripted", SCRIPTED),
    "whole": train("whole", SAMPLED),
    "resumed": train("resumed", SAMPLED, resume=str(FOLDER / "whole" / "checkpoint-14")),
    "kl": kl_to_what_is_given(),
}
rank = int(os.environ["RANK"])
(FOLDER / f"found_{rank}.json").write_text(json.dumps(found))
with pytest.raises(RuntimeError, match="mismatch between collectives"):  # so the runs' calls have been compared
    torch.distributed.all_reduce(torch.zeros(1 + rank, device="cuda"))
torch.distributed.destroy_process_group()
