"""The runs of a comparison: find the missing ones, and run each in a process."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from opo_trl.checks.secrets import mask
from opo_trl.report.run_files import LOG, RECIPE, is_finished, is_run, read_settings

from .runs import Settings, check_comparable


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
        return f"{self.folder.parent.name}, seed {self.seed}"

    @property
    def output(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.txt"

    @property
    def command(self) -> list[str]:
        own = ["--output_dir", str(self.folder), "--seed", str(self.seed), "--disable_tqdm", "true"]
        start = [sys.executable, "-m", "opo_trl.command.cli", "train", "--config", str(self.recipe)]
        return [*start, *own, "--resume_from_checkpoint", "auto", *self.fields]


def check(job: Job) -> None:
    """
    Check a run's recipe, and that a finished run, or one that would resume from a checkpoint, has the same settings.
    """
    from opo_trl.command.recipe import read  # takes seconds

    found = read(["--config", str(job.recipe), *job.fields, "--seed", str(job.seed)])
    if not is_run(job.folder):
        return
    goes_on = is_finished(job.folder) or any(job.folder.glob("checkpoint-*"))
    if not goes_on:
        return
    asked = mask(found.as_stored)
    earlier = read(["--config", str(job.folder / RECIPE)]).as_stored
    for fields in (asked, earlier):
        if fields.get("accelerate_config"):  # the same file may be at another place, and that of the run be gone
            fields["accelerate_config"] = Path(fields["accelerate_config"]).stem
    lines = [f"The run in {str(job.folder)!r} differs from {str(job.recipe)!r}:"]
    names = asked.keys() | earlier.keys()
    for name in sorted(names - set(_IMMATERIAL)):
        there, here = earlier.get(name, "not set"), asked.get(name, "not set")
        if asked.get(name) != earlier.get(name):
            lines.append(f"  {name}: {there} there, {here} requested")
    if lines[1:]:
        raise ValueError("\n".join([*lines, "Choose another --output, or delete that run."]))


def run_missing(jobs: Sequence[Job], at_once: int, others: Mapping[str, Settings]) -> list[Job]:
    """
    Run the unfinished jobs, each in its own process, under one progress bar; returns those that failed.

    `others` are the settings of the finished runs to compare with, by name.
    """
    waiting = [job for job in jobs if not is_finished(job.folder)]
    if not waiting:
        return []
    failed, done = [], len(jobs) - len(waiting)
    # The bar counts the steps of runs under way. It is drawn more often than runs end, so all time so far counts.
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    how: Any = {"desc": f"{done} of {len(jobs)} runs", "smoothing": 0, "bar_format": form}
    begun = done + sum(map(_share, waiting))
    with tqdm(total=len(jobs), initial=begun, **how) as bar, _processes() as running:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = _start(job)
            time.sleep(_POLL_SECONDS)
            ended = [job for job, process in running.items() if process.poll() is not None]
            failed += [job for job in ended if running.pop(job).returncode or not is_finished(job.folder)]
            done += len(ended)
            bar.n = done + sum(map(_share, [*running, *waiting]))
            bar.set_description_str(f"{done} of {len(jobs)} runs", refresh=False)
            shown = [f"{job.name}: {step} steps" if (step := _step(job)) else job.name for job in running]
            bar.set_postfix_str("; ".join(shown), refresh=bool(ended) or sys.stderr.isatty())
            if ended:  # possibly hours before the last run ends
                settings = {job.name: own for job in jobs if (own := read_settings(job.folder))}
                check_comparable({**others, **settings})
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
    with job.output.open("ab") as output:
        try:
            # The run's processes inherit the lock: it lasts as long as any of them, even if this process is killed.
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = f"{job.name} is still running: it writes to {str(job.output)!r}. Wait for it, or end it."
            raise ValueError(said) from None
        output.truncate(0)
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(job.command, start_new_session=True, **streams)


def _tail(path: Path, size: int = 2**16) -> str:
    """The last bytes of a text file, decoded; empty if there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - size, 0))
        return file.read().decode("utf-8", "replace")


def _step(job: Job) -> int:
    """The last optimizer step that a run has logged."""
    steps = re.findall(r'^\{"step": (\d{1,15}),', _tail(job.folder / LOG), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def _share(job: Job) -> float:
    """How much of a run is done, according to its settings."""
    of = read_settings(job.folder).get("max_steps") or -1
    return min(_step(job) / of, 1.0) if of > 0 else 0.0


def failure(job: Job) -> str:
    """Message about a failed run: where its output is, and the end of it."""
    lines = [line for line in _tail(job.output).splitlines() if line.strip()]
    quoted = "\n".join(f"    {line}" for line in lines[-_QUOTED_LINES:])
    return f"{job.name} failed. The end of {job.output}:\n{quoted}"
