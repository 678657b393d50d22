"""
TRL's GRPOTrainer, `objective: grpo` and OPO with replay, from one model, on one GPU, in less than half an hour.

    ./start gpu                                          Qwen3-0.6B on GSM8K, from the Hub
    ./start gpu --model FOLDER --data FOLDER             from folders
    python -m benchmarks.gpu --tiny --output runs/tiny   two minutes on a CPU

Each part has a third of `--minutes`, after the model has been downloaded, and is a process of its own. It ends by
itself when its budget of completions or its time is spent, and is killed half a minute later. `report.md` and
`report.json` in the output are written while it trains: whenever this ends, they have what was measured until then.
The same command goes on with the parts that are missing. Any GPU that PyTorch calls `cuda`, with 16 GB of memory.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opo_trl.checks.files import read_lines

from .page import write_report
from .settings import DATA, PARTS, Settings


GRACE = 30  # seconds that a part may take longer than it should


def has_gpu() -> bool:
    """Whether there is a GPU to train on."""
    import torch  # takes seconds, which a tiny run can do without

    return torch.cuda.is_available()


def download(settings: Settings) -> None:
    """Bring model and data to this machine, before any time counts."""
    if not Path(settings.model).is_dir():
        from huggingface_hub import snapshot_download

        print(f"Downloading {settings.model} …", flush=True)
        snapshot_download(settings.model)
    if settings.data == DATA:
        from opo_trl.data import load_problems

        load_problems(settings.data, dataset_config="main")


def is_finished(file: Path, settings: Settings) -> bool:
    """
    Whether a part has come to its end.

    Raises:
        `ValueError`: its settings are others.
    """
    lines = read_lines(file)
    if not lines:
        return False
    found, wanted = lines[0]["settings"], settings.as_dict()
    if found != wanted:
        raise ValueError(f"{file} has settings {found}, not {wanted}. Choose another --output.")
    return "end" in lines[-1]


def run_part(name: str, settings: Settings, output: Path, seconds: float, statuses: dict[str, str]) -> int:
    """Run a part in a process, writing the report meanwhile; its exit status."""
    words: list[Any] = [sys.executable, "-m", "benchmarks.gpu.part", name, output, seconds]
    words += ["--model", settings.model, "--data", settings.data, *(["--tiny"] if settings.tiny else [])]
    ends = time.monotonic() + seconds + GRACE
    with (output / f"{name}.log").open("w") as log:
        process = subprocess.Popen([*map(str, words)], stderr=log)
        try:
            while process.poll() is None and time.monotonic() < ends:
                time.sleep(1)
                write_report(output, statuses)
        finally:
            process.kill()
            status = process.wait()
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder to write, or to go on in")
    parser.add_argument("--minutes", type=float, default=24, help="for all parts together")
    Settings.add_arguments(parser)
    arguments = parser.parse_args(argv)
    output, settings = arguments.output, Settings.of(arguments)
    if not (settings.tiny or has_gpu()):
        parser.error("PyTorch sees no GPU. `--tiny` tries the same code on a CPU.")
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        missing = [name for name in PARTS if not is_finished(output / f"{name}.jsonl", settings)]
    except ValueError as error:
        parser.error(str(error))
    download(settings)
    statuses: dict[str, str] = {}
    seconds = 60 * arguments.minutes / len(PARTS)
    try:
        for name in missing:
            status = run_part(name, settings, output, seconds, statuses)
            if status != 0:
                statuses[name] = f"failed with exit status {status}: see {name}.log"
                print(f"{name} {statuses[name]}", file=sys.stderr, flush=True)
    finally:
        write_report(output, statuses)
    print(f"Attach {output / 'report.md'} and {output / 'report.json'} to an issue.")
    return int(bool(statuses))


if __name__ == "__main__":
    sys.exit(main())
