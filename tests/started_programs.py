"""Processes that tests start: their environment and end, what they wait for, and limits of files."""

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """Environment of a process: this checkout's package, modules in `folders`, this interpreter's programs."""
    programs = Path(sys.executable).parent
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    modules = [ROOT, *folders, os.environ.get("PYTHONPATH")]
    module_path = os.pathsep.join(map(str, filter(None, modules)))
    return {**os.environ, "PYTHONPATH": module_path, "PATH": path, **more}


def run_to_its_end(command: Sequence[str | Path], env: dict[str, str], *, limit: float) -> tuple[int, str]:
    """Exit status of a command, and what it has printed. Whatever it has started ends with it, at the latest then."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        log.seek(0)
        return status, log.read()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], object], limit: float = 240.0) -> None:
    """Wait for a condition, for at most `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"The condition was not met within {limit} seconds.")
        time.sleep(0.01)


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Limit the size of files; −1 for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
