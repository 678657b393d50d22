"""
Kill a run with SIGKILL at random points, resume it, and compare the result with the uninterrupted run bitwise.

    PYTHONPATH=tests python -m faults.kill_and_resume [--kills 20] [--seed 0]

The run is the canonical one with completions that the policy samples, so that random states matter. It saves a
checkpoint every second optimizer step and keeps two: in the middle of a rollout's first iteration, in its second one,
and at its end. It is killed before or after any micro-step, or at any time during a save.

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
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from helpers import without_times
from invariance.canonical import STEPS, Form, make_trainer, weights
from invariance.launch import launch, logs
from tiny import save_tiny_model

from opo_trl import OPOTrainer
from opo_trl.rollout import checkpoint, position


SAVE_STEPS = 2
# Log entries cover three optimizer steps, so some checkpoints lie between them.
SAVING = {"save_strategy": "steps", "save_steps": SAVE_STEPS, "save_total_limit": 2, "logging_steps": 3}

# About the duration of a save of the tiny model, by number of processes.
_SAVE_SECONDS = {1: 0.03, 4: 0.3}

# What a save does, in this order: which call, and whether the process dies before or after it.
PLACES = {
    "before the model": (OPOTrainer, "save_model", "before"),
    "after the model": (OPOTrainer, "save_model", "after"),
    "after the optimizer": (OPOTrainer, "_save_optimizer_and_scheduler", "after"),
    "before the manifest": (checkpoint, "finalize", "before"),
    "after the manifest": (checkpoint, "finalize", "after"),
    "before the manifest is completed": (checkpoint, "finish", "before"),
    "before an old one is deleted": (checkpoint, "rotate", "before"),
    "after a file of an old one is deleted": (os, "unlink", "after"),
    "after an old one is deleted": (checkpoint, "rotate", "after"),
}

ONE = Form("1 process", rows=4, sampled=True, options=SAVING)
LORA = replace(ONE, name="LoRA, 1 process", lora=True)
# Rewards are fractions of even tokens: with completions of one token, some groups have zero variance.
DYNAMIC = replace(
    ONE,
    name="dynamic sampling, 1 process",
    options={**SAVING, "max_sampling_rounds": 3, "num_generations": 4, "max_completion_length": 1},
)
# Three passes over each rollout, the later ones over groups of it and the one before: nine steps per rollout.
REPLAY = replace(ONE, name="replay, 1 process", options={**SAVING, "num_iterations": 3, "max_staleness": 1})
ZERO3 = Form("zero3, 4 processes", rows=2, processes=4, config="zero3", sampled=True, options=SAVING)
FORMS = (
    ONE,
    LORA,
    DYNAMIC,
    ZERO3,
    replace(ZERO3, name="LoRA, zero3, 4 processes", lora=True),
    replace(ZERO3, name="zero2, 4 processes", config="zero2"),
    replace(ZERO3, name="fsdp2, 4 processes", config="fsdp2"),
    replace(ZERO3, name="multi_gpu, 4 processes", config="multi_gpu"),
    REPLAY,
    replace(ZERO3, name="replay, zero3, 4 processes", options=REPLAY.options),
)


@dataclass(frozen=True)
class Kill:
    """
    When a process kills itself.

    Args:
        micro_step: number of the micro-step, from 0, before which one process kills itself; or
        save: number of the save, from 0, during which it does, either
        seconds: this long after the save began, or
        place: at one of `PLACES`.
        process: which one; the launcher ends the others.
    """

    micro_step: int | None = None
    save: int | None = None
    seconds: float = 0.0
    place: str | None = None
    process: int = 0

    def __str__(self) -> str:
        when = f"{self.seconds * 1000:.0f} ms into save {self.save}"
        return f"process {self.process} {when if self.micro_step is None else f'before micro-step {self.micro_step}'}"

    @staticmethod
    def at_random(form: Form, draw: random.Random) -> "Kill":
        process = draw.randrange(form.processes)
        if draw.random() < 0.5:
            return Kill(micro_step=draw.randrange(STEPS * form.accumulation), process=process)
        seconds = _SAVE_SECONDS[form.processes]
        return Kill(save=draw.randrange(STEPS // SAVE_STEPS), seconds=draw.uniform(0, seconds), process=process)


class Mortal(OPOTrainer):
    """Kills its process at the chosen moment."""

    kill: Kill | None = None
    saves = 0

    def training_step(self, *args, **kwargs):
        if self._doomed and self._step == self.kill.micro_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        doomed = self._doomed and self.saves == self.kill.save
        self.saves += 1
        if doomed and self.kill.place:
            self._die_at(*PLACES[self.kill.place])
        elif doomed:
            death = threading.Thread(target=self._die_later, daemon=True)
            death.start()
        super()._save_checkpoint(*args, **kwargs)
        if doomed:
            death.join()  # dies right after the save at the latest

    @property
    def _doomed(self) -> bool:
        return self.kill is not None and self.accelerator.process_index == self.kill.process

    def _die_at(self, owner: object, name: str, when: str):
        call = getattr(owner, name)

        def die(*args, **kwargs):
            if when == "after":
                call(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, die)

    def _die_later(self):
        time.sleep(self.kill.seconds)
        os.kill(os.getpid(), signal.SIGKILL)


def train(form: Form, model: str, folder: str, kill: Kill | None) -> None:
    """In each process: resume from the last complete checkpoint, or start from the beginning."""
    trainer = make_trainer(form, model, Path(folder), Mortal)
    trainer.kill = kill
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(str(Path(folder) / "end"))
    if trainer.accelerator.is_main_process:
        (Path(folder) / "log.json").write_text(json.dumps(trainer.state.log_history))


def train_without_state(*arguments) -> None:
    """Control: the same with TRL's checkpoints."""
    position.restore = lambda trainer, state: None
    train(*arguments)


