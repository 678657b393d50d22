"""The page and the figure of the ablation, from its runs."""

import itertools
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from ...intervals import Estimate, estimate
from ...pages import fill, table
from ...staged import holm
from . import design
from .design import ENTRIES, FRESH_SEEDS, GSPO, LITERATURE, PAPER, REPORTED, RIVALS, SEEDS, TODAY, TR, WIDER, Results
from .training import REGIMES, Run


ROOT = Path(__file__).resolve().parents[3]
NEAR = 3.0  # points within which a form is level
AGES = {
    "fresh": "fresh",
    "lag16": "16 versions old, once",
    "lag16x2": "16 versions old, twice",
    "lag64": "all by the base model, once",
    "replay": "replay, four passes",
}
# Of the README's table
METHODS = {"OPO": PAPER, "truncated REINFORCE": TR, "TOPR": "TOPR", "GSPO": GSPO, "GRPO": WIDER}
ADMISSIBLE = 1.0  # points that a simpler form may lose in any regime

_INTRODUCTION = """\
# What makes OPO work: push, weight and pull-back

`python -m benchmarks.losses.objectives report` makes this page from `objectives.jsonl`, in which every run is a line.
[The plan](plan.md) was committed before the first run: objectives, regimes, trials, seeds and rules.

A form is called push-weight-pull-back (`grid.py`). `{today}` is today's form, the default when the plan was made
(`ratio_form: log`); `{paper}`, the paper's χ² with a truncated ratio, is the default since; `{gspo}` is GSPO. Embedded
arithmetic task, accuracies in % on 500 test problems, ± half of the 95 % t interval over seeds {seeds}. All runs but
those of `replay` were made with `AsyncOPOTrainer`, which commit 6495d6c5ac08 has; `python -m
benchmarks.losses.objectives check lag16` makes a row of the README again with `OPOTrainer`: of the 90 runs of `lag16`
and `lag64`, 89 have the same accuracies, and one of TOPR is 2.0 points off, sampled.
Differences are paired by seed. ▲ and ▼ mark the confirmatory comparisons that remain after Holm's correction for all
{comparisons} of them; ≈ marks those whose interval lies within ±{near:g} points. Everything else is a direction."""

_SECOND_RULE = """\
Sampled accuracy less that of today's form, from simple to complex. A form is admissible if today's form does not beat
it (▼) and is not more than {most:g} point ahead, in any regime."""


_OF_DEFAULT = """\
The default, `escort-bounded-chi2`, less the other forms. It was chosen by these runs, so these differences are
directions:"""

_EVIDENCE = """\
`reward-bounded-none` (TR), and how far it is behind OPO and ahead of the others, sampled and in brackets greedy.
Directions; μ is the one that OPO's trials chose."""

_FRESH = f"""\
Seeds {FRESH_SEEDS[0]} to {FRESH_SEEDS[-1]}, run after all of this page's others, the first four before the rest:
`lag64` with the settings above, and OPO with its default μ, 0.3, too."""


def wrapped(text: str) -> str:
    """Paragraphs, with lines that end where the sources' do."""
    return "\n\n".join(textwrap.fill(paragraph, 119, break_on_hyphens=False) for paragraph in text.split("\n\n"))


def reported(name: str, regime: str, found: Results) -> dict[int, Run]:
    """The finished runs that report, by seed."""
    runs = [run for run in found if (run.objective, run.regime) == (name, regime) and not run.tuning]
    return {run.seed: run for run in runs}


def is_complete(name: str, regime: str, found: Results) -> bool:
    """Whether all seeds have been run."""
    return set(reported(name, regime, found)) == set(SEEDS)


def values(name: str, regime: str, found: Results, measure: str) -> list[float]:
    """A measurement of each seed, in %."""
    runs = reported(name, regime, found)
    return [100 * found[runs[seed]][measure] for seed in sorted(runs)]


def differences(name: str, regime: str, found: Results, measure: str, other: str = TODAY) -> list[float]:
    """Differences of an objective from another, by seed."""
    of_two = (values(each, regime, found, measure) for each in (name, other))
    return [own - other for own, other in zip(*of_two, strict=True)]


