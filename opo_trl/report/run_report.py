"""
The report of a run: its accuracies, and verdicts on its log; or a comparison of several.

    opo-trl report runs/arithmetic [--output report.html]
    opo-trl report RUN RUN … [--output report.md]

A run writes its `report.html` when it ends. The same folder gives the same bytes.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checks import files
from ..checks.text import one_line, printable
from ..methods import BASELINE, DEFAULT, method_of
from . import run_folder
from .pages import check_output, render, table
from .several import compare
from .verdicts import conclusion, judge, spark


REPORT = "report.html"


def report(folders: Sequence[Path], output: Path | None) -> None:
    """Print the accuracies of a run and the verdicts on it, or compare several; `output` gets the same as a page."""
    check_output(output, ".md" if folders[1:] else ".html")
    with run_folder.as_a_run_leaves_it(*folders):
        content = {} if folders[1:] else describe(folders[0])
        page = render("report.html.j2", content) if content else compare(folders)
    if not content:
        print(page, end="")
    else:
        print(printable(str(folders[0])), *map(printable, content["summary"]))
        for name, *cells in content["accuracies"]["rows"]:
            print(f"{printable(name)}: {' → '.join(cells)}")
        print(*(verdict.line for verdict in content["verdicts"]), sep="\n")
    if output is not None:
        files.write(output, page)
        print(printable(str(output)))


def write_report(folder: Path) -> Path:
    """Write the `report.html` of a run, finished or not, into its folder. A `ValueError` if the folder has no run."""
    files.write(folder / REPORT, render("report.html.j2", describe(folder)))
    return folder / REPORT


def write_or_say_why(folder: Path) -> None:
    """Write the report of a run and print its path: whatever is wrong with it does not hide how the run ended."""
    try:
        print(f"Report: {write_report(folder)}", flush=True)
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(str(error))}"
        again = f"`opo-trl report {shlex.quote(str(folder))}` prints it."
        print(f"The report could not be written: {said}. {again}", file=sys.stderr, flush=True)


def describe(folder: Path) -> dict[str, Any]:
    """The content of the report."""
    if not run_folder.is_run(folder):
        raise ValueError(
            f"{str(folder)!r} has no {run_folder.SETTINGS}, so it is not a run of opo-trl. Pass the folder of a run, "
            "or use `opo-trl diagnose`, which reads any log."
        )
    log, settings = run_folder.read_log(folder), run_folder.read_settings(folder)
    summary = run_folder.read_summary(folder)
    verdicts = judge(log, settings)
    said = [_method(settings), _progress(log, settings, summary), conclusion(verdicts)]
    return {
        "name": folder.resolve().name,
        "summary": said,
        "plan": run_folder.read_plan(folder),
        "accuracies": _accuracies(summary),
        "verdicts": verdicts,
        "spark": spark,
        "beyond": [verdict for verdict in verdicts if verdict.remedy],
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
    return f"Not finished: {step:,}{wanted} optimizer steps."


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
    return "{accuracy:.1%} [{low:.1%}, {high:.1%}]".format_map(accuracy) if accuracy else "–"
