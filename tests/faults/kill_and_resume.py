"""
Kill a run with SIGKILL at random writes, resume it, and compare the result with the uninterrupted run bitwise.

    PYTHONPATH=tests python -m faults.kill_and_resume [--kills 20] [--seed 0]

The run is the canonical one with completions that the policy samples, so that random states matter. It saves a
checkpoint every second optimizer step and keeps two: in each pass over a rollout, between passes, and at its end. One
of its processes kills itself when it opens, creates, renames or removes a file of the run for the n-th time.

Ends with status 1 if a resumed run differs from the uninterrupted one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from helpers import without_times
from invariance.canonical import Form, make_trainer, weights
from invariance.launch import launch, logs
from tiny import save_tiny_model

from opo_trl.rollout import checkpoint


# Log entries cover three optimizer steps, so some checkpoints lie between them.
SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "logging_steps": 3}
# Three passes over each rollout, the later ones over groups of it and the one before: nine steps per rollout.
REPLAY = {**SAVING, "num_iterations": 3, "max_staleness": 1}
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
# Rewards are fractions of even tokens: with completions of one token, some groups have zero variance.
DYNAMIC = {**SAVING, "max_sampling_rounds": 3, "num_generations": 4, "max_completion_length": 1}

ONE = Form("1 process", rows=4, sampled=True, options=SAVING)
TWO = Form("replay, 2 processes", rows=4, processes=2, config="multi_gpu", sampled=True, options=REPLAY)
ZERO3 = replace(TWO, name="replay, moving reference, zero3", config="zero3", options={**REPLAY, **MOVING})
FSDP2 = replace(ZERO3, name="replay, moving reference, fsdp2", config="fsdp2")
QUICK = (
    replace(ONE, name="replay, moving reference", options={**REPLAY, **MOVING}),
    replace(ONE, name="dynamic sampling, LoRA", lora=True, options=DYNAMIC),
    TWO,
    ZERO3,
)
FOUR = replace(TWO, rows=2, processes=4)
FORMS = (
    ONE,
    *QUICK,
    FSDP2,
    *(
        replace(FOUR, name=f"{config}, 4 processes", config=config)
        for config in ("multi_gpu", "zero2", "zero3", "fsdp2")
    ),
    replace(FOUR, name="LoRA, zero3, 4 processes", config="zero3", lora=True),
)


def train(form: Form, model: str, folder: str, kill: tuple[int, int] | None) -> None:
    """In each process: resume from the last complete checkpoint, or start from the beginning."""
    trainer = make_trainer(form, model, Path(folder))
    process = trainer.accelerator.process_index
    writes = _count_writes(folder, kill[1] if kill and kill[0] == process else None)
    trainer.train(resume_from_checkpoint="auto")
    (Path(folder) / f"writes_{process}").write_text(str(len(writes)))
    trainer.save_model(str(Path(folder) / "end"))
    if trainer.accelerator.is_main_process:
        (Path(folder) / "log.json").write_text(json.dumps(trainer.state.log_history))


def _count_writes(folder: str, last: int | None) -> list[str]:
    """The calls of this process that touch files of a folder, so far; it dies before the `last`."""
    found: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            return
        path = arguments[0]
        of_tree = event == "os.remove" and not os.path.isabs(path)  # that is being deleted
        if isinstance(path, str | os.PathLike) and (of_tree or os.fspath(path).startswith(folder)):
            found.append(event)
            if len(found) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return found


def train_without_state(*arguments) -> None:
    """Control: the same with TRL's checkpoints."""
    checkpoint.restore = lambda trainer, state: None
    train(*arguments)


def start(form: Form, model: str, folder: Path, kill: tuple[int, int] | None = None, target=train) -> list[int]:
    """Launch the run, with a `kill` of a process before one of its writes; returns the exit status of each process."""
    where = {"config": form.config, "processes": form.processes, "folder": folder}
    status = launch(target, form, model, str(folder), kill, **where)
    if kill is None and any(status):
        raise RuntimeError(f"{form.name}: exit status {status}\n{logs(folder)}")
    return status


def random_kill(
    form: Form, reference: Path, draw: random.Random, share: tuple[float, float] = (0.0, 1.0)
) -> tuple[int, int]:
    """A process, and the number of one of its writes, in this share of those of an uninterrupted run."""
    process = draw.randrange(form.processes)
    total = int((reference / f"writes_{process}").read_text())
    return process, min(1 + int(total * draw.uniform(*share)), total)


def differences(folder: Path, reference: Path) -> list[str]:
    """Names of tensors and log entries that differ bitwise."""
    end, wanted = (weights(path / "end") for path in (folder, reference))
    different = [name for name in wanted if not torch.equal(end[name], wanted[name])]
    log, wanted_log = (json.loads((path / "log.json").read_text()) for path in (folder, reference))
    pairs = zip(map(without_times, log), map(without_times, wanted_log), strict=True)
    return different + [f"log entry {number}" for number, (one, other) in enumerate(pairs) if one != other]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.kill_and_resume")
    parser.add_argument("--kills", type=int, default=20, help="kills per form of the run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    arguments = parser.parse_args()
    table, failed = ["| run | kills | another result |", "| --- | --- | --- |"], 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = save_tiny_model(place / "model")
        for form in FORMS:
            reference, killed, bad = place / form.name, place / "killed", 0
            start(form, model, reference)
            draw = random.Random(f"{arguments.seed} {form.name}")
            for _ in range(arguments.kills):
                shutil.rmtree(killed, ignore_errors=True)
                kill = random_kill(form, reference, draw)
                status = start(form, model, killed, kill)
                start(form, model, killed)
                wrong = differences(killed, reference)
                bad += bool(wrong) or -signal.SIGKILL not in status
                print(f"{form.name}: process, write {kill}: {', '.join(wrong[:3]) or 'the same bits'}", flush=True)
            table.append(f"| {form.name} | {arguments.kills} | {bad} |")
            failed += bad
    print("", *table, sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
