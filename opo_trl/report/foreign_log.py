"""
The log of a run that TRL, trackio or wandb has kept, as entries like ours.

    runs/grpo, runs/grpo/checkpoint-200    TRL's folders, with trainer_state.json
    trainer_state.json                     its `log_history`
    run.jsonl, run.json, run.csv           an export, with a row for each call that logged something
"""

import csv
import gzip
import io
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ..checks.text import one_line, printable, quoted
from ..metrics.log import number
from .diagnostics import diagnostics


GENERATION = "generation"  # seconds of generation and scoring since the last entry, from TRL's profiling
STATE = "trainer_state.json"

_FORMS = (
    f"RUN is a folder of TRL with {STATE}, that file, or an export of one run as .jsonl, .json or .csv: a row per "
    "logged step, with columns such as step, reward and frac_reward_zero_std."
)
_LONGEST = 2**28  # characters of a file
_OF_GRPO = {name for each in diagnostics({}) for name in each.metrics.split()} - {"grad_norm", "entropy"}
_OF_STEP = {"learning_rate", "grad_norm"}  # by Transformers, of every optimizer step, and of none besides
_OF_TRAINING = _OF_GRPO | _OF_STEP | {"entropy", "step_time", "validation/accuracy"}
_OF_ROLLOUT = {"reward_std", "frac_reward_zero_std", "completion_length", "completions/mean_length"}  # as `reward`
_CLOCKS = ("global_step", "step", "_step")  # where there is the first, trackio and wandb count calls in the others
_RUNS = ("run_name", "run_id", "run", "name")  # columns that tell runs apart
_EMPTY = {"", "-", "none", "null", "na", "n/a"}
_PROFILED = (".transformers.generate", ".transformers.generate_batch", ".vLLM.generate", "._calculate_rewards")


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """
    The entries of training, in order, and sentences on what was read and left out. A `ValueError` names the file, what
    was found and what is expected.
    """
    found = _file(path)
    try:
        content = _rows(found)
        rows = [_numbers(row) for row in content]
        _check_runs([own for own, row in zip(content, rows, strict=True) if _is_of_training(row)])
        del content
        log, notes = _entries(rows)
        if not any(_OF_GRPO & entry.keys() for entry in log):
            names = {name for row in rows for name in row}
            raise ValueError(f"no step has a metric of GRPOTrainer; found {_some(names)}")
    except (ValueError, EOFError, gzip.BadGzipFile, csv.Error, RecursionError) as error:
        said = str(error).rstrip(".")
        raise ValueError(f"RUN={str(found)!r} is not the log of a GRPO run: {said}. {_FORMS}") from error
    return log, notes if found == path else [f"Read: {printable(str(found))}.", *notes]


def _some(names: set[str], most: int = 12) -> str:
    shown = [one_line(name, 40) for name in sorted(names)[:most]] or ["nothing"]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _file(path: Path) -> Path:
    """The file, or of a folder the state of the most optimizer steps: that of a checkpoint, or of the end."""
    if path.is_file():
        return path
    steps: dict[Path, float] = {}
    for state in filter(Path.is_file, (*path.glob(f"*checkpoint*/{STATE}"), path / STATE)):
        with suppress(ValueError, TypeError, AttributeError, RecursionError):  # a kill has cut it short
            steps[state] = float(json.loads(state.read_text(encoding="utf-8")).get("global_step") or 0)
    if not steps:
        raise ValueError(f"RUN={str(path)!r} has no {STATE}, nor has a checkpoint in it, and is no file. {_FORMS}")
    return max(steps, key=lambda state: steps[state])


