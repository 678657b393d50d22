"""
A run that is killed and resumed, again and again, is bitwise identical to an uninterrupted one.

The run is the canonical one with completions that the policy samples, so that random states matter. It saves a
checkpoint every second optimizer step and keeps two: in each pass over a rollout, between passes, and at its end. One
of its processes kills itself when it opens, creates, renames or removes a file of the run for the n-th time.
"""

import json
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from canonical_run import Form, make_trainer, weights
from launched_processes import launch, logs
from recording_trainers import without_times

from opo_trl import OPOTrainer
from opo_trl.resume import checkpoint


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
QUICK = (
    replace(ONE, name="dynamic sampling, LoRA", lora=True, options=DYNAMIC),
    TWO,
)
SLOW = (
    # By default, tests/device resumes a run with a moving reference.
    replace(ONE, name="replay, moving reference", options={**REPLAY, **MOVING}),
    ZERO3,
    replace(ZERO3, name="replay, moving reference, fsdp2", config="fsdp2"),
    replace(TWO, name="replay, zero2, 4 processes", rows=2, processes=4, config="zero2"),
    replace(TWO, name="replay, LoRA, zero3, 4 processes", rows=2, processes=4, config="zero3", lora=True),
)


def train(form: Form, model: str, folder: str, kill: tuple[int, int] | None) -> None:
    """In each process: resume from the last complete checkpoint, or start from the beginning."""
    trainer = make_trainer(form, model, Path(folder))
    process = trainer.accelerator.process_index
    killed, write = kill or (None, None)
    writes = count_writes(folder, write if process == killed else None)
    trainer.train(resume_from_checkpoint="auto")
    run = Path(folder)
    (run / f"writes_{process}").write_text(str(len(writes)))
    trainer.save_model(str(run / "end"))
    if process == 0:
        (run / "log.json").write_text(json.dumps(trainer.state.log_history))


def count_writes(folder: str, last: int | None) -> list[str]:
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
    OPOTrainer._load_state = lambda self, state: None
    train(*arguments)


def start(form: Form, model: str, folder: Path, kill: tuple[int, int] | None = None, target=train) -> list[int]:
    """Launch the run, with a `kill` of a process before one of its writes; returns the exit status of each process."""
    where = {"config": form.config, "processes": form.processes, "folder": folder}
    status = launch(target, form, model, str(folder), kill, **where)
    assert kill or not any(status), f"{form.name}: exit status {status}\n{logs(folder)}"
    return status


def n_writes(folder: Path, process: int) -> int:
    """How often a process of a run has touched files of its folder."""
    return int((folder / f"writes_{process}").read_text())


def differences(folder: Path, reference: Path) -> list[str]:
    """Names of tensors and log entries that differ bitwise."""
    end = weights(folder / "end")
    expected_end = weights(reference / "end")
    different = [name for name, weight in expected_end.items() if not torch.equal(end[name], weight)]
    pairs = zip(log_of(folder), log_of(reference), strict=True)
    return different + [f"log entry {number}" for number, (one, other) in enumerate(pairs) if one != other]


def log_of(folder: Path) -> list[dict]:
    entries = json.loads((folder / "log.json").read_text())
    return [without_times(entry) for entry in entries]


@pytest.mark.parametrize(
    "form",
    [*QUICK, *(pytest.param(form, marks=pytest.mark.slow) for form in SLOW)],
    ids=lambda form: form.name.replace(", ", "-"),
)
def test_a_run_killed_at_random_writes_repeats_itself(tiny_model: str, tmp_path: Path, form):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(form, tiny_model, whole)
    draw, steps = random.Random(form.name), []
    for _ in range(2):
        process = draw.randrange(form.processes)
        # After a checkpoint, and so that there is something left to kill.
        share = draw.uniform(0.2, 0.5)
        write = 1 + int(n_writes(whole, process) * share)
        assert -signal.SIGKILL in start(form, tiny_model, killed, (process, write))
        last = checkpoint.last_complete(str(killed))
        steps += [checkpoint.load_state(Path(last), 0)["position"]] if last else []
    start(form, tiny_model, killed)
    assert differences(killed, whole) == []
    assert any(steps), "none was resumed inside a rollout"


def test_without_the_rollout_state_the_run_is_another(tiny_model: str, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(ONE, tiny_model, whole)
    assert start(ONE, tiny_model, killed, (0, n_writes(whole, 0) // 2)) == [-signal.SIGKILL]
    start(ONE, tiny_model, killed, target=train_without_state)
    assert differences(killed, whole) != []
