"""
Verdicts on the log of any GRPO run, in the terminal and as a page.

    opo-trl diagnose RUN [--output report.html]
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..checks.errors import under_way
from ..checks.files import write
from ..checks.paths import check_folder, check_name
from ..checks.text import one_line, printable
from ..metrics.log import Entry, finite, number, off_policy
from . import run_folder
from .foreign_log import GENERATION, read
from .pages import render
from .run_report import conclusion, spark
from .verdicts import Verdict, judge


# What replay takes on the embedded task, of docs/reuse.md: gradients per completion, and completions to the same
# accuracy as a share of GRPO's.
GRADIENTS, COMPLETIONS = 4, 0.67

_MADE = ("num_tokens", "completions/mean_length", "reward")  # logged with a rollout only
_CLIPPED = ("clip_ratio/region_mean", "clip_ratio", "cispo_clip_ratio")
_DEAD = "frac_reward_zero_std"
_WHOLE = 0.9  # share of tokens clipped in the completion with most of them: 1 per completion, up to 0.3 per token


def diagnose(run: Path, output: Path | None) -> int:
    """Print verdicts on a run, and write them to a page; returns 1 if something is wrong."""
    if output is not None:
        check_name("output", output)
        check_folder("output", output.parent)
        if output.suffix != ".html" or output.is_dir():
            raise ValueError(f"output={str(output)!r} is not the name of a page. Let it end with .html.")
    if run_folder.is_run(run):
        log, settings = run_folder.read_log(run), run_folder.read_settings(run)
    else:
        log = read(run)
        settings = {"importance_sampling_level": _level(log)}
    verdicts = judge(log, settings)
    steps = f"{len(log)} entries up to optimizer step {log[-1]['step']:,}." if log else ""
    said = [steps, conclusion(verdicts)]
    reuse = what_reuse_saves(log)
    print(printable(f"{run}: {' '.join(said)}"))
    for verdict in (*verdicts, *reuse):
        bound = f" Healthy: {verdict.range}." if verdict.range else ""
        print(f"{verdict.word:7}  {verdict.sentence}{bound}{' ' if verdict.remedy else ''}{verdict.remedy}")
    if output is not None:
        beyond = [verdict for verdict in verdicts if verdict.remedy]
        page = {"name": one_line(run.resolve().name), "summary": said, "verdicts": [*verdicts, *reuse], "spark": spark}
        with under_way():
            write(output, render("diagnosis.html.j2", {**page, "beyond": beyond, "figures": {}, "watching": []}))
        print(printable(str(output)))
    return int(any(verdict.wrong for verdict in verdicts))


def _level(log: Sequence[Entry]) -> str:
    """Whether the log is of ratios per token or per completion, of which all tokens are clipped or none."""
    clipped = [share for _, share in finite(log, "clip_ratio/high_max", lambda row: number(row, _CLIPPED[0]) > 0)]
    return "sequence" if clipped and np.median(clipped) > _WHOLE else "token"


def what_reuse_saves(log: Sequence[Entry]) -> list[Verdict]:
    """Facts: whether completions are reused already, what zero-variance groups cost, and an estimate of the time."""
    steps = [row for row in log if "grad_norm" in row or "step_time" in row]
    made = [row for row in steps if any(name in row for name in _MADE)]
    is_each = len(steps) > 1 and all(after["step"] - before["step"] == 1 for before, after in pairwise(steps))
    served = round(len(steps) / len(made)) if is_each and made else 0  # 0: the log does not say
    metric = next((name for name in _CLIPPED if finite(log, name)), "step")
    points = finite(log, metric) if metric in _CLIPPED else []
    is_reused = served > 1 or any(value > 0 for _, value in points) or any(map(off_policy, log))
    if is_reused:
        said = f"Off-policy: a rollout serves {served if served > 1 else 'several'} optimizer steps."
    elif served == 1:
        said = "On-policy: every optimizer step has a rollout of its own, which is used once."
    elif points:
        said = "On-policy, or nearly: no ratio was clipped in any entry."
    else:
        said = "Whether a rollout serves several optimizer steps is not in this log. Set `logging_steps: 1`."
    found = [Verdict(metric, said, None, "", points)]
    if dead := finite(log, _DEAD):
        share = np.mean([value for _, value in dead])
        said = f"Over the run, {share:.0%} of completions were in zero-variance groups, and their time was wasted"
        found.append(Verdict(_DEAD, f"{said}. Replay never draws them.", None, "", dead))
    if not is_reused:
        found.append(Verdict("step_time", _estimate(log), None, "", finite(log, "step_time")))
    return found


def _estimate(log: Sequence[Entry]) -> str:
    """What replay takes, as a share of the time of a run that trains on each completion once."""
    timed = [
        (after.get(GENERATION, 0.0), number(after, "step_time") * (after["step"] - before["step"]))
        for before, after in pairwise(log)
    ]
    timed = [pair for pair in timed if math.isfinite(pair[1])]
    generating, total = (sum(seconds) for seconds in zip(*timed, strict=True)) if timed else (0.0, 0.0)
    said = (
        f"Estimate: if replay needs {COMPLETIONS:g} of the completions with {GRADIENTS} gradients for each, as on the "
        "embedded task (`docs/reuse.md`), it takes"
    )
    if not 0 < generating <= total:
        least = (GRADIENTS - 1 / COMPLETIONS) / (GRADIENTS - 1)
        return (
            f"{said} less time where generation and scoring take over {least:.0%} of it. This log does not time them; "
            "an export of trackio or wandb does."
        )
    share = generating / total
    cost = COMPLETIONS * (share + GRADIENTS * (1 - share))
    return f"{said} {cost:.2f} times as long, because generation and scoring take {share:.0%} of the time."
