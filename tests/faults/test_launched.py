"""`opo-trl train` as the launcher of a run: signals to it, and killed processes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from device_fields import USE_CPU, devices_for, several_processes
from started_programs import environment, wait_until
from test_killed_command import OPTIONS, RECIPE

from opo_trl.checks.files import read_lines
from opo_trl.resume.checkpoint import last_complete


# Most of it is startup time.
SECONDS = 240.0


def steps(folder: Path) -> list[int]:
    lines = read_lines(folder / "run" / "log.jsonl")
    return [line["step"] for line in lines if "grad_norm" in line]


def output(folder: Path) -> str:
    return (folder / "log").read_text()[-5000:]


@contextmanager
def launched(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """The launcher and the two processes of a run in `folder / "run"`, after its first step."""
    fields = {**OPTIONS, "max_steps": 1000, "save_steps": 1000, "output_dir": folder / "run", "num_processes": 2}
    fields |= {"per_device_train_batch_size": OPTIONS["per_device_train_batch_size"] // 2, "main_process_port": 0}
    command = [sys.executable, "-m", "opo_trl.command.cli", "train", "--config", str(RECIPE), *more]
    command += several_processes(folder, "cpu" if USE_CPU else "multi_gpu")
    command += [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    n_before = len(steps(folder))
    settings = environment(**devices_for(2))
    training: list[psutil.Process] = []
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, env=settings, start_new_session=True)

    def has_begun_or_ended() -> bool:
        return len(steps(folder)) > n_before or launcher.poll() is not None

    try:
        wait_until(has_begun_or_ended, SECONDS)
        assert launcher.poll() is None, output(folder)
        training = psutil.Process(launcher.pid).children()
        yield launcher, training
        assert psutil.wait_procs(training, SECONDS)[1] == [], output(folder)
    finally:
        for process in training:
            if process.is_running():
                process.kill()
        launcher.kill()
        launcher.wait()


@pytest.mark.slow
def test_launched_run_is_stopped_resumes_and_is_killed(tmp_path: Path):
    run = str(tmp_path / "run")
    with launched(tmp_path) as (launcher, training):
        assert len(training) == 2
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SECONDS) == 128 + signal.SIGTERM, output(tmp_path)
        last = steps(tmp_path)[-1]
        assert last_complete(run) == f"{run}/checkpoint-{last}"
        assert f"Ended by SIGTERM after optimizer step {last}" in output(tmp_path)
        assert (tmp_path / "run" / "report.html").is_file(), output(tmp_path)
    with launched(tmp_path, "--resume_from_checkpoint", "auto") as (launcher, training):
        (second,) = [process for process in training if process.environ()["RANK"] == "1"]
        second.kill()
        assert launcher.wait(SECONDS) == 128 + signal.SIGKILL
        assert "opo-trl train: error: a training process was ended by SIGKILL" in output(tmp_path)
        assert last_complete(run) is not None
