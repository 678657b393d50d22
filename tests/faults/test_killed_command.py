"""
A killed or interrupted `opo-trl train` resumes with `--resume_from_checkpoint auto`, and leaves the same folder as an
uninterrupted one.
"""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from device_fields import DEVICE_FIELDS
from launched_processes import launch, logs
from named_tensors import same_weights
from recording_trainers import without_times
from safetensors.torch import load_file
from started_programs import wait_until

from opo_trl.command.callbacks import LogFile
from opo_trl.command.recipe import parse
from opo_trl.command.train import main
from opo_trl.resume.checkpoint import fault
from opo_trl.resume.other_processes import CUT


# A run takes a few seconds.
SECONDS = 240.0


RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic" / "opo.yaml"
OPTIONS = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 3,
    "logging_steps": 1,
    "validation_steps": 2,
    "validation_size": 8,
    "report_levels": "Level 4",
    "report_size": 8,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 12,
    "disable_tqdm": "true",
}


def arguments(folder: Path, *further: str) -> list[str]:
    options = [word for name, value in {**OPTIONS, **DEVICE_FIELDS}.items() for word in (f"--{name}", str(value))]
    return ["--config", str(RECIPE), "--output_dir", str(folder), *options, *further]


def train(folder: Path, *further: str) -> None:
    status = main(arguments(folder, *further))
    with suppress(TimeoutError):  # a thread that has been told to end may take its time
        wait_until(lambda: not any("gloo" in name for name in threads()), 10)
    print("threads:", *threads())
    sys.exit(status)


def threads() -> list[str]:
    """Names of this process's threads."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return names


def train_and_wait(folder: Path, step: int, go_on: Path, *further: str) -> None:
    """[`train`], but wait for a file after the first line of the log that is of `step`."""
    on_log = LogFile.on_log

    def log_and_wait(self, args, state, control, **kwargs):
        on_log(self, args, state, control, **kwargs)
        if state.global_step == step:
            wait_until(go_on.exists)

    with patch.object(LogFile, "on_log", log_and_wait):
        train(folder, *further)


def lines(folder: Path) -> list[dict]:
    """The run's log without measured times."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


def accuracies(folder: Path) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name != "train_seconds"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    status = launch(train, folder / "run", folder=folder)
    assert status == [0], logs(folder)
    return folder / "run"


def test_killed_command_resumes(uninterrupted: Path, tmp_path: Path):
    """Before the first checkpoint, and inside the second rollout."""
    for step in (2, 5):
        again = [] if step == 2 else ["--resume_from_checkpoint", "auto"]
        assert stopped(tmp_path, signal.SIGKILL, step, *again) == [-signal.SIGKILL]
    assert_resumes(tmp_path, uninterrupted)


def test_interrupted_command_saves_first(uninterrupted: Path, tmp_path: Path):
    folder, number = tmp_path / "run", signal.SIGTERM
    assert stopped(tmp_path, number, 1, "--save_steps", "1000") == [128 + number]
    (saved,) = folder.glob("checkpoint-*")
    assert saved.name == "checkpoint-2"  # after the current step, and no further one
    assert fault(saved) is None
    assert lines(folder)[-1]["step"] == 2
    assert not accuracies(folder).keys() & {"after", "optimizer_steps"}
    assert not (folder / "model.safetensors").exists()
    log = logs(tmp_path)
    assert f"{number.name}: the run saves a checkpoint after this optimizer step and ends" in log
    assert f"Ended by {number.name} after optimizer step 2" in log
    assert_resumes(tmp_path, uninterrupted)


def test_process_group_is_gone_before_the_interpreter_is(tmp_path: Path):
    further = ("--max_steps", "2", "--per_device_train_batch_size", "6")
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path, "limit": SECONDS}
    assert launch(train, tmp_path / "run", *further, **where) == [0, 0], logs(tmp_path)
    for number in range(2):
        (threads,) = re.findall("threads: .*", (tmp_path / f"process_{number}.log").read_text())
        assert "gloo" not in threads


