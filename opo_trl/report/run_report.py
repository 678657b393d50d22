"""
The report of a run: a self-contained HTML file, written when a run ends.

    opo-trl report runs/arithmetic

The same folder gives the same bytes.
"""

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checks.files import lines, read_text, write
from ..checks.text import one_line
from ..methods import BASELINE, DEFAULT, method_of
from .evaluation import described, read_evaluation, steps_trained
from .pages import render, versions
from .run_folder import (
    COMPLETIONS,
    COMPLETIONS_FORM,
    PLAN,
    RECIPE,
    SETTINGS,
    is_run,
    read_environment,
    read_log,
    read_settings,
    read_summary,
)
from .verdicts import Verdict, fired, judge


REPORT = "report.html"

_CAPTIONS = {
    "training": "Thin: every entry of the log. Thick: moving mean over a tenth of the run.",
    "passes": "How much of the change that the target asks for has happened, by pass over a rollout.",
    "time": "Mean seconds per optimizer step, by phase.",
    "accuracy": "Accuracy before and after training, with 95 % intervals.",
}
_PROMPTS, _TIMES = 4, 5  # how many prompts to show, and how many validations of each
_LONGEST = 2000  # characters of a prompt or completion
_MOST_ROWS = 50  # of a prompt that is validated several times
_SPARK = 100, 24, 2  # width, height and margin of a small curve


def write_report(folder: Path) -> Path:
    """
    Write the `report.html` of a run, finished or not, and its figures; returns its path.

    Raises:
        `ValueError`: the folder does not contain a run.
    """
    if not is_run(folder):
        raise ValueError(
            f"{str(folder)!r} contains no {RECIPE} with its {SETTINGS}, so it is not a run. Pass the folder of a run."
        )
    path = folder / REPORT
    write(path, render("report.html.j2", describe(folder)))
    return path


def write_or_say_why(folder: Path) -> None:
    """
    Write the report of a run whose results are in its folder by now, and print its path.

    Whatever is wrong with the report, it neither ends the run nor hides how that ended.
    """
    try:
        print(f"Report: {write_report(folder)}", flush=True)
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(str(error))}"
        again = f"`opo-trl report {shlex.quote(str(folder))}` writes it again."
        print(f"The report could not be written: {said}. {again}", file=sys.stderr, flush=True)


def describe(folder: Path) -> dict[str, Any]:
    """The content of the report."""
    log, settings, summary = read_log(folder), read_settings(folder), read_summary(folder)
    verdicts, watches = judge(log, settings), fired(log, settings)
    return {
        "name": folder.resolve().name,
        "summary": [_method(settings), _progress(log, settings, summary), _conclusion(verdicts)],
        "plan": read_text(folder / PLAN),
        "accuracies": _accuracies(summary),
        "evaluation": _evaluation(folder),
        "figures": _figures(folder) if log else {},
        "captions": _CAPTIONS,
        "verdicts": [{"said": verdict, "curve": _spark(verdict.points)} for verdict in verdicts],
        "watches": watches,
        "watching": settings.get("watches") or [],
        "samples": samples(folder),
        "versions": versions([read_environment(folder)]),
    }


def _method(settings: dict[str, Any]) -> str:
    known = method_of(settings)
    trainer = settings.get("trainer", DEFAULT)
    of_trl = f"TRL's loss “{settings.get('loss_type')}”" if trainer == BASELINE else trainer
    method = known.label if known else of_trl
    levels = ", ".join(settings.get("levels") or [])
    data = f"{settings.get('dataset_name')}{f' ({levels})' if levels else ''}"
    return f"{method}, model {settings.get('model_name_or_path')}, data {data}, seed {settings.get('seed')}."


def _progress(log: Sequence[dict], settings: dict[str, Any], summary: dict[str, Any]) -> str:
    step = log[-1]["step"] if log else 0
    if "after" in summary:
        seconds = f" in {summary['train_seconds']:,.0f} seconds" if summary.get("train_seconds") is not None else ""
        return f"Finished: {summary.get('optimizer_steps') or step:,} optimizer steps{seconds}."
    wanted = settings.get("max_steps") or 0
    return (
        f"Not finished when this was written: {step:,}{f' of {wanted:,}' if wanted > 0 else ''} optimizer steps. "
        "`opo-trl report` updates it."
    )


