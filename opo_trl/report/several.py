"""
`opo-trl report RUN RUN …`: which fields of finished runs differ, and their accuracies, as a table in Markdown.

Runs that differ in nothing but the seed are one method; its name is that of its first folder. Accuracies of several
seeds have the 95 % t interval of their mean, of one seed the Wilson interval over its problems. The difference to the
first method is paired by seed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ..checks.text import one_line, printable
from .run_folder import by_decoding, is_finished, read_settings, read_summary


# Where a run is written, how it is shown and how it is launched: not part of the method.
INCIDENTAL = frozenset(
    {
        *("seed", "output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "accelerate_config"),
        *("overwrite", "resume_from_checkpoint", "local_rank", "reward_workers", "data_seed"),
        *("save_steps", "save_strategy", "save_total_limit", "logging_steps", "logging_strategy"),
    }
)

Runs = dict[int, dict[str, Any]]  # of a method: seed → accuracies after training by level and decoding


def compare(folders: Sequence[Path]) -> str:
    """The table. A `ValueError` if a folder holds no finished run, or two of them the same seed of one method."""
    methods: dict[str, dict[str, Any]] = {}
    runs: dict[str, Runs] = {}
    for folder in folders:
        if not is_finished(folder):
            raise ValueError(f"{str(folder)!r} is not the folder of a finished run.")
        settings = read_settings(folder)
        method = {field: value for field, value in settings.items() if field not in INCIDENTAL}
        name = next((name for name, other in methods.items() if other == method), str(folder))
        methods[name] = method
        seeds = runs.setdefault(name, {})
        if settings["seed"] in seeds:
            raise ValueError(f"{name} has several runs of seed {settings['seed']}. Leave one of them out.")
        seeds[settings["seed"]] = by_decoding(read_summary(folder)["after"])
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
        return _interval([each["accuracy"] for each in found], "")
    return "{:.1f} % [{:.1f}, {:.1f}]".format(*(100 * found[0][name] for name in ("accuracy", "low", "high")))


def _gain(measure: str, baseline: Runs, runs: Runs) -> str:
    common = [seed for seed in runs if measure in runs[seed] and measure in baseline.get(seed, {})]
    gains = [runs[seed][measure]["accuracy"] - baseline[seed][measure]["accuracy"] for seed in common]
    if len(gains) > 1:
        return _interval(gains, "+") + (f" ({len(gains)} seeds)" if len(gains) < max(len(runs), len(baseline)) else "")
    return f"{100 * gains[0]:+.1f} points (one seed)".replace("-", "−") if gains else "no common seed"


def _interval(shares: Sequence[float], sign: str) -> str:
    half = stats.t.ppf(0.975, len(shares) - 1) * stats.sem(shares)
    unit = "points" if sign else "%"
    return f"{100 * np.mean(shares):{sign}.1f} ± {100 * half:.1f} {unit}".replace("-", "−")


def in_markdown(text: str) -> str:
    """A text of others in Markdown: neither HTML nor a link or picture from elsewhere."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(")
