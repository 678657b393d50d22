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
from . import run_files
from .diagnostics import conclusion, judge, spark
from .examples import examples


REPORT = "report.html"
_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=lambda value: printable(value) if type(value) is str else value,  # a macro returns `Markup`, not `str`
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

# Where a run is written, how it is shown and how it is launched: not part of the method.
INCIDENTAL = frozenset(
    {
        "accelerate_config",
        "data_seed",
        "disable_tqdm",
        "local_rank",
        "logging_dir",
        "logging_steps",
        "logging_strategy",
        "output_dir",
        "overwrite",
        "report_to",
        "resume_from_checkpoint",
        "reward_workers",
        "run_name",
        "save_steps",
        "save_strategy",
        "save_total_limit",
        "seed",
    }
)

_SHOWN_SETTINGS = ("objective", "model_name_or_path", "dataset_name", "levels", "seed")

# The runs of a method: seed → level and decoding → accuracy after training with its interval
Runs = dict[int, dict[str, Any]]


def report(folders: Sequence[Path], output: Path | None) -> None:
    """Print the accuracies of a run and the verdicts on it, or compare several; `output` gets the same as a page."""
    if len(folders) == 1:
        run = folders[0]
        show(run, describe(run), output)
        return
    table = compare(folders)
    print(table, end="")
    if output is not None:
        files.write(output, table)
        print(printable(str(output)))


def show(path: Path, content: Mapping[str, Any], output: Path | None) -> None:
    """Print the content of a report on what is at `path`; `output` gets it as a page."""
    head = " ".join([str(path), *content["summary"]])
    lines = accuracy_lines(content["accuracies"])
    lines += [verdict.line for verdict in content["verdicts"]]
    print(printable(head))
    print("\n".join(lines))
    if output is not None:
        files.write(output, page(content))
        print(printable(str(output)))


def accuracy_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of [`accuracies`] as lines of a terminal."""
    return [f"{printable(name)}: {' → '.join(cells)}" for name, *cells in rows]


def page(content: Mapping[str, Any]) -> str:
    """The content of a report as HTML. All values are escaped."""
    with_remedy = [verdict for verdict in content["verdicts"] if verdict.remedy]
    template = _PAGES.get_template("report.html.j2")
    return template.render(content, spark=spark, with_remedy=with_remedy)


def write_report(folder: Path) -> None:
    """
    Write the `report.html` of a run, finished or not, into its folder, and print its path, its conclusion and what is
    wrong. If that fails in any way, print why, and raise nothing: it must not hide how the run ended.
    """
    try:
        content = describe(folder)
        path = folder / REPORT
        files.write(path, page(content))
        conclusion_of_run = printable(content["summary"][-1])
        lines = [f"Report: {path}. {conclusion_of_run}"]
        lines += [verdict.line for verdict in content["verdicts"] if verdict.wrong]
        print("\n".join(lines), flush=True)
    except Exception as error:
        reason = one_line(str(error))
        quoted = shlex.quote(str(folder))
        print(
            f"The report could not be written: {type(error).__name__}: {reason}. `opo-trl report {quoted}` prints it.",
            file=sys.stderr,
            flush=True,
        )


def describe(folder: Path) -> dict[str, Any]:
    """
    The content of the report: `name`, `summary` (sentences), `plan`, `accuracies` (rows), `verdicts` and `examples`. A
    `ValueError` if the folder is no run of opo-trl, or one of its files is not as opo-trl writes it.
    """
    log = run_files.read_log(folder)
    settings = run_files.read_settings(folder)
    summary = run_files.read_summary(folder)
    plan = files.read_text(folder / run_files.PLAN)
    completions = files.read_lines(folder / run_files.COMPLETIONS)
    if not settings:
        raise ValueError(
            f"{str(folder)!r} has no {run_files.SETTINGS}, so it is not a run of opo-trl. `opo-trl diagnose` reads "
            "any log."
        )
    with _named_in_errors(folder):
        settings = mask(settings)
        verdicts = judge(log, settings)
        method = ", ".join(f"{name} {settings[name]}" for name in _SHOWN_SETTINGS if settings.get(name))
        return {
            "name": folder.resolve().name,
            "summary": [f"{method}.", _progress(log, settings, summary), conclusion(verdicts)],
            "plan": mask_text(plan),
            "accuracies": accuracies(summary),
            "examples": examples(completions),
            "verdicts": verdicts,
        }


@contextmanager
def _named_in_errors(folder: Path) -> Iterator[None]:
    """
    Within this context, where the contents of a run's files are used, an error becomes a `ValueError` that names the
    folder: the contents have another form than opo-trl writes.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        message = one_line(f"{type(error).__name__}: {error}").rstrip(".")
        names = f"{run_files.SETTINGS}, {run_files.SUMMARY}, {run_files.COMPLETIONS} or the log"
        raise ValueError(f"In {str(folder)!r}, {names} is not as opo-trl writes it: {message}.") from error


