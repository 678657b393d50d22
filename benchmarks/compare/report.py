"""The report of a comparison, in Markdown, and its figure."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from opo_trl.checks.files import read_text, write
from opo_trl.report.run_report import in_markdown

from ..intervals import Interval
from .curves import draw
from .measures import DECIMALS, WINDOW, Comparison
from .runs import what_differs


NOTHING = "–"
_PAGE, _CURVES = "report.md", "curves.png"
_HEADLINES = ("final reward", "validation accuracy")  # of the summary


def write_report(comparison: Comparison, output: Path, command: str) -> Path:
    """
    Write `report.md` and `curves.png`; returns the path of the former. `command` makes the same bytes of the same
    runs: there is no date, no path and no random order.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        finalize=lambda value: in_markdown(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["cell"] = lambda text: text.replace("|", r"\|").replace("\n", " ")
    content = {**describe(comparison), "curves": draw(comparison, output / _CURVES), "command": command}
    write(output / _PAGE, templates.get_template("comparison.md.j2").render(content))
    return output / _PAGE


def table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> dict[str, Any]:
    """A table, as the template shows it."""
    return {"head": head, "rows": rows, "title": title}


def check_output(output: Path) -> None:
    """A `ValueError` if a report would replace something else than an earlier one, such as that of a run."""
    page, curves = output / _PAGE, output / _CURVES
    if page.exists() and "# Comparison: " not in read_text(page):
        raise ValueError(
            f"{str(page)!r} is not the report of a comparison, and would be replaced. Set `--output` "
            "to another folder."
        )
    if os.path.lexists(curves) and not page.exists():
        raise ValueError(
            f"{str(curves)!r} is of no earlier comparison, and would be replaced. Set `--output` to another folder."
        )


def describe(comparison: Comparison) -> dict[str, Any]:
    """What the templates show."""
    methods, target, tables = comparison.methods, comparison.target, comparison.tables()
    of_differences = ["measure", "method", "difference", "95 % paired t", "95 % bootstrap", "pairs", "verdict"]
    means, differences = [], []
    for title, names in tables.items():
        rows = [[label, *(_estimate(comparison, label, name) for name in names)] for label in methods]
        means.append(table(["method", *names], rows, title))
        pairs = [(name, label) for name in names for label in [*methods][1:]]
        differences.append(table(of_differences, [_difference_row(comparison, *pair) for pair in pairs], title))
    measures = [name for names in tables.values() for name in names]
    runs = [run for members in methods.values() for run in members]
    cells = {run.name: [number(comparison.values[run.name].get(name), name) for name in measures] for run in runs}
    return {
        "comparison": comparison,
        "methods": list(methods),
        "summary": [_sentence(comparison, label) for label in methods],
        "tables": means,
        "differences": differences,
        "target": f"{target:.3f}" if math.isfinite(target) else None,
        "window": WINDOW,
        "settings": table(["setting", *methods], what_differs(methods)),
        "seeds": table(["method", "seed", *measures], [[run.label, str(run.seed), *cells[run.name]] for run in runs]),
        "versions": versions([run.environment for run in runs]),
    }


_PACKAGES = ("opo-trl", "trl", "transformers", "torch", "accelerate", "datasets", "peft", "deepspeed", "vllm")


def versions(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of the versions in the runs' `environment.json`, listing every value if runs differ."""
    rows = []
    for environment in environments:
        own = {key: environment.get(key) for key in ("git_commit", "python", "platform")}
        devices = ", ".join(environment.get("devices") or [])
        packages = {name.replace("_", "-"): number for name, number in (environment.get("packages") or {}).items()}
        rows.append({**own, "devices": devices, **{name: packages.get(name) for name in _PACKAGES}})
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: sorted({str(row.get(name)) for row in rows if row.get(name)}) for name in names}
    found = [(name.replace("git_commit", "commit"), "; ".join(values[name])) for name in names if values[name]]
    return table(["made with", "version"], found)


def _sentence(comparison: Comparison, label: str) -> str:
    """A method's headline measures in words, with the differences from the baseline."""
    parts = []
    for measure in _HEADLINES:
        own, found = comparison.estimate(label, measure), comparison.difference(label, measure)
        if own is None:
            continue
        parts.append(f"{measure} {number(own.mean, measure)}{_bracket(own.interval, measure)}")
        if found is not None and label != comparison.baseline:
            by = number(found.estimate.mean, measure, True) + _bracket(found.estimate.interval, measure, True)
            parts.append(f"differs from {comparison.baseline} by {by}: {found.verdict}")
    count = len(comparison.methods[label])
    return f"{label} ({count} {'seed' if count == 1 else 'seeds'}): {'; '.join(parts)}."


def _bracket(interval: Interval | None, measure: str, signed: bool = False) -> str:
    return f" [{', '.join(number(bound, measure, signed) for bound in interval)}]" if interval is not None else ""


def number(value: float | None, measure: str, signed: bool = False) -> str:
    """A value as a report shows it: accuracies in percent, other measures with their decimals."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    sign, decimals = "+z" if signed else "z", DECIMALS.get(measure)
    if decimals is not None:
        return f"{value:{sign},.{decimals}f}".replace("-", "−")
    return f"{value * 100:{sign}.1f} {'pp' if signed else '%'}".replace("-", "−")


def _estimate(comparison: Comparison, label: str, measure: str) -> str:
    """Mean ± half-width of the 95 % interval."""
    found = comparison.estimate(label, measure)
    if found is None:
        runs = comparison.methods[label]
        count = sum(comparison.values[run.name].get(measure) is not None for run in runs)
        return f"{NOTHING} ({count} of {len(runs)} seeds)" if count else NOTHING
    half = "" if found.interval is None else f" ± {number(found.interval[1] - found.mean, measure)}"
    return number(found.mean, measure) + half


def _difference_row(comparison: Comparison, measure: str, label: str) -> list[str]:
    found = comparison.difference(label, measure)
    if found is None:
        return [measure, label, *[NOTHING] * 5]
    mean, both = number(found.estimate.mean, measure, signed=True), (found.estimate.interval, found.bootstrap)
    intervals = [_bracket(each, measure, signed=True).strip() or NOTHING for each in both]
    return [measure, label, mean, *intervals, str(found.estimate.n), found.verdict]
