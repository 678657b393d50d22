"""
Greedy completions of seven problems, with the number of processes that made them.

    torchrun --nproc-per-node 2 tests/scripts/evaluate_processes.py MODEL FOLDER
"""

import json
import sys
from pathlib import Path

from test_evaluate import PROBLEMS, make_trainer

from opo_trl.evaluate import evaluate


model, folder = sys.argv[1:]
trainer = make_trainer(model, folder)
result = evaluate(trainer, PROBLEMS, decoding="greedy")
if trainer.accelerator.is_main_process:
    processes = trainer.accelerator.num_processes
    Path(folder, "result.json").write_text(json.dumps({"processes": processes, "samples": result.samples}))
trainer.end()
