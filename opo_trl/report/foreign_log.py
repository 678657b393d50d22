"""
The log of a run that TRL, trackio or wandb has kept, as the entries of ours.

    runs/grpo, runs/grpo/checkpoint-200    TRL's folders, with a trainer_state.json
    trainer_state.json                     its `log_history`
    run.jsonl, run.json, run.csv           an export with a row for each call that logged something
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..checks import files
from ..checks.paths import check_file
from ..checks.text import one_line, quoted
from ..metrics.log import number
from .diagnostics import diagnostics


GENERATION = "generation"  # seconds of generation and scoring since the last entry, from TRL's profiling

_STATE = "trainer_state.json"
_FORMS = (
    f"RUN is a folder of TRL with {_STATE}, that file, or an export of one run as .jsonl, .json or .csv: a row per "
    "logged step, with columns such as step, reward and frac_reward_zero_std."
)
_ANY = files.Kind("JSON", lambda value: True)
_METRICS = {"validation/accuracy", *(name for each in diagnostics({}) for name in each.metrics.split())}
_OF_ANY_TRAINER = {"grad_norm", "entropy"}
_CLOCKS = ("global_step", "step", "_step")  # trackio's step and wandb's _step count calls, if there is a global_step
_GENERATING = (".transformers.generate", ".transformers.generate_batch", ".vLLM.generate", "._calculate_rewards")
_SHOWN = 12  # names of what was found


def read(path: Path) -> list[dict[str, Any]]:
    """
    The log of a run: its entries of training in order, with their numbers.

    `path`: a folder of TRL, its `trainer_state.json`, or an export. A `ValueError` names the file, what was found and
    what is expected.
    """
    found = _file(path)
    try:
        rows = _rows(found)
        log = _entries([_numbers(row) for row in rows])
        if not {name for entry in log for name in entry} & (_METRICS - _OF_ANY_TRAINER):
            names = list(dict.fromkeys(one_line(str(name), 40) for row in rows for name in row)) or ["nothing"]
            raise ValueError(f"no optimizer step has a metric of GRPOTrainer: found {_some(names)}.")
    except (ValueError, csv.Error) as error:
        said = str(error).rstrip(".")
        raise ValueError(f"RUN={str(found)!r} is not the log of a run: {said}. {_FORMS}") from error
    return log


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")


def _file(path: Path) -> Path:
    if not path.is_dir():
        check_file("RUN", path, _FORMS)
        return path
    numbered = {folder / _STATE: folder.name.rpartition("-")[2] for folder in path.glob("checkpoint-*")}
    saved = [state for state, number in numbered.items() if number.isdecimal() and state.is_file()]
    newest = max(saved, key=lambda state: int(numbered[state]), default=path / _STATE)
    states = [state for state in (newest, path / _STATE) if state.is_file()]
    if not states:
        names = sorted(one_line(entry.name, 40) for entry in path.iterdir()) or ["nothing"]
        raise ValueError(
            f"RUN={str(path)!r} has no {_STATE} in it, or in a checkpoint: found {_some(names)}. {_FORMS}"
        )
    # Whichever has more steps: in the folder of a resumed run, the state of the first part may still lie.
    form = {"global_step?": files.STEP}
    return max(states, key=lambda state: files.read_json(state, form, linked=True).get("global_step") or 0)


def _rows(found: Path) -> list[dict[str, Any]]:
    """The rows of a file, of the forms in which TRL, pandas and `trackio query --json` write them."""
    file = found.resolve()  # chosen by the user; in the cache of the Hub, all files are links
    content: Any
    if found.suffix == ".csv":
        content = list(csv.DictReader(io.StringIO(files.read_text(file)), restkey="", strict=True))
    elif found.suffix == ".jsonl":
        content = files.read_lines(file, {})
    elif found.suffix == ".json":
        content = files.read_json(file, _ANY)
    else:
        raise ValueError(f"its name ends with {found.suffix!r}.")
    if isinstance(content, dict):
        columns = {name: column for name, column in content.items() if isinstance(column, dict)}
        by_column = [{name: columns[name].get(row) for name in columns} for row in next(iter(columns.values()), ())]
        content = content.get("log_history") or content.get("rows") or by_column
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f"it holds {quoted(content)}, not rows of names and values.")
    runs = sorted({str(row["run_name"]) for row in content if row.get("run_name")})
    if len(runs) > 1:
        raise ValueError(f"it holds {len(runs)} runs, {_some([one_line(name, 40) for name in runs])}. Export one.")
    return content


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, also of the JSON in which trackio keeps metrics, without the prefix of training."""
    nested = row.get("metrics")
    if isinstance(nested, str) and nested.startswith("{"):
        row = {**row, **files.parse(nested.encode(), {})}
    found: dict[str, float] = {}
    for name, value in row.items():
        with suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
            found[name.removeprefix("train/")] = number({name: value}, name)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _entries(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The rows with a metric of training, one for each step, and the seconds of generation that led to it."""
    clock = next((name for name in _CLOCKS if any(name in row for row in rows)), "")
    calls = [row["_step"] for row in rows if "_step" in row]
    complete = all(after - before <= 1 for before, after in pairwise(calls))  # wandb's `history()` draws a sample
    log: list[dict[str, Any]] = []
    seconds = 0.0
    for row in rows:
        step = row.get(clock, -1.0)
        if step < 0 or not step.is_integer() or not _METRICS & row.keys():
            evaluated = any(name.startswith(("eval/", "eval_")) for name in row)
            timed = sum(value for name, value in row.items() if name.endswith(_GENERATING))
            seconds = 0.0 if evaluated else seconds + timed
            continue
        while log and log[-1]["step"] > step:  # a resumed run repeats the steps after its checkpoint
            log.pop()
        timing = {GENERATION: seconds} if seconds and complete else {}
        before = log.pop() if log and log[-1]["step"] == step else {}
        log.append({**before, **row, **timing, "step": int(step)})
        seconds = 0.0
    return log
