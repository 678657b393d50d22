"""
The report of a run: its accuracies, and verdicts on its log; or a comparison of several.

    opo-trl report runs/arithmetic [--output report.html]
    opo-trl report RUN RUN … [--output report.md]

A run writes its `report.html` when it ends. The same folder gives the same bytes.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from scipy import stats

from ..checks import files
from ..checks.secrets import mask, mask_text
from ..checks.text import one_line, printable
from . import run_files as run_folder
from .diagnostics import conclusion, judge, spark


REPORT = "report.html"
_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=lambda value: printable(value) if type(value) is str else value,  # what a macro has made is `Markup`
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

# Where a run is written, how it is shown and how it is launched: not part of the method.
INCIDENTAL = frozenset(
    {
        *("seed", "output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "accelerate_config"),
        *("overwrite", "resume_from_checkpoint", "local_rank", "reward_workers", "data_seed"),
        *("save_steps", "save_strategy", "save_total_limit", "logging_steps", "logging_strategy"),
    }
)

Runs = dict[int, dict[str, Any]]  # of a method: seed → accuracies after training by level and decoding


def report(folders: Sequence[Path], output: Path | None) -> None:
    """Print the accuracies of a run and the verdicts on it, or compare several; `output` gets the same as a page."""
    if not folders[1:]:
        show(folders[0], describe(folders[0]), output)
        return
    print(table := compare(folders), end="")
    if output is not None:
        files.write(output, table)
        print(printable(str(output)))


def show(path: Path, content: Mapping[str, Any], output: Path | None) -> None:
    """Print the content of a report on what is at `path`; `output` gets it as a page."""
    print(*map(printable, (str(path), *content["summary"])))
    print(*accuracy_lines(content["accuracies"]), *(verdict.line for verdict in content["verdicts"]), sep="\n")
    if output is not None:
        files.write(output, page(content))
        print(printable(str(output)))


def accuracy_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of [`accuracies`] as lines of a terminal."""
    return [f"{printable(name)}: {' → '.join(cells)}" for name, *cells in rows]


def page(content: Mapping[str, Any]) -> str:
    """The content of a report as HTML. All values are escaped."""
    beyond = [verdict for verdict in content["verdicts"] if verdict.remedy]
    return _PAGES.get_template("report.html.j2").render(content, spark=spark, beyond=beyond)


def write_report(folder: Path) -> None:
    """
    Write the `report.html` of a run, finished or not, into its folder, and print its path and verdict; or why not:
    whatever is wrong with a report does not hide how the run ended.
    """
    try:
        content = describe(folder)
        files.write(folder / REPORT, page(content))
        wrong = [verdict.line for verdict in content["verdicts"] if verdict.wrong]
        print(f"Report: {folder / REPORT}. {printable(content['summary'][-1])}", *wrong, sep="\n", flush=True)
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(str(error))}"
        again = f"`opo-trl report {shlex.quote(str(folder))}` prints it."
        print(f"The report could not be written: {said}. {again}", file=sys.stderr, flush=True)


def describe(folder: Path) -> dict[str, Any]:
    """The content of the report."""
    log, settings = run_folder.read_log(folder), run_folder.read_settings(folder)
    summary, plan = run_folder.read_summary(folder), files.read_text(folder / run_folder.PLAN)
    if not settings:
        said = "is not a run of opo-trl. `opo-trl diagnose` reads any log."
        raise ValueError(f"{str(folder)!r} has no {run_folder.SETTINGS}, so it {said}")
    shown = ("objective", "model_name_or_path", "dataset_name", "levels", "seed")
    with _of_a_run(folder):
        settings = mask(settings)
        verdicts = judge(log, settings)
        return {
            "name": folder.resolve().name,
            "summary": [
                ", ".join(f"{name} {settings[name]}" for name in shown if settings.get(name)) + ".",
                _progress(log, settings, summary),
                conclusion(verdicts),
            ],
            "plan": mask_text(plan),
            "accuracies": accuracies(summary),
            "verdicts": verdicts,
        }


