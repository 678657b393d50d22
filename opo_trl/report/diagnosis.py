"""
Verdicts on the log of any GRPO run, and what reuse of its completions would save.

    opo-trl diagnose RUN [--output report.html]
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..checks.files import write
from ..checks.text import printable
from ..metrics.log import Entry, finite, number, off_policy
from .diagnostics import diagnostics
from .foreign_log import read
from .run_folder import is_run, read_log, read_settings
from .run_report import page
from .verdicts import Verdict, conclusion, judge, spark


# OPO with replay on the embedded task, in docs/reuse.md: gradients per completion, and completions to GRPO's accuracy
# as a share of GRPO's.
GRADIENTS, COMPLETIONS = 4, 0.67

_OF_A_ROLLOUT = ("num_tokens", "completions/mean_length", "reward")  # logged in the step that generates it
_CLIPPED = ("clip_ratio/region_mean", "clip_ratio", "cispo_clip_ratio")


def diagnose(run: Path, output: Path | None) -> int:
    """Print the verdicts on a run, and write them to a page; returns 1 if one of them is "wrong"."""
    folders = (run, run.resolve().parent) if run.is_dir() else ()  # a checkpoint is judged as its run
    notes: list[str] = []
    if own := next(filter(is_run, folders), None):
        log, settings = read_log(own), read_settings(own)
    else:
        log, notes = read(run)
        # Ratios of whole completions, as in GSPO, clip all tokens of a completion or none.
        most = [share for _, share in finite(log, "clip_ratio/high_max", lambda row: number(row, _CLIPPED[0]) > 0)]
        settings = {"importance_sampling_level": "sequence"} if most and np.median(most) > 0.9 else {}
        known = {name for row in log for name in row}
        wanted = [each.metrics.split() for each in diagnostics({}) if not each.metrics.startswith(("opo/", "reward/"))]
        if missing := sorted({names[-1] for names in wanted if not known & {*names}}):
            notes.append(f"Without a verdict, because not in this log: {', '.join(missing)}.")
    judged = judge(log, settings)
    verdicts = [*judged, *reuse(log)]
    said = [f"Optimizer steps: {log[-1]['step'] if log else 0:,}. Entries: {len(log):,}.", *notes, conclusion(judged)]
    print(*map(printable, (str(run), *said)))
    print(*(verdict.line for verdict in verdicts), sep="\n")
    if output is not None:
        content = {"name": run.resolve().name, "summary": said, "verdicts": verdicts, "spark": spark, "plan": ""}
        write(output, page({**content, "accuracies": [], "beyond": [each for each in judged if each.remedy]}))
        print(printable(str(output)))
    return int(any(verdict.wrong for verdict in judged))


def reuse(log: Sequence[Entry]) -> list[Verdict]:
    """Facts: whether completions are reused, what zero-variance groups cost, and when reuse would save time."""
    steps = [row for row in log if "grad_norm" in row or "step_time" in row]
    rollouts = sum(any(name in row for name in _OF_A_ROLLOUT) for row in steps)
    has_each = len(steps) > 1 and all(after["step"] - before["step"] == 1 for before, after in pairwise(steps))
    served = len(steps) / rollouts if has_each and rollouts else 0.0  # 0: the log does not say
    metric = next((name for name in _CLIPPED if finite(log, name)), _CLIPPED[0])
    points = finite(log, metric)
    is_moved = any(value > 0 for _, value in points) or any(map(off_policy, log))
    said = "Whether a rollout serves several optimizer steps is not in this log. Set `logging_steps: 1`."
    if served > 1:
        said = f"Off-policy: a rollout serves {served:.2g} optimizer steps{' on average' if served % 1 else ''}."
    elif is_moved:
        said = "Off-policy: an earlier policy wrote the completions."
    elif served == 1:
        said = "On-policy: every optimizer step has a rollout of its own, which is used once."
    found = [Verdict(metric, said, None, "", points)]
    dead = finite(log, "frac_reward_zero_std")
    if any(value > 0 for _, value in dead):
        share = f"{np.mean([value for _, value in dead]):.0%} of completions were in zero-variance groups"
        said = f"Over the run, {share}: the time for these was wasted. Replay draws others."
        found.append(Verdict("frac_reward_zero_std", said, None, "", dead))
    if not (is_moved or served > 1):
        least = (GRADIENTS - 1 / COMPLETIONS) / (GRADIENTS - 1)
        said = (
            f"Estimate: replay that needs {COMPLETIONS:g} of the completions and {GRADIENTS} gradients of each, in "
            f"`docs/reuse.md`, takes less time if generation and scoring take over {least:.0%} of a step."
        )
        found.append(Verdict("step_time", said, None, "", finite(log, "step_time")))
    return found