def _progress(log: Sequence[dict], settings: dict[str, Any], summary: dict[str, Any]) -> str:
    """A sentence on how far a run is, and one on the steps after which it went on with another learning rate."""
    max_steps = settings.get("max_steps") or 0
    of_all = f" of {max_steps:,}" if max_steps > 0 else ""
    if "after" in summary:  # accuracies after training, which are measured at the end
        progress = f"Finished: {summary['optimizer_steps']:,} optimizer steps"
        seconds = summary.get("train_seconds")  # a run that was resumed does not know them
        progress += "." if seconds is None else f" in {seconds:,.0f} seconds."
    else:
        step = log[-1]["step"] if log else 0
        progress = f"Not finished: {step:,}{of_all} optimizer steps."
    changes = []
    for entry in log:
        if run_files.CHANGED_RATE in entry:
            rate = entry[run_files.CHANGED_RATE]
            changes.append(f"{rate:g} after step {entry['step']:,}")
    if changes:
        progress += f" Not one trajectory: learning_rate={', '.join(changes)}."
    return progress


def accuracies(summary: Mapping[str, Any]) -> list[list[str]]:
    """Rows of three cells: level and decoding, accuracy before training, accuracy after training."""
    before = run_files.by_decoding(summary.get("before", {}))
    after = run_files.by_decoding(summary.get("after", {}))
    names = {**after, **before}  # a run that has not finished has only the accuracies before training
    return [[name, _interval(before.get(name)), _interval(after.get(name))] for name in names]


def _interval(accuracy: Mapping[str, Any] | None) -> str:
    """An accuracy with its interval, in per cent; a dash if it was not measured."""
    return "{accuracy:.1%} [{low:.1%}, {high:.1%}]".format_map(accuracy) if accuracy else "–"


def compare(folders: Sequence[Path]) -> str:
    """
    Which fields of finished runs differ, and their accuracies, as a table in Markdown.

    Runs that differ in nothing but the seed are one method; its name is that of its first folder. Accuracies of
    several seeds have the 95 % t interval of their mean, of one seed the Wilson interval over its problems. The
    difference to the first method is paired by seed. A `ValueError` if a folder holds no finished run, or two of them
    the same seed of one method.
    """
    settings_of: dict[str, dict[str, Any]] = {}  # method → its settings, without those that are incidental
    runs_of: dict[str, Runs] = {}  # method → its runs
    for folder in folders:
        settings = run_files.read_settings(folder)
        summary = run_files.read_summary(folder)
        if "after" not in summary:  # the accuracies after training
            raise ValueError(f"{str(folder)!r} is not the folder of a finished run.")
        with _named_in_errors(folder):
            accuracies(summary)  # raises if an accuracy is not a number
            seed = int(settings["seed"])
            after = run_files.by_decoding(summary["after"])
            settings = {field: value for field, value in mask(settings).items() if field not in INCIDENTAL}
        method = _method_with(settings, settings_of) or str(folder)
        settings_of[method] = settings
        runs = runs_of.setdefault(method, {})
        if seed in runs:
            raise ValueError(f"{method} has several runs of seed {seed}. Leave one of them out.")
        runs[seed] = after
    seeds = [", ".join(map(str, runs)) for runs in runs_of.values()]
    rule = ["---"] * (1 + len(runs_of))
    rows = [["", *runs_of], rule, ["seeds", *seeds]]
    rows += _rows_of_differing_fields(settings_of) + _rows_of_accuracies(runs_of)
    return "".join(map(_markdown_row, rows))


