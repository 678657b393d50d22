"""
A pretrained model trained by `opo-trl train` with its recipe: SmolLM2-135M-Instruct on `addition`, killed and resumed.

    python -m benchmarks.gpu.online --output runs/gpu/online --model runs/smollm2       a GPU, 100 seconds
    python -m benchmarks.gpu.online --output runs/gpu/tiny --tiny                       a minute, without weights

`recipes/smollm2-135m/opo.yaml`, with 2,000 training and 1,000 test problems. A checkpoint is saved every eight steps;
after the twelfth step every process of the run is killed (SIGKILL), and the same command resumes it. `online.json` has
the validation curve, accuracies before and after, the seconds of an optimizer step by phase, tokens per second, and
those of both commands. Starting, measuring and saving are in the seconds of the commands, but in no phase.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from opo_trl.checks.files import read_json, read_lines, write_json, write_lines
from opo_trl.data.arithmetic import base_model_path
from opo_trl.data.few_shot import make_problems
from opo_trl.metrics.log import PHASES
from opo_trl.report.run_files import LOG, SUMMARY

from ..many_runs import options
from ..record import begin
from .recorded import SPLITS


ON_GPU = {"use_cpu": "false", "bf16": "true", "accelerate_config": "single_gpu"}
FULL = {"report_size": 1000, "validation_size": 500, "per_device_eval_batch_size": 250}
TINY = {
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "max_completions": 48,
    "report_size": 8,
    "validation_size": 8,
    "validation_steps": 8,
    "reward_funcs": "benchmarks.gpu.recorded.turns",
}


def run(words: list[str], output: Path, *, until: int | None, seconds: float) -> dict[str, Any]:
    """Run a command, kill it when it has logged a step, or when its time is over; its seconds and status."""
    began = time.perf_counter()
    with (output / "run.log").open("a") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
        while process.poll() is None and time.perf_counter() - began < seconds:
            if until and any(entry["step"] >= until for entry in read_lines(output / "run" / LOG)):
                break
            time.sleep(0.2)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return {"status": process.wait(), "seconds": round(time.perf_counter() - began, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write or resume")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, or for tiny of any model")
    parser.add_argument("--limit_seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, also on a CPU")
    args = parser.parse_args(argv)
    if not args.model and not args.tiny:
        parser.error("--model is needed, but for --tiny")
    ends, save = time.perf_counter() + args.limit_seconds, 4 if args.tiny else 8
    fields = {
        "config": "recipes/smollm2-135m/opo.yaml",
        "model_name_or_path": args.model or os.path.relpath(base_model_path()),
        "dataset_name": args.output / "data",
        "output_dir": args.output / "run",
        "save_strategy": "steps",
        "save_steps": save,
        "save_total_limit": 2,
        "resume_from_checkpoint": "auto",
        **(ON_GPU if torch.cuda.is_available() else {}),
        **(TINY if args.tiny else FULL),
    }
    words = [sys.executable, "-m", "opo_trl.command.cli", "train", *options(fields)]
    file = args.output / "online.json"
    found = begin(file, {"tiny": args.tiny, "run": " ".join(words[1:])})
    (args.output / "data").mkdir(exist_ok=True)
    for split in ("train", "test"):
        write_lines(args.output / "data" / f"{split}.jsonl", make_problems(split, ["addition"], SPLITS))
    for part, until in (("killed", save * 3 // 2), ("resumed", None)):
        if found.get(part, {}).get("status") not in (0, -signal.SIGKILL if until else 0):
            found[part] = run(words, args.output, until=until, seconds=ends - time.perf_counter())
    entries = read_lines(args.output / "run" / LOG)
    steps = [entry for entry in entries if "opo/time/update" in entry]
    phases = {name: fmean(entry[f"opo/time/{name}"] for entry in steps) for name in PHASES} if steps else {}
    found |= {
        "steps": steps[-1]["step"] if steps else 0,
        "curve": [[line["step"], line["validation/accuracy"]] for line in entries if "validation/accuracy" in line],
        "seconds_per_step": phases,
        "share_of_update": phases["update"] / sum(phases.values()) if steps else None,
        "summary": read_json(args.output / "run" / SUMMARY),
    }
    write_json(file, found)
    print(json.dumps({name: found[name] for name in ("killed", "resumed", "steps", "curve", "seconds_per_step")}))
    return int(found["resumed"]["status"] != 0)


if __name__ == "__main__":
    sys.exit(main())
