"""Many small training runs side by side, resumed where they were interrupted."""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm


def options(fields: Mapping[str, Any]) -> list[str]:
    """Command line of recipe fields."""
    return list(itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in fields.items()))


def read_command_line(description: str | None, *commands: str) -> argparse.Namespace:
    """Command line of a benchmark: one of the `commands`, and `--jobs`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    return parser.parse_args()


def is_done(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    summary = folder / "summary.json"
    return summary.exists() and "after" in json.loads(summary.read_text())


def train(run: tuple[Path, list[str]]) -> tuple[Path, int]:
    """Train in this process, which must be a new one; its output goes to a file next to the run's folder."""
    from opo_trl.command.train import main

    folder, command_line = run
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(folder.name + ".txt").open("w")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    return folder, main([*command_line, "--overwrite", "true"])


def run_missing(runs: Mapping[Path, list[str]], jobs: int) -> int:
    """Run what is not finished: folder → command line for `opo_trl.command.train`. Returns the exit status."""
    missing = [(folder, line) for folder, line in runs.items() if not is_done(folder)]
    # Importing takes longer than some of the runs: the server does it once for all.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opo_trl.command.train"])
    failed = []
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for folder, status in tqdm(pool.imap_unordered(train, missing), total=len(missing), desc="runs"):
            failed += [folder] if status else []
    for folder in failed:
        print(f"failed: {folder}.txt", file=sys.stderr)
    return int(bool(failed))