def _conclusion(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "Nothing has been logged yet."
    poor = [f"`{verdict.metric}`" for verdict in verdicts if verdict.healthy is False]
    count = sum(verdict.healthy is not None for verdict in verdicts)
    if not count:
        return "Too little has been logged for a verdict."
    return (
        f"Look at {len(poor)} of {count} diagnostics: {', '.join(poor)}."
        if poor
        else f"All {count} diagnostics are healthy."
    )


def _accuracies(summary: dict[str, Any]) -> dict[str, Any]:
    """A table with a row per level and decoding, and one for pass@k with the largest k."""
    before, after = summary.get("before", {}), summary.get("after", {})
    rows = []
    for level, by_decoding in {**after, **before}.items():
        for decoding in by_decoding:
            result, then = (known.get(level, {}).get(decoding) for known in (before, after))
            rows.append([f"{level}, {decoding}", *(_interval(each) for each in (result, then))])
            if by_decoding[decoding].get("pass_at"):
                k = max(by_decoding[decoding]["pass_at"], key=lambda k: (len(k), k))
                known = ((each.get("pass_at") or {}).get(k) if each else None for each in (result, then))
                passed = ("–" if each is None else f"{each:.1%}" for each in known)
                rows.append([f"{level}, {decoding}, pass@{k}", *passed])
    return {"head": ["accuracy [95 % interval]", "before", "after"], "rows": rows}


def _evaluation(folder: Path) -> dict[str, Any] | None:
    """What `opo-trl evaluate` measured, if it has been run."""
    content = read_evaluation(folder)
    if not content:
        return None
    shown, then = described(content), content.get("optimizer_steps")
    if then != steps_trained(folder):
        when = "before the run ended" if then is None else f"after {then:,} optimizer steps"
        shown["sentences"].insert(0, f"Measured {when}: run `opo-trl evaluate` again.")
    return shown


def _interval(result: dict[str, Any] | None) -> str:
    return f"{result['accuracy']:.1%} [{result['low']:.1%}, {result['high']:.1%}]" if result else "–"


def _figures(folder: Path) -> dict[str, bytes] | None:
    """Content of the PNG files by name; `None` without matplotlib."""
    try:
        from .figures import draw_run
    except ImportError:
        return None
    return {path.stem: content for path, content in draw_run(folder).items() if path.suffix == ".png"}


def _spark(points: Sequence[tuple[float, float]]) -> str:
    """Points of an SVG polyline, with values averaged to at most its width in points; empty for fewer than two."""
    if len(points) < 2:
        return ""
    width, height, margin = _SPARK
    size = -(-len(points) // width)
    values = [value for _, value in points]
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (height - 2 * margin) / (high - low) if high > low else 0.0
    base = height - margin if high > low else height / 2
    step = width / max(len(means) - 1, 1)
    return " ".join(f"{i * step:.1f},{base - (value - low) * scale:.1f}" for i, value in enumerate(means))


def samples(folder: Path) -> list[dict[str, Any]]:
    """The first validation problems, each with its completions at some validations, including the first and last."""
    rows = partial(lines, folder / COMPLETIONS, COMPLETIONS_FORM)  # read twice: they may not fit into memory
    found: dict[int, None] = {}
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in rows():
        found[row["step"]] = None
        if len(prompts) < _PROMPTS:
            prompts.setdefault(_text(row["prompt"]), [])
    steps = sorted(found)
    shown = {steps[round(i * (len(steps) - 1) / (_TIMES - 1))] for i in range(_TIMES)} if steps else set()
    for row in rows():
        kept = prompts.get(_text(row["prompt"]))
        if kept is not None and row["step"] in shown and len(kept) < _MOST_ROWS:
            kept.append(_sample(row))
    return [{"prompt": _cut(prompt), "rows": kept} for prompt, kept in prompts.items()]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    reward = row.get("reward")
    said = "unscored" if reward is None else f"{reward:g}"
    return {"step": row["step"], "reward": said, "completion": _cut(_text(row["completion"]))}


def _cut(text: str) -> str:
    return f"{text[:_LONGEST]}\n… {len(text) - _LONGEST:,} more characters" if len(text) > _LONGEST else text


def _text(content: Any) -> str:
    """A prompt or completion, which may be messages."""
    if isinstance(content, str):
        return content
    return "\n".join(part for message in content for part in (_content(message), *_calls(message)) if part)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return f"→ {content}" if message.get("role") == "tool" else str(content)


def _calls(message: dict[str, Any]) -> list[str]:
    """The calls of tools in a message, such as `guess(number=27)`."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    named = [(f.get("name"), f.get("arguments")) for f in functions if isinstance(f, dict)]
    given = [(name, arguments if isinstance(arguments, dict) else {}) for name, arguments in named]
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in each.items())})" for name, each in given]
