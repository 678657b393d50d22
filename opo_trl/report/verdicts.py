"""Verdicts on a run's log, one for each diagnostic."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from ..checks.text import printable
from ..metrics.log import Entry, Points, finite, number, off_policy
from .diagnostics import Diagnostic, diagnostics


_FEWEST_OF_A_TREND = 6  # entries


@dataclass(frozen=True)
class Verdict:
    """A verdict on a run, in a sentence, from the points of one metric of its log."""

    metric: str
    sentence: str
    healthy: bool | None  # whether it is within its bounds; `None` for a fact without a bound
    remedy: str  # what to try; empty if nothing needs to be done
    points: Points
    range: str = ""  # of healthy values, in words; empty for a fact without a bound
    wrong: bool = False  # whether the run no longer learns

    @property
    def word(self) -> str:
        """The verdict in a word."""
        return "wrong" if self.wrong else {True: "healthy", False: "look", None: "–"}[self.healthy]

    @property
    def line(self) -> str:
        """The verdict in a line of a terminal."""
        healthy = f"Healthy: {self.range}." if self.range else ""
        return printable(" ".join(filter(None, (f"{self.word:7} ", self.sentence, healthy, self.remedy))))


def facts(values: Sequence[float], on_policy: Sequence[float], generated: float) -> dict[str, float]:
    """
    What sentences and bounds of a metric refer to, from its finite values in the order of the log.

    `on_policy`: those of optimizer steps in which the policy is still the one that generated the rollout.
    `generated`: completions generated in the run; NaN if not logged.
    """
    tenth = min(max(len(values) // 10, 3), len(values))
    first, last, median = (float(np.median(part)) for part in (values[:tenth], values[-tenth:], values))
    nonzero = [value for value in values if value][:tenth]  # the first groups may all have zero variance
    start = first or (float(np.median(nonzero)) if nonzero else 0.0)
    change, margin = trend(values)
    rise = _ratio(change, margin)
    # The mean of |x - y| is 1.13 standard deviations of the noise, so that this is about twice the standard error of a
    # median.
    noise = float(np.mean(np.abs(np.diff(values)))) if len(values) > 1 else 0.0
    has_fallen = last < median - 2.5 * noise / tenth**0.5
    return {
        "first": first,
        "last": last,
        "start": start,
        "ratio": _ratio(last, start) if len(values) >= _FEWEST_OF_A_TREND else math.nan,
        "mean": float(np.mean(values)),
        "median": median,
        "low": float(np.quantile(values, 0.1)),
        "most": max(values),
        "total": sum(values),
        "share": sum(values) / generated,
        "over_on_policy": _ratio(median, float(np.median(on_policy))) if len(on_policy) else math.nan,
        "change": change,
        "margin": margin,
        "rise": min(rise, 0.0) if has_fallen else rise,
    }


def _ratio(value: float, other: float) -> float:
    """`value` / `other`; 0 if both are 0."""
    return value / other if other else math.copysign(math.inf, value) if value else 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Change along the least-squares line from the first value to the last, and half of its 95 % t interval."""
    n = len(values)
    if n > 1 and np.ptp(values) == 0:
        return 0.0, 0.0  # rounding would leave a slope
    if n < _FEWEST_OF_A_TREND:
        return math.nan, math.nan
    line = stats.linregress(np.linspace(-0.5, 0.5, n), values)
    return float(line.slope), float(stats.t.ppf(0.975, n - 2)) * float(line.stderr)


def judge(log: Sequence[Entry], settings: Mapping[str, Any]) -> list[Verdict]:
    """
    Verdicts on a run, from the lines of its `log.jsonl` and its settings: one for each diagnostic that was logged, and
    one for the validation.
    """
    rewards = [value for _, value in finite(log, "reward")]
    # Without a signal, a run whose reward has risen has solved its problems.
    learns = bool(rewards) and facts(rewards, [], math.nan)["rise"] >= 1
    scored = [row for row in log if "reward" not in row or math.isfinite(number(row, "reward"))]
    found = [_judge(each, scored if each.name == "groups" else log, learns) for each in diagnostics(settings)]
    everything = (*(_not_finite(log, metric) for metric in _NOT_FINITE), *found, _validation(log))
    return [verdict for verdict in everything if verdict is not None]