def start(form: Form, model: str, folder: Path, kill: Kill | None = None, target=train) -> list[int]:
    """Launch the run; returns the exit status of each process."""
    where = {"config": form.config, "processes": form.processes, "folder": folder}
    status = launch(target, form, model, str(folder), kill, **where)
    if kill is None and any(status):
        raise RuntimeError(f"{form.name}: exit status {status}\n{logs(folder)}")
    return status


def differences(folder: Path, reference: Path) -> list[str]:
    """Names of tensors and log entries that differ bitwise."""
    end, wanted = (weights(path / "end") for path in (folder, reference))
    different = [name for name in wanted if not torch.equal(end[name], wanted[name])]
    log, wanted_log = (_log(path) for path in (folder, reference))
    different += [f"log entry {i}" for i, pair in enumerate(zip(log, wanted_log, strict=True)) if pair[0] != pair[1]]
    return different


def _log(folder: Path) -> list[dict]:
    entries = json.loads((folder / "log.json").read_text())
    return [without_times(entry) for entry in entries]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.kill_and_resume")
    parser.add_argument("--kills", type=int, default=20, help="kills per form of the run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    arguments = parser.parse_args()
    table = ["| run | kills | of these in a save | another result |", "| --- | --- | --- | --- |"]
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = save_tiny_model(place / "model")
        for form in FORMS:
            start(form, model, place / form.name)
            draw = random.Random(f"{arguments.seed} {form.name}")
            kills = [Kill.at_random(form, draw) for _ in range(arguments.kills)]
            bad = sum(not survives(form, kill, model, place / "killed", place / form.name) for kill in kills)
            in_save = sum(kill.save is not None for kill in kills)
            table.append(f"| {form.name} | {len(kills)} | {in_save} | {bad} |")
            failed += bad
    print("", *table, sep="\n")
    return int(failed > 0)


def survives(form: Form, kill: Kill, model: str, folder: Path, reference: Path) -> bool:
    """Kill and resume once, print what happened, and return whether the result is the reference's."""
    shutil.rmtree(folder, ignore_errors=True)
    status = start(form, model, folder, kill)
    resumed_from = checkpoint.last_complete(str(folder))
    start(form, model, folder)
    wrong = differences(folder, reference)
    origin = Path(resumed_from).name if resumed_from else "the beginning"
    outcome = f"{len(wrong)} differ: {', '.join(wrong[:3])}" if wrong else "the same bits"
    print(f"{form.name}: {kill}; resumed from {origin}: {outcome}", flush=True)
    return not wrong and -signal.SIGKILL in status


if __name__ == "__main__":
    sys.exit(main())