def remaining(found: Results) -> set[tuple[str, str]]:
    """Confirmatory comparisons, as objective and regime, that remain after Holm's correction for all of them."""
    p = {
        (name, regime): float(stats.ttest_1samp(differences(name, regime, found, "sampled"), 0).pvalue)
        for regime in REGIMES
        for name in RIVALS
        if is_complete(name, regime, found) and is_complete(TODAY, regime, found)
    }
    return holm(p, comparisons=len(REGIMES) * len(RIVALS))


def half(found: Estimate) -> float:
    """Half of the width of an interval."""
    return (found.interval[1] - found.interval[0]) / 2 if found.interval else float("nan")


def shown(numbers: list[float], *, signed: bool = False) -> str:
    """A mean and half of its interval."""
    found = estimate(numbers)
    return f"{found.mean:{'+' if signed else ''}.1f} ± {half(found):.1f}".replace("-", "−")


def row_of(name: str, regime: str, found: Results) -> str:
    """One line: an objective's accuracies, sampled and greedy."""
    if not is_complete(name, regime, found):
        return f"{name}: {len(reported(name, regime, found))} of {len(SEEDS)} runs"
    sampled, greedy = (shown(values(name, regime, found, measure)) for measure in ("sampled", "greedy"))
    return f"{name}: sampled {sampled}, greedy {greedy}"


def _regime(regime: str, found: Results, kept: set[tuple[str, str]]) -> Iterator[str]:
    complete = [name for name in (*REPORTED, *LITERATURE, WIDER) if is_complete(name, regime, found)]
    if TODAY not in complete:
        yield f"\n{sum(run.regime == regime for run in found)} runs so far."
        return
    rows = []
    for name in complete:
        rate, own = design.stages(name, regime, found).chosen(found)
        tuned = f"{rate:.2g}" + (f", {ENTRIES[name].own.split()[0]} {own:g}" if ENTRIES[name].own else "")
        row = [f"`{name}`", tuned]
        for measure in ("sampled", "greedy"):
            row.append(shown(values(name, regime, found, measure)))
            if name == TODAY:
                row.append("")
                continue
            gain = differences(name, regime, found, measure)
            row.append(shown(gain, signed=True) + (_mark(name, regime, gain, kept) if measure == "sampled" else ""))
        rows.append(row)
    yield "\n" + table(("", "learning rate, own field", "sampled", "difference", "greedy", "difference"), rows)


def _mark(name: str, regime: str, gain: list[float], kept: set[tuple[str, str]]) -> str:
    if name not in RIVALS:
        return ""
    found = estimate(gain)
    if (name, regime) in kept:
        return " ▲" if found.mean > 0 else " ▼"
    return " ≈" if abs(found.mean) + half(found) <= NEAR else ""


def _best_trials(regime: str, names: Iterable[str], found: Results) -> Iterator[str]:
    """Best trials of the objectives that are tuned."""
    rows = []
    for name in names:
        stages = design.stages(name, regime, found)
        if stages.next_runs(found) and not reported(name, regime, found):
            continue
        setting = stages.chosen(found)
        scored = stages.scores(setting, found)
        rows.append([f"`{name}`", f"{setting[0]:.2g}", f"{setting[1]:g}", f"{100 * np.mean(scored):.1f}"])
    if rows:
        yield f"\n### `{regime}`"
        yield "\n" + table(("", "learning rate", "own field", "sampled"), sorted(rows, key=lambda row: -float(row[3])))


def is_admissible(name: str, found: Results) -> bool:
    """Whether today's form beats an objective in no regime, and is not more than a point ahead in any."""
    kept = remaining(found)
    means = {regime: np.mean(differences(name, regime, found, "sampled")) for regime in REGIMES}
    return all(mean >= -ADMISSIBLE and not (mean < 0 and (name, regime) in kept) for regime, mean in means.items())


