"""
Verdicts on the log of any GRPO run: of ours, or of TRL, verl, prime-rl or OpenRLHF, as these, trackio or wandb have
kept it.

    opo-trl diagnose RUN [--output report.html]

    runs/grpo, runs/grpo/checkpoint-200    TRL's folders, with trainer_state.json
    trainer_state.json                     its `log_history`
    run.jsonl, run.json, run.csv           an export, with a row for each call that logged something
"""

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from ..checks.files import MOST_LINES, loads, parse, read_json, read_lines, read_text
from ..checks.text import one_line
from ..metrics.log import finite, number
from .diagnostics import conclusion, diagnostics, judge
from .run_files import is_run
from .run_report import describe, show


STATE = "trainer_state.json"

_TRUNCATED = "completions/clipped_ratio"

# Metrics of verl, prime-rl and OpenRLHF, and of TRL.
_NAMES = {
    **dict.fromkeys(["critic/score/mean", "reward/all/mean", "agg/effective/agent/reward/mean"], "reward"),
    **dict.fromkeys(["response_length/clip_ratio", "is_truncated/all/mean", "response_clip_ratio"], _TRUNCATED),
    "agg/effective/agent/is_truncated/mean": _TRUNCATED,
    **dict.fromkeys(["actor/entropy", "entropy/all/mean", "entropy/mean", "entropy_loss"], "entropy"),
    **dict.fromkeys(["actor/pg_clipfrac", "ppo_clip_ratio"], "clip_ratio"),
    **dict.fromkeys(["actor/grad_norm", "optim/grad_norm"], "grad_norm"),
    **dict.fromkeys(["actor/lr", "optim/lr", "actor_lr"], "learning_rate"),
    "training/global_step": "global_step",
}
_OF_GRPO = {name for each in diagnostics({}) for name in each.metrics.split()} - {"grad_norm", "entropy"}
_OF_STEP = {"learning_rate", "grad_norm"}  # by Transformers, of every optimizer step, and of none besides
_OF_TRAINING = _OF_GRPO | _OF_STEP | {"entropy", "step_time", "validation/accuracy"}
_OF_ROLLOUT = {"reward_std", "frac_reward_zero_std", "completion_length", "completions/mean_length"}  # as `reward`


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


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The entries of training, in order, and which file of a folder they are from. A `ValueError` names the file."""
    file = path if path.is_file() else _newest_state(path)
    try:
        rows = [numbers(row) for row in _rows(file, named=file == path)]
        log = entries(rows)
        if not any(_OF_GRPO & entry.keys() for entry in log):
            found = one_line(", ".join(sorted({name for row in rows for name in row})))
            raise ValueError(f"no row with a `step` has a metric of GRPOTrainer; found {found or 'nothing'}")
    except (ValueError, csv.Error) as error:
        wanted = f"a folder of TRL with {STATE}, that file or an export of one run as .jsonl, .json or .csv"
        message = str(error).rstrip(".")
        raise ValueError(f"RUN={str(file)!r} is not the log of a GRPO run: {message}. RUN is {wanted}.") from error
    return log, [] if file == path else [f"Read: {file}."]


def _newest_state(folder: Path) -> Path:
    """The state of the most optimizer steps: that of a checkpoint, or of the end. A link to a checkpoint is none."""
    checkpoints = [checkpoint for checkpoint in folder.glob("checkpoint-*") if not checkpoint.is_symlink()]
    states = [state for state in (each / STATE for each in (*checkpoints, folder)) if os.path.lexists(state)]
    if not states:
        raise ValueError(f"RUN={str(folder)!r} has no {STATE}, nor has a checkpoint in it, and is no file.")
    return max(states, key=_steps_of)


def _steps_of(state: Path) -> float:
    step = number({"global_step": 0, **read_json(state)}, "global_step")
    if math.isnan(step):
        raise ValueError(f"{str(state)!r} cannot be read: its `global_step` is not a number.")
    return step


def _rows(file: Path, *, named: bool) -> Sequence[Mapping[str, Any]]:
    """The rows of a file. If the user has named it, it may be a link."""
    form = file.name.removesuffix(".gz").rpartition(".")[2]
    if form == "csv":
        rows: Any = list(csv.DictReader(io.StringIO(read_text(file, follow=named))))
    elif form == "jsonl":
        rows = read_lines(file, follow=named)
    elif form == "json":
        content = loads(read_text(file, follow=named))
        rows = content.get("log_history") or content.get("rows") if isinstance(content, dict) else content
    else:
        raise ValueError(f"its name ends with {file.suffix!r}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it holds no rows with names and values")
    if len(rows) > MOST_LINES:
        raise ValueError(f"it holds more than {MOST_LINES:,} rows, the most that are read")
    if len(runs := {str(row["run_name"]) for row in rows if "run_name" in row}) > 1:
        raise ValueError(f"it holds {len(runs)} runs by `run_name`. Export one of them")
    return rows


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row under TRL's names, with NaN for all but numbers; trackio and verl keep metrics in one value."""
    if isinstance(row.get("metrics"), str):
        row = {**row, **parse(row["metrics"])}
    if isinstance(row.get("data"), dict):
        row = {**row, **row["data"]}
    found = {}
    for column, value in row.items():
        name = (column or "").removeprefix("train/")  # of cells without a column
        name = _NAMES.get(name, name)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        found[name] = number({name: value}, name)
    if "effective_batch_size/all" in found:  # the share of groups with a signal
        found["frac_reward_zero_std"] = 1 - found["effective_batch_size/all"]
    return found


def entries(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The finite numbers of training, in an entry for each step; of a step that comes again, the later ones."""
    named = {name for row in rows for name in row}
    clock = "global_step" if "global_step" in named else "step"  # trackio and wandb may count calls in the latter
    log: dict[int, dict[str, Any]] = {}
    for every in rows:
        row = {name: value for name, value in every.items() if math.isfinite(value)}
        is_of_step = _OF_STEP & row.keys()
        is_other = "train_runtime" in row or any(name.startswith(("eval/", "eval_")) for name in row)
        if clock not in row or not _OF_TRAINING & row.keys() or (is_other and not is_of_step):
            continue
        entry = log.setdefault(step := int(row[clock]), {})
        again = entry.keys() & (row.keys() - {clock})  # if it resumed: what followed is of the attempt before
        for later in takewhile(step.__lt__, reversed(log)) if again else ():
            log[later] = {name: value for name, value in log[later].items() if name not in again}
        entry |= row
        if is_of_step and "grad_norm" in named:
            entry.setdefault("grad_norm", math.nan)
        if _OF_ROLLOUT & row.keys() and "reward" in named:
            entry.setdefault("reward", math.nan)
    return [{**log[step], "step": step} for step in sorted(log) if log[step].keys() - {clock}]
