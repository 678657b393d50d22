"""
`python -m MODULE …` in a process that is forked from the server of `launched_processes`, which has imported torch, TRL
and this package: their imports take longer than what most tests start. Where a test is about an interpreter's start
(what it imports, variables that are read then, a console script), it starts a new one instead.
"""

import atexit
import os
import runpy
import sys
from pathlib import Path

from launched_processes import launch, logs


def run_module(module: str, *words: str, folder: Path, place: Path) -> str:
    """
    Run a module as `python -m` does in a folder, which is first on the path; returns what it prints.

    Args:
        module: its name.
        words: its command line.
        folder: current folder of the process.
        place: folder of its log.
    """
    status = launch(_run, module, words, str(folder), folder=place)
    assert status == [0], logs(place)
    return (place / "process_0.log").read_text()


def _run(module: str, words: tuple[str, ...], folder: str) -> None:
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"  # of processes that this one starts
    sys.path.insert(0, folder)
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # of which a forked process runs none
