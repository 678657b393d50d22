"""A killed `opo-trl train` goes on with `--resume_from_checkpoint auto`, and leaves the folder of an unkilled one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from helpers import without_times
from invariance.launch import launch, logs, server
from safetensors.torch import load_file

from opo_trl.train import main


RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic" / "opo.yaml"
OPTIONS = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 3,
    "logging_steps": 1,
    "validation_steps": 2,
    "validation_size": 8,
    "report_size": 8,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 12,
    "disable_tqdm": "true",
}


def train(folder: Path, *further: str) -> None:
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    assert main(["--config", str(RECIPE), "--output_dir", str(folder), *options, *further]) == 0


def lines(folder: Path) -> list[dict]:
    """The run's log without measured times."""
    path = folder / "log.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [without_times(entry) for entry in entries]


def accuracies(folder: Path) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name != "train_seconds"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    status = launch(train, folder / "run", folder=folder)
    assert status == [0], logs(folder)
    return folder / "run"


@pytest.mark.parametrize("step", [2, 5], ids=["before the first checkpoint", "inside the second rollout"])
def test_killed_command_goes_on(uninterrupted: Path, tmp_path: Path, step: int):
    folder = tmp_path / "run"
    process = server().Process(target=train, args=(folder,))
    process.start()
    while process.is_alive() and not any(entry["step"] == step for entry in lines_so_far(folder)):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert launch(train, folder, "--resume_from_checkpoint", "auto", folder=tmp_path) == [0], logs(tmp_path)
    one, other = load_file(folder / "model.safetensors"), load_file(uninterrupted / "model.safetensors")
    assert all(one[name].equal(other[name]) for name in other)
    assert lines(folder) == lines(uninterrupted)
    assert accuracies(folder) == accuracies(uninterrupted)


def lines_so_far(folder: Path) -> list[dict]:
    """As [`lines`], of a log that is being written."""
    try:
        return lines(folder)
    except json.JSONDecodeError:
        return []
