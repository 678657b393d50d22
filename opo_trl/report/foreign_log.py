"""
The log of a run that TRL, trackio or wandb has kept, as entries like ours.

    runs/grpo, runs/grpo/checkpoint-200    TRL's folders, with trainer_state.json
    trainer_state.json                     its `log_history`
    run.jsonl, run.json, run.csv           an export, with a row for each call that logged something
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

from ..checks import files
from ..checks.paths import check_file, readable
from ..checks.text import one_line, printable, quoted
from ..metrics.log import number
from .diagnostics import diagnostics


GENERATION = "generation"  # seconds of generation and scoring since the last entry, from TRL's profiling
STATE = "trainer_state.json"

_FORMS = (
    f"RUN is a folder of TRL with {STATE}, that file, or an export of one run as .jsonl, .json or .csv: a row per "
    "logged step, with columns such as step, reward and frac_reward_zero_std."
)
_MOST = 2**22  # values of a table, and 32 in each row: two bytes of a file may become hundreds in memory
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
    with readable("RUN", path):
        found = _file(path)
        try:
            content = _rows(found)
            rows = [_numbers(row) for row in content]
            _check_runs([own for own, row in zip(content, rows, strict=True) if _is_of_training(row)])
            log, notes = _entries(rows)
            if not any(_OF_GRPO & entry.keys() for entry in log):
                names = {name for row in rows for name in row}
                is_chart = any(" - train/" in name for name in names)
                said = f"no step has a metric of GRPOTrainer; found {_some(names)}"
                raise ValueError(f"{said}. It looks like a chart of wandb: export the run" if is_chart else said)
        except (ValueError, csv.Error) as error:
            said = str(error).rstrip(".")
            raise ValueError(f"RUN={str(found)!r} is not the log of a GRPO run: {said}. {_FORMS}") from error
    return log, notes if found == path else [f"Read: {printable(str(found))}.", *notes]


def _some(names: set[str], most: int = 12) -> str:
    shown = [one_line(name, 40) for name in sorted(names)[:most]] or ["nothing"]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _file(path: Path) -> Path:
    if not path.is_dir():
        check_file("RUN", path, _FORMS)
        return path
    steps: dict[Path, float] = {}
    broken = None
    for state in filter(Path.is_file, (*path.glob(f"*checkpoint*/{STATE}"), path / STATE)):
        try:
            steps[state] = files.read_json(state).get("global_step") or 0
        except ValueError as error:  # a kill may have cut it short
            broken = error
    if steps:
        return max(steps, key=lambda state: steps[state])
    names = {entry.name for entry in path.iterdir()}
    raise broken or ValueError(
        f"RUN={str(path)!r} has no {STATE}, nor has a checkpoint in it; found {_some(names)}. {_FORMS}"
    )


def _rows(found: Path) -> list[dict[str, Any]]:
    """The rows of a file in one of the forms that TRL, pandas and `trackio query --json` write."""
    file = found.resolve()  # the user's choice, and in the cache of the Hub all files are links
    content: Any
    form = found.name.lower().removesuffix(".gz").rpartition(".")[2]
    if form in ("csv", "tsv"):
        text = files.read_text(file).removeprefix("\ufeff")  # of Windows
        csv.field_size_limit(max(len(text), csv.field_size_limit()))
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        table = csv.DictReader(io.StringIO(text), restkey="", delimiter=delimiter, strict=True)
        content = _bounded(table, table.fieldnames or ())
    elif form in ("json", "jsonl"):
        content = _json(file, in_lines=form == "jsonl")
    else:
        raise ValueError(f"its name ends with {found.suffix!r}")
    if isinstance(content, dict):
        columns = {name: column for name, column in content.items() if isinstance(column, dict)}
        by_row = ({name: columns[name].get(row) for name in columns} for row in next(iter(columns.values()), ()))
        known = [content[name] for name in ("log_history", "rows") if name in content]
        if not known and not columns:
            raise ValueError(f"it holds {_some({*content})}, but neither `log_history` nor `rows`")
        content = known[0] if known else _bounded(by_row, columns)
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f"it holds {quoted(content)}, not rows with names and values")
    return _bounded(content)


def _bounded(rows: Iterable[dict[str, Any]], columns: Sized = ()) -> list[dict[str, Any]]:
    most = _MOST // max(len(columns), 32)
    found = list(islice(rows, most + 1))
    if len(found) > most:
        raise ValueError(f"it has more than {most:,} rows, the limit. Export fewer steps or columns")
    return found


def _json(file: Path, *, in_lines: bool) -> Any:
    """JSON as a whole or in lines; the other of the two if the name does not say what it is."""
    readers: list[Callable[[], Any]] = [lambda: _parsed(file), lambda: _bounded(files.read_lines(file))]
    first, second = reversed(readers) if in_lines else readers
    try:
        return first()
    except ValueError:
        with suppress(ValueError):
            if content := second():
                return content
        raise


def _parsed(file: Path) -> Any:
    try:
        return json.loads(files.read_text(file))
    except RecursionError:
        raise ValueError("its lists and mappings are nested too deeply") from None


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
        nested = files.parse(nested)
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
