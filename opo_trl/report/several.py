"""
`opo-trl report RUN RUN …`: which fields of finished runs differ, and their accuracies, as a table in Markdown.

Runs that differ in nothing but the seed are one method; its name is that of its first folder. Accuracies of several
seeds have the 95 % t interval of their mean, of one seed the Wilson interval over its problems. The difference to the
first method is paired by seed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ..checks.text import one_line
from .pages import in_markdown
from .run_folder import SETTINGS, by_decoding, is_finished, read_settings, read_summary


# Where a run is written, how it is shown and how it is launched: not part of the method.
INCIDENTAL = frozenset(
    {
        *("seed", "output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "accelerate_config"),
        *("overwrite", "resume_from_checkpoint", "local_rank", "reward_workers", "data_seed"),
        *("save_steps", "save_strategy", "save_total_limit", "logging_steps", "logging_strategy"),
    }
)

Run = tuple[str, dict[str, Any], dict[str, Any]]  # name, settings, accuracies after training by level and decoding


def compare(folders: Sequence[Path]) -> str:
    """The table. A `ValueError` if a folder holds no finished run, or two of them the same seed of one method."""
    methods: dict[str, list[Run]] = {}
    for run in map(_read, folders):
        same = [own for own in methods.values() if _method(own[0]) == _method(run)]
        (same[0] if same else methods.setdefault(_unused(run[0], methods), [])).append(run)
    for name, runs in methods.items():
        seeds = [settings.get("seed") for _, settings, _ in runs]
        if len({*seeds}) < len(seeds):
            raise ValueError(f"{name} has several runs of one seed: {seeds}. Leave one of them out.")
    first, *others = methods
    rows = [["seeds", *(", ".join(str(settings.get("seed")) for _, settings, _ in runs) for runs in methods.values())]]
    fields = sorted({field for runs in methods.values() for field in _method(runs[0])})
    for field in fields:
        values = [_shown(_method(runs[0]).get(field)) for runs in methods.values()]
        rows += [[field, *values]] if len({*values}) > 1 else []
    for measure in dict.fromkeys(name for runs in methods.values() for _, _, found in runs for name in found):
        rows.append([measure, *(_mean([found.get(measure) for _, _, found in runs]) for runs in methods.values())])
        if others:
            rows.append(
                [f"{measure}, less {first}", "", *(_gain(measure, methods[first], methods[o]) for o in others)]
            )
    lines = [["", *methods], ["---"] * (len(methods) + 1), *rows]
    cells = ([one_line(in_markdown(cell)).replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _read(folder: Path) -> Run:
    settings = read_settings(folder)
    if not settings:
        raise ValueError(f"{str(folder)!r} has no {SETTINGS}, so it is not a run. Pass the folders of runs.")
    if not is_finished(folder):
        raise ValueError(f"The run {str(folder)!r} is not finished. Let it finish (`--resume_from_checkpoint auto`).")
    place = folder.resolve()
    name = place.parent.name if place.name.startswith("seed-") else place.name
    return name, settings, by_decoding(read_summary(folder)["after"])


def _method(run: Run) -> dict[str, Any]:
    return {field: value for field, value in run[1].items() if field not in INCIDENTAL}


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    return name if name not in taken else _unused(f"{name}'", taken)


def _mean(results: Sequence[Mapping[str, Any] | None]) -> str:
    if None in results:
        return f"– (missing in {results.count(None)} of {len(results)})"
    values = [100 * result["accuracy"] for result in results]
    if len(values) > 1:
        return _interval(values, "")
    low, high = results[0]["low"], results[0]["high"]
    return f"{values[0]:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _gain(measure: str, baseline: Sequence[Run], runs: Sequence[Run]) -> str:
    first, own = (
        {s.get("seed"): found[measure] for _, s, found in each if measure in found} for each in (baseline, runs)
    )
    gains = [100 * (own[seed]["accuracy"] - first[seed]["accuracy"]) for seed in own if seed in first]
    if len(gains) > 1:
        return _interval(gains, "+") + (f" ({len(gains)} seeds)" if len(gains) < max(len(first), len(own)) else "")
    return f"{gains[0]:+.1f} points (one seed)".replace("-", "−") if gains else "no common seed"


def _interval(values: Sequence[float], sign: str) -> str:
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    unit = "points" if sign else "%"
    return f"{np.mean(values):{sign}.1f} ± {half:.1f} {unit}".replace("-", "−")


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
