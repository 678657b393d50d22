"""Processes that tests start: their environment and end, what they wait for, and limits of files."""

import os
import random
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


_given_ports: set[int] = set()


def free_port() -> int:
    """
    A port that nothing listens on and that this process has not been given before. Workers of pytest-xdist have 1,000
    ports each, none of which the kernel gives to connections, so that another process seldom takes it meanwhile.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20_000 + 1_000 * (worker % 12)
    draw = random.SystemRandom()  # tests set the seed of the other one
    while True:
        port = draw.randrange(first, first + 1_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port


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
