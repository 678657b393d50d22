"""
Verdicts on the log of any GRPO run, and what reuse of its completions would save.

    opo-trl diagnose RUN [--output report.html]
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..checks.files import read_text, write
from ..checks.paths import check_folder, readable
from ..checks.text import one_line, printable
from ..metrics.log import Entry, finite, number, off_policy
from .diagnostics import diagnostics
from .foreign_log import GENERATION, STATE, read
from .pages import render
from .run_folder import LOG, is_run, read_log, read_settings
from .run_report import conclusion, spark
from .verdicts import Verdict, judge


# OPO with replay on the embedded task, in docs/reuse.md: gradients per completion, and completions to GRPO's accuracy
# as a share of GRPO's.
GRADIENTS, COMPLETIONS = 4, 0.67

_OF_A_ROLLOUT = ("num_tokens", "completions/mean_length", "reward")  # logged in the step that generates it
_CLIPPED = ("clip_ratio/region_mean", "clip_ratio", "cispo_clip_ratio")
# Share of its tokens clipped, in the completion with most of them. A ratio of whole completions clips all or none; a
# token's cannot rise by a fifth if it was nearly certain, as many are in a completion.
_WHOLE = 0.9
_WHOLE_ON_AVERAGE = 0.25  # over the steps of an entry, which may clip nothing


def diagnose(run: Path, output: Path | None) -> int:
    """Print the verdicts on a run, and write them to a page; returns 1 if one of them is "wrong"."""
    if output is not None:
        check_folder("output", output.parent)
        if output.suffix != ".html":
            raise ValueError(f"output={str(output)!r} is not the name of a page. Let it end with .html.")
        if output.is_dir():
            raise ValueError(f"output={str(output)!r} is a folder. Add the name of a page to it, such as report.html.")
        if output.exists() and "<title>Diagnosis: " not in (read_text(output) or "<title>Diagnosis: "):
            raise ValueError(f"output={str(output)!r} is another page, and would be replaced. Choose another name.")
    with readable("RUN", run):
        is_own, of_run = is_run(run), next(filter(is_run, _folders(run)), None)
    log, notes = (read_log(run), []) if is_own else read(run)
    settings = read_settings(of_run) if of_run else {"importance_sampling_level": _level(log)}
    judged = [*_non_finite(log), *judge(log, settings)]
    verdicts, beyond = [*judged, *reuse(log)], [verdict for verdict in judged if verdict.remedy]
    if not of_run:
        notes += _assumed(log, settings)
    said = [f"Optimizer steps: {log[-1]['step'] if log else 0:,}. Entries: {len(log):,}.", *notes, conclusion(judged)]
    print(printable(str(run)), *said)
    for verdict in verdicts:
        range = f"Healthy: {verdict.range}." if verdict.range else ""
        print(f"{verdict.word:7} ", *filter(None, (verdict.sentence, range, verdict.remedy)))
    if output is not None:
        page = {"name": one_line(run.resolve().name), "summary": said, "verdicts": verdicts, "beyond": beyond}
        output.parent.mkdir(parents=True, exist_ok=True)
        write(output, render("diagnosis.html.j2", {**page, "spark": spark, "figures": {}, "watching": []}))
        print(printable(str(output)))
    return int(any(verdict.wrong for verdict in judged))


def _folders(run: Path) -> Iterator[Path]:
    """Where the settings of a run of ours may be: a checkpoint is judged as its run."""
    yield run
    if run.is_dir() or run.name in (STATE, LOG):
        yield from run.resolve().parents[: 2 if run.name == STATE else 1]


def _assumed(log: Sequence[Entry], settings: Mapping[str, Any]) -> Iterator[str]:
    """What the verdicts on a log take for granted, and which of them it has no metric for."""
    if settings["importance_sampling_level"] == "sequence":
        yield "Taken as ratios of whole completions, as in GSPO: in some, nearly all tokens are clipped."
    known = {name for row in log for name in row}
    wanted = [each.metrics.split() for each in diagnostics({})]
    # Of each diagnostic, TRL's metric is the last.
    missing = [names[-1] for names in wanted if not names[-1].startswith(("opo/", "reward/")) and not known & {*names}]
    if missing:
        shown = ", ".join(dict.fromkeys(f"`{name}`" for name in missing))
        yield f"Without a verdict, because not in this log: {shown}."


def _level(log: Sequence[Entry]) -> str:
    """Whether ratios are those of tokens or of whole completions, of which all tokens are clipped or none."""
    most = [share for _, share in finite(log, "clip_ratio/high_max", lambda row: number(row, _CLIPPED[0]) > 0)]
    least = _WHOLE if _has_each_step(log) else _WHOLE_ON_AVERAGE
    return "sequence" if most and np.median(most) > least else "token"


def _has_each_step(log: Sequence[Entry]) -> bool:
    counts_calls = any("_step" in row and "global_step" not in row for row in log)
    return len(log) > 1 and not counts_calls and all(b["step"] - a["step"] == 1 for a, b in pairwise(log))


def _non_finite(log: Sequence[Entry]) -> list[Verdict]:
    norms = [number(row, "grad_norm") for row in log if "grad_norm" in row]
    lost = [norm for norm in norms if math.isnan(norm)]
    if not lost:
        return []
    said = f"Gradient norm was not finite in {len(lost):,} of {len(norms):,} entries."
    remedy = "Lower `learning_rate`, and use bfloat16 instead of float16. Go back to a checkpoint from before."
    return [Verdict("grad_norm", said, False, remedy, finite(log, "grad_norm"), "finite", math.isnan(norms[-1]))]


def reuse(log: Sequence[Entry]) -> list[Verdict]:
    """Facts: whether completions are reused already, what zero-variance groups cost, and an estimate of the time."""
    steps = [row for row in log if "grad_norm" in row or "step_time" in row]
    rollouts = sum(any(name in row for name in _OF_A_ROLLOUT) for row in steps)
    served = len(steps) / rollouts if _has_each_step(steps) and rollouts else 0.0  # 0: the log does not say
    metric = next((name for name in _CLIPPED if finite(log, name)), _CLIPPED[0])
    points = finite(log, metric)
    is_moved = any(value > 0 for _, value in points) or any(map(off_policy, log))
    is_reused = is_moved or served > 1
    said = "Whether a rollout serves several optimizer steps is not in this log. Set `logging_steps: 1`."
    if served > 1:
        said = f"Off-policy: a rollout serves {served:.2g} optimizer steps{' on average' if served % 1 else ''}."
    elif is_moved and served:
        said = "Off-policy, although every optimizer step has a rollout of its own: an earlier policy wrote it."
    elif is_moved:
        said = "Off-policy: a rollout serves several optimizer steps, or an earlier policy wrote it."
    elif served == 1:
        said = "On-policy: every optimizer step has a rollout of its own, which is used once."
    elif points:
        said = "On-policy, or nearly: no ratio was clipped in any entry."
    found = [Verdict(metric, said, None, "", points)]
    dead = finite(log, "frac_reward_zero_std")
    if any(value > 0 for _, value in dead):
        share = f"{np.mean([value for _, value in dead]):.0%} of completions were in zero-variance groups"
        said = f"Over the run, {share}: the time for these was wasted. Replay draws others."
        found.append(Verdict("frac_reward_zero_std", said, None, "", dead))
    return found if is_reused else [*found, Verdict("step_time", _estimate(log), None, "", finite(log, "step_time"))]


def _estimate(log: Sequence[Entry]) -> str:
    """Time with replay as a share of that of a run that uses each completion once."""
    steps = [(row, row["step"] - last["step"]) for last, row in pairwise(log) if {"step_time", GENERATION} <= {*row}]
    total = sum(number(row, "step_time") * passed for row, passed in steps)
    share = sum(row[GENERATION] for row, _ in steps) / total if total > 0 else math.nan
    said = (
        f"Estimate: replay that needs {COMPLETIONS:g} of the completions, and {GRADIENTS} gradients for each, as on "
        "the embedded task (`docs/reuse.md`), takes"
    )
    if 0 < share <= 1:
        times = COMPLETIONS * (share + GRADIENTS * (1 - share))
        return f"{said} {times:.2f} times as long: generation and scoring take {share:.0%} of a step."
    least = (GRADIENTS - 1 / COMPLETIONS) / (GRADIENTS - 1)
    return f"{said} less time if generation and scoring take over {least:.0%} of a step, which this log does not time."
