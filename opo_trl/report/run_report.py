"""
The report of a run: a self-contained HTML file, written when a run ends.

    opo-trl report runs/arithmetic

The same folder gives the same bytes.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checks.files import read_text, write
from ..checks.text import one_line
from ..methods import BASELINE, DEFAULT, method_of
from . import run_folder
from .pages import render, table, versions
from .verdicts import Verdict, fired, judge


REPORT = "report.html"

_PROMPTS, _TIMES = 4, 5  # how many prompts to show, and how many validations of each
_LONGEST = 2000  # characters of a prompt or completion
_MOST_ROWS = 50  # of a prompt that is validated several times


def write_report(folder: Path) -> Path:
    """Write the `report.html` of a run, finished or not, and its figures. A `ValueError` if the folder has no run."""
    if not run_folder.is_run(folder):
        raise ValueError(
            f"{str(folder)!r} contains no {run_folder.RECIPE} with its {run_folder.SETTINGS}, so it is not a run. "
            "Pass the folder of a run."
        )
    write(folder / REPORT, render("report.html.j2", describe(folder)))
    return folder / REPORT


def write_or_say_why(folder: Path) -> None:
    """Write the report of a run and print its path: whatever is wrong with it does not hide how the run ended."""
    try:
        print(f"Report: {write_report(folder)}", flush=True)
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(str(error))}"
        again = f"`opo-trl report {shlex.quote(str(folder))}` writes it again."
        print(f"The report could not be written: {said}. {again}", file=sys.stderr, flush=True)


def describe(folder: Path) -> dict[str, Any]:
    """The content of the report."""
    log, settings = run_folder.read_log(folder), run_folder.read_settings(folder)
    summary = run_folder.read_summary(folder)
    verdicts, watches = judge(log, settings), fired(log, settings)
    said = [_method(settings), _progress(log, settings, summary), conclusion(verdicts)]
    return {
        "name": folder.resolve().name,
        "summary": [*said, *(watch.sentence for watch in watches)],
        "plan": read_text(folder / run_folder.PLAN),
        "accuracies": _accuracies(summary),
        "figures": _figures(folder) if log else {},
        "verdicts": verdicts,
        "spark": spark,
        "beyond": [*watches, *(verdict for verdict in verdicts if verdict.remedy)],
        "watching": settings.get("watches") or [],
        "samples": samples(folder),
        "versions": versions([run_folder.read_environment(folder)]),
    }


def _method(settings: dict[str, Any]) -> str:
    known, trainer = method_of(settings), settings.get("trainer", DEFAULT)
    of_trl = f"TRL's loss “{settings.get('loss_type')}”" if trainer == BASELINE else settings.get("objective", trainer)
    levels = f" ({', '.join(settings['levels'])})" if settings.get("levels") else ""
    model, data, seed = (settings.get(name) for name in ("model_name_or_path", "dataset_name", "seed"))
    return f"{known.label if known else of_trl}, model {model}, data {data}{levels}, seed {seed}."


def _progress(log: Sequence[dict], settings: dict[str, Any], summary: dict[str, Any]) -> str:
    step = log[-1]["step"] if log else 0
    if "after" in summary:
        seconds = f" in {summary['train_seconds']:,.0f} seconds" if "train_seconds" in summary else ""
        return f"Finished: {summary.get('optimizer_steps') or step:,} optimizer steps{seconds}."
    wanted = f" of {settings['max_steps']:,}" if (settings.get("max_steps") or 0) > 0 else ""
    return f"Not finished when this was written: {step:,}{wanted} optimizer steps. `opo-trl report` updates it."


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in a sentence."""
    judged = [verdict for verdict in verdicts if verdict.healthy is not None]
    if not judged:
        return "Too little has been logged for a verdict." if verdicts else "Nothing has been logged yet."
    if poor := [f"`{verdict.metric}`" for verdict in judged if not verdict.healthy]:
        return f"Look at {len(poor)} of {len(judged)} diagnostics: {', '.join(poor)}."
    return f"All {len(judged)} diagnostics are healthy."