def _rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file in one of the forms that TRL, pandas and `trackio query --json` write."""
    form = file.name.lower().removesuffix(".gz").rpartition(".")[2]
    if form not in ("csv", "tsv", "json", "jsonl"):
        raise ValueError(f"its name ends with {file.suffix!r}")
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as source:
        raw = source.read(_LONGEST + 1)
    if len(raw) > _LONGEST:
        raise ValueError(f"it has more than {_LONGEST:,} bytes, the limit. Export fewer steps or columns")
    text = raw.decode("utf-8-sig")  # Windows begins with a mark
    del raw
    if form in ("csv", "tsv"):
        csv.field_size_limit(max(len(text), csv.field_size_limit()))
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        return list(csv.DictReader(io.StringIO(text), restkey="", delimiter=delimiter, strict=True))
    content = _json(text)
    if isinstance(content, dict):
        columns = {name: column for name, column in content.items() if isinstance(column, dict)}
        by_row = [{name: columns[name].get(row) for name in columns} for row in next(iter(columns.values()), ())]
        content = content.get("log_history") or content.get("rows") or by_row or [content]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f"it holds {quoted(content)}, not rows with names and values")
    return content


def _json(text: str) -> Any:
    """JSON as a whole or in lines, whatever the name says; a kill may have cut the last line short."""
    try:
        return json.loads(text)
    except ValueError:
        lines = [line for line in text.split("\n") if line.strip()]
        cut = 0 if text.endswith("\n") else 1
        rows = [json.loads(line) for line in lines[: len(lines) - cut]]
        with suppress(ValueError):
            rows += map(json.loads, lines[len(rows) :])
        if not rows:
            raise
        return rows


def _check_runs(rows: Sequence[Mapping[str, Any]]) -> None:
    for column in sorted({name for row in rows for name in row}):
        runs = {str(row[column]) for row in rows if row.get(column) not in (None, "")}
        if column.strip().lower().replace(" ", "_") in _RUNS and len(runs) > 1:
            raise ValueError(f"it holds {len(runs)} runs by `{column}`, {_some(runs)}. Export one of them")


def _is_of_training(row: Mapping[str, float]) -> bool:
    return any(name in _OF_TRAINING and math.isfinite(value) for name, value in row.items())


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A row with NaN for all but numbers, without the prefix of training; trackio keeps metrics as JSON in one."""
    nested = row.get("metrics")
    if isinstance(nested, str) and nested.startswith("{"):
        nested = json.loads(nested)
    if isinstance(nested, dict):
        row = {**row, **nested}
    found: dict[str, float] = {}
    for column, value in row.items():
        name = column.strip().removeprefix("train/")
        if isinstance(value, str):
            with suppress(ValueError):
                value = None if value.strip().lower() in _EMPTY else float(value)
        if name in _OF_TRAINING | {*_CLOCKS} and not isinstance(value, int | float | None):
            raise ValueError(f"`{column}` is {quoted(value)} in a row, not a number")
        if not math.isfinite(found.get(name, math.nan)):
            found[name] = number({name: value}, name)
    return found


def _entries(rows: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The finite numbers of training, an entry for each step, and sentences on what is left out."""
    named = {name for row in rows for name in row}
    rows = [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]
    known = {name for row in rows for name in row}
    clock = next((name for name in _CLOCKS if name in known), "")
    # What training has left to log at its end has a time, but no gradient.
    of_gradient = "learning_rate" if "learning_rate" in known else "step_time"
    # Some versions of TRL log evaluations under the names of training.
    of_training = known & {*_OF_STEP, "step_time"} or _OF_TRAINING
    steps = [step for step, _ in groupby(row[clock] for row in rows if clock in row and _OF_TRAINING & row.keys())]
    falls, is_once = sum(after < before for before, after in pairwise(steps)), len({*steps}) == len(steps)
    if falls and falls >= (len(steps) - 1 if is_once else len(steps) / 2):  # a table with the newest row first
        rows.reverse()
    elif is_once and (falls > 1 or (falls and steps[-1] < max(steps))):  # in another order, as of steps as text
        rows = sorted((row for row in rows if clock in row), key=lambda row: row[clock])
    calls = [row["_step"] for row in rows if "_step" in row]
    # wandb's `history()` draws a sample.
    is_timed = clock != "_step" and all(after - before <= 1 for before, after in pairwise(calls))
    log: list[dict[str, Any]] = []
    seconds, repeated, unplaced = 0.0, 0, 0
    for row in rows:
        step = row.get(clock, math.nan)
        if any(name.startswith(("eval/", "eval_")) for name in row) and not of_training & row.keys():
            # It has timed its own generation, and what training has generated since the last entry, if anything.
            seconds = 0.0 if log and log[-1]["step"] == step else math.nan
            continue
        if not _OF_TRAINING & row.keys():
            seconds += sum(value for name, value in row.items() if name.endswith(_PROFILED))
            continue
        if not (step >= 0 and step.is_integer()):
            unplaced += 1
            continue
        # A resumed run repeats what came after its checkpoint.
        while log and (log[-1]["step"], bool(_OF_STEP & row.keys() & log[-1].keys())) > (step, False):
            log.pop()
            repeated += 1
        entry: dict[str, Any] = log.pop() if log and log[-1]["step"] == step else {}
        if "grad_norm" in named and of_gradient in row and "train_runtime" not in row:
            entry.setdefault("grad_norm", math.nan)  # unless the row has a finite one
        if "reward" in named and _OF_ROLLOUT & row.keys():
            entry.setdefault("reward", math.nan)  # likewise
        log.append({**entry, **row, **({GENERATION: seconds} if seconds > 0 and is_timed else {}), "step": int(step)})
        seconds = 0.0
    notes = {
        f"Left out: {repeated:,} earlier entries of steps that come again, as in a resumed run.": repeated,
        f"Left out: {unplaced:,} entries without a whole number in `{clock}`.": unplaced,
        "Steps are those of `_step`, which counts calls that log: export `train/global_step`, too.": clock == "_step",
    }
    return log, [note for note, holds in notes.items() if holds]