@contextmanager
def _of_a_run(folder: Path) -> Iterator[None]:
    """Name the folder if what is in its files has another form than that of a run."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        message = one_line(f"{type(error).__name__}: {error}").rstrip(".")
        names = f"{run_folder.SETTINGS}, {run_folder.SUMMARY} or the log"
        raise ValueError(f"In {str(folder)!r}, {names} is not as opo-trl writes it: {message}.") from error


def _progress(log: Sequence[dict], settings: dict[str, Any], summary: dict[str, Any]) -> str:
    step = log[-1]["step"] if log else 0
    wanted = f" of {settings['max_steps']:,}" if (settings.get("max_steps") or 0) > 0 else ""
    said = f"Not finished: {step:,}{wanted} optimizer steps."
    if "after" in summary:
        said = f"Finished: {summary['optimizer_steps']:,} optimizer steps"
        seconds = summary.get("train_seconds")  # not of a resumed run
        said += "." if seconds is None else f" in {seconds:,.0f} seconds."
    changes = [
        f"{row[run_folder.CHANGED_RATE]:g} after step {row['step']:,}" for row in log if run_folder.CHANGED_RATE in row
    ]
    return f"{said} Not one trajectory: learning_rate={', '.join(changes)}." if changes else said


def accuracies(summary: Mapping[str, Any]) -> list[list[str]]:
    """Rows of level and decoding, accuracies before and after."""
    before, after = (run_folder.by_decoding(summary.get(time, {})) for time in ("before", "after"))
    return [[name, _interval(before.get(name)), _interval(after.get(name))] for name in {**after, **before}]


def _interval(accuracy: Mapping[str, Any] | None) -> str:
    return "{accuracy:.1%} [{low:.1%}, {high:.1%}]".format_map(accuracy) if accuracy else "–"


def compare(folders: Sequence[Path]) -> str:
    """
    Which fields of finished runs differ, and their accuracies, as a table in Markdown.

    Runs that differ in nothing but the seed are one method; its name is that of its first folder. Accuracies of
    several seeds have the 95 % t interval of their mean, of one seed the Wilson interval over its problems. The
    difference to the first method is paired by seed. A `ValueError` if a folder holds no finished run, or two of them
    the same seed of one method.
    """
    methods: dict[str, dict[str, Any]] = {}
    runs: dict[str, Runs] = {}
    for folder in folders:
        settings, summary = run_folder.read_settings(folder), run_folder.read_summary(folder)
        if "after" not in summary:
            raise ValueError(f"{str(folder)!r} is not the folder of a finished run.")
        with _of_a_run(folder):
            accuracies(summary)  # numbers, which have a format
            seed, results = int(settings["seed"]), run_folder.by_decoding(summary["after"])
            method = {field: value for field, value in mask(settings).items() if field not in INCIDENTAL}
            name = next((name for name, other in methods.items() if other == method), str(folder))
        methods[name] = method
        seeds = runs.setdefault(name, {})
        if seed in seeds:
            raise ValueError(f"{name} has several runs of seed {seed}. Leave one of them out.")
        seeds[seed] = results
    first, *others = runs
    rows = [
        ["", *runs],
        ["---"] * (len(runs) + 1),
        ["seeds", *(", ".join(map(str, seeds)) for seeds in runs.values())],
    ]
    for field in sorted({field for method in methods.values() for field in method}):
        values = [str(method.get(field)) for method in methods.values()]
        rows += [[field, *values]] if len({*values}) > 1 else []
    for measure in dict.fromkeys(name for seeds in runs.values() for found in seeds.values() for name in found):
        rows.append([measure, *(_mean(measure, seeds) for seeds in runs.values())])
        rows.append([f"{measure}, less {first}", "", *(_gain(measure, runs[first], runs[other]) for other in others)])
    cells = ([one_line(in_markdown(cell)).replace("|", r"\|") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _mean(measure: str, runs: Runs) -> str:
    found = [accuracies[measure] for accuracies in runs.values() if measure in accuracies]
    if len(found) < len(runs):
        return f"– (missing in {len(runs) - len(found)} of {len(runs)})"
    if len(found) > 1:
        return _spread([each["accuracy"] for each in found], "")
    return "{:.1f} % [{:.1f}, {:.1f}]".format(*(100 * found[0][name] for name in ("accuracy", "low", "high")))


def _gain(measure: str, baseline: Runs, runs: Runs) -> str:
    common = [seed for seed in runs if measure in runs[seed] and measure in baseline.get(seed, {})]
    gains = [runs[seed][measure]["accuracy"] - baseline[seed][measure]["accuracy"] for seed in common]
    if len(gains) > 1:
        return _spread(gains, "+") + (f" ({len(gains)} seeds)" if len(gains) < max(len(runs), len(baseline)) else "")
    return f"{100 * gains[0]:+.1f} points (one seed)".replace("-", "−") if gains else "no common seed"


def _spread(shares: Sequence[float], sign: str) -> str:
    half = stats.t.ppf(0.975, len(shares) - 1) * stats.sem(shares)
    unit = "points" if sign else "%"
    return f"{100 * np.mean(shares):{sign}.1f} ± {100 * half:.1f} {unit}".replace("-", "−")


def in_markdown(text: str) -> str:
    """A text of others in Markdown: neither HTML nor a link or picture from elsewhere."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(")