def _accuracies(summary: dict[str, Any]) -> dict[str, Any]:
    """A table with a row per level and decoding, and one for pass@k with the largest k."""
    before, after = (run_folder.by_decoding(summary.get(time, {})) for time in ("before", "after"))
    rows = []
    for name, shown in {**after, **before}.items():
        both = [before.get(name), after.get(name)]
        rows.append([name, *map(_interval, both)])
        if shown.get("pass_at"):
            k = max(shown["pass_at"], key=lambda k: (len(k), k))
            passed = [(result or {}).get("pass_at") or {} for result in both]
            rows.append([f"{name}, pass@{k}", *(f"{values[k]:.1%}" if k in values else "–" for values in passed)])
    return table(["accuracy [95 % interval]", "before", "after"], rows)


def _interval(accuracy: Mapping[str, Any] | None) -> str:
    """An accuracy in a table, with its interval."""
    return f"{accuracy['accuracy']:.1%} [{accuracy['low']:.1%}, {accuracy['high']:.1%}]" if accuracy else "–"


def _figures(folder: Path) -> dict[str, bytes] | None:
    """Content of the PNG files by name; `None` without matplotlib."""
    try:
        from .figures import draw_run
    except ImportError:
        return None
    return {path.stem: content for path, content in draw_run(folder).items() if path.suffix == ".png"}


def spark(points: Sequence[tuple[float, float]]) -> str:
    """Points of an SVG polyline, with values averaged to at most its width in points."""
    width, height, margin = 100, 24, 2
    parts = np.array_split([value for _, value in points], min(len(points), width))
    means = np.array([part.mean() for part in parts])
    middle, span = (means.max() + means.min()) / 2, np.ptp(means) or 1
    places = height / 2 - (means - middle) / span * (height - 2 * margin)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(np.linspace(0, width, len(means)), places, strict=True))


def samples(folder: Path) -> list[dict[str, Any]]:
    """The first validation problems, each with its completions at some validations, including the first and last."""
    found: set[int] = set()
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in run_folder.read_completions(folder):  # and again below: they may not fit into memory
        found.add(row["step"])
        if len(prompts) < _PROMPTS:
            prompts.setdefault(_text(row["prompt"]), [])
    steps = sorted(found)
    shown = {steps[round(i * (len(steps) - 1) / (_TIMES - 1))] for i in range(_TIMES)} if steps else set()
    for row in run_folder.read_completions(folder):
        kept = prompts.get(_text(row["prompt"]))
        if kept is not None and row["step"] in shown and len(kept) < _MOST_ROWS:
            reward = "unscored" if row.get("reward") is None else f"{row['reward']:g}"
            kept.append({"step": row["step"], "reward": reward, "completion": _cut(_text(row["completion"]))})
    return [{"prompt": _cut(prompt), "rows": kept} for prompt, kept in prompts.items()]


def _cut(text: str) -> str:
    return f"{text[:_LONGEST]}\n… {len(text) - _LONGEST:,} more characters" if len(text) > _LONGEST else text


def _text(content: Any) -> str:
    """A prompt or completion, which may be messages."""
    parts = []
    for message in [{"content": content}] if isinstance(content, str) else content:
        said, calls = message.get("content") or "", message.get("tool_calls")
        parts.append(f"→ {said}" if message.get("role") == "tool" else str(said))
        parts += map(_call, calls if isinstance(calls, list) else [])
    return "\n".join(filter(None, parts))


def _call(call: Any) -> str:
    """The call of a tool, such as `guess(number=27)`; empty if it is of another form."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ""
    arguments = function.get("arguments")
    given = arguments.items() if isinstance(arguments, dict) else ()
    return f"{function.get('name')}({', '.join(f'{key}={value!r}' for key, value in given)})"