def beats_today(name: str, found: Results) -> set[str]:
    """The regimes in which an objective beats today's form."""
    kept = remaining(found)
    gains = {regime: np.mean(differences(name, regime, found, "sampled")) for regime in REGIMES}
    return {regime for regime, gain in gains.items() if gain > 0 and (name, regime) in kept}


def _default(found: Results, kept: set[tuple[str, str]]) -> Iterator[str]:
    """The plan's second rule, form by form."""
    if not all(is_complete(name, regime, found) for name in design.FORMS for regime in REGIMES):
        return
    yield "\n## The default\n\n" + wrapped(_SECOND_RULE.format(most=ADMISSIBLE)) + "\n"
    rows = []
    for name in design.FORMS[:-1]:
        gains = {regime: differences(name, regime, found, "sampled") for regime in REGIMES}
        cells = [shown(gain, signed=True) + _mark(name, regime, gain, kept) for regime, gain in gains.items()]
        rows.append([f"`{name}`", *cells, "yes" if is_admissible(name, found) else "no"])
    yield table(("", *(f"`{regime}`" for regime in REGIMES), "admissible"), rows)


def _of_default(found: Results) -> Iterator[str]:
    """How far the default is ahead of the other forms, and of published losses that have been run."""
    yield "\n" + wrapped(_OF_DEFAULT) + "\n"
    run = [name for name in LITERATURE if any(is_complete(name, regime, found) for regime in REGIMES)]
    names = [name for name in (*design.CONFIRMED, WIDER, *run) if name != PAPER]
    rows = []
    for name, measure in itertools.product(names, ("sampled", "greedy")):
        cells = [
            shown(differences(PAPER, regime, found, measure, name), signed=True)
            if is_complete(name, regime, found)
            else ""
            for regime in REGIMES
        ]
        rows.append([f"`{name}`, {measure}", *cells])
    yield table(("", *(f"`{regime}`" for regime in REGIMES)), rows)


def _pair(one: str, other: str, regime: str, found: Results) -> str:
    """A difference, sampled, and in brackets greedy."""
    if not reported(other, regime, found):
        return "not run"
    gains = (shown(differences(one, regime, found, m, other), signed=True) for m in ("sampled", "greedy"))
    return "{} [{}]".format(*gains)


def table_of_evidence(found: Results) -> str:
    """Truncated REINFORCE beside OPO and the best known published losses, by age of completions and passes."""
    rows = []
    for regime, age in AGES.items():
        mu = design.stages(PAPER, regime, found).chosen(found)[1]
        tr = "{} [{}]".format(*(shown(values(TR, regime, found, measure)) for measure in ("sampled", "greedy")))
        opo = f"{_pair(PAPER, TR, regime, found)}, μ {mu:g}"
        rows.append([age, tr, opo, *(_pair(TR, name, regime, found) for name in (GSPO, WIDER, "TOPR"))])
    return table(("completions", "TR", "OPO less TR", "TR less GSPO", "TR less GRPO", "TR less TOPR"), rows)


def table_of_methods(found: Results) -> str:
    """Sampled, and in brackets greedy accuracy of OPO and published losses, by age of completions and passes."""
    return table(("completions", *METHODS), [[age, *cells(regime, found)] for regime, age in AGES.items()])


def cells(regime: str, found: Results) -> Iterator[str]:
    """The cells of one row of that table."""
    for name in METHODS.values():
        reached = [values(name, regime, found, measure) for measure in ("sampled", "greedy")]
        yield "{} [{}]".format(*map(shown, reached)) if all(reached) else "not run"


def table_of_fresh_seeds(fresh: Results) -> str:
    """OPO with either μ, less TOPR and truncated REINFORCE."""
    rows = []
    for mu in ENTRIES[PAPER].values:
        found = {run: result for run, result in fresh.items() if run.own in (0.0, mu)}
        rows.append([f"OPO, μ {mu:g}", *(_pair(PAPER, name, "lag64", found) for name in ("TOPR", TR))])
    return table(("`lag64`", "less TOPR", "less TR"), rows)


