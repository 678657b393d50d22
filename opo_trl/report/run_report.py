"""
The report of a run: a self-contained HTML file, written when a run ends.

    opo-trl report runs/arithmetic

The same folder gives the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks.files import read_json, read_lines, read_text, write
from ..methods import BASELINE, DEFAULT, method_of
from .evaluation import described, read_evaluation, steps_trained
from .pages import render, versions
from .run_folder import COMPLETIONS, ENVIRONMENT, LOG, PLAN, RECIPE, SETTINGS, SUMMARY, is_run
from .verdicts import Verdict, fired, judge


REPORT = "report.html"

_CAPTIONS = {
    "training": "Thin: every entry of the log. Thick: moving mean over a tenth of the run.",
    "passes": "How much of the change that the target asks for has happened, by pass over a rollout.",
    "time": "Mean seconds per optimizer step, by phase.",
    "accuracy": "Accuracy before and after training, with 95 % intervals.",
}
_PROMPTS, _TIMES = 4, 5  # how many prompts to show, and how many validations of each
_LONGEST = 2000  # characters of a completion
_SPARK = 100, 24, 2  # width, height and margin of a small curve


def write_report(folder: Path) -> Path:
    """
    Write the `report.html` of a run, finished or not, and its figures; returns its path.

    Raises:
        `ValueError`: the folder does not contain a run.
    """
    if not is_run(folder):
        raise ValueError(f"{str(folder)!r} contains no {RECIPE}, so it is not a run. Pass the folder of a run.")
    path = folder / REPORT
    write(path, render("report.html.j2", describe(folder)))
    return path


def describe(folder: Path) -> dict[str, Any]:
    """The content of the report."""
    log, settings, summary = read_lines(folder / LOG), read_json(folder / SETTINGS), read_json(folder / SUMMARY)
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
        "samples": samples(read_lines(folder / COMPLETIONS)),
        "versions": versions([read_json(folder / ENVIRONMENT)]),
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
    if "after" in summary:
        return f"Finished: {summary['optimizer_steps']:,} optimizer steps in {summary['train_seconds']:,.0f} seconds."
    step = log[-1]["step"] if log else 0
    wanted = settings.get("max_steps") or 0
    return (
        f"Not finished when this was written: {step:,}{f' of {wanted:,}' if wanted > 0 else ''} optimizer steps. "
        "`opo-trl report` updates it."
    )


def _conclusion(verdicts: Sequence[Verdict]) -> str:
    healthy, poor = (sum(verdict.healthy is wanted for verdict in verdicts) for wanted in (True, False))
    if not verdicts:
        return "Nothing has been logged yet."
    return f"{healthy} of {healthy + poor} diagnostics are healthy."


def _accuracies(summary: dict[str, Any]) -> dict[str, Any]:
    """A table with a row per level and decoding, and one for pass@k with the largest k."""
    before, after = summary.get("before", {}), summary.get("after", {})
    rows = []
    for level, by_decoding in {**after, **before}.items():
        for decoding in by_decoding:
            result, then = (known.get(level, {}).get(decoding) for known in (before, after))
            rows.append([f"{level}, {decoding}", *(_interval(each) for each in (result, then))])
            if "pass_at" in by_decoding[decoding]:
                k = max(by_decoding[decoding]["pass_at"], key=int)
                passed = (f"{each['pass_at'][k]:.1%}" if each else "–" for each in (result, then))
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
    return {path.stem: path.read_bytes() for path in draw_run(folder) if path.suffix == ".png"}


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


def samples(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first validation problems, each with its completions at some validations, including the first and last."""
    steps = sorted({row["step"] for row in rows})
    last = len(steps) - 1
    shown = {steps[round(i * last / (_TIMES - 1))] for i in range(_TIMES)} if steps else set()
    prompts = list(dict.fromkeys(_text(row["prompt"]) for row in rows))[:_PROMPTS]
    return [
        {
            "prompt": prompt,
            "rows": [_sample(row) for row in rows if _text(row["prompt"]) == prompt and row["step"] in shown],
        }
        for prompt in prompts
    ]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    text, reward = _text(row["completion"]), row["reward"]
    cut = f"{text[:_LONGEST]}\n… {len(text) - _LONGEST:,} more characters" if len(text) > _LONGEST else text
    return {"step": row["step"], "reward": "unscored" if reward is None else f"{reward:g}", "completion": cut}


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
    functions = [call["function"] for call in message.get("tool_calls") or []]
    named = [(f["name"], f["arguments"] if isinstance(f["arguments"], dict) else {}) for f in functions]
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in named]
