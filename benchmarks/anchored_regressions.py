"""
The family of anchored regressions: what in OPO makes reuse of completions work, and which neighbours share it.

    python -m benchmarks.anchored_regressions run --jobs 1    # all missing runs, into runs/anchored; half an hour
    python -m benchmarks.anchored_regressions collect         # what is finished → results/anchored_regressions.json.gz
    python -m benchmarks.anchored_regressions report          # → results/anchored_regressions.md and .png

`anchored_methods` defines the methods, `anchored_design` the runs.
"""

import gzip
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from .anchored_design import BUDGET, CELLS, LEARNING_RATE, SEEDS, Cell, runs
from .anchored_report import write_report
from .learning_curves import run_missing
from .many_runs import read_command_line
from .record import origin


RESULTS = Path(__file__).resolve().parent / "results"
RECORD = RESULTS / "anchored_regressions.json.gz"


def summarize(cell: Cell, seed: int) -> dict[str, Any]:
    """What the report reads of a run: points of its curve, and metrics at its end."""
    curve = json.loads((cell.run(seed).folder / "curve.json").read_text())
    return {
        "regime": cell.regime,
        "part": cell.part,
        "name": cell.name,
        "fields": dict(cell.fields),
        "seed": seed,
        "points": curve["points"],
        "entropy": at_the_end(curve["steps"].get("entropy", [])),
        "target_fit": at_the_end(curve["steps"].get("opo/target_fit", [])),
    }


def at_the_end(values: list[float | None]) -> float | None:
    """Mean over the last quarter of the optimizer steps, to four digits; `None` if the metric was not logged."""
    known = [value for value in values[-(len(values) // 4) :] if value is not None]
    return float(f"{statistics.fmean(known):.4g}") if known else None


def collect() -> None:
    """Write the record of the finished runs."""
    found = [summarize(cell, seed) for cell in CELLS for seed in SEEDS if cell.run(seed).is_done]
    settings = {"budget": BUDGET, "learning_rate": LEARNING_RATE, "seeds": sorted({run["seed"] for run in found})}
    text = json.dumps({**origin(), "settings": settings, "runs": found}, indent=1)
    RECORD.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(found)} of {len(CELLS) * len(SEEDS)} runs; `run` resumes the others")


def report(folder: Path = RESULTS) -> None:
    """Write the page and the figure."""
    write_report(json.loads(gzip.decompress(RECORD.read_bytes())), folder)


def main() -> int:
    arguments = read_command_line(__doc__, "run", "collect", "report")
    if arguments.command == "run":
        return run_missing(list(runs()), arguments.jobs)
    {"collect": collect, "report": report}[arguments.command]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
