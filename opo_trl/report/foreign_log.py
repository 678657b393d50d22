"""
The log of a run that TRL, trackio or wandb has kept, as entries like ours.

    runs/grpo, runs/grpo/checkpoint-200    TRL's folders, with trainer_state.json
    trainer_state.json                     its `log_history`
    run.jsonl, run.json, run.csv           an export, with a row for each call that logged something
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ..checks import files
from ..checks.paths import check_file, readable
from ..checks.text import one_line, quoted
from ..metrics.log import number
from .diagnostics import diagnostics


GENERATION = "generation"  # seconds of generation and scoring since the last entry, from TRL's profiling
STATE = "trainer_state.json"

_FORMS = (
    f"RUN is a folder of TRL with {STATE}, that file, or an export of one run as .jsonl, .json or .csv: a row per "
    "logged step, with columns such as step, reward and frac_reward_zero_std."
)
_ANY = files.Kind("JSON", lambda value: True)
_OF_GRPO = {name for each in diagnostics({}) for name in each.metrics.split()} - {"grad_norm", "entropy"}
_OF_TRAINING = _OF_GRPO | {"entropy", "step_time", "validation/accuracy"}
_CLOCKS = ("global_step", "step", "_step")  # where there is the first, trackio and wandb count calls in the others
_RUNS = ("run_name", "run_id", "run", "name")  # columns that tell runs apart
_PROFILED = (".transformers.generate", ".transformers.generate_batch", ".vLLM.generate", "._calculate_rewards")


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """
    The entries of training, in order, and how many are left out because a later part of the log repeats their steps. A
    `ValueError` names the file, what was found and what is expected.
    """
    with readable("RUN", path):
        found = _file(path)
    try:
        content = _rows(found)
        rows = [_numbers(row) for row in content]
        _check_runs([own for own, row in zip(content, rows, strict=True) if _is_of_training(row)])
        log, repeated = _entries(rows)
        if not any(_OF_GRPO & entry.keys() for entry in log):
            raise ValueError(
                f"no step has a metric of GRPOTrainer; found {_some({name for row in rows for name in row})}"
            )
    except (ValueError, csv.Error) as error:
        said = str(error).rstrip(".")
        raise ValueError(f"RUN={str(found)!r} is not the log of a GRPO run: {said}. {_FORMS}") from error
    return log, repeated


def _some(names: set[str], most: int = 12) -> str:
    shown = [one_line(name, 40) for name in sorted(names)[:most]] or ["nothing"]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _file(path: Path) -> Path:
    if not path.is_dir():
        check_file("RUN", path, _FORMS)
        return path
    numbered = {folder / STATE: folder.name.removeprefix("checkpoint-") for folder in path.glob("checkpoint-*")}
    saved = [state for state, number in numbered.items() if number.isdecimal() and state.is_file()]
    newest = max(saved, key=lambda state: int(numbered[state]), default=path / STATE)
    states = [state for state in (newest, path / STATE) if state.is_file()]
    if not states:
        names = {entry.name for entry in path.iterdir()}
        raise ValueError(
            f"RUN={str(path)!r} has no {STATE}, nor has a checkpoint in it; found {_some(names)}. {_FORMS}"
        )
    # The one with more steps: the first part of a resumed run may have left its own in the folder.
    form = {"global_step?": files.STEP}
    return max(states, key=lambda state: files.read_json(state, form, linked=True).get("global_step") or 0)


def _rows(found: Path) -> list[dict[str, Any]]:
    """The rows of a file in one of the forms that TRL, pandas and `trackio query --json` write."""
    file = found.resolve()  # the user's choice, and in the cache of the Hub all files are links
    content: Any
    if found.suffix == ".csv":
        text = files.read_text(file).removeprefix("\ufeff")  # of Windows
        csv.field_size_limit(max(len(text), csv.field_size_limit()))
        content = list(csv.DictReader(io.StringIO(text), restkey="", strict=True))
    elif found.suffix == ".jsonl":
        content = files.read_lines(file, {})
    elif found.suffix == ".json":
        content = files.read_json(file, _ANY)
    else:
        raise ValueError(f"its name ends with {found.suffix!r}")
    if isinstance(content, dict):
        columns = {name: column for name, column in content.items() if isinstance(column, dict)}
        by_column = [{name: columns[name].get(row) for name in columns} for row in next(iter(columns.values()), ())]
        content = content.get("log_history", content.get("rows", by_column))
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f"it holds {quoted(content)}, not rows with names and values")
    return content


def _check_runs(rows: Sequence[Mapping[str, Any]]) -> None:
    for column in _RUNS:
        if len(runs := {str(row[column]) for row in rows if row.get(column) not in (None, "")}) > 1:
            raise ValueError(f"it holds {len(runs)} runs by `{column}`, {_some(runs)}. Export one of them")


def _is_of_training(row: Mapping[str, float]) -> bool:
    return any(name in _OF_TRAINING and math.isfinite(value) for name, value in row.items())


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row with NaN for all but numbers, without the prefix of training; trackio keeps metrics in it as JSON."""
    nested = row.get("metrics")
    if isinstance(nested, str) and nested.startswith("{"):
        row = {**row, **files.parse(nested.encode(), {})}
    found: dict[str, float] = {}
    for column, value in row.items():
        name = column.removeprefix("train/")
        with suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        if not math.isfinite(found.get(name, math.nan)):
            found[name] = number({name: value}, name)
    return found


def _entries(rows: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, Any]], int]:
    """The finite numbers of training, an entry for each step, and how many entries a later one replaces."""
    has_norm, has_reward = (any(name in row for row in rows) for name in ("grad_norm", "reward"))
    rows = [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]
    clock = next((name for name in _CLOCKS if any(name in row for row in rows)), "")
    steps = [step for step, _ in groupby(row[clock] for row in rows if clock in row and _OF_TRAINING & row.keys())]
    falls, is_once = sum(after < before for before, after in pairwise(steps)), len({*steps}) == len(steps)
    if falls and falls >= (len(steps) - 1 if is_once else len(steps) / 2):  # a table with the newest row first
        rows.reverse()
    elif falls and is_once:  # in another order, such as that of the steps as text
        rows = sorted((row for row in rows if clock in row), key=lambda row: row[clock])
    calls = [row["_step"] for row in rows if "_step" in row]
    is_whole = all(after - before <= 1 for before, after in pairwise(calls))  # wandb's `history()` draws a sample
    log: list[dict[str, Any]] = []
    seconds, repeated = 0.0, 0
    for row in rows:
        step = row.get(clock, -1.0)
        if step < 0 or not step.is_integer() or not _OF_TRAINING & row.keys():
            is_evaluation = any(name.startswith(("eval/", "eval_")) for name in row)
            timed = sum(value for name, value in row.items() if name.endswith(_PROFILED))
            seconds = 0.0 if is_evaluation else seconds + timed
            continue
        if log and log[-1]["step"] > step:  # a resumed run repeats what came after its checkpoint
            kept = [entry for entry in log if entry["step"] < step]
            log, repeated = kept, repeated + len(log) - len(kept)
        entry: dict[str, Any] = log.pop() if log and log[-1]["step"] == step else {}
        if has_norm and "step_time" in row:
            entry["grad_norm"] = math.nan  # unless the row has a finite one
        if has_reward and "frac_reward_zero_std" in row:
            entry.setdefault("reward", math.nan)  # likewise
        log.append({**entry, **row, **({GENERATION: seconds} if seconds and is_whole else {}), "step": int(step)})
        seconds = 0.0
    return log, repeated
