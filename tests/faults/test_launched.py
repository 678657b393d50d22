"""`opo-trl train` as the launcher of a run: signals to it, and killed processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers import DEVICE_FIELDS, devices_for, environment, several_processes, wait_until

from opo_trl.checks.files import read_lines
from opo_trl.rollout.checkpoint import last_complete

from .test_killed_command import OPTIONS, RECIPE


# Most of it is startup time.
SECONDS = 240.0


class Launched:
    """A run in `folder / "run"` that `opo-trl train` has launched, after its first step."""

    def __init__(self, folder: Path, processes: int, *more: str):
        self.folder, self.log = folder / "run", folder / "log"
        command = [sys.executable, "-m", "opo_trl.launch.cli", "train", "--config", str(RECIPE), *more]
        fields = {**OPTIONS, "max_steps": 1000, "save_steps": 1000, "output_dir": self.folder}
        fields["per_device_train_batch_size"] //= processes
        if processes > 1:
            command += several_processes(folder, "multi_gpu")
            fields |= {"num_processes": processes, "main_process_port": 0}
        else:
            fields |= DEVICE_FIELDS
        for name, value in fields.items():
            command += [f"--{name}", str(value)]
        before = len(self.steps())
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env=environment(**devices_for(processes)),
                start_new_session=True,
            )
        try:
            wait_until(lambda: len(self.steps()) > before or self.process.poll() is not None, SECONDS)
        finally:
            self.training = psutil.Process(self.process.pid).children()

    def steps(self) -> list[int]:
        return [line["step"] for line in read_lines(self.folder / "log.jsonl") if "grad_norm" in line]

    def said(self) -> str:
        return self.log.read_text()[-5000:]

    def ends(self) -> int:
        """Exit status of the launcher, in bounded time; it must leave no process behind."""
        status = self.process.wait(SECONDS)
        assert psutil.wait_procs(self.training, 5)[1] == [], self.said()
        return status


@contextmanager
def launched(*arguments) -> Iterator[Launched]:
    run = Launched(*arguments)
    try:
        assert run.process.poll() is None, run.said()
        yield run
    finally:
        for process in run.training:
            if process.is_running():
                process.kill()
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_launched_run_is_stopped_resumes_and_is_killed(tmp_path: Path, processes: int):
    with launched(tmp_path, processes) as run:
        assert len(run.training) == processes
        run.process.send_signal(signal.SIGTERM)
        assert run.ends() == 128 + signal.SIGTERM, run.said()
        saved = last_complete(str(run.folder))
        assert saved == str(run.folder / f"checkpoint-{run.steps()[-1]}")
        assert f"Ended by SIGTERM after optimizer step {run.steps()[-1]}" in run.said()
    with launched(tmp_path, processes, "--resume_from_checkpoint", "auto") as run:
        at = time.monotonic()
        os.kill(next(p.pid for p in run.training if p.environ().get("RANK", "0") == str(processes - 1)), 9)
        assert run.ends() == 128 + signal.SIGKILL
        assert time.monotonic() - at < 60
        assert "opo-trl train: error: a training process was ended by SIGKILL" in run.said()
        assert last_complete(str(run.folder)) is not None