def _method_with(settings: dict[str, Any], settings_of: Mapping[str, dict[str, Any]]) -> str | None:
    """The name of the method with these settings, if there is one already."""
    for method, its_settings in settings_of.items():
        if its_settings == settings:
            return method
    return None


def _rows_of_differing_fields(settings_of: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """A row for each field that has not the same value in all methods: its name, and its value in each."""
    fields: set[str] = set().union(*settings_of.values())
    rows = []
    for field in sorted(fields):
        values = [str(settings.get(field)) for settings in settings_of.values()]
        if len(set(values)) > 1:
            rows.append([field, *values])
    return rows


def _rows_of_accuracies(runs_of: Mapping[str, Runs]) -> list[list[str]]:
    """Two rows for each level and decoding: the accuracy of each method, and its difference to that of the first."""
    first, *others = runs_of
    measures: dict[str, None] = {}  # level and decoding of accuracies, in the order in which runs have them
    for runs in runs_of.values():
        for after in runs.values():
            measures |= dict.fromkeys(after)
    rows = []
    for measure in measures:
        means = [_mean(measure, runs) for runs in runs_of.values()]
        gains = [_gain(measure, runs_of[first], runs_of[other]) for other in others]
        rows += [[measure, *means], [f"{measure}, less {first}", "", *gains]]
    return rows


def _markdown_row(cells: Sequence[str]) -> str:
    """A row of a table in Markdown, whose cells hold no markup of others."""
    escaped = [one_line(in_markdown(cell)).replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |\n"


def _mean(measure: str, runs: Runs) -> str:
    """
    The accuracy of a method in per cent, with its 95 % interval: the mean over several seeds, or of one seed its own.
    If some runs lack it, only how many. `measure` is its level and decoding.
    """
    results = [after[measure] for after in runs.values() if measure in after]
    n_missing = len(runs) - len(results)
    if n_missing:
        return f"– (missing in {n_missing} of {len(runs)})"
    if len(results) > 1:
        return _spread([result["accuracy"] for result in results], sign="")
    percent = {name: 100 * results[0][name] for name in ("accuracy", "low", "high")}
    return "{accuracy:.1f} % [{low:.1f}, {high:.1f}]".format_map(percent)


def _gain(measure: str, baseline: Runs, runs: Runs) -> str:
    """
    How much higher the accuracy of a method is than that of the baseline, in points: the mean of the differences, one
    for each seed that both have. `measure` is the accuracy's level and decoding.
    """
    gains = []
    for seed, after in runs.items():
        after_baseline = baseline.get(seed, {})
        if measure in after and measure in after_baseline:
            gains.append(after[measure]["accuracy"] - after_baseline[measure]["accuracy"])
    if not gains:
        return "no common seed"
    if len(gains) == 1:
        return _with_minus(f"{100 * gains[0]:+.1f} points (one seed)")
    some_are_unpaired = len(gains) < max(len(runs), len(baseline))
    return _spread(gains, sign="+") + (f" ({len(gains)} seeds)" if some_are_unpaired else "")


def _spread(shares: Sequence[float], *, sign: str) -> str:
    """
    The mean of two or more shares and half the width of its 95 % t interval, in per cent. With the sign `"+"` the
    shares are differences: then in points, and a positive mean has a plus.
    """
    half_width = stats.t.ppf(0.975, len(shares) - 1) * stats.sem(shares)
    unit = "points" if sign else "%"
    return _with_minus(f"{100 * np.mean(shares):{sign}.1f} ± {100 * half_width:.1f} {unit}")


def _with_minus(text: str) -> str:
    """A text with a minus sign in place of each hyphen."""
    return text.replace("-", "−")


def in_markdown(text: str) -> str:
    """A text of unknown origin for Markdown, where it can be neither HTML nor a link or picture from elsewhere."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(")