_NOT_FINITE = {
    "reward": "Fix the reward function, or the solutions: it returns `None` where it cannot read one.",
    "grad_norm": "Lower `learning_rate`, and use bfloat16 instead of float16. Go back to a checkpoint from before.",
}


def _not_finite(log: Sequence[Entry], metric: str) -> Verdict | None:
    lost = [math.isnan(number(row, metric)) for row in log if metric in row]
    if not any(lost):
        return None
    said = f"`{metric}` was not a number in {sum(lost):,} of {len(lost):,} entries."
    at_end = all(lost[-max(len(lost) // 10, 3) :])
    return Verdict(metric, said, False, _NOT_FINITE[metric], finite(log, metric), "a number in every entry", at_end)


def _judge(diagnostic: Diagnostic, log: Sequence[Entry], learns: bool) -> Verdict | None:
    if learns and diagnostic.name == "groups":  # most are solved
        diagnostic = replace(diagnostic, high=diagnostic.wrong[1])
    metric = next((name for name in diagnostic.metrics.split() if any(name in row for row in log)), None)
    points = metric and finite(log, metric, lambda row: not diagnostic.off_policy or off_policy(row))
    if not points:
        return None
    on_policy = finite(log, metric, lambda row: row.get("opo/off_policy_steps") == 0)
    generated = [value for _, value in finite(log, "completions/generated")]
    found = facts([y for _, y in points], [y for _, y in on_policy], max(generated, default=math.nan))
    value = found[diagnostic.fact]
    if math.isnan(value):
        return Verdict(metric, f"Too little in this log for a verdict on `{metric}`.", None, "", points)
    side = "<" if value < diagnostic.low else ">" if value > diagnostic.high else ""
    meaning, remedy = diagnostic.advice(side)
    said = f"{diagnostic.sentence(found)}: {meaning}" if side else diagnostic.sentence(found)
    lost = not learns and not diagnostic.wrong[0] <= value <= diagnostic.wrong[1]
    return Verdict(metric, f"{said}.", not side, remedy, points, diagnostic.range(), lost)


def _validation(log: Sequence[Entry]) -> Verdict | None:
    """The first validation against the last; they differ if their intervals do not overlap."""
    names = [f"validation/{name}" for name in ("accuracy", "low", "high")]
    rows = [row for row in log if all(math.isfinite(number(row, name)) for name in names)]
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    rose, fell = last["validation/low"] > first["validation/high"], last["validation/high"] < first["validation/low"]
    verb = "rose" if rose else "fell" if fell else "went"
    undecided = "" if rose or fell else ": the intervals overlap, so there is no verdict"
    shown = "{validation/accuracy:.1%} [{validation/low:.1%}, {validation/high:.1%}]"
    said = f"Validation accuracy {verb} from {shown.format_map(first)} to {shown.format_map(last)}{undecided}."
    points = finite(rows, "validation/accuracy")
    return Verdict("validation/accuracy", said, rose if rose or fell else None, _CHEATED if fell else "", points)


_CHEATED = (
    "If the reward rose, the policy earns it by something other than correct answers: read the completions and "
    "fix the reward. Otherwise lower `learning_rate`."
)


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in a sentence."""
    judged = [verdict for verdict in verdicts if verdict.healthy is not None]
    if not judged:
        return "Too little has been logged for a verdict." if verdicts else "Nothing has been logged yet."
    if poor := [f"`{verdict.metric}`" for verdict in judged if not verdict.healthy]:
        return f"Look at {len(poor)} of {len(judged)} diagnostics: {', '.join(poor)}."
    return f"All {len(judged)} diagnostics are healthy."


def spark(points: Points) -> str:
    """Points of an SVG polyline, with values averaged to at most its width in points."""
    width, height, margin = 100, 24, 2
    parts = np.array_split([value for _, value in points], min(len(points), width))
    means = np.array([part.mean() for part in parts])
    middle, span = (means.max() + means.min()) / 2, np.ptp(means) or 1
    places = height / 2 - (means - middle) / span * (height - 2 * margin)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(np.linspace(0, width, len(means)), places, strict=True))