def test_signal_to_one_process_stops_all(tmp_path: Path):
    further = ("--max_steps", "1000", "--save_steps", "1000", "--per_device_train_batch_size", "6")
    where = {"config": "multi_gpu", "processes": 2}
    assert 128 + signal.SIGTERM in stopped(tmp_path, signal.SIGTERM, 1, *further, **where), logs(tmp_path)
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert saved.name == "checkpoint-2"
    assert fault(saved) is None
    assert "Ended by SIGTERM after optimizer step 2." in (tmp_path / "process_0.log").read_text()


@pytest.mark.slow
def test_recipe_goes_on_with_another_number_of_processes(tmp_path: Path):
    """Inside a rollout, whose nine completions for each process are no multiple of a group's six."""
    folder, last = tmp_path / "run", ("--resume_from_checkpoint", "last")
    cut = ("--per_device_train_batch_size", "3", "--steps_per_generation", "3")
    further = (*cut, "--save_steps", "1", "--validation_size", "1", "--report_size", "1", "--max_steps")
    where = {"folder": tmp_path, "limit": SECONDS}
    assert launch(train, folder, *further, "2", config="multi_gpu", processes=2, **where) == [0, 0], logs(tmp_path)

    def cut_of(*changes: str) -> list[int]:
        """The sizes with which the run would go on."""
        _, args, *_ = parse(arguments(folder, *further, "6", *last, *changes))
        return [getattr(args, name) for name in CUT[1:]]

    for steps in ("4", "5"):  # the second time from a checkpoint of one process, whose recipe is still that of two
        assert launch(train, folder, *further, steps, *last, **where) == [0], logs(tmp_path)
        settings = json.loads((folder / "settings.json").read_text())
        assert [settings[name] for name in CUT[1:]] == [3, 2, 6]
    assert [entry["step"] for entry in lines(folder) if "grad_norm" in entry] == [1, 2, 3, 4, 5]
    assert cut_of("--steps_per_generation", "4") == [3, 1, 4]  # on purpose
    assert cut_of("--per_device_train_batch_size", "6") == [6, 1, 3]
    # A recipe that sets the size of a rollout instead
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"generation_batch_size": 18}
    del recipe["steps_per_generation"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    _, args, *_ = parse(["--config", str(folder / "recipe.yaml")])
    assert [getattr(args, name) for name in CUT[1:]] == [3, 2, 6]


def stopped(place: Path, number: signal.Signals, step: int, *further: str, **where) -> list[int]:
    """
    Exit status of the processes of a run in `place / "run"`, of which the last gets a signal after `step`, before the
    next one.
    """
    go_on = place / "go on"
    go_on.unlink(missing_ok=True)

    def is_logged() -> bool:
        return any(entry["step"] == step for entry in lines_so_far(place / "run"))

    def stop(processes):
        wait_until(is_logged)
        last = processes[-1]
        os.kill(last.pid, number)
        go_on.touch()

    run = (place / "run", step, go_on, *further)
    return launch(train_and_wait, *run, folder=place, meanwhile=stop, limit=SECONDS, **where)


def assert_resumes(place: Path, uninterrupted: Path):
    folder = place / "run"
    again = launch(train, folder, "--resume_from_checkpoint", "auto", folder=place, limit=SECONDS)
    assert again == [0], logs(place)
    one, other = load_file(folder / "model.safetensors"), load_file(uninterrupted / "model.safetensors")
    assert same_weights(one, other)
    assert lines(folder) == lines(uninterrupted)
    assert accuracies(folder) == accuracies(uninterrupted)


def lines_so_far(folder: Path) -> list[dict]:
    """[`lines`] of a log that is being written."""
    try:
        return lines(folder)
    except json.JSONDecodeError:
        return []
