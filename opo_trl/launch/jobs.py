"""The runs of a comparison: find the missing ones, and run each in a process."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..checks.files import read_json
from ..checks.secrets import mask
from ..report.run_folder import LOG, RECIPE, SETTINGS, is_run
from ..report.runs import Settings, check_comparable, is_finished


# Fields that are set here for each run, and those that do not affect training.
OWN_FIELDS = ("config", "output_dir", "seed", "disable_tqdm", "resume_from_checkpoint")
_IMMATERIAL = (*OWN_FIELDS, "overwrite", "report_to", "env")

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.5
_QUOTED_LINES = 12


@dataclass(frozen=True)
class Job:
    """A run of a recipe."""

    recipe: Path
    seed: int
    folder: Path
    fields: tuple[str, ...]  # other `--field value` of the command line

    @property
    def name(self) -> str:
        """Method and seed."""
        return f"{self.folder.parent.name}, seed {self.seed}"

    @property
    def output(self) -> Path:
        """File for the run's output."""
        return self.folder.parent / f"{self.folder.name}.txt"

    @property
    def command(self) -> list[str]:
        """Command line of the run."""
        own = ["--output_dir", str(self.folder), "--seed", str(self.seed), "--disable_tqdm", "true"]
        start = [sys.executable, "-m", "opo_trl.launch.cli", "train", "--config", str(self.recipe)]
        return [*start, *own, "--resume_from_checkpoint", "auto", *self.fields]


def check_earlier_run(job: Job) -> None:
    """
    Check that a finished run, or one that would resume from a checkpoint, has the requested settings.

    Raises:
        `ValueError`: settings differ; the message lists them.
    """
    if not is_run(job.folder) or not (is_finished(job.folder) or any(job.folder.glob("checkpoint-*"))):
        return
    from .recipe import read  # takes seconds

    asked = read(["--config", str(job.recipe), *job.fields]).as_stored
    earlier = read(["--config", str(job.folder / RECIPE)]).as_stored
    asked = mask(asked)
    for fields in (asked, earlier):
        if "accelerate_config" in fields:  # the same file may be at another place
            fields["accelerate_config"] = Path(fields["accelerate_config"]).name
    lines = [
        f"  {name}: {earlier.get(name, 'not set')} there, {asked.get(name, 'not set')} requested"
        for name in sorted((asked.keys() | earlier.keys()) - set(_IMMATERIAL))
        if asked.get(name) != earlier.get(name)
    ]
    if lines:
        listed = "\n".join(lines)
        raise ValueError(
            f"The run in {str(job.folder)!r} differs from {str(job.recipe)!r}:\n{listed}\n"
            "Choose another --output, or delete that run."
        )


def run_missing(jobs: Sequence[Job], at_once: int, others: Mapping[str, Settings]) -> list[Job]:
    """
    Run the unfinished jobs, each in its own process, under one progress bar; returns those that failed.

    `others` are the settings of the finished runs to compare with, by name.

    Raises:
        `ValueError`: a run is not comparable with the others, or another process is running it.
    """
    waiting = [job for job in jobs if not is_finished(job.folder)]
    if not waiting:
        return []
    failed = []
    with tqdm(total=len(jobs), initial=len(jobs) - len(waiting), unit="run") as bar, _processes() as running:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = _start(job)
            time.sleep(_POLL_SECONDS)
            ended = [job for job, process in running.items() if process.poll() is not None]
            failed += [job for job in ended if running.pop(job).returncode or not is_finished(job.folder)]
            bar.update(len(ended))
            bar.set_postfix_str("; ".join(map(_progress, running)), refresh=sys.stderr.isatty())
            if ended:  # possibly hours before the last run ends
                check_comparable({**others, **_begun(jobs)})
    return failed


@contextmanager
def _processes() -> Iterator[dict[Job, subprocess.Popen]]:
    """Processes that end when this one leaves the block, also through a signal."""
    running: dict[Job, subprocess.Popen] = {}
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in _ENDING_SIGNALS}
    try:
        yield running
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGTERM)  # including what the launcher has started
        for process in running.values():
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(job: Job) -> subprocess.Popen:
    job.output.parent.mkdir(parents=True, exist_ok=True)
    with job.output.open("a") as output:
        try:
            # The run's processes inherit the lock: it lasts as long as any of them, even if this process is killed.
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{job.name} is still running: it writes to {str(job.output)!r}. Wait for it, or end it."
            ) from None
        output.truncate(0)
        return subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def _progress(job: Job) -> str:
    """Name of a run, and how many steps it has logged."""
    log = job.folder / LOG
    steps = log.read_bytes().count(b'"grad_norm"') if log.exists() else 0
    return f"{job.name}: {steps} steps" if steps else job.name


def _begun(jobs: Sequence[Job]) -> dict[str, Settings]:
    settings = {job.name: read_json(job.folder / SETTINGS) for job in jobs}
    return {name: own for name, own in settings.items() if own}


def failure(job: Job) -> str:
    """Message about a failed run: where its output is, and the end of it."""
    lines = [line for line in job.output.read_text(errors="replace").splitlines() if line.strip()]
    quoted = "\n".join(f"    {line}" for line in lines[-_QUOTED_LINES:])
    return f"{job.name} failed. The end of {job.output}:\n{quoted}"
