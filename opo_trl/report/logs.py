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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..checks.files import MOST_LINES, loads, parse, read_json, read_lines, read_text
from ..checks.text import one_line
from ..metrics.log import Entry, finite, number, values_of
from .diagnostics import conclusion, diagnostics, judge
from .run_files import LOG, is_run
from .run_report import describe, show


STATE = "trainer_state.json"

_TRUNCATED = "completions/clipped_ratio"

# Metrics of verl, prime-rl and OpenRLHF, and of TRL.
_TRL_NAMES = {
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/pg_clipfrac": "clip_ratio",
    "actor_lr": "learning_rate",
    "agg/effective/agent/is_truncated/mean": _TRUNCATED,
    "agg/effective/agent/reward/mean": "reward",
    "critic/score/mean": "reward",
    "entropy/all/mean": "entropy",
    "entropy/mean": "entropy",
    "entropy_loss": "entropy",
    "is_truncated/all/mean": _TRUNCATED,
    "optim/grad_norm": "grad_norm",
    "optim/lr": "learning_rate",
    "ppo_clip_ratio": "clip_ratio",
    "response_clip_ratio": _TRUNCATED,
    "response_length/clip_ratio": _TRUNCATED,
    "reward/all/mean": "reward",
    "training/global_step": "global_step",
}
_METRICS_OF_DIAGNOSTICS = [diagnostic.metrics.split() for diagnostic in diagnostics({})]  # metrics of each diagnostic
# Other trainers than those of GRPO log a gradient norm and an entropy, too.
_METRICS_OF_GRPO = set(chain(*_METRICS_OF_DIAGNOSTICS)) - {"grad_norm", "entropy"}
# Transformers logs these for every optimizer step, and for nothing else.
_METRICS_OF_STEPS = {"learning_rate", "grad_norm"}
_METRICS_OF_TRAINING = _METRICS_OF_GRPO | _METRICS_OF_STEPS | {"entropy", "step_time", "validation/accuracy"}
# TRL logs these with every reward: without one beside them, the reward was not a number.
_METRICS_BESIDE_REWARD = {"reward_std", "frac_reward_zero_std", "completion_length", "completions/mean_length"}


def diagnose(run: Path, output: Path | None) -> int:
    """Print the verdicts on a run, and write them to a page; returns 1 if one of them is "wrong"."""
    folder = _folder_of_our_run(run)
    content = describe(folder) if folder else _describe_log(run)
    show(run, content, output)
    some_are_wrong = any(verdict.wrong for verdict in content["verdicts"])
    return 1 if some_are_wrong else 0


def _folder_of_our_run(path: Path) -> Path | None:
    """
    The folder of a run of opo-trl at this path, which may be one of its checkpoints, or the log in either; `None` if
    there is none.
    """
    if path.name in (LOG, STATE):
        path = path.parent
    if not path.is_dir():
        return None
    for folder in (path, path.resolve().parent):
        if is_run(folder):
            return folder
    return None


def _describe_log(run: Path) -> dict[str, Any]:
    """
    The content of a report on a log of another trainer: verdicts, and which metrics are missing for others. It has no
    accuracies, examples or plan.
    """
    log, notes = read(run)
    # Its settings are not known, but how many ratios are clipped shows this one, which changes a bound.
    settings = {"importance_sampling_level": "sequence"} if _clips_sequences(log) else {}
    verdicts = judge(log, settings)
    logged = {name for entry in log for name in entry}
    missing = []
    for names in _METRICS_OF_DIAGNOSTICS:
        is_of_this_package = names[0].startswith(("opo/", "reward/"))  # other trainers never log these
        if not is_of_this_package and logged.isdisjoint(names):
            missing.append(names[-1])
    if missing:
        listed = ", ".join(sorted(set(missing)))
        notes.append(f"Without a verdict, because not in this log: {listed}.")
    size = f"Optimizer steps: {log[-1]['step']:,}. Entries: {len(log):,}."
    summary = [size, *notes, conclusion(verdicts)]
    return {
        "name": run.resolve().name,
        "summary": summary,
        "accuracies": [],
        "verdicts": verdicts,
        "examples": [],
        "plan": "",
    }


def _clips_sequences(log: Sequence[Entry]) -> bool:
    """
    Whether ratios are of whole completions, as in GSPO: then all tokens of a completion are clipped, or none. So in
    most entries with a clipped ratio, the largest share that a micro-batch has clipped is near 1.
    """
    most_clipped = finite(log, "clip_ratio/high_max", lambda entry: number(entry, "clip_ratio/region_mean") > 0)
    return bool(most_clipped) and float(np.median(values_of(most_clipped))) > 0.9


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """
    The entries of training in the log at a path, in order, and as notes, if this is a folder, which file of it was
    read. A `ValueError` names a file that is not the log of a GRPO run.
    """
    is_file = path.is_file()
    file = path if is_file else _newest_state(path)
    try:
        rows = [numbers(row) for row in _rows(file, follow=is_file)]
        log = entries(rows)
        if not any(_METRICS_OF_GRPO & entry.keys() for entry in log):
            names = {name for row in rows for name in row}
            listed = one_line(", ".join(sorted(names)))
            raise ValueError(f"no row with a `step` has a metric of GRPOTrainer; found {listed or 'nothing'}")
    except (ValueError, csv.Error) as error:
        message = str(error).rstrip(".")
        raise ValueError(
            f"RUN={str(file)!r} is not the log of a GRPO run: {message}. RUN is a folder of TRL with {STATE}, that "
            "file or an export of one run as .jsonl, .json or .csv."
        ) from error
    notes = [] if is_file else [f"Read: {file}."]
    return log, notes


