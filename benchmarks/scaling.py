"""
How the cost of an update phase grows with OPOTrainer and TRL's GRPOTrainer, and how much of it is OPOTrainer's own.

    python -m benchmarks.scaling            → benchmarks/results/scaling.{json,md}; two cores, 5 minutes
    python -m benchmarks.scaling --write    the tables from scaling.json
    python -m benchmarks.scaling --quick    the two shortest lengths only, once; writes nothing; half a minute

One size varies at a time, the others are those of `Setting`; rollouts are replayed as in `benchmarks/update_phase.py`.
OPOTrainer's own parts are all its work except passes through the model and what TRL does: see `OWN_PARTS` in
`benchmarks/replay.py`. Each process has the same number of prompts. Times are processor times of the first process, so
that waiting for others does not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread helps little with so small a model

import numpy as np
import torch.distributed

from opo_trl.checks.files import write_json

from .record import origin
from .replay import OWN_PARTS, Split, draw_rollout, make_trainer, phase, take_turns
from .shapes import small_qwen3


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "scaling.json"
GROUPS, ROWS, STEPS, WIDTH = 4, 4, 2, 128
LONGEST = 992  # tokens of MATH's solutions, without the longest percent
REPEATS = 3


@dataclass(frozen=True)
class Setting:
    """
    The sizes of a measurement.

    Args:
        length: tokens of the longest completion; all are scaled from MATH.
        group: completions of a prompt.
        vocabulary: tokens in it.
        processes: number of processes, with `GROUPS` prompts each.
    """

    length: int = 248
    group: int = 8
    vocabulary: int = 1024
    processes: int = 1


AXES: dict[str, tuple[int, ...]] = {
    "length": (124, 248, 496, 992),
    "group": (4, 8, 16, 32),
    "vocabulary": (1024, 4096, 16384, 65536),
    "processes": (1, 2),
}


# Measurements


def measure(setting: Setting, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of a phase of each trainer in this process: the median of the `whole`, and the mean of each part."""
    shape = small_qwen3(WIDTH, setting.vocabulary)
    rollout = draw_rollout(
        "math",
        groups=GROUPS * setting.processes,
        generations=setting.group,
        vocab_size=setting.vocabulary,
        shorter=LONGEST // setting.length,
    )
    options = {"rows": ROWS, "steps": STEPS, "processes": setting.processes}
    trainers = {method: make_trainer(method, shape, rollout, **options) for method in ("GRPO", "OPO")}
    for trainer in trainers.values():
        phase(trainer)  # not counted, because it creates the moments
    splits = {method: Split(trainer) for method, trainer in trainers.items()}
    whole = take_turns(trainers, repeats)
    return {
        method: {"whole": statistics.median(whole[method])}
        | {part: seconds / repeats for part, seconds in split.seconds.items()}
        for method, split in splits.items()
    }


def measure_launched(setting: Setting, repeats: int) -> dict[str, dict[str, float]]:
    """[`measure`] in the first one of several processes."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"setting": asdict(setting), "repeats": repeats, "output": f"{folder}/result.json"}
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
        subprocess.run(
            [sys.executable, *launch, "-m", "benchmarks.scaling", "--process", json.dumps(task)], cwd=ROOT, check=True
        )
        return json.loads(Path(task["output"]).read_text())


def run_process(task: dict[str, Any]) -> None:
    """A process of [`measure_launched`]."""
    result = measure(Setting(**task["setting"]), task["repeats"])
    if torch.distributed.get_rank() == 0:
        Path(task["output"]).write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def measure_axes(axes: Mapping[str, Sequence[int]], repeats: int) -> dict[str, dict[str, Any]]:
    """Axis → size → what [`measure`] returns there."""
    result: dict[str, dict[str, Any]] = {}
    for axis, sizes in axes.items():
        for size in sizes:
            print(axis, size, flush=True)
            setting = replace(Setting(), **{axis: size})
            measured = (measure if setting.processes == 1 else measure_launched)(setting, repeats)
            result.setdefault(axis, {})[str(size)] = measured
    return result


# Tables

COLUMNS = ("GRPO", "OPO", "OPO ÷ GRPO", "forward", "backward", "anchor", *OWN_PARTS, "own", "own ÷ OPO")


def columns(measured: dict[str, dict[str, float]]) -> dict[str, float]:
    """A row of a table: milliseconds, and ratios."""
    opo = {part: 1e3 * seconds for part, seconds in measured["OPO"].items()}
    grpo, own = 1e3 * measured["GRPO"]["whole"], sum(opo[part] for part in OWN_PARTS)
    row = {"GRPO": grpo, "OPO": opo["whole"], "OPO ÷ GRPO": opo["whole"] / grpo} | opo
    return row | {"own": own, "own ÷ OPO": own / opo["whole"]}


def exponents(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Least-squares slope of log cost over log size: cost grows as size to this power."""
    sizes = np.log([float(size) for size in rows])
    return {name: np.polyfit(sizes, np.log([row[name] for row in rows.values()]), 1)[0] for name in COLUMNS}


def page(results: dict[str, Any]) -> str:
    """`scaling.md`."""
    made = results["origin"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    lines = [
        "# How the cost of an update phase grows",
        "",
        f"By `{made['command']}` ({made['device']}, {made['date']}, commit {made['git_commit']}; {versions});"
        f" {results['repeats']} phases of each, in turns.",
        "How it is measured: [scaling.py](../scaling.py). Milliseconds of processor time: of GRPOTrainer's and",
        "OPOTrainer's complete phase, and of parts of OPOTrainer's. `own` is the sum of OPOTrainer's own parts:",
        f"{', '.join(OWN_PARTS)}. The exponent is the slope of log cost over log size.",
    ]
    for axis, measured in results["axes"].items():
        rows = {size: columns(one) for size, one in measured.items()}
        lines += ["", f"## {axis}", "", f"| {' | '.join((axis, *COLUMNS))} |", "| ---: |" + " ---: |" * len(COLUMNS)]
        lines += [f"| {size} | {' | '.join(cell(row[name]) for name in COLUMNS)} |" for size, row in rows.items()]
        lines += [f"| exponent | {' | '.join(f'{slope:.2f}' for slope in exponents(rows).values())} |"]
    return "\n".join(lines) + "\n"


def cell(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write from the results, without measuring")
    parser.add_argument("--quick", action="store_true", help="two sizes only; write nothing")
    parser.add_argument("--process", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.process:
        run_process(args.process)
        return 0
    if args.quick:
        axes = measure_axes({"length": AXES["length"][:2]}, repeats=1)
        print(page({"origin": origin(), "repeats": 1, "axes": axes}))
        return 0
    if not args.write:
        write_json(RESULTS, {"origin": origin(), "repeats": REPEATS, "axes": measure_axes(AXES, REPEATS)})
    RESULTS.with_suffix(".md").write_text(page(json.loads(RESULTS.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
