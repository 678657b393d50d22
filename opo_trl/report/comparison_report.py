"""The report of a comparison: a self-contained HTML file, the same in Markdown, and the figures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks.files import read_text, write
from .curves import draw
from .intervals import Difference, Interval
from .measures import DECIMALS, SHARE, WINDOW, Comparison
from .pages import render, versions
from .runs import what_differs


NOTHING = "–"
_HEADLINES = ("final reward", "validation accuracy")  # of the summary


def write_report(comparison: Comparison, output: Path, command: str) -> list[Path]:
    """
    Write `report.html`, `report.md` and `figures/`; returns the paths of the first two.

    The same runs give the same bytes: no date, no path, no random order. `command` reproduces the report.
    """
    figures = draw(comparison, output)
    content = {**describe(comparison), "figures": figures, "command": command}
    paths = [output / "report.html", output / "report.md"]
    for path in paths:
        write(path, render(f"comparison{path.suffix}.j2", content))
    return paths


def check_output(output: Path) -> None:
    """
    Check that a report replaces at most an earlier one.

    Raises:
        `ValueError`: the folder has a report of something else, such as that of a run.
    """
    for name, heading in (("report.html", "<title>Comparison: "), ("report.md", "# Comparison: ")):
        if (output / name).exists() and heading not in read_text(output / name):
            raise ValueError(
                f"{str(output / name)!r} is not the report of a comparison, and would be replaced. Set `--output` to "
                "another folder."
            )


def describe(comparison: Comparison) -> dict[str, Any]:
    """The content of a report, as text."""
    tables = comparison.tables()
    target = comparison.target
    return {
        "methods": list(comparison.methods),
        "baseline": comparison.baseline,
        "summary": [_sentence(comparison, label) for label in comparison.methods],
        "tables": [_estimates(comparison, *table) for table in tables.items()],
        "differences": [_differences(comparison, *table) for table in tables.items()],
        "unpaired": [label for label in comparison.methods if not comparison.pairs(label)],
        "target": f"{target:.3f}" if math.isfinite(target) else None,
        "share": f"{SHARE:.0%}".replace("%", " %"),
        "window": WINDOW,
        "last": f"{comparison.window:,.0f}",
        "unit": comparison.unit,
        "over_completions": comparison.over_completions,
        "settings": {
            "head": ["setting", *comparison.methods],
            "rows": [[name, *values] for name, values in what_differs(comparison.methods)],
        },
        "seeds": _per_seed(comparison, [measure for measures in tables.values() for measure in measures]),
        "versions": versions([run.environment for runs in comparison.methods.values() for run in runs]),
    }


def _sentence(comparison: Comparison, label: str) -> str:
    """A method's headline measures in words, with the differences from the baseline."""
    parts = []
    for measure in _HEADLINES:
        own = comparison.estimate(label, measure)
        if own is None:
            continue
        text = f"{measure} {number(own.mean, measure)}{_bracket(own.interval, measure)}"
        difference = comparison.difference(label, measure) if label != comparison.baseline else None
        if difference is not None:
            text += f"; differs from {comparison.baseline} by {_difference(difference, measure)}: {difference.verdict}"
        parts.append(text)
    count = len(comparison.methods[label])
    return f"{label} ({count} {'seed' if count == 1 else 'seeds'}): {'; '.join(parts)}."


def _difference(difference: Difference, measure: str) -> str:
    estimate = difference.estimate
    return number(estimate.mean, measure, signed=True) + _bracket(estimate.interval, measure, signed=True)


def _bracket(interval: Interval | None, measure: str, signed: bool = False) -> str:
    if interval is None:
        return ""
    return f" [{', '.join(number(bound, measure, signed) for bound in interval)}]"


def number(value: float, measure: str, signed: bool = False) -> str:
    """A value as a report shows it: accuracies in percent, other measures with their decimals."""
    if not math.isfinite(value):
        return "not finite"
    share = measure not in DECIMALS
    text = f"{value * 100 if share else value:,.{1 if share else DECIMALS[measure]}f}"
    if not any(digit in text for digit in "123456789"):
        text = text.lstrip("-")  # negative zero
    sign = "+" if signed and not text.startswith("-") else ""
    return f"{sign}{text}".replace("-", "−") + ("" if not share else " pp" if signed else " %")


def _estimates(comparison: Comparison, title: str, measures: Sequence[str]) -> dict[str, Any]:
    """A table with a row per method: mean ± half-width of the 95 % interval."""
    rows = [[label, *(_estimate(comparison, label, measure) for measure in measures)] for label in comparison.methods]
    return {"title": title, "head": ["method", *measures], "rows": rows}


def _estimate(comparison: Comparison, label: str, measure: str) -> str:
    found = comparison.estimate(label, measure)
    if found is None:
        count = comparison.count(label, measure)
        return f"{NOTHING} ({count} of {len(comparison.methods[label])} seeds)" if count else NOTHING
    if found.interval is None:
        return number(found.mean, measure)
    return f"{number(found.mean, measure)} ± {number(found.interval[1] - found.mean, measure)}"


def _differences(comparison: Comparison, title: str, measures: Sequence[str]) -> dict[str, Any]:
    """A table with a row per measure and method, except the baseline."""
    head = ["measure", "method", "difference", "95 % paired t", "95 % bootstrap", "pairs", "verdict"]
    others = list(comparison.methods)[1:]
    rows = [_difference_row(comparison, measure, label) for measure in measures for label in others]
    return {"title": title, "head": head, "rows": rows}


def _difference_row(comparison: Comparison, measure: str, label: str) -> list[str]:
    found = comparison.difference(label, measure)
    if found is None:
        return [measure, label, *[NOTHING] * 5]
    both = found.estimate.interval, found.bootstrap
    intervals = [_bracket(each, measure, signed=True).strip() or NOTHING for each in both]
    mean = number(found.estimate.mean, measure, signed=True)
    return [measure, label, mean, *intervals, str(found.estimate.n), found.verdict]


def _per_seed(comparison: Comparison, measures: Sequence[str]) -> dict[str, Any]:
    """A table with a row per run."""
    rows = []
    for label, runs in comparison.methods.items():
        for run in runs:
            values = comparison.values[run.name]
            rows.append([label, str(run.seed), *(_value(values.get(measure), measure) for measure in measures)])
    return {"title": "Every run", "head": ["method", "seed", *measures], "rows": rows}


def _value(value: float | None, measure: str) -> str:
    return NOTHING if value is None else number(value, measure)