def _newest_state(folder: Path) -> Path:
    """
    The `trainer_state.json` with the most optimizer steps, of those in a folder and in its checkpoints. A checkpoint
    that is a link is not followed. A `ValueError` if there is none.
    """
    checkpoints = [path for path in folder.glob("checkpoint-*") if not path.is_symlink()]
    files = [path / STATE for path in (*checkpoints, folder)]
    states = [file for file in files if os.path.lexists(file)]
    if not states:
        raise ValueError(f"RUN={str(folder)!r} has no {STATE}, nor has a checkpoint in it, and is no file.")
    return max(states, key=_steps_of)


def _steps_of(state: Path) -> float:
    """Optimizer steps of a `trainer_state.json`; 0 if it does not say. A `ValueError` if that is not a number."""
    step = number({"global_step": 0, **read_json(state)}, "global_step")
    if math.isnan(step):
        raise ValueError(f"{str(state)!r} cannot be read: its `global_step` is not a number.")
    return step


def _rows(file: Path, *, follow: bool) -> Sequence[Mapping[str, Any]]:
    """
    The rows of a file, each a mapping of names to values, by the ending of its name. A `ValueError` if it holds no
    rows, too many or those of several runs. `follow`: it may be a link, because the user has named it.
    """
    form = file.name.removesuffix(".gz").rpartition(".")[2]
    if form == "csv":
        text = read_text(file, follow=follow)
        rows: Any = list(csv.DictReader(io.StringIO(text)))
    elif form == "jsonl":
        rows = read_lines(file, follow=follow)
    elif form == "json":
        rows = loads(read_text(file, follow=follow))
        if isinstance(rows, dict):
            rows = rows.get("log_history") or rows.get("rows")
    else:  # the caller's message begins with the file, and says which endings are read
        raise ValueError(f"its name ends with {file.suffix!r}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it holds no rows with names and values")
    if len(rows) > MOST_LINES:
        raise ValueError(f"it holds more than {MOST_LINES:,} rows, the most that are read")
    runs = {str(row["run_name"]) for row in rows if "run_name" in row}
    if len(runs) > 1:
        raise ValueError(f"it holds {len(runs)} runs by `run_name`. Export one of them")
    return rows


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """
    A row of a log as metric → number, under TRL's names of metrics, with NaN for what is not a number. Metrics that
    trackio (`metrics`, as JSON) and verl (`data`) keep in one value are taken out of it.
    """
    if isinstance(row.get("metrics"), str):
        row = {**row, **parse(row["metrics"])}
    if isinstance(row.get("data"), dict):
        row = {**row, **row["data"]}
    values = {}
    for column, value in row.items():
        name = (column or "").removeprefix("train/")  # The reader of CSV names no column for cells beyond the header.
        name = _TRL_NAMES.get(name, name)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        values[name] = number({name: value}, name)
    if "effective_batch_size/all" in values:  # prime-rl's share of groups with a signal: the others have no variance
        values["frac_reward_zero_std"] = 1 - values["effective_batch_size/all"]
    return values


def entries(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """
    The finite numbers that were logged in training, in an entry for each optimizer step, with its `step`; rows of a
    step are joined. Of a step that was trained again after a resumption, the later numbers count. A gradient norm or
    reward that an entry should have, but was no number, is NaN.
    """
    logged = {name for row in rows for name in row}
    # With `global_step`, `step` may count the calls of trackio or wandb.
    clock = "global_step" if "global_step" in logged else "step"
    log: dict[int, dict[str, Any]] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if math.isfinite(value)}
        if clock not in values or not _is_of_training(values):
            continue
        step = int(values[clock])
        entry = log.setdefault(step, {})
        names = values.keys() - {clock}
        repeated = entry.keys() & names
        if repeated:  # The run was resumed before this step: later steps in the log are of the attempt before.
            _remove_after(step, repeated, log)
        entry |= values
        if "grad_norm" in logged and _METRICS_OF_STEPS & values.keys():
            entry.setdefault("grad_norm", math.nan)
        if "reward" in logged and _METRICS_BESIDE_REWARD & values.keys():
            entry.setdefault("reward", math.nan)
    in_order = sorted(log.items())
    return [{**entry, "step": step} for step, entry in in_order if entry.keys() - {clock}]


def _is_of_training(values: Mapping[str, float]) -> bool:
    """
    Whether the names of a row's numbers are those of training, and not of an evaluation (`eval_…`) or the summary at
    the end (`train_runtime`).
    """
    if _METRICS_OF_STEPS & values.keys():
        return True
    is_evaluation = any(name.startswith(("eval/", "eval_")) for name in values)
    is_summary = "train_runtime" in values
    return bool(_METRICS_OF_TRAINING & values.keys()) and not is_evaluation and not is_summary


def _remove_after(step: int, names: Collection[str], log: dict[int, dict[str, Any]]) -> None:
    """Remove these metrics from the entries after this step, which are the last ones of a log (step → entry)."""
    for later in reversed(log):
        if later <= step:
            break
        log[later] = {name: value for name, value in log[later].items() if name not in names}
