"""
Verdicts on the log of any GRPO run.

    opo-trl diagnose RUN [--output report.html]
"""

from pathlib import Path
from typing import Any

import numpy as np

from ..metrics.log import finite, number
from .diagnostics import diagnostics
from .foreign_log import read
from .run_folder import is_run
from .run_report import describe, show
from .verdicts import conclusion, judge


def diagnose(run: Path, output: Path | None) -> int:
    """Print the verdicts on a run, and write them to a page; returns 1 if one of them is "wrong"."""
    folders = (run, run.resolve().parent) if run.is_dir() else ()  # a checkpoint is judged as its run
    own = next(filter(is_run, folders), None)
    content = describe(own) if own else _describe_log(run)
    show(run, content, output)
    return int(any(verdict.wrong for verdict in content["verdicts"]))


def _describe_log(run: Path) -> dict[str, Any]:
    """The content of a report on a log that is not ours."""
    log, notes = read(run)
    # Ratios of whole completions, as in GSPO, clip all tokens of a completion or none.
    most = [y for _, y in finite(log, "clip_ratio/high_max", lambda row: number(row, "clip_ratio/region_mean") > 0)]
    settings = {"importance_sampling_level": "sequence"} if most and np.median(most) > 0.9 else {}
    known = {name for row in log for name in row}
    wanted = [each.metrics.split() for each in diagnostics({}) if not each.metrics.startswith(("opo/", "reward/"))]
    if missing := sorted({names[-1] for names in wanted if not known & {*names}}):
        notes.append(f"Without a verdict, because not in this log: {', '.join(missing)}.")
    verdicts = judge(log, settings)
    said = [f"Optimizer steps: {log[-1]['step']:,}. Entries: {len(log):,}.", *notes, conclusion(verdicts)]
    return {"name": run.resolve().name, "summary": said, "accuracies": [], "verdicts": verdicts, "plan": ""}