def table_of_losses() -> str:
    """Name and loss of every objective of the table, and of two forms of the ablation."""
    losses = {
        f"OPO: `{PAPER}`": "min(t, 2)·[−(ω − 1)·Δ + μ·(min(t, 2) − 1)·Δ]",
        f"OPO, `log`: `{TODAY}`": "min(t, 2)·[−(ω − 1)·Δ + μ/2·Δ²]",
        f"Truncated REINFORCE: `{TR}`": "−min(t, 2)·(r − r̄)·Δ",
        "GSPO": "−min(sA, clip(s)A) (2507.18071)",
        **{name: ENTRIES[name].loss for name in ("GRPO", *LITERATURE)},
    }
    return table(("", "loss of a completion"), losses.items()).replace("---:", "---")


def write_report(found: Results, fresh: Results, folder: Path, root: Path = ROOT) -> None:
    """Write `objectives.md` and `objectives.png`; fill `docs/objectives.md` and the table of the README."""
    page = {"objectives": table_of_losses()}
    for name, blocks in (("README.md", {"evidence": table_of_methods(found)}), ("docs/objectives.md", page)):
        (root / name).write_text(fill((root / name).read_text(), blocks))
    kept = remaining(found)
    seeds = f"{SEEDS[0]} to {SEEDS[-1]}"
    known = {"today": TODAY, "paper": PAPER, "gspo": GSPO, "near": NEAR}
    introduction = _INTRODUCTION.format(**known, seeds=seeds, comparisons=len(REGIMES) * len(RIVALS))
    missing = [f"`{n}` in `{r}`" for r in REGIMES for n in RIVALS if not is_complete(n, r, found)]
    if missing:
        introduction += f"\n\nOf these comparisons, {len(missing)} are still to be run: {', '.join(missing)}."
    lines = [wrapped(introduction)]
    lines.append("\n![Differences from today's form](objectives.png)")
    for regime in REGIMES:
        lines += [f"\n## `{regime}`", *_regime(regime, found, kept)]
    lines += [*_default(found, kept), *_of_default(found)]
    lines.append(f"\n## Truncated REINFORCE\n\n{wrapped(_EVIDENCE)}\n\n{table_of_evidence(found)}")
    lines.append(f"\n{wrapped(_FRESH)}\n\n{table_of_fresh_seeds(fresh)}")
    lines.append("\n## The whole grid\n\nMean of the best trial over the three tuning seeds, on the tuning problems.")
    lines += _best_trials(design.WHOLE, (name for name in ENTRIES if name not in design.SIGNALS), found)
    lines.append(
        "\n## Published signals\n\nThe default; with a learning rate times a power of the effective sample size; "
        "and without the\nsteps in which the gradient of the output layer surges: the same trials."
    )
    for regime in REGIMES:
        if any(run.objective in design.SIGNALS and run.regime == regime for run in found):
            lines += _best_trials(regime, (PAPER, *design.SIGNALS), found)
    (folder / "objectives.md").write_text("\n".join(lines) + "\n")
    _draw(found, folder / "objectives.png")


def _draw(found: Results, file: Path) -> None:
    plt.switch_backend("Agg")
    done = [regime for regime in REGIMES if is_complete(TODAY, regime, found)]
    figure, axes = plt.subplots(
        1, max(len(done), 1), figsize=(2.6 * max(len(done), 1) + 2, 4), sharey=True, squeeze=False
    )
    for axis, regime in zip(axes[0], done, strict=False):
        for place, name in enumerate(reversed(RIVALS)):
            if not is_complete(name, regime, found):
                continue
            gain = estimate(differences(name, regime, found, "sampled"))
            axis.errorbar(gain.mean, place, xerr=half(gain), fmt="o", color="#0072b2", capsize=3)
        axis.axvline(0, color="0.6", linewidth=1)
        axis.set_title(regime)
        axis.set_yticks(range(len(RIVALS)), reversed(RIVALS))
        axis.set_xlabel("points")
    figure.supxlabel("sampled accuracy less that of today's form, 95 %", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
